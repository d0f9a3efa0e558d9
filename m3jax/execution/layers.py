"""The loop over a model's layers: a scan of each stack, or one layer after the other with parameters of its own."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree, Shaped

from m3jax.cache import Cache, LayerPages
from m3jax.execution.protocol import Execution
from m3jax.make import dotted_path
from m3jax.mxfp8 import MXFP8Array
from m3jax.weights import StackedLayer

_CHOICES = ("msa_blocks", "expert_ids")  # that a backward pass must not make again (T30)
_OF_PRODUCTS = ("attention", "product of matrices", "product of experts")
_named, _both = jax.checkpoint_policies.save_only_these_names, jax.checkpoint_policies.save_from_both_policies
# cuDNN's attention has a gradient of its own, which reads more than its output; it is known by its primitive.
_of_cudnn = lambda primitive, *_, **__: primitive.name.startswith("dot_product_attention_fwd")
SAVED = {True: _named(*_CHOICES), "products": _both(_named(*_CHOICES, *_OF_PRODUCTS), _of_cudnn)}


class Layers(NamedTuple):
    """The results of a model's layers.

    Attributes:
      x: Residual stream after the last layer.
      cache: The cache with the new tokens; None in a call without one.
      kept: Values by own name for each run of layers that are edited and kept alike (`Taps.runs`), stacked over its
        layers.
      probed: Results of the call's probe for each of these runs; None without a probe.
      residuals: Residual stream at `Taps.residual_layers`, and one unused place; None if none is kept.
    """

    x: Float[Array, "B T D"]
    cache: Cache | None
    kept: list[dict[str, Array]]
    probed: list[PyTree[Array]]
    residuals: Float[Array, "_ B T D"] | None


def run_layers(stacks: Sequence[nnx.Module], x: Float[Array, "B T D"], context: Any, cache: Cache | None) -> Layers:
    """Run all layers of a model.

    Args:
      stacks: Consecutive layers of one kind each (`m3jax.model.decoder.Decoder`), whose parameters have a leading layer
        axis. A call of one, with the parameters of one layer, is (x, context, pages, layer, tap) -> (x, pages).
      x: Residual stream before the first layer.
      context: Values that the layers of the call share (`m3jax.model.context.Context`).
      cache: Keys of the call's rows; None if the call computes all that it reads.
    """
    how, taps, residuals = context.how, context.taps, context.taps.no_residuals(x)
    new_stacks, kept, num_before = [], [], 0
    for index, stack in enumerate(stacks):
        # A call without a cache attends over pages that its layers are about to make.
        pages = how.call_pages(context.config.index_block_size) if cache is None else cache.stacks[index]
        parameters, as_layer = _layers_of(stack, how, num_rows=x.shape[0] * x.shape[1], dtype=x.dtype)
        of_stack, carry = context.of_stack(index, cache), (x, pages, residuals)
        for first, end in taps.runs(num_before, stack.depth):
            step = partial(run_layer, as_layer, of_stack, num_before, first)
            if how.remat:
                step = jax.checkpoint(step, policy=SAVED[how.remat])
            layer_ids = jnp.arange(first, end, dtype=jnp.int32)
            if stack.apart is not None:
                step, kept_of_each = jax.jit(step), []  # traced once, for all layers of the run
                for layer in range(first, end):
                    carry, kept_of_layer = step(carry, (parameters[layer], jnp.int32(layer)))
                    kept_of_each.append(kept_of_layer)
                kept_of_layers = jax.tree.map(lambda *layers: jnp.stack(layers), *kept_of_each)
            elif end - first == stack.depth:
                carry, kept_of_layers = jax.lax.scan(step, carry, (parameters, layer_ids))
            else:  # each turn reads its layer where it lies: a part of the stack would be a copy
                part = partial(_step_of_part, step, parameters)
                carry, kept_of_layers = jax.lax.scan(part, carry, layer_ids)
            kept.append(kept_of_layers)
        x, pages, residuals = carry
        new_stacks.append(pages)
        num_before += stack.depth
    cache = None if cache is None else cache.replace(stacks=tuple(new_stacks))
    return Layers(x, cache, [values for values, _ in kept], [probed for _, probed in kept], residuals)


def run_layer(
    as_layer: Callable[[PyTree[Array], Int[Array, ""]], nnx.Module],
    context: Any,
    num_before: int,
    first: int,
    carry: tuple[Float[Array, "B T D"], LayerPages, PyTree[Array]],
    parameters_and_layer: tuple[PyTree[Array], Int[Array, ""]],
) -> tuple[tuple[Float[Array, "B T D"], LayerPages, PyTree[Array]], PyTree[Array]]:
    """Run one layer, as a turn of a scan.

    Args:
      as_layer: Function that makes a module of the layer's parameters and its index in the stack.
      context: Values that the layers of the call share.
      num_before: Layers of the model before this stack.
      first: First layer of the scan, in the stack; its edits and kept values are those of all layers of the scan.
      carry: The residual stream, pages of the stack, and kept residuals.
      parameters_and_layer: Parameters of this turn's layer, and its index in the stack.

    Returns:
      (the carry of the next turn, (kept values by name, the probe's result)).
    """
    x, pages, residuals = carry
    parameters, layer = parameters_and_layer
    decoder, taps = as_layer(parameters, layer), context.taps
    tap = taps.of_layer(num_before, first, layer, context)
    x, pages = decoder(x, context, pages, layer, tap)
    residuals = taps.keep_residual(residuals, num_before + layer + 1, x)
    # The probe is offered all values; those that it leaves out are read by nothing, and compiled away.
    probed = None if taps.probe is None else taps.probe(dict(tap.values), context)
    return (x, pages.after_layer(), residuals), (tap.kept, probed)


def _step_of_part(step: Callable, parameters: PyTree[Array], carry: PyTree[Array], layer: Int[Array, ""]) -> tuple:
    """Run a turn of a scan over some layers of a stack, given which one it is."""
    of_layer = jax.tree.map(lambda of_stack: jax.lax.dynamic_index_in_dim(of_stack, layer, 0, False), parameters)
    return step(carry, (of_layer, layer))


def take_apart(stack: nnx.Module, how: Execution, num_rows: int, dtype: DTypeLike) -> nnx.Module:
    """Return a stack whose layers `run_layers` runs one after the other, without a scan.

    For a program that runs many decode steps in a loop, before the loop: what is cut out of the stacks is copied once,
    where a scan copies it in each step. What a kernel reads where it lies stays there, experts too. The program grows
    with the number of layers.

    Args:
      stack: a `m3jax.model.decoder.Decoder`.
      how: computes a call with a cache.
      num_rows: tokens of a call.
      dtype: of the activations.
    """
    stacks, structure = _parameters(stack, how, num_rows, dtype)

    def parameters(layer: int) -> nnx.Module:
        index = jnp.int32(layer)
        of_layer = [how.stacked(of_stack, index) if stays else of_stack[layer] for of_stack, stays in stacks]
        return jax.tree.unflatten(structure, of_layer)

    other = copy.copy(stack)
    other.apart = nnx.List([parameters(layer) for layer in range(stack.depth)])
    return other


def _layers_of(
    stack: nnx.Module, how: Execution, num_rows: int, dtype: DTypeLike
) -> tuple[PyTree[Array], Callable[[PyTree[Array], Int[Array, ""]], nnx.Module]]:
    """Return the parameters that a turn over layers gets one by one, and what makes a layer of those of one turn.

    Matrices that a kernel reads in place are not among them: a scan would copy each layer's matrix first.
    """
    if stack.apart is not None:
        return stack.apart, lambda one_layer, layer: how.prepared(_with_experts(one_layer, stack, layer))
    stacked, structure = _parameters(stack, how, num_rows, dtype)

    def as_layer(of_layer, layer):
        whole = [
            how.stacked(of_stack, layer) if stays else one_layer
            for (of_stack, stays), one_layer in zip(stacked, of_layer, strict=True)
        ]
        return how.prepared(_with_experts(jax.tree.unflatten(structure, whole), stack, layer))

    return [None if stays else of_stack for of_stack, stays in stacked], as_layer


def _parameters(
    stack: nnx.Module, how: Execution, num_rows: int, dtype: DTypeLike
) -> tuple[list[tuple[Shaped[Array, "L ..."] | MXFP8Array, bool]], jax.tree_util.PyTreeDef]:
    """Return every parameter but the experts', and True for those whose layers a kernel reads where they lie."""
    # Experts are left out: they are read where they lie by every way to compute.
    without_experts = _replace_experts(stack, None)
    leaves, structure = jax.tree_util.tree_flatten_with_path(without_experts, is_leaf=_is_matrix_of_its_own)
    names = [dotted_path(path).rpartition(".")[2] for path, _ in leaves]
    return [
        (of_stack, how.reads_in_place(name, of_stack, num_rows, dtype))
        for name, (_, of_stack) in zip(names, leaves, strict=True)
    ], structure


def _with_experts(one_layer: nnx.Module, stack: nnx.Module, layer: Int[Array, ""]) -> nnx.Module:
    """Return one layer with its stack's experts, read where they lie: a copy would be of all experts to use a few."""
    experts = getattr(stack.mlp, "experts", None)
    if experts is None:
        return one_layer
    matrices = jax.tree.map(lambda matrix: StackedLayer(matrix, layer), experts, is_leaf=_is_matrix_of_its_own)
    return _replace_experts(one_layer, matrices)


def _replace_experts(layers: nnx.Module, experts: nnx.Module | None) -> nnx.Module:
    """Return a copy with other experts, if there are any."""
    other = jax.tree.map(lambda parameter: parameter, layers, is_leaf=_is_matrix_of_its_own)
    if hasattr(layers.mlp, "experts"):
        other.mlp.experts = experts
    return other


def _is_matrix_of_its_own(leaf: object) -> bool:
    return isinstance(leaf, MXFP8Array | StackedLayer)
