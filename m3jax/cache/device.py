"""The device side of the cache: the pages of all stacks of layers, and the table that finds them."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Int

from m3jax.cache.device_pages import INDEX_AXES, KV_AXES, StackCache
from m3jax.cache.offload.pool import OffloadedStack, Slots
from m3jax.cache.storage import DTYPES, HostPages, Places, Scales, unit_scales
from m3jax.config import M3Config
from m3jax.parallel import PAGE_AXES, sharding


@struct.dataclass
class Cache:
    """The keys and values of what a model has read: an argument and a result of every call, donated between them.

    Slot s of row b lies in page `table[b, s // P]` at offset s % P, in every layer. A cache holds no lengths: they are
    data of the call. The host decides which row owns which page (`m3jax.cache.PageAllocator`). If keys and values of
    sparse layers are in host memory, `host` has them for the time of a call, one entry per stack.
    """

    stacks: tuple[StackCache | OffloadedStack, ...]
    table: Int[Array, "B M"]
    host: tuple[HostPages | None, ...] | None = None

    @classmethod
    def init(
        cls, config: M3Config, batch: int, max_length: int, dtype: str = "bfloat16", mesh: Mesh | None = None, **types
    ) -> "Cache":
        """Return an empty cache in which every row owns the pages of `max_length` tokens.

        Args:
          config: the model's configuration.
          batch: B, rows.
          max_length: tokens a row can hold; rounded up to whole pages.
          dtype: of what is stored.
          mesh: divides pages and KV heads by the rules table.
          **types: `kv_dtype`, `index_dtype` and `scales` of `pool`.

        Raises:
          ValueError: batch or max_length below 1, or max_length beyond the model's context.
        """
        if batch < 1 or not 1 <= max_length <= config.max_position_embeddings:
            raise ValueError(
                f"batch = {batch}, max_length = {max_length}: need at least 1 row and 1 to "
                f"{config.max_position_embeddings} tokens (the model's context)"
            )
        blocks, shards = -(-max_length // config.index_block_size), page_shards(mesh)
        cache = cls.pool(config, pages_of_rows([blocks] * batch, shards), batch, blocks, dtype, mesh, **types)
        # The blocks of a row lie on the devices in turn (`PageAllocator`), those of row b from device b on.
        row, block = jnp.arange(batch, dtype=jnp.int32)[:, None], jnp.arange(blocks, dtype=jnp.int32)
        on_device = block // shards * batch + row  # [B M]: each device has a page of every row for each turn
        table = (block + row) % shards * (cache.num_pages // shards) + on_device
        return cache.replace(table=jax.device_put(table, sharding(table.shape, (None, None), mesh)))

    @classmethod
    def pool(
        cls,
        config: M3Config,
        pages: int,
        batch: int,
        blocks: int,
        dtype: str = "bfloat16",
        mesh: Mesh | None = None,
        *,
        kv_dtype: str | None = None,
        index_dtype: str | None = None,
        scales: tuple[Scales, ...] | None = None,
        device_pages: int | None = None,
    ) -> "Cache":
        """Return a cache of empty pages that no row owns yet.

        Args:
          config: the model's configuration; a page holds one block.
          pages: at least this many; rounded up to what the mesh divides.
          batch: B, rows of the table.
          blocks: M, pages a row can have.
          dtype: of keys, values and index keys.
          mesh: divides pages and KV heads by the rules table.
          kv_dtype: of keys and values, if it is another.
          index_dtype: of index keys, if it is another.
          scales: one per stack of layers, for float8; ones by default (see `measure_scales`).
          device_pages: keys and values of sparse layers are in host memory (`HostMemory`), and the device has room for
            those of this many pages in each layer.

        Raises:
          ValueError: a count below 1, or a dtype that a cache cannot have.
        """
        if min(pages, batch, blocks) < 1:
            raise ValueError(f"pages = {pages}, batch = {batch}, blocks = {blocks}: each must be at least 1")
        kv_dtype, index_dtype = kv_dtype or dtype, index_dtype or dtype
        for stored_dtype in (kv_dtype, index_dtype):
            if str(stored_dtype) not in DTYPES:
                raise ValueError(f"a cache cannot hold {stored_dtype}: choose one of {', '.join(DTYPES)}")
        pages = -(-pages // page_shards(mesh)) * page_shards(mesh)
        given = (config, pages, batch, blocks, kv_dtype, index_dtype, mesh, device_pages, scales)
        if mesh is not None:
            return _empty(*given)  # array by array: inside a program, `zeros` forgets on which devices
        # Committed, as the results of a call are: otherwise the second call of each program would compile it again.
        return jax.device_put(_empty_as_one_program(*given), sharding((), (), None))

    @property
    def max_length(self) -> int:
        """The most tokens of a row: the slots of all blocks of its table."""
        return self.table.shape[1] * self.page_size

    @property
    def num_pages(self) -> int:
        """X, pages of the pool."""
        return self.stacks[0].num_pages

    @property
    def page_size(self) -> int:
        """P, tokens of a page."""
        return self.stacks[0].page_size

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, all devices together."""
        return sum(x.nbytes for x in jax.tree.leaves(self))

    @property
    def bytes_per_token(self) -> float:
        """Bytes of pages that one token takes, wherever they lie."""
        return sum(s.bytes_per_token for s in self.stacks)

    def places(self, positions: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Places:
        """Return the page and the offset to which each token of a call is written; padding is written nowhere."""
        is_token = (positions >= 0) & (positions < lengths[:, None])  # [B T]
        # Padding may have any position: it is clipped to some block, whose page is then not taken.
        block = jnp.clip(positions // self.page_size, 0, self.table.shape[1] - 1)
        page = jnp.take_along_axis(self.table, block, axis=1)  # [B T]
        fits = is_token & (positions < self.max_length)
        return Places(self.table, jnp.where(fits, page, -1), positions % self.page_size)

    def copy_pages(self, source: Int[Array, " C"], target: Int[Array, " C"]) -> "Cache":
        """Copy whole pages, all layers; a target outside the pool is dropped."""
        return self.replace(stacks=tuple(s.copy_pages(source, target) for s in self.stacks))

    def read_pages(self, pages: Int[Array, " C"]) -> list[tuple[Array | None, Array | None, Array | None]]:
        """Return the contents of pages, per stack: k, v [L C K P H], index keys [L C P I]; None if not held here."""
        return [s.read_pages(pages) for s in self.stacks]

    def write_pages(self, pages: Int[Array, " C"], contents: list[tuple[Array, Array, Array | None]]) -> "Cache":
        """Put back what `read_pages` gave."""
        pairs = zip(self.stacks, contents, strict=True)
        return self.replace(stacks=tuple(s.write_pages(pages, content) for s, content in pairs))


def _empty(
    config: M3Config,
    pages: int,
    batch: int,
    blocks: int,
    kv_dtype: str,
    index_dtype: str,
    mesh: Mesh | None,
    device_pages: int | None,
    scales: tuple[Scales, ...] | None,
) -> Cache:
    """Return a cache of empty pages."""
    page_size, heads = config.index_block_size, config.num_key_value_heads

    def zeros(shape, axes, dtype):
        return jnp.zeros(shape, dtype, device=None if mesh is None else sharding(shape, axes, mesh))

    def place_scale(scale):
        # Copied: a cache is donated from call to call, the caller's scales are not.
        scale, axes = jnp.copy(scale), ("layers", "kv_heads")[: scale.ndim]
        return scale if mesh is None else jax.device_put(scale, sharding(scale.shape, axes, mesh))

    stacks = []
    for stack, scale in zip(config.stacks, scales or tuple(unit_scales(config)), strict=True):
        index_k, layers = None, stack.num_layers
        if stack.is_sparse:
            index_k = zeros((layers, pages, page_size, config.index_head_dim), INDEX_AXES, index_dtype)
        scale = jax.tree.map(place_scale, scale)
        if device_pages is not None and stack.is_sparse:
            stacks.append(_offloaded(layers, config, index_k, scale, device_pages, kv_dtype))
            continue
        shape = (layers, pages, heads, page_size, config.head_dim)
        stacks.append(StackCache(zeros(shape, KV_AXES, kv_dtype), zeros(shape, KV_AXES, kv_dtype), index_k, scale))
    no_pages = zeros((batch, blocks), (None, None), jnp.int32) - 1
    return Cache(tuple(stacks), no_pages)


# All arrays are made by one program: made one by one, each would be a program of its own to compile.
_empty_as_one_program = jax.jit(
    _empty, static_argnames=("config", "pages", "batch", "blocks", "kv_dtype", "index_dtype", "mesh", "device_pages")
)


def _offloaded(
    layers: int, config: M3Config, index_k: Array, scales: Scales, device_pages: int, dtype: str
) -> OffloadedStack:
    """Return the device's side of a stack whose keys and values are in host memory, with an empty pool."""
    heads = config.num_key_value_heads
    num_slots = device_pages * heads
    shape = (layers, num_slots, config.index_block_size, config.head_dim)
    slots = Slots.empty(layers, index_k.shape[1] * heads, num_slots)
    hits, misses, moved = (jnp.zeros(layers, jnp.int32) for _ in range(3))
    return OffloadedStack(
        jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), index_k, scales, slots, jnp.int32(0), hits, misses, moved
    )


def pages_of_rows(blocks: Sequence[int], shards: int) -> int:
    """Return the pages with which rows of so many blocks find room on every device, wherever each of them begins.

    Args:
      blocks: of each row.
      shards: devices that divide the pages (`page_shards`).
    """
    return shards * sum(-(-count // shards) for count in blocks)


def page_shards(mesh: Mesh | None) -> int:
    """Return the number of devices that divide the pages."""
    return 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in PAGE_AXES)
