"""A vector times a matrix, as every linear layer asks for it, whatever the matrix is stored as."""

from collections.abc import Sequence
from math import prod

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from m3jax.mxfp8 import MXFP8Array, MXFP8Layer, dequantize, quantize
from m3jax.numerics import einsum
from m3jax.ops.backends import interpreted, kernel_name
from m3jax.ops.mxfp8_kernels import mxfp8_kernel

_FEW_ROWS = 48  # up to which a kernel makes numbers as it multiplies


def project(
    spec: str, x: Float[Array, "..."], weight: Float[Array, "..."] | MXFP8Array | MXFP8Layer
) -> Float[Array, "..."]:
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
    spec: str, x: Float[Array, "..."], weights: Sequence[Float[Array, "..."] | MXFP8Array | MXFP8Layer]
) -> list[Float[Array, "..."]]:
    """`project` of the same activations and several weights: one kernel, where there is one.

    Args:
      spec: of einsum, of each product.
      x: activations.
      weights: matrices.
    """
    # Layers are made where a kernel reads their stacks (`kernel_reads`).
    if all(isinstance(weight, MXFP8Layer) for weight in weights):
        return _by_kernels(x, weights)
    taken = [weight.take() if isinstance(weight, MXFP8Layer) else weight for weight in weights]
    return [einsum(spec, *operands(x, weight)) for weight in taken]


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


def kernel_reads(stack: MXFP8Array, dtype: DTypeLike, backend: str) -> bool:
    """Whether a kernel multiplies by the matrices of a stack: on one GPU or TPU, 16-bit numbers, whole pieces.

    There is nothing to ask for by name: what a kernel cannot take, XLA multiplies.

    Args:
      stack: one matrix a layer.
      dtype: of the activations.
      backend: one of `m3jax.ops.BACKENDS`.
    """
    first_output = stack.ndim - stack.num_outputs
    widths = prod(stack.shape[1:first_output]), prod(stack.shape[first_output:])
    return mxfp8_kernel(stack, dtype, [widths], backend) is not None


def _by_kernels(x: Float[Array, "... I"], weights: Sequence[MXFP8Layer]) -> list[Float[Array, "..."]]:
    """x [X I] times codes [L I O], with all axes of outputs as one; gradients are those of XLA's product.

    A kernel multiplies few rows. With many, a kernel writes the numbers of a matrix, and XLA multiplies by them.
    """
    from pallas_kernels.gradient import with_gradient
    from pallas_kernels.mxfp8_numbers import Weights, mxfp8_numbers
    from pallas_kernels.mxfp8_project import mxfp8_project

    options = dict(backend=kernel_name(weights[0].backend), interpret=interpreted())

    def by_kernel(x, stacks, layer):
        if len(x) <= _FEW_ROWS:
            return mxfp8_project(x, stacks, layer, **options)
        if options["backend"] != "triton":
            return by_xla(x, stacks, layer)
        return tuple(einsum("xi,io->xo", x, mxfp8_numbers(stack, layer, x.dtype, **options)) for stack in stacks)

    def by_xla(x, stacks, layer):
        taken = [MXFP8Layer(MXFP8Array(*stack), layer).take() for stack in stacks]
        return tuple(einsum("xi,io->xo", *operands(x, weight)) for weight in taken)

    flat = lambda y: y.reshape(*y.shape[:2], -1)  # [L I O], [L blocks O]
    stacks = tuple(Weights(flat(weight.stack.codes), flat(weight.stack.scales)) for weight in weights)
    products = with_gradient(by_kernel, by_xla, 1)(x.reshape(-1, x.shape[-1]), stacks, weights[0].layer)
    shapes = [weight.stack.shape[2:] for weight in weights]
    return [out.reshape(*x.shape[:-1], *shape) for out, shape in zip(products, shapes, strict=True)]
