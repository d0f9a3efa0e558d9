"""Layer norm, a product with a bias, and GELU."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from m3jax.make import Make
from m3jax.numerics import accumulator, einsum


class LayerNorm(nnx.Module):
    """Norm with weight and bias, [..., W]; a stack of layers has L in front."""

    def __init__(self, shape: tuple[int, ...], make: Make):
        self.weight = make.norm(shape, start=1.0)
        self.bias = make.norm(shape)

    def __call__(self, x: Float[Array, "X W"], eps: float) -> Float[Array, "X W"]:
        """Normalise each row to mean 0 and variance 1, times the weight, plus the bias; rounded once, at the end."""
        dtype = accumulator(x.dtype)
        centred = x.astype(dtype) - jnp.mean(x.astype(dtype), axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
        return (normed * self.weight[...].astype(dtype) + self.bias[...].astype(dtype)).astype(x.dtype)


class Linear(nnx.Module):
    """A product and a bias: weight [inputs outputs], bias [outputs], each in one axis or more; L in front in a stack.

    `stack` is the shape in front, () or (L,); `axes` are the logical names of inputs and outputs.
    """

    def __init__(
        self,
        stack: tuple[int, ...],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: tuple[str | None, ...],
        make: Make,
    ):
        names = ("layers",) * len(stack) + axes
        self.weight = make.weight((*stack, *inputs, *outputs), names, fan_in=math.prod(inputs))
        self.bias = make.norm((*stack, *outputs))

    def __call__(self, spec: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the product that an einsum names, plus the bias, in the accumulator's dtype."""
        product = einsum(spec, x, self.weight[...])
        return product + self.bias[...].astype(product.dtype)


def gelu(x: Float[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """Return x times the standard normal distribution function of x, by erf (no approximation); rounded once.

    Written with erf as in PyTorch. `jax.nn.gelu` writes erfc(-x / sqrt 2), which has more correct digits below x = -3,
    but they are lost beside the other channels; XLA makes 120 operations of it, and on a GPU that took twice as long as
    reading and writing the memory.
    """
    return (0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))).astype(dtype)
