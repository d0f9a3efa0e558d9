"""The settings of a model's calls that say how they are computed, not what."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jax.sharding import Mesh

from m3jax.cache import CallPages
from m3jax.platform import platform

# Tokens of a tile in the invariant mode. A GPU reads the weights once a tile, and multiplies 128 tokens about as fast
# as one; on a CPU what only fills a tile costs time.
TOKEN_TILE = {"cpu": 32, "gpu": 128, "tpu": 128}


Remat = bool | Literal["products"]


@dataclass(frozen=True)
class Compute:
    """The settings by which a model's calls are computed: the function is the same under all, but for rounding.

    Attributes:
      schedule: of attention: "auto", or one of `m3jax.msa.SCHEDULES`.
      backend: one of `m3jax.ops.BACKENDS`.
      invariant: whether a token's own row alone decides the order of its sums, and so its bits.
      expert_path: "auto", "trained", or one of `m3jax.ops.EXPERT_PATHS`, as of `run_experts`.
      call_pages: makes, given block_size, what holds the keys of a stack of layers in a call without a cache; a class,
        or another callable that is equal to one that makes the same.
      remat: True if the backward pass recomputes activations, "products" if it does but finds what attention and the
        products of matrices gave. Selections are saved: made again they could be others, and the gradient would be that
        of another choice (T30).
      mesh: the devices that parameters and pages are divided over; None for one device.
    """

    schedule: str = "auto"
    backend: str = "auto"
    invariant: bool = False
    expert_path: str = "auto"
    call_pages: Callable[..., CallPages] = CallPages
    remat: Remat = False
    mesh: Mesh | None = None

    @property
    def is_divided(self) -> bool:
        """True if several devices compute a call together."""
        return self.mesh is not None and self.mesh.size > 1

    @property
    def token_tile(self) -> int | None:
        """The number of tokens that the invariant mode computes at once in tiles; None outside of that mode."""
        return TOKEN_TILE[platform()] if self.invariant else None

    @property
    def tower_backend(self) -> str:
        """The backend of the vision tower's attention, as of `m3jax.vision.Vision`.

        cuDNN's kernels are neither XLA's, which a model may be asked to keep to, nor the invariant mode's; and heads
        that are divided among devices have not been tried with them.
        """
        return "xla" if self.backend == "xla" or self.invariant or self.is_divided else "auto"
