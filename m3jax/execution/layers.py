"""The loop over the layers of a stack: a scan, or one layer after the other with parameters of its own."""

import copy
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree, Shaped

from m3jax.cache import LayerPages
from m3jax.execution.keep import Keep
from m3jax.execution.protocol import Execution
from m3jax.make import dotted_path
from m3jax.mxfp8 import MXFP8Array
from m3jax.weights import StackedLayer

_NAMES_OF_SAVED = ("msa_blocks", "expert_ids")  # choices that a backward pass must not make again (T30)


def run_layers(
    stack: nnx.Module,
    x: Float[Array, "B T D"],
    context: Any,
    pages: LayerPages,
    keep: Keep,
    memory: PyTree[Array],
    num_before: int,
) -> tuple[Float[Array, "B T D"], LayerPages, PyTree[Array], PyTree[Array]]:
    """Run all layers of a stack.

    Args:
      stack: a `m3jax.model.decoder.Decoder`, whose parameters have a leading layer axis. A call of it, with the
        parameters of one layer, is (x, context, pages, layer) -> (x, pages, named values).
      x: the residual stream.
      context: what the layers of the call share (`m3jax.model.context.Context`).
      pages: the keys that the call's rows have in this stack, or those that the call is about to make.
      keep: what is kept of each layer.
      memory: of `keep`, after the layers before.
      num_before: layers of the model before this stack.

    Returns:
      (residual stream, pages with the new tokens, memory, what was kept of each layer, stacked).
    """
    how = context.how

    def run_layer(carry, parameters_and_layer):
        x, pages, memory = carry
        one_layer, layer = parameters_and_layer
        one_layer = how.prepared(_with_experts(one_layer, stack, layer))
        x, pages, values = one_layer(x, context, pages, layer)
        memory, kept = keep.after_layer(memory, num_before, layer, values, context)
        return (x, pages.after_layer(), memory), kept

    if how.remat:
        run_layer = jax.checkpoint(run_layer, policy=jax.checkpoint_policies.save_only_these_names(*_NAMES_OF_SAVED))
    carry = x, pages, memory
    if stack.apart is not None:
        kept_of_each, run_layer = [], jax.jit(run_layer)  # traced once, for all layers of the stack
        for layer, one_layer in enumerate(stack.apart):
            carry, kept = run_layer(carry, (one_layer, jnp.int32(layer)))
            kept_of_each.append(kept)
        x, pages, memory = carry
        return x, pages, memory, jax.tree.map(lambda *layers: jnp.stack(layers), *kept_of_each)

    stacks, structure = _parameters(stack, how, x.shape[0] * x.shape[1], x.dtype)

    # Matrices that a kernel reads in place are not scanned over: a scan would copy each layer's matrix first.
    def run_scanned(carry, scanned_and_layer):
        scanned, layer = scanned_and_layer
        parameters = [
            how.stacked(of_stack, layer) if stays else one_layer
            for (of_stack, stays), one_layer in zip(stacks, scanned, strict=True)
        ]
        return run_layer(carry, (jax.tree.unflatten(structure, parameters), layer))

    of_layers = [None if stays else of_stack for of_stack, stays in stacks]
    layer_ids = jnp.arange(stack.depth, dtype=jnp.int32)
    (x, pages, memory), kept = jax.lax.scan(run_scanned, carry, (of_layers, layer_ids))
    return x, pages, memory, kept


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


def _parameters(
    stack: nnx.Module, how: Execution, num_rows: int, dtype: DTypeLike
) -> tuple[list[tuple[Shaped[Array, "L ..."] | MXFP8Array, bool]], jax.tree_util.PyTreeDef]:
    """Return every parameter but the experts', and True for those whose layers a kernel reads where they lie."""
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
