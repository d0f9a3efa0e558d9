"""The compiled programs of training, with the compiler's options that suit platform and mode."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import jax

from m3jax.model import M3
from m3jax.platform import platform
from m3jax.tiles import GPU_OPTIONS, UNTUNED

Result = TypeVar("Result")

# Else XLA lets cuBLAS write a product into the loop's stack of what is kept for the backward pass, and computes it
# again where the forward pass reads it: 14 of the 85 TFLOP of a step of four layers at M3's widths.
_OPTIONS = UNTUNED | {"xla_gpu_enable_dynamic_slice_fusion": False}


def jit_for_training(fn: Callable[..., Result], **arguments: Any) -> Callable[..., Result]:
    """Return `jax.jit` of a function of a model, compiled on a GPU nearly as the engine's prefill.

    Products are left to cuBLAS's first choice (`m3jax.tiles.UNTUNED`): by default XLA compiles and times dozens of
    kernels for each, and a step has three times the products of a forward pass, all of other shapes. In float32 that
    takes minutes. An invariant model has the options of the invariant engine (`GPU_OPTIONS`), whose bits it is to
    compute. Elsewhere XLA's defaults stand. `__wrapped__` is the function, for other options.

    Args:
      fn: to be called outside of other programs; its arguments are pytrees with a model in one of them.
      arguments: of `jax.jit`.
    """
    plain, untuned, invariant = (
        jax.jit(fn, **arguments, compiler_options=options) for options in (None, dict(_OPTIONS), dict(GPU_OPTIONS))
    )

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Result:
        if platform() != "gpu":
            return plain(*args, **kwargs)
        return (invariant if _has_invariant_model((args, kwargs)) else untuned)(*args, **kwargs)

    return call


def _has_invariant_model(arguments: Any) -> bool:
    """Return True if some model in the arguments computes in the invariant mode."""
    leaves = jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, M3))
    return any(leaf.compute.invariant for leaf in leaves if isinstance(leaf, M3))
