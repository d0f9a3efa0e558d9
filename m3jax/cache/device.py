"""The device side of the cache: pages of keys, values and index keys, and the table that finds them."""

import math

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from m3jax.cache.offload.pool import HostPages, OffloadedStack, Slots
from m3jax.cache.storage import DTYPES, FLOAT8, Places, Scales, stored, unit_scales
from m3jax.config import M3Config
from m3jax.msa.views import Paged, PagedIndex
from m3jax.parallel import PAGE_AXES, sharding

KV_AXES = ("layers", "pages", "kv_heads", None, None)
INDEX_AXES = ("layers", "pages", None, None)


@struct.dataclass
class StackCache:
    """The pages of one stack of layers; `index_k` is None where attention is dense."""

    k: Num[Array, "L X K P H"]
    v: Num[Array, "L X K P H"]
    index_k: Num[Array, "L X P I"] | None
    scales: Scales

    @property
    def num_pages(self) -> int:
        """X, the pages held here."""
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        """P, tokens of a page."""
        return self.k.shape[3]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of pages that one token takes."""
        arrays = (x for x in (self.k, self.v, self.index_k) if x is not None)
        return sum(x.nbytes for x in arrays) / (self.num_pages * self.page_size)

    def write(
        self,
        layer: Int[Array, ""],
        places: Places,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        index_k: Float[Array, "B T I"] | None,
    ) -> "StackCache":
        """Put new tokens in their places; a token whose page is not held is dropped."""
        held = (places.page >= 0) & (places.page < self.num_pages)
        page, offset = jnp.where(held, places.page, self.num_pages), places.offset
        scale = lambda x: x[layer][:, None]
        put = lambda x, new, s: x.at[layer, page, :, offset].set(stored(new, x.dtype, scale(s)), mode="drop")
        out = self.replace(k=put(self.k, k, self.scales.k), v=put(self.v, v, self.scales.v))
        if index_k is None:
            return out
        new = stored(index_k, self.index_k.dtype, self.scales.index_k[layer])
        return out.replace(index_k=self.index_k.at[layer, page, offset].set(new, mode="drop"))

    def view(self, layer: Int[Array, ""] | int, places: Places, dtype: DTypeLike) -> Paged:
        """One layer's keys and values, read in `dtype`."""
        small = self.k.dtype == FLOAT8
        scales = (self.scales.k[layer], self.scales.v[layer]) if small else None
        return Paged(self.k, self.v, scales, layer, places.table, dtype)

    def index_view(self, layer: Int[Array, ""] | int, places: Places, dtype: DTypeLike) -> PagedIndex:
        """One layer's index keys, read in `dtype`."""
        scale = self.scales.index_k[layer] if self.index_k.dtype == FLOAT8 else None
        return PagedIndex(self.index_k, scale, layer, places.table, dtype)

    def copy_pages(self, source: Int[Array, " C"], target: Int[Array, " C"]) -> "StackCache":
        """Copy whole pages, all layers; a target outside the pool is dropped."""
        target = jnp.where(target >= 0, target, self.num_pages)
        return self._each(lambda x: x.at[:, target].set(x[:, source], mode="drop"))

    def read_pages(self, pages: Int[Array, " C"]) -> tuple[Array, Array, Array | None]:
        """The contents of pages: k, v [L C K P H] and index keys [L C P I]."""
        read = lambda x: None if x is None else x[:, pages]
        return read(self.k), read(self.v), read(self.index_k)

    def write_pages(self, pages: Int[Array, " C"], contents: tuple[Array, Array, Array | None]) -> "StackCache":
        """Put back what `read_pages` gave."""
        pages = jnp.where(pages >= 0, pages, self.num_pages)
        put = lambda x, new: None if x is None else x.at[:, pages].set(new, mode="drop")
        k, v, index_k = contents
        return self.replace(k=put(self.k, k), v=put(self.v, v), index_k=put(self.index_k, index_k))

    def _each(self, fn) -> "StackCache":
        index_k = None if self.index_k is None else fn(self.index_k)
        return self.replace(k=fn(self.k), v=fn(self.v), index_k=index_k)


@struct.dataclass
class Cache:
    """What a model has seen: an argument and a result of every call, donated between them.

    Slot s of row b lies in page `table[b, s // P]` at offset s % P, in every layer. There are no lengths in it: they
    are data of the call. Which row owns which page is decided on the host (`m3jax.cache.PageAllocator`). Where keys
    and values of sparse layers are in host memory, `host` has them for the time of a call, one entry per stack.
    """

    stacks: tuple[StackCache | OffloadedStack, ...]
    table: Int[Array, "B M"]
    host: tuple[HostPages | None, ...] | None = None

    @classmethod
    def init(
        cls, config: M3Config, batch: int, max_length: int, dtype: str = "bfloat16", mesh: Mesh | None = None, **types
    ) -> "Cache":
        """An empty cache in which every row owns the pages of `max_length` tokens.

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
        blocks = -(-max_length // config.index_block_size)
        pages = batch * blocks
        cache = cls.pool(config, pages, batch, blocks, dtype, mesh, **types)
        # Neighbouring blocks lie `batch` pages apart, so that devices which divide the pages share every row.
        table = jnp.arange(pages, dtype=jnp.int32).reshape(blocks, batch).T
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
        """Empty pages that no row owns yet.

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
        _check_pool(pages, batch, blocks, kv_dtype or dtype, index_dtype or dtype)
        pages = _round_up(pages, page_shards(mesh))
        zeros = lambda shape, axes, kind: jnp.zeros(shape, kind, device=sharding(shape, axes, mesh))
        given = scales or tuple(unit_scales(config))
        size, heads = config.index_block_size, config.num_key_value_heads

        def stack(s, scale):
            index = (s.num_layers, pages, size, config.index_head_dim)
            keys = zeros(index, INDEX_AXES, index_dtype or dtype) if s.is_sparse else None
            # Copied: a cache is donated from call to call, the caller's scales are not.
            place = lambda x: jax.device_put(jnp.copy(x), sharding(x.shape, ("layers", "kv_heads")[: x.ndim], mesh))
            scale = jax.tree.map(place, scale)
            if device_pages is not None and s.is_sparse:
                return _offloaded(s.num_layers, config, keys, scale, device_pages, kv_dtype or dtype)
            kv = (s.num_layers, pages, heads, size, config.head_dim)
            k, v = (zeros(kv, KV_AXES, kv_dtype or dtype) for _ in "kv")
            return StackCache(k, v, keys, scale)

        stacks = tuple(stack(s, g) for s, g in zip(config.stacks, given, strict=True))
        table = jnp.full((batch, blocks), -1, jnp.int32, device=sharding((batch, blocks), (None, None), mesh))
        return cls(stacks, table)

    @property
    def max_length(self) -> int:
        """Slots of a row."""
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
        """Where the tokens of a call go; padding goes nowhere."""
        real = (positions >= 0) & (positions < lengths[:, None])
        block = jnp.clip(positions // self.page_size, 0, self.table.shape[1] - 1)
        page = jnp.take_along_axis(self.table, block, axis=1)
        inside = real & (positions < self.max_length)
        return Places(self.table, jnp.where(inside, page, -1), positions % self.page_size)

    def copy_pages(self, source: Int[Array, " C"], target: Int[Array, " C"]) -> "Cache":
        """Copy whole pages, all layers; a target outside the pool is dropped."""
        return self.replace(stacks=tuple(s.copy_pages(source, target) for s in self.stacks))

    def read_pages(self, pages: Int[Array, " C"]) -> list[tuple[Array | None, Array | None, Array | None]]:
        """The contents of pages, per stack of layers: k, v [L C K P H] and index keys [L C P I]; None is not here."""
        return [s.read_pages(pages) for s in self.stacks]

    def write_pages(self, pages: Int[Array, " C"], contents: list[tuple[Array, Array, Array | None]]) -> "Cache":
        """Put back what `read_pages` gave."""
        pairs = zip(self.stacks, contents, strict=True)
        return self.replace(stacks=tuple(s.write_pages(pages, content) for s, content in pairs))


def _offloaded(layers: int, config: M3Config, index_k: Array, scales: Scales, device_pages: int, dtype: str):
    """The device's side of a stack whose keys and values are in host memory; nothing is here yet."""
    heads = config.num_key_value_heads
    slots = device_pages * heads
    k, v = (jnp.zeros((layers, slots, config.index_block_size, config.head_dim), dtype) for _ in "kv")
    zeros = lambda: jnp.zeros(layers, jnp.int32)
    places = Slots.empty(layers, index_k.shape[1] * heads, slots)
    stack = OffloadedStack(k, v, index_k, scales, places, jnp.int32(0), zeros(), zeros(), zeros())
    # Committed, as what a call returns is: else the second call of each program would compile it again.
    return jax.device_put(stack, index_k.sharding)


def page_shards(mesh: Mesh | None) -> int:
    """How many devices divide the pages."""
    return 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in PAGE_AXES)


def _check_pool(pages: int, batch: int, blocks: int, *dtypes: str) -> None:
    if min(pages, batch, blocks) < 1:
        raise ValueError(f"pages = {pages}, batch = {batch}, blocks = {blocks}: each must be at least 1")
    for dtype in dtypes:
        if str(dtype) not in DTYPES:
            raise ValueError(f"a cache cannot hold {dtype}: choose one of {', '.join(DTYPES)}")


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
