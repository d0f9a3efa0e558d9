"""The Flax model: functional NNX modules that hold parameters and nothing else."""

from m3jax.model.build import abstract, init, logical_axes, shardings
from m3jax.model.choices import Choices
from m3jax.model.m3 import M3
from m3jax.model.quantized import dequantize, quantize

__all__ = ["M3", "Choices", "abstract", "dequantize", "init", "logical_axes", "quantize", "shardings"]
