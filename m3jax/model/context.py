"""What every layer of one call shares."""

from collections.abc import Callable

import jax
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from m3jax.cache import Cache, Places
from m3jax.config import M3Config
from m3jax.msa import SelectionRules
from m3jax.msa.rules import Score
from m3jax.mxfp8 import MXFP8Array
from m3jax.ops import kernel_reads
from m3jax.tiles import by_tiles


@struct.dataclass
class Context:
    """Positions, rotary tables and places of one call, and how it is to be computed.

    Attributes:
      positions: absolute position of each token; < 0 or >= lengths marks padding.
      lengths: valid tokens of each row after this call.
      cos: cosines of each token's angles.
      sin: sines.
      places: where the tokens go in the cache; nowhere in a call without one.
      rules: of selection.
      schedule: "auto", or one of `m3jax.msa.SCHEDULES`.
      backend: one of `m3jax.ops.BACKENDS`.
      dense: whether sparse layers attend to every block, as in the dense warm-up of training.
      expert_path: "auto", or one of `m3jax.ops.EXPERT_PATHS`.
      token_tile: tokens whose products and norms are computed at once, so that what surrounds a token changes none of
        its bits; None for all of a call.
      mesh: where the model lies.
      has_cache: whether there is one; on a mesh its pages are divided over devices.
    """

    positions: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    cos: Float[Array, "B T R"]
    sin: Float[Array, "B T R"]
    places: Places
    rules: SelectionRules = struct.field(pytree_node=False)
    schedule: str = struct.field(pytree_node=False, default="auto")
    backend: str = struct.field(pytree_node=False, default="auto")
    dense: bool = struct.field(pytree_node=False, default=False)
    expert_path: str = struct.field(pytree_node=False, default="auto")
    token_tile: int | None = struct.field(pytree_node=False, default=None)
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    has_cache: bool = struct.field(pytree_node=False, default=False)

    @property
    def is_divided(self) -> bool:
        """Whether several devices hold the pages."""
        return self.has_cache and self.mesh is not None and self.mesh.size > 1

    def kernel_reads(self, stack: MXFP8Array, dtype: DTypeLike) -> bool:
        """Whether layers multiply by a stack's matrices where they lie: by a kernel, on one device, in any order.

        Args:
          stack: one matrix a layer.
          dtype: of the activations.
        """
        is_free = self.token_tile is None and (self.mesh is None or self.mesh.size == 1)
        return is_free and kernel_reads(stack, dtype, self.backend)

    def by_token(self, fn: Callable[..., PyTree[Array]], *arrays: PyTree[Array]) -> PyTree[Array]:
        """A function of arrays [B T ...] that treats each token alone: in tiles of tokens where there are to be any."""
        return by_token(fn, self.token_tile, *arrays)

    def of_stack(self, index: int, cache: Cache | None) -> "Context":
        """With the host memory of one stack of layers, where its keys and values are offloaded."""
        if cache is None or cache.host is None:
            return self
        return self.replace(places=self.places.replace(host=cache.host[index]))


def by_token(fn: Callable[..., PyTree[Array]], token_tile: int | None, *arrays: PyTree[Array]) -> PyTree[Array]:
    """`Context.by_token` where there is no context."""
    if token_tile is None:
        return fn(*arrays)
    batch_and_length = jax.tree.leaves(arrays)[0].shape[:2]
    as_one_row = lambda *tile: jax.tree.map(lambda x: x[0], fn(*jax.tree.map(lambda x: x[None], tile)))
    tokens = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
    out = by_tiles(as_one_row, token_tile, *tokens)
    return jax.tree.map(lambda x: x.reshape(*batch_and_length, *x.shape[1:]), out)


def selection_rules(config: M3Config, score: Score) -> SelectionRules:
    """The model's rules of selection, with a score that may be another than the configuration's."""
    return SelectionRules(
        top_k=config.index_topk_blocks, local_blocks=config.index_local_blocks, init_blocks=config.index_init_blocks,
        score=score,
    )  # fmt: skip
