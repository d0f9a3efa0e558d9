"""Training: losses, steps, runs that can be stopped, and EAGLE3 drafts."""
