"""MiniMax-M3 in JAX: the model, MiniMax Sparse Attention, and a generate loop."""

from m3jax.checkpoint import load, save
from m3jax.config import M3Config
from m3jax.decoding import generate
from m3jax.model import M3

__all__ = ["M3", "M3Config", "generate", "load", "save"]
