"""Training of the embedded checkpoint: data, losses and steps."""
