"""What every layer of one call shares."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from m3jax.cache import Cache, Places
from m3jax.config import M3Config
from m3jax.msa import SelectionRules
from m3jax.msa.rules import Score
from m3jax.mxfp8 import MXFP8Array
from m3jax.ops import can_order, kernel_reads, reads_in_place
from m3jax.tiles import by_tiles
from m3jax.weights import StackedLayer


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
      is_ordered: whether kernels do that for all tokens of a call at once, instead of tiles (`m3jax.ops.ordered`).
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
    is_ordered: bool = struct.field(pytree_node=False, default=False)
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    has_cache: bool = struct.field(pytree_node=False, default=False)

    @property
    def is_divided(self) -> bool:
        """Whether several devices hold the pages."""
        return self.has_cache and self.mesh is not None and self.mesh.size > 1

    @property
    def is_tiled(self) -> bool:
        """Whether a token has the same bits whatever is beside it because tokens are computed in tiles."""
        return self.token_tile is not None and not self.is_ordered

    def prepared(self, layer: PyTree[Array]) -> PyTree[Array]:
        """A layer's parameters as products in one order read them: its matrices as stacks of one, but for a stack's.

        Args:
          layer: a pytree of parameters without their layer axis.
        """

        def prepare(parameter):
            if isinstance(parameter, StackedLayer) or parameter.ndim < 2:  # norms and biases are no matrices
                return parameter
            return StackedLayer(jax.tree.map(lambda x: x[None], parameter), jnp.int32(0), self.backend, True)

        is_matrix = lambda x: isinstance(x, MXFP8Array | StackedLayer)
        return jax.tree.map(prepare, layer, is_leaf=is_matrix) if self.is_ordered else layer

    def by_token(self, fn: Callable[..., PyTree[Array]], *arrays: PyTree[Array]) -> PyTree[Array]:
        """A function of arrays [B T ...] that treats each token alone: in tiles of tokens where there are to be any."""
        return by_token(fn, self.token_tile if self.is_tiled else None, *arrays)

    def of_stack(self, index: int, cache: Cache | None) -> "Context":
        """With the host memory of one stack of layers, where its keys and values are offloaded."""
        if cache is None or cache.host is None:
            return self
        return self.replace(places=self.places.replace(host=cache.host[index]))


@dataclass(frozen=True)
class InPlace:
    """Which matrices of a stack of layers a kernel reads where they lie: on one device, in any order of sums.

    Attributes:
      num_rows: tokens of the call.
      dtype: of the activations.
      backend: one of `m3jax.ops.BACKENDS`.
      token_tile: as of `Context`.
      mesh: where the model lies.
      is_ordered: whether all matrices are read there, by a kernel that gives a row the same bits in every call.
    """

    num_rows: int
    dtype: DTypeLike
    backend: str
    token_tile: int | None
    mesh: Mesh | None
    is_ordered: bool = False

    def reads(self, stack: Float[Array, "..."] | MXFP8Array, num_inputs: int) -> bool:
        """Whether a stack's matrices are among them.

        Args:
          stack: `[L *inputs *outputs]`, one matrix a layer.
          num_inputs: how many axes a product sums over.
        """
        if self.is_ordered:
            return reads_in_place(stack)
        backend = backend_of_products(self.backend, self.token_tile, self.mesh)
        return kernel_reads(stack, num_inputs, self.num_rows, self.dtype, backend)


def backend_of_products(backend: str, token_tile: int | None, mesh: Mesh | None) -> str:
    """What runs a layer's products, norms and routers: XLA alone where sums have one order, or devices divide arrays.

    A kernel sees one device's memory, and sums in an order that the number of tokens decides.

    Args:
      backend: the model's, one of `m3jax.ops.BACKENDS`.
      token_tile: as of `Context`.
      mesh: where the model lies.
    """
    return backend if token_tile is None and (mesh is None or mesh.size == 1) else "xla"


def by_token(fn: Callable[..., PyTree[Array]], token_tile: int | None, *arrays: PyTree[Array]) -> PyTree[Array]:
    """`Context.by_token` where there is no context."""
    if token_tile is None:
        return fn(*arrays)
    batch_and_length = jax.tree.leaves(arrays)[0].shape[:2]
    as_one_row = lambda *tile: jax.tree.map(lambda x: x[0], fn(*jax.tree.map(lambda x: x[None], tile)))
    tokens = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
    out = by_tiles(as_one_row, token_tile, *tokens)
    return jax.tree.map(lambda x: x.reshape(*batch_and_length, *x.shape[1:]), out)


def kernels_order(config: M3Config, dtype: DTypeLike, backend: str) -> bool:
    """Whether kernels run all layers of a model in its invariant mode, for a device by itself.

    Args:
      config: the model's.
      dtype: of the activations.
      backend: one of `m3jax.ops.BACKENDS`.
    """
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads
    widths = heads, kv_heads * config.head_dim, kv_heads * config.index_head_dim, config.index_head_dim
    widths += config.shared_intermediate_size, config.dense_intermediate_size
    router, head = (config.hidden_size, config.num_local_experts), (config.head_dim, config.rotary_dim)
    return can_order(dtype, backend, widths=widths, router=router, head=head)


def selection_rules(config: M3Config, score: Score) -> SelectionRules:
    """The model's rules of selection, with a score that may be another than the configuration's."""
    return SelectionRules(
        top_k=config.index_topk_blocks, local_blocks=config.index_local_blocks, init_blocks=config.index_init_blocks,
        score=score,
    )  # fmt: skip
