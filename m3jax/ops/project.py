"""A vector times a matrix, as every linear layer asks for it, whatever the matrix is stored as."""

from jaxtyping import Array, Float

from m3jax.mxfp8 import MXFP8Array, dequantize, quantize
from m3jax.numerics import einsum


def project(spec: str, x: Float[Array, "..."], weight: Float[Array, "..."] | MXFP8Array) -> Float[Array, "..."]:
    """`m3jax.numerics.einsum` of activations and a weight.

    Of an MXFP8 weight it is the product with the dequantised one, in x's dtype: to the bit that of a model whose
    weights were dequantised when they were loaded ("W8A16"). Where the weight says so, activations are quantised first,
    each token's 32 channels by 32, as engines with products of MXFP8 do ("W8A8").

    Args:
      spec: of einsum; x's last axis is the one that is summed over.
      x: activations.
      weight: a matrix, or one for each token.

    Returns:
      The product in the accumulator's dtype.
    """
    return einsum(spec, *operands(x, weight))


def operands(
    x: Float[Array, "..."], weight: Float[Array, "..."] | MXFP8Array
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """What `project` multiplies with what.

    Args:
      x: activations.
      weight: a matrix, or a stack of them.
    """
    if not isinstance(weight, MXFP8Array):
        return x, weight
    if weight.activations == "mxfp8":
        x = dequantize(quantize(x, num_outputs=0), x.dtype)
    return x, dequantize(weight, x.dtype)
