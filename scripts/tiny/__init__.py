"""The training data and the measurements of the embedded checkpoint, for the scripts; not part of the wheel."""
