"""Products and norms by kernels that give a token the same bits whatever else a call has, on a GPU.

The invariant mode takes them where they can run, and `m3jax.tiles` elsewhere. All tokens of a call go through one
kernel, where a tile would read the weights again. What is left to XLA between the kernels is element by element, so
that nothing in it has an order.
"""

from collections.abc import Callable, Sequence
from math import prod

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from m3jax.mxfp8 import MXFP8Array, dequantize
from m3jax.numerics import einsum
from m3jax.ops.backends import interpreted, kernel_name
from m3jax.weights import StackedLayer, merge_outputs

_FEW_ROWS = 64  # up to which a kernel makes numbers of MXFP8 as it multiplies
_UNIT = 64  # channels of a step, and the least columns of a program
_FLOAT32_UNITS = 256, 16  # likewise of the router's product: channels, where there are more, and columns


def can_order(
    dtype: DTypeLike, backend: str, *, widths: Sequence[int], router: tuple[int, int], head: tuple[int, int]
) -> bool:
    """Whether the kernels run a model's layers: on a GPU, 16-bit numbers, widths of whole pieces.

    The answer is one for all calls of a model: a part of it by tiles in one call and by a kernel in the next would have
    other bits.

    Args:
      dtype: of the activations.
      backend: one of `m3jax.ops.BACKENDS`.
      widths: of all that goes into a matrix or comes out of one, but for the router.
      router: its width and how many experts it scores.
      head: width of a head, and how many dims of it are rotated.
    """
    (width, experts), (head_width, rotated) = router, head
    unit, columns = _FLOAT32_UNITS
    is_whole = not any(n % _UNIT for n in (*widths, width)) and not (width % min(width, unit) or experts % columns)
    powers = (rotated // 2, *([head_width - rotated] if head_width > rotated else []))
    are_powers = all(n > 0 and n & (n - 1) == 0 for n in powers)
    return kernel_name(backend) == "triton" and jnp.dtype(dtype).itemsize == 2 and is_whole and are_powers


def reads_in_place(stack: Float[Array, "L ..."] | MXFP8Array) -> bool:
    """Whether the kernel finds its way in a stack; else a layer is copied out of it.

    Args:
      stack: one matrix a layer.
    """
    from pallas_kernels.numbers import can_reach

    return not isinstance(stack, MXFP8Array) or can_reach(prod(stack.shape))


def project_in_order(
    x: Float[Array, "... I"], weights: Sequence[StackedLayer], is_detached: Sequence[bool]
) -> list[Float[Array, "..."]]:
    """x [... I] times matrices [I *outputs] of one layer; gradients are those of XLA's products.

    With many rows a kernel first writes the numbers of a matrix in MXFP8: to make them anew for every tile would take
    longer than to multiply. They are the same numbers.

    Args:
      x: activations, in the matrices' dtype where these are not in MXFP8.
      weights: matrices.
      is_detached: of each product, whether no gradient goes to x.

    Returns:
      The products in float32.
    """
    from pallas_kernels.gradient import with_gradient
    from pallas_kernels.mxfp8_numbers import mxfp8_numbers
    from pallas_kernels.ordered_project import Weights, ordered_project

    options = dict(backend="triton", interpret=interpreted())
    is_mxfp8 = lambda stack: isinstance(stack, MXFP8Array)

    def by_kernel(x, stacks, layer):
        operands = [Weights(stack.codes, stack.scales) if is_mxfp8(stack) else stack for stack in stacks]
        if len(x) > _FEW_ROWS and any(map(is_mxfp8, stacks)):
            numbers = lambda operand: mxfp8_numbers(operand, layer, x.dtype, **options)
            pairs = zip(stacks, operands, strict=True)
            taken = [numbers(own) if is_mxfp8(stack) else StackedLayer(stack, layer).take() for stack, own in pairs]
            return ordered_project(x, [matrix[None] for matrix in taken], jnp.int32(0), **options)
        return ordered_project(x, operands, layer, **options)

    def by_xla(x, stacks, layer):
        taken = [StackedLayer(stack, layer).take() for stack in stacks]
        taken = [dequantize(matrix, x.dtype) if is_mxfp8(matrix) else matrix for matrix in taken]
        rows = [jax.lax.stop_gradient(x) if detached else x for detached in is_detached]
        return tuple(einsum("xi,io->xo", *pair) for pair in zip(rows, taken, strict=True))

    stacks, layer = tuple(merge_outputs(weight.stack) for weight in weights), weights[0].layer
    if len({weight.stack.shape[0] for weight in weights}) > 1:  # some are read in place, others were taken out
        taken = [StackedLayer(stack, w.layer).take() for w, stack in zip(weights, stacks, strict=True)]
        stacks, layer = tuple(jax.tree.map(lambda y: y[None], one) for one in taken), jnp.int32(0)
    count = 1 if any(map(is_mxfp8, stacks)) else 2  # arrays with gradients
    products = with_gradient(by_kernel, by_xla, count)(x.reshape(-1, x.shape[-1]), stacks, layer)
    return [out.reshape(*x.shape[:-1], *weight.stack.shape[2:]) for out, weight in zip(products, weights, strict=True)]


def unembed_in_order(x: Float[Array, "... D"], weight: Float[Array, "V D"]) -> Float[Array, "... V"]:
    """x times the transposed unembedding.

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
    """Heads of each token normed, rotated and rounded.

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
