"""What the embedded checkpoint is trained on and measured with: scripts beside import it, no wheel carries it."""
