"""The parts of `scripts/gpu_check.py`, each by itself; `repeat` is what they share."""
