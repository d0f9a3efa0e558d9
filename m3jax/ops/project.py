"""A vector times a matrix, as every linear layer asks for it, whatever the matrix is stored as."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from m3jax.mxfp8 import MXFP8Array, dequantize, quantize
from m3jax.numerics import einsum, sum_over_devices
from m3jax.ops import measured
from m3jax.ops.backends import interpreted, kernels_here
from m3jax.ops.cases import ProductCase
from m3jax.ops.collectives import sum_of_parts
from m3jax.ops.ordered import products_in_order
from m3jax.parallel import token_axes
from m3jax.platform import platform
from m3jax.weights import DividedWeight, StackedLayer, Weight, merge_outputs

_LEAST_CHANNELS = 64  # of a part of a sum


def project(spec: str, x: Float[Array, "..."], weight: Weight) -> Float[Array, "..."]:
    """Return the product of activations and a weight, as `m3jax.numerics.einsum` does.

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
    return project_each(spec, x, [weight])[0]


def project_each(
    spec: str, x: Float[Array, "..."], weights: Sequence[Weight], num_detached: int = 0
) -> list[Float[Array, "..."]]:
    """Return `project` of the same activations and each of several weights, by one kernel where there is one.

    Args:
      spec: of einsum, of each product.
      x: activations.
      weights: matrices.
      num_detached: of the last so many products no gradient goes to x.
    """
    if isinstance(weights[0], DividedWeight):
        return _over_mesh(spec, x, weights, num_detached)
    is_detached = [False] * (len(weights) - num_detached) + [True] * num_detached
    products: list[Array | None] = [None] * len(weights)
    # Layers are left in their stacks where a kernel reads them there (`m3jax.ops.cases.ProductCase`), or XLA late.
    in_stacks = [index for index, weight in enumerate(weights) if isinstance(weight, StackedLayer)]
    if in_stacks:
        in_place = _in_stacks(x, [weights[i] for i in in_stacks], [is_detached[i] for i in in_stacks])
        for index, product in zip(in_stacks, in_place, strict=True):
            products[index] = product
    for index, weight in enumerate(weights):
        if products[index] is None:
            source, matrix = operands(jax.lax.stop_gradient(x) if is_detached[index] else x, weight)
            parts = _parts_of_sum(source, matrix)
            products[index] = einsum(spec, source, matrix) if parts == 1 else _sum_in_parts(source, matrix, parts)
    return [checkpoint_name(product, "product of matrices") for product in products]


def _parts_of_sum(x: Float[Array, "... I"], weight: Float[Array, "..."]) -> int:
    """Return the number of parts in which channels are summed: several for a narrow float32 matrix on a GPU.

    A GPU's libraries divide such a product by its outputs alone, of which there are too few for all its processors: the
    router's, 6,144 channels to 128 experts, took 166 us for 256 tokens, and in 16 parts 23 (docs/notes/kernels.md).
    """
    if platform() != "gpu" or weight.ndim != 2:
        return 1
    parts = measured.float32_parts(x.size // x.shape[-1])
    is_narrow = weight.dtype == jnp.float32 and weight.shape[-1] <= measured.FLOAT32_OUTPUTS
    return parts if is_narrow and x.shape[-1] % (parts * _LEAST_CHANNELS) == 0 else 1


def _sum_in_parts(x: Float[Array, "... I"], weight: Float[Array, "I O"], parts: int) -> Float[Array, "... O"]:
    """Return the product, summed in parts of the channels that are then added up."""
    rows, matrix = x.reshape(-1, parts, x.shape[-1] // parts), weight.reshape(parts, -1, weight.shape[-1])
    of_parts = einsum("xpi,pio->pxo", rows, matrix)
    return jnp.sum(of_parts, axis=0).reshape(*x.shape[:-1], weight.shape[-1])


def _over_mesh(
    spec: str, x: Float[Array, "..."], weights: Sequence[DividedWeight], num_detached: int
) -> list[Float[Array, "..."]]:
    """Return products on a mesh: each device multiplies its tokens by its parts of the matrices.

    Where the inputs of a matrix are divided, its parts of the sums are added up: the one exchange of a product. All
    matrices of a call are divided in one way.
    """
    mesh, is_summed = weights[0].mesh, weights[0].is_summed
    tokens = token_axes(x.shape[:-1], mesh, weights[0].least_tokens)
    in_order = partial(sum_over_devices, mesh_axes=weights[0].partition[0])
    add_parts = in_order if weights[0].is_ordered else partial(sum_of_parts, tokens=tokens, backend=weights[0].backend)

    def on_each_device(x, parts):
        products = project_each(spec, x, parts, num_detached)
        return [add_parts(product) for product in products] if is_summed else products

    out_specs = [tokens.of_stream() if is_summed else tokens.of_products(*weight.partition[1:]) for weight in weights]
    return jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(tokens.of_products(weights[0].partition[0]), [weight.specs for weight in weights]),
        out_specs=out_specs,
        check_vma=False,
    )(x, [weight.weight for weight in weights])


def operands(
    x: Float[Array, "..."], weight: Float[Array, "..."] | MXFP8Array
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Return the arrays that `project` multiplies: MXFP8 as numbers, activations quantised where the weight asks.

    Args:
      x: activations.
      weight: a matrix, or a stack of them.
    """
    if not isinstance(weight, MXFP8Array):
        return x, weight
    if weight.activations == "mxfp8":
        x = dequantize(quantize(x, num_outputs=0), x.dtype)
    return x, dequantize(weight, x.dtype)


def _in_stacks(
    x: Float[Array, "... I"], weights: Sequence[StackedLayer], is_detached: Sequence[bool]
) -> list[Float[Array, "..."]]:
    """Return x [... I] times a layer's matrices [L I *outputs], by what the weights name.

    Gradients of a kernel are those of XLA's product.
    """
    from pallas_kernels.gradient import with_gradient

    stacks, layer = tuple(merge_outputs(weight.stack) for weight in weights), weights[0].layer
    if len({weight.stack.shape[0] for weight in weights}) > 1:  # some are read in place, others were taken out
        taken = [StackedLayer(stack, w.layer).take() for w, stack in zip(weights, stacks, strict=True)]
        stacks, layer = tuple(jax.tree.map(lambda y: y[None], one) for one in taken), jnp.int32(0)

    def by_kernel(x, stacks, layer):
        if weights[0].is_ordered:
            return products_in_order(x, stacks, layer)
        kernels = kernels_here(weights[0].backend)
        if isinstance(stacks[0], MXFP8Array):
            return _by_mxfp8_kernel(x, stacks, layer, kernels)
        from pallas_kernels.stacked_project import stacked_project

        return stacked_project(x, stacks, layer, backend=kernels, interpret=interpreted())

    def by_xla(x, stacks, layer):
        products = []
        for stack, detached in zip(stacks, is_detached, strict=True):
            source, matrix = jax.lax.stop_gradient(x) if detached else x, StackedLayer(stack, layer).take()
            products.append(einsum("xi,io->xo", *operands(source, matrix)))
        return tuple(products)

    rows, shapes = x.reshape(-1, x.shape[-1]), [weight.stack.shape[2:] for weight in weights]
    if weights[0].backend == "xla":
        # XLA learns which layer it is when the activations are there: so it reads the matrices no earlier.
        rows, layer = jax.lax.optimization_barrier((rows, layer))
        products = by_xla(rows, stacks, layer)
    else:
        # No gradient goes to weights in MXFP8, and through a call with others their stacks' too.
        has_mxfp8 = any(isinstance(stack, MXFP8Array) for stack in stacks)
        products = with_gradient(by_kernel, by_xla, 1 if has_mxfp8 else 2)(rows, stacks, layer)
    return [out.reshape(*x.shape[:-1], *shape) for out, shape in zip(products, shapes, strict=True)]


def _by_mxfp8_kernel(
    x: Float[Array, "X I"], stacks: Sequence[MXFP8Array], layer: Array, backend: str
) -> tuple[Float[Array, "X _"], ...]:
    """Return products with matrices in MXFP8.

    A kernel multiplies few rows, on Hopper some hundreds. With more, a kernel writes the numbers of a matrix, and XLA
    multiplies by them.
    """
    from pallas_kernels.mxfp8_numbers import Weights, mxfp8_numbers
    from pallas_kernels.mxfp8_project import mxfp8_project

    options = dict(backend=backend, interpret=interpreted())
    weights = tuple(Weights(stack.codes, stack.scales) for stack in stacks)
    cases = [ProductCase.of(stack, 1, len(x), x.dtype) for stack in stacks]
    if backend == "triton" and not any(case.why_not("mosaic_gpu") for case in cases):
        return mxfp8_project(x, weights, layer, backend="mosaic_gpu")
    if len(x) <= measured.MXFP8_ROWS:
        return mxfp8_project(x, weights, layer, **options)
    if backend != "triton":
        taken = (StackedLayer(stack, layer).take() for stack in stacks)
        return tuple(einsum("xi,io->xo", *operands(x, matrix)) for matrix in taken)
    return tuple(einsum("xi,io->xo", x, mxfp8_numbers(weight, layer, x.dtype, **options)) for weight in weights)
