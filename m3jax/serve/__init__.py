"""A server: a gateway on CPUs that speaks the protocols of clients, and a worker that owns the engine."""
