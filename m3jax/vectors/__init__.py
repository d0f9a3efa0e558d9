"""Golden vectors: small inputs with the outputs that any engine must give for them (docs/vectors.md)."""
