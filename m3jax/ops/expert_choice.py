"""Where the kernels of experts can run, with the reasons why not."""

from jaxtyping import Array, Float

from m3jax.mxfp8 import MXFP8Array
from m3jax.ops.backends import interpreted, kernel_name
from m3jax.ops.few_tokens import MOST_TOKENS
from m3jax.platform import platform

GROUPED_UNIT, FEW_UNIT = 128, 64  # widths are multiples of these where `grouped` or `few` runs


def why_not_path(path: str, gate: Float[Array, "L E D F"] | MXFP8Array, num_tokens: int) -> str | None:
    """Return why a path that is asked for by name cannot run, in words; None if it can.

    A path by name is not held to what is fastest, nor to the backend: it runs wherever it gives the right numbers.

    Args:
      path: one of `m3jax.ops.EXPERT_PATHS`.
      gate: their first matrices, of all layers of a stack.
      num_tokens: X.
    """
    if path not in ("few", "grouped"):
        return None  # XLA's paths run everywhere
    if isinstance(gate, MXFP8Array):  # both paths go to one kernel, which a GPU and a TPU have
        return None if kernel_name("auto") else f"it is a kernel, and JAX runs on a {platform().upper()}"
    if platform() != "gpu" and not interpreted():
        return f"it is a kernel for a GPU, and JAX runs on a {platform().upper()}"
    # In 32-bit numbers `grouped` too has pieces of 64 channels, for tiles of many tokens.
    is_narrow = path == "few" or gate.dtype.itemsize == 4
    widths, unit = gate.shape[2:], FEW_UNIT if is_narrow else GROUPED_UNIT
    if any(width % unit for width in widths):
        return f"experts of {widths[0]} by {widths[1]} channels (it has multiples of {unit})"
    if path == "few" and num_tokens > MOST_TOKENS:
        return f"{num_tokens} tokens (it has up to {MOST_TOKENS})"
    return None
