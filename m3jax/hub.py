"""The model and the hub's layout: `load` and `save`, and `save_pretrained` as a method of the model."""

from m3jax.checkpoint import load, save
from m3jax.model import M3, init, quantize

# The rooms of the model know nothing of files.
M3.save_pretrained = save

__all__ = ["M3", "init", "load", "quantize", "save"]
