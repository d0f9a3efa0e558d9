"""A vector times a matrix, as every linear layer asks for it, whatever the matrix is stored as."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from m3jax.mxfp8 import MXFP8Array, dequantize, quantize
from m3jax.numerics import einsum
from m3jax.ops.backends import interpreted, kernel_name
from m3jax.ops.mxfp8_kernels import mxfp8_kernel
from m3jax.ops.ordered import project_in_order
from m3jax.weights import StackedLayer, Weight, merge_outputs

_FEW_ROWS = 48  # up to which a kernel makes numbers of MXFP8 as it multiplies
# Rows up to which a kernel that reads a matrix in its stack is faster on an H200 than XLA's product with the matrix
# by itself, by (inputs, outputs) of 16-bit weights (`scripts/bench_gpu.py --only projections`). 1 and 8 rows were
# measured, and the kernel does the same for up to 16.
_MOST_ROWS = {(6144, 8192): 16, (6144, 128): 16, (6144, 12288): 16, (6144, 3072): 16, (3072, 6144): 16, (192, 192): 0}
_DEPTH_UNIT, _COLUMNS_UNIT = 32, 64  # of the widths that the kernel takes


def project(spec: str, x: Float[Array, "..."], weight: Weight) -> Float[Array, "..."]:
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
    (out,) = project_each(spec, x, (weight,))
    return out


def project_each(
    spec: str, x: Float[Array, "..."], weights: Sequence[Weight], num_detached: int = 0
) -> list[Float[Array, "..."]]:
    """`project` of the same activations and several weights: one kernel, where there is one.

    Args:
      spec: of einsum, of each product.
      x: activations.
      weights: matrices.
      num_detached: of the last so many products no gradient goes to x.
    """
    # Layers are left in their stacks where a kernel reads them there (`kernel_reads`, `can_order`).
    is_detached = [index >= len(weights) - num_detached for index in range(len(weights))]
    if all(isinstance(weight, StackedLayer) and weight.is_ordered for weight in weights):
        return project_in_order(x, weights, is_detached)
    stacked = [index for index, weight in enumerate(weights) if isinstance(weight, StackedLayer)]
    products = _by_kernel(x, [weights[i] for i in stacked], [is_detached[i] for i in stacked]) if stacked else []
    found = dict(zip(stacked, products, strict=True))
    for index, weight in enumerate(weights):
        if index not in found:
            found[index] = einsum(spec, *operands(_detach(x, is_detached[index]), weight))
    return [found[index] for index in range(len(weights))]


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


def kernel_reads(
    stack: Float[Array, "..."] | MXFP8Array, num_inputs: int, num_rows: int, dtype: DTypeLike, backend: str
) -> bool:
    """Whether a kernel multiplies by the matrices of a stack where they lie: 16-bit numbers, whole pieces.

    On one GPU few rows, as many as were measured to gain, and in MXFP8 any number of them; on one TPU in MXFP8 alone.
    There is nothing to ask for by name: what a kernel cannot take, XLA multiplies.

    Args:
      stack: `[L *inputs *outputs]`, one matrix a layer.
      num_inputs: how many axes a product sums over.
      num_rows: of the activations, tokens of the call.
      dtype: of the activations.
      backend: one of `m3jax.ops.BACKENDS`.
    """
    widths = math.prod(stack.shape[1 : 1 + num_inputs]), math.prod(stack.shape[1 + num_inputs :])
    if isinstance(stack, MXFP8Array):
        return mxfp8_kernel(stack, dtype, [widths], backend) is not None
    is_whole = widths[0] % _DEPTH_UNIT == 0 and widths[1] % _COLUMNS_UNIT == 0
    is_taken = kernel_name(backend) == "triton" and stack.dtype == dtype and jnp.dtype(dtype).itemsize == 2
    return is_taken and is_whole and num_rows <= most_rows(*widths)


def most_rows(inputs: int, outputs: int) -> int:
    """Rows up to which a kernel is the fastest product with a 16-bit matrix in a stack, by the nearest widths.

    In interpret mode the kernel takes as many as it can.
    """
    distance = lambda measured: abs(math.log(measured[0] / inputs)) + abs(math.log(measured[1] / outputs))
    return max(_MOST_ROWS.values()) if interpreted() else _MOST_ROWS[min(_MOST_ROWS, key=distance)]


def _detach(x: Float[Array, "..."], is_detached: bool) -> Float[Array, "..."]:
    return jax.lax.stop_gradient(x) if is_detached else x


def _by_kernel(
    x: Float[Array, "... I"], weights: Sequence[StackedLayer], is_detached: Sequence[bool]
) -> list[Float[Array, "..."]]:
    """x [X I] times matrices [L I O], with all axes of outputs as one; gradients are those of XLA's product."""
    from pallas_kernels.gradient import with_gradient

    is_mxfp8 = isinstance(weights[0].stack, MXFP8Array)
    stacks = tuple(merge_outputs(weight.stack) for weight in weights)
    backend = kernel_name(weights[0].backend)

    def by_kernel(x, stacks, layer):
        if is_mxfp8:
            return _by_mxfp8_kernel(x, stacks, layer, backend)
        from pallas_kernels.stacked_project import stacked_project

        return stacked_project(x, stacks, layer, backend=backend, interpret=interpreted())

    def by_xla(x, stacks, layer):
        taken = (StackedLayer(stack, layer).take() for stack in stacks)
        pairs = zip(taken, is_detached, strict=True)
        return tuple(einsum("xi,io->xo", *operands(_detach(x, detached), matrix)) for matrix, detached in pairs)

    # No gradient goes to weights in MXFP8, and through a call with others their stacks' too.
    count = 1 if is_mxfp8 else 2
    products = with_gradient(by_kernel, by_xla, count)(x.reshape(-1, x.shape[-1]), stacks, weights[0].layer)
    shapes = [weight.stack.shape[2:] for weight in weights]
    return [out.reshape(*x.shape[:-1], *shape) for out, shape in zip(products, shapes, strict=True)]


def _by_mxfp8_kernel(
    x: Float[Array, "X I"], stacks: Sequence[MXFP8Array], layer: Array, backend: str
) -> tuple[Float[Array, "X _"], ...]:
    """A kernel multiplies few rows. With many, a kernel writes the numbers of a matrix, and XLA multiplies by them."""
    from pallas_kernels.mxfp8_numbers import Weights, mxfp8_numbers
    from pallas_kernels.mxfp8_project import mxfp8_project

    options = dict(backend=backend, interpret=interpreted())
    weights = tuple(Weights(stack.codes, stack.scales) for stack in stacks)
    if len(x) <= _FEW_ROWS:
        return mxfp8_project(x, weights, layer, **options)
    if backend != "triton":
        taken = (StackedLayer(stack, layer).take() for stack in stacks)
        return tuple(einsum("xi,io->xo", *operands(x, matrix)) for matrix in taken)
    return tuple(einsum("xi,io->xo", x, mxfp8_numbers(weight, layer, x.dtype, **options)) for weight in weights)
