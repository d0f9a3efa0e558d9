"""The device side of the cache: pages of keys, values and index keys, and the table that finds them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from m3jax.config import M3Config
from m3jax.msa.views import Paged, PagedIndex
from m3jax.parallel import sharding

KV_AXES = ("layers", "pages", "kv_heads", None, None)
INDEX_AXES = ("layers", "pages", None, None)
_FLOAT8 = "float8_e4m3fn"
DTYPES = ("bfloat16", "float16", "float32", "float64", _FLOAT8)


class Places(NamedTuple):
    """Where a call's tokens go and where their rows' past lies; pages outside [0, pages) are not held."""

    table: Int[Array, "B M"]
    page: Int[Array, "B T"]
    offset: Int[Array, "B T"]


@struct.dataclass
class Scales:
    """What stored float8 numbers are multiplied by: one per layer and head, one per layer for index keys."""

    k: Float[Array, "L K"]
    v: Float[Array, "L K"]
    index_k: Float[Array, " L"]


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
        put = lambda x, new, s: x.at[layer, page, :, offset].set(_stored(new, x.dtype, scale(s)), mode="drop")
        out = self.replace(k=put(self.k, k, self.scales.k), v=put(self.v, v, self.scales.v))
        if index_k is None:
            return out
        new = _stored(index_k, self.index_k.dtype, self.scales.index_k[layer])
        return out.replace(index_k=self.index_k.at[layer, page, offset].set(new, mode="drop"))

    def view(self, layer: Int[Array, ""] | int, places: Places, dtype: DTypeLike) -> Paged:
        """One layer's keys and values, read in `dtype`."""
        small = self.k.dtype == _FLOAT8
        scales = (self.scales.k[layer], self.scales.v[layer]) if small else None
        return Paged(self.k, self.v, scales, layer, places.table, dtype)

    def index_view(self, layer: Int[Array, ""] | int, places: Places, dtype: DTypeLike) -> PagedIndex:
        """One layer's index keys, read in `dtype`."""
        scale = self.scales.index_k[layer] if self.index_k.dtype == _FLOAT8 else None
        return PagedIndex(self.index_k, scale, layer, places.table, dtype)


@struct.dataclass
class Cache:
    """What a model has seen: an argument and a result of every call, donated between them.

    Slot s of row b lies in page `table[b, s // P]` at offset s % P, in every layer. There are no lengths in it: they
    are data of the call. Which row owns which page is decided on the host (`m3jax.cache.PageAllocator`).
    """

    stacks: tuple[StackCache, ...]
    table: Int[Array, "B M"]

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

        Raises:
          ValueError: a count below 1, or a dtype that a cache cannot have.
        """
        _check_pool(pages, batch, blocks, kv_dtype or dtype, index_dtype or dtype)
        pages = _round_up(pages, page_shards(mesh))
        zeros = lambda shape, axes, kind: jnp.zeros(shape, kind, device=sharding(shape, axes, mesh))
        given = scales or tuple(unit_scales(config))
        size, heads = config.index_block_size, config.num_key_value_heads

        def stack(s, scale):
            kv = (s.num_layers, pages, heads, size, config.head_dim)
            index = (s.num_layers, pages, size, config.index_head_dim)
            k, v = (zeros(kv, KV_AXES, kv_dtype or dtype) for _ in "kv")
            keys = zeros(index, INDEX_AXES, index_dtype or dtype) if s.is_sparse else None
            # Copied: a cache is donated from call to call, the caller's scales are not.
            place = lambda x: jax.device_put(jnp.copy(x), sharding(x.shape, ("layers", "kv_heads")[: x.ndim], mesh))
            return StackCache(k, v, keys, jax.tree.map(place, scale))

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
        return self.stacks[0].k.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, all devices together."""
        return sum(x.nbytes for x in jax.tree.leaves(self))

    @property
    def bytes_per_token(self) -> float:
        """Bytes of pages that one token takes."""
        arrays = (x for s in self.stacks for x in (s.k, s.v, s.index_k) if x is not None)
        return sum(x.nbytes for x in arrays) / (self.num_pages * self.page_size)

    def places(self, positions: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Places:
        """Where the tokens of a call go; padding goes nowhere."""
        real = (positions >= 0) & (positions < lengths[:, None])
        block = jnp.clip(positions // self.page_size, 0, self.table.shape[1] - 1)
        page = jnp.take_along_axis(self.table, block, axis=1)
        inside = real & (positions < self.max_length)
        return Places(self.table, jnp.where(inside, page, -1), positions % self.page_size)

    def copy_pages(self, source: Int[Array, " C"], target: Int[Array, " C"]) -> "Cache":
        """Copy whole pages, all layers; a target outside the pool is dropped."""
        target = jnp.where(target >= 0, target, self.num_pages)
        copy = lambda x: x.at[:, target].set(x[:, source], mode="drop")
        return self._map_pages(copy)

    def read_pages(self, pages: Int[Array, " C"]) -> list[tuple[Array, Array, Array | None]]:
        """The contents of pages, per stack of layers: k, v [L C K P H] and index keys [L C P I]."""
        read = lambda x: None if x is None else x[:, pages]
        return [(read(s.k), read(s.v), read(s.index_k)) for s in self.stacks]

    def write_pages(self, pages: Int[Array, " C"], contents: list[tuple[Array, Array, Array | None]]) -> "Cache":
        """Put back what `read_pages` gave."""
        pages = jnp.where(pages >= 0, pages, self.num_pages)
        put = lambda x, new: None if x is None else x.at[:, pages].set(new, mode="drop")
        stacks = (
            s.replace(k=put(s.k, k), v=put(s.v, v), index_k=put(s.index_k, i))
            for s, (k, v, i) in zip(self.stacks, contents, strict=True)
        )
        return self.replace(stacks=tuple(stacks))

    def _map_pages(self, fn) -> "Cache":
        each = lambda x: None if x is None else fn(x)
        stacks = (s.replace(k=each(s.k), v=each(s.v), index_k=each(s.index_k)) for s in self.stacks)
        return self.replace(stacks=tuple(stacks))


def unit_scales(config: M3Config) -> list[Scales]:
    """Scales that change nothing."""
    heads = config.num_key_value_heads
    ones = lambda *shape: jnp.ones(shape, jnp.float32)
    return [Scales(ones(s.num_layers, heads), ones(s.num_layers, heads), ones(s.num_layers)) for s in config.stacks]


def page_shards(mesh: Mesh | None) -> int:
    """How many devices divide the pages."""
    return 1 if mesh is None else mesh.shape.get("data", 1) * mesh.shape.get("context", 1)


def _stored(x, dtype, scale):
    """New numbers as they are stored; float8 is scaled and kept from overflowing into NaN."""
    if dtype != _FLOAT8:
        return x.astype(dtype)
    top = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(scale.dtype) / scale, -top, top).astype(dtype)


def _check_pool(pages: int, batch: int, blocks: int, *dtypes: str) -> None:
    if min(pages, batch, blocks) < 1:
        raise ValueError(f"pages = {pages}, batch = {batch}, blocks = {blocks}: each must be at least 1")
    for dtype in dtypes:
        if str(dtype) not in DTYPES:
            raise ValueError(f"a cache cannot hold {dtype}: choose one of {', '.join(DTYPES)}")


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
