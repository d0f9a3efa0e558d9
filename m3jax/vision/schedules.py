"""The choice of the schedule of `segment_attention` that runs a call: cuDNN, tiles, or the definition."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from m3jax.platform import compute_capability, platform
from m3jax.spec.vision import segment_attention
from m3jax.vision.rows import Turns, row_attention
from m3jax.vision.tiles import tiled_attention

BACKENDS = ("auto", "definition", "xla", "cudnn")
_OLDEST = 8.0  # the compute capability of cards whose cuDNN has fused attention (Ampere)
_WIDEST = 128  # of the heads that it takes on every one of them


# q, k and v [X N H] to the output [X N H], for segments that are known already.
AttendSegments = Callable[[Array, Array, Array], Array]


def attend_segments(
    q: Float[Array, "X N H"],
    k: Float[Array, "X N H"],
    v: Float[Array, "X N H"],
    segments: Int[Array, " X"],
    backend: str = "auto",
) -> Float[Array, "X N H"]:
    """Compute `segment_attention` of segments whose patches stand together, padding behind the last.

    Args:
      q, k, v, segments: as in the definition; padding may hold anything.
      backend: "cudnn" for NVIDIA's kernels, on a GPU and in 16 bits; "xla" for tiles, on any device; "auto" for the
        first where it can run, else the second; "definition" holds all X x X scores, and suits `jax.vmap` over small X.

    Raises:
      ValueError: an unknown backend, or cuDNN where it cannot run, with the reason.
    """
    return schedule_of(segments, q.dtype, q.shape[-1], backend)(q, k, v)


def schedule_of(segments: Int[Array, " X"], dtype: jnp.dtype, head_dim: int, backend: str = "auto") -> AttendSegments:
    """Return `attend_segments` for several layers: what depends on the segments alone is computed once.

    Args:
      segments, backend: as in `attend_segments`.
      dtype: of queries, keys and values.
      head_dim: H.

    Raises:
      ValueError: as `attend_segments`.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: allowed are {', '.join(map(repr, BACKENDS))}")
    if backend == "definition":
        return partial(segment_attention, segments=segments)
    reason = _why_not_cudnn(dtype, head_dim)
    if backend == "cudnn" and reason:
        raise ValueError(f"backend = 'cudnn' cannot run this attention: {reason}; choose 'auto' or 'xla'")
    if backend == "xla" or reason:
        return lambda q, k, v: tiled_attention(q, k, v, segments)
    turns = Turns.of(segments)
    return lambda q, k, v: row_attention(q, k, v, segments, turns, "cudnn")


def _why_not_cudnn(dtype: jnp.dtype, head_dim: int) -> str | None:
    """Return the reason for which cuDNN cannot run a call; None if it can."""
    if platform() != "gpu":
        return f"it needs a GPU, and JAX runs on a {platform().upper()}"
    capability = compute_capability()
    if capability is not None and float(capability) < _OLDEST:
        return f"a card of compute capability {capability} (it takes {_OLDEST} and newer)"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, and this is {dtype}"
    if head_dim % 8 or head_dim > _WIDEST:
        return f"heads of {head_dim} (it takes multiples of 8 up to {_WIDEST})"
    return None
