"""Products and norms by kernels that give a token the same bits whatever else a call has, on a GPU.

The invariant mode takes them where they can run, and `m3jax.tiles` elsewhere. All tokens of a call go through one
kernel, where a tile would read the weights again. What is left to XLA between the kernels is element by element, so
that nothing in it has an order.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from m3jax.mxfp8 import MXFP8Array
from m3jax.numerics import einsum
from m3jax.ops import measured
from m3jax.ops.backends import interpreted
from m3jax.weights import StackedLayer


def products_in_order(
    x: Float[Array, "X I"], stacks: Sequence[Float[Array, "L I _"] | MXFP8Array], layer: Int[Array, ""]
) -> tuple[Float[Array, "X _"], ...]:
    """Return x times a layer's matrices, in float32.

    With many rows a kernel first writes the numbers of a matrix in MXFP8: to make them anew for every tile would take
    longer than to multiply. They are the same numbers.

    Args:
      x: activations, in the matrices' dtype where these are not in MXFP8.
      stacks: one matrix a layer.
      layer: which of them.
    """
    from pallas_kernels.mxfp8_numbers import mxfp8_numbers
    from pallas_kernels.ordered_project import Weights, ordered_project

    options = dict(backend="triton", interpret=interpreted())
    is_mxfp8 = [isinstance(stack, MXFP8Array) for stack in stacks]
    operands = [
        Weights(stack.codes, stack.scales) if has_codes else stack
        for stack, has_codes in zip(stacks, is_mxfp8, strict=True)
    ]
    if len(x) <= measured.ORDERED_MXFP8_ROWS or not any(is_mxfp8):
        return ordered_project(x, operands, layer, **options)
    matrices = [
        mxfp8_numbers(operand, layer, x.dtype, **options) if has_codes else StackedLayer(operand, layer).take()
        for operand, has_codes in zip(operands, is_mxfp8, strict=True)
    ]
    return ordered_project(x, [matrix[None] for matrix in matrices], jnp.int32(0), **options)


def unembed_in_order(x: Float[Array, "... D"], weight: Float[Array, "V D"]) -> Float[Array, "... V"]:
    """Return x times the transposed unembedding, each row's sums in one order.

    Args:
      x: normed hidden states, in the weight's dtype.
      weight: one row a token of the vocabulary; V a multiple of 64.
    """
    from pallas_kernels.gradient import with_gradient
    from pallas_kernels.ordered_project import ordered_project

    def by_kernel(x, weight):
        options = dict(by_output=True, backend="triton", interpret=interpreted())
        return ordered_project(x, [weight[None]], jnp.int32(0), **options)[0]

    by_xla = lambda x, weight: einsum("xd,vd->xv", x, weight)
    out = with_gradient(by_kernel, by_xla, 2)(x.reshape(-1, x.shape[-1]), weight)
    return out.reshape(*x.shape[:-1], -1)


def norm_rope_in_order(
    definition: Callable[..., tuple[Float[Array, "... _ _"], ...]],
    heads: Sequence[Float[Array, "... _ _"]],
    norms: Sequence[Float[Array, " _"]],
    cos: Float[Array, "... R"],
    sin: Float[Array, "... R"],
    *,
    eps: float,
    dtype: DTypeLike,
) -> tuple[Float[Array, "... _ _"], ...]:
    """Return the heads of each token normed, rotated and rounded.

    Args:
      definition: of (heads, norms, cos, sin), whose gradients these are.
      heads: of queries, keys and so on, each with its own number of heads.
      norms: weights of each one's norm.
      cos: cosines of each token's angles.
      sin: sines.
      eps: of the norm.
      dtype: of the result.
    """
    from pallas_kernels.gradient import with_gradient
    from pallas_kernels.qk_norm_rope import qk_norm_rope

    def by_kernel(heads, norms, cos, sin):
        rows = [x.reshape(-1, *x.shape[-2:]) for x in heads]
        angles = (x.reshape(-1, x.shape[-1]) for x in (cos, sin))
        options = dict(eps=eps, dtype=dtype, backend="triton", interpret=interpreted())
        out = qk_norm_rope(rows, norms, *angles, **options)
        return tuple(y.reshape(x.shape) for x, y in zip(heads, out, strict=True))

    return with_gradient(by_kernel, definition, 2)(tuple(heads), tuple(norms), cos, sin)
