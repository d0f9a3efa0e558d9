"""Which schedule of `segment_attention` runs a call."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from m3jax.platform import platform
from m3jax.vision.definition import segment_attention
from m3jax.vision.rows import row_attention
from m3jax.vision.tiles import tiled_attention

BACKENDS = ("auto", "definition", "xla", "cudnn")
_WIDEST = 128  # of the heads that cuDNN takes on every card


def attend_segments(
    q: Float[Array, "X N H"],
    k: Float[Array, "X N H"],
    v: Float[Array, "X N H"],
    segments: Int[Array, " X"],
    backend: str = "auto",
) -> Float[Array, "X N H"]:
    """`segment_attention` of segments whose patches stand together, padding behind the last.

    Args:
      q, k, v, segments: as in the definition; padding may hold anything.
      backend: "xla" for tiles, on any device, which "auto" takes; "cudnn" for NVIDIA's kernels, on a GPU and in 16
        bits, by name alone until it is known that neighbours change no bit there; "definition" holds all X x X scores,
        and suits `jax.vmap` over small X.

    Raises:
      ValueError: an unknown backend, or cuDNN where it cannot run, with the reason.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: allowed are {', '.join(map(repr, BACKENDS))}")
    if backend == "definition":
        return segment_attention(q, k, v, segments)
    if backend != "cudnn":
        return tiled_attention(q, k, v, segments)
    if reason := _why_not_cudnn(q):
        raise ValueError(f"backend = 'cudnn' cannot run this attention: {reason}; choose 'auto' or 'xla'")
    return row_attention(q, k, v, segments)


def _why_not_cudnn(q: Float[Array, "X N H"]) -> str | None:
    """Why cuDNN cannot run a call; None if it can."""
    if platform() != "gpu":
        return f"it needs a GPU, and JAX runs on a {platform().upper()}"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, and this is {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > _WIDEST:
        return f"heads of {q.shape[-1]} (it takes multiples of 8 up to {_WIDEST})"
    return None
