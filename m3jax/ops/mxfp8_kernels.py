"""Whether kernels multiply by MXFP8 weights, and which."""

from collections.abc import Sequence
from math import prod

import jax.numpy as jnp
from jax.typing import DTypeLike

from m3jax.mxfp8 import BLOCK, MXFP8Array
from m3jax.ops.backends import kernel_name

_NARROWEST = 32  # outputs that a Triton program takes at least
_TPU_DEPTH = 1024  # input channels of a step, where there are more
_LANES = 128


def mxfp8_kernel(stack: MXFP8Array, dtype: DTypeLike, widths: Sequence[tuple[int, int]], backend: str) -> str | None:
    """The backend whose kernels multiply by the matrices of a stack; None where XLA does.

    There is nothing to ask for by name: what no kernel takes, XLA multiplies.

    Args:
      stack: of matrices, on this device.
      dtype: of the activations.
      widths: (inputs, outputs) of the products.
      backend: one of `m3jax.ops.BACKENDS`.
    """
    from pallas_kernels.numbers import can_reach

    kernel = kernel_name(backend)
    if kernel is None or stack.activations is not None or any(inputs % BLOCK for inputs, _ in widths):
        return None
    if kernel == "triton":
        is_taken = jnp.dtype(dtype).itemsize == 2 and can_reach(prod(stack.shape))
        return kernel if is_taken and not any(outputs % _NARROWEST for _, outputs in widths) else None
    is_deep = [inputs % _TPU_DEPTH == 0 or inputs < _TPU_DEPTH for inputs, _ in widths]
    is_wide = [outputs % _LANES == 0 for _, outputs in widths]
    return kernel if str(dtype) == "bfloat16" and all(is_deep) and all(is_wide) else None
