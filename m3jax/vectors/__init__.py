"""Golden vectors: small inputs with the outputs that any correct engine must give for them (docs/vectors.md)."""
