"""Conversion of a model's weights to MXFP8 and back."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from m3jax import mxfp8
from m3jax.make import Frozen
from m3jax.model.build import abstract
from m3jax.model.m3 import M3
from m3jax.mxfp8 import MXFP8Array


def quantize(model: M3) -> M3:
    """Return the model with the matrices of its linear layers in MXFP8, as the MXFP8 release has them (docs/mxfp8.md).

    Each number is rounded to the nearest, ties to even, under the scale of its block (`m3jax.mxfp8.quantize`). The
    embedding, the head, norms and routers stay as they are. The given model is not changed; both models are in memory
    until the caller drops the given one.

    Args:
      model: in any dtype, on any mesh.

    Raises:
      ValueError: the weights are in MXFP8 already, one is NaN or infinite, or the mesh cuts through blocks.
    """
    if model.is_mxfp8:
        raise ValueError("the model's weights are in MXFP8 already")
    template = abstract(model.config, str(model.dtype), model.mesh, weights="mxfp8")
    variables, structure = jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_variable)
    made = [
        _quantized(jax.tree_util.keystr(path, simple=True, separator="."), variable[...], like[...])
        if isinstance(like, Frozen)
        else variable
        for (path, variable), like in zip(variables, jax.tree.leaves(template, is_leaf=_is_variable), strict=True)
    ]
    return jax.tree.unflatten(structure, made)


def dequantize(model: M3) -> M3:
    """Return the model with its MXFP8 weights in its own dtype, as `m3jax.load(folder, weights="dequantize")` does.

    Args:
      model: with or without MXFP8 weights.
    """

    def restore(variable: nnx.Variable) -> nnx.Variable:
        if not isinstance(variable, Frozen):
            return variable
        return nnx.Param(_dequantize(variable[...], str(model.dtype)))

    return jax.tree.map(restore, model, is_leaf=_is_variable)


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _quantized(name: str, weight: jax.Array, like: MXFP8Array) -> Frozen:
    """Return one weight in MXFP8, placed as a template has it; ValueError, with its name, if it is not finite."""

    def of_layer(layer):
        return mxfp8.quantize(layer, like.num_inputs, like.num_outputs), jnp.all(jnp.isfinite(layer))

    # One layer at a time: a compiler may keep 32 bits for each of its numbers.
    shardings = jax.tree.map(lambda x: x.sharding, like)
    quantize_layers = jax.jit(lambda weight: jax.lax.map(of_layer, weight), out_shardings=(shardings, None))
    quantized, is_finite = quantize_layers(weight)
    if not is_finite.all():
        raise ValueError(f"{name}: layer {int(is_finite.argmin())} of its stack has a weight that is NaN or infinite")
    return Frozen(quantized)


_dequantize = jax.jit(mxfp8.dequantize, static_argnames="dtype")
