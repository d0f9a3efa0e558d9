"""Keys and values in host memory, with the recently used ones on the device (docs/cache.md).

The unit is a virtual page: one KV head's part of a page, P tokens. KV heads choose different blocks, so a whole page
would bring in heads that nobody asked for.
"""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from m3jax.cache.storage import Places, Scales, stored
from m3jax.msa.views import PagedIndex, Pooled

GROUP = 8  # virtual pages that are brought in together


@runtime_checkable
class HostPages(Protocol):
    """The virtual pages of a stack of layers in host memory."""

    def read(self, layer: Int[Array, ""], pages: Int[Array, " F"]) -> Num[Array, "F 2 P H"]:
        """Keys and values of some virtual pages, on the device; called within a jitted function."""
        ...


@struct.dataclass
class Slots:
    """Which virtual page is where, in every layer: V virtual pages, D slots of the device's pool.

    `page_of` is -1 for a free slot and `slot_of` is -1 for a page that is not here. A dirty slot has tokens that host
    memory does not have; it is never given away.
    """

    slot_of: Int[Array, "L V"]
    page_of: Int[Array, "L D"]
    used_at: Int[Array, "L D"]
    dirty: Bool[Array, "L D"]

    @classmethod
    def empty(cls, layers: int, pages: int, slots: int) -> "Slots":
        """No page is here."""
        none = lambda n: jnp.full((layers, n), -1, jnp.int32)
        return cls(none(pages), none(slots), none(slots), jnp.zeros((layers, slots), bool))

    def assign(
        self, layer: Int[Array, ""], wanted: Bool[Array, " V"], now: Int[Array, ""]
    ) -> tuple["Slots", Int[Array, " D"], Int[Array, " D"], Int[Array, ""]]:
        """Give slots to wanted pages that have none, as many as there are slots to give: the least recently used first.

        Returns:
          (slots, pages, their slots, count): `count` pages that have to be read, and where to.
        """
        slot_of, page_of, used_at, dirty = (x[layer] for x in (self.slot_of, self.page_of, self.used_at, self.dirty))
        size, total = len(page_of), len(slot_of)
        here = page_of >= 0
        busy = dirty | (here & wanted[jnp.maximum(page_of, 0)])
        missing = wanted & (slot_of < 0)
        count = jnp.minimum(jnp.sum(missing), jnp.sum(~busy)).astype(jnp.int32)
        slots = jnp.argsort(jnp.where(busy, jnp.iinfo(jnp.int32).max, jnp.where(here, used_at, -1))).astype(jnp.int32)
        pages = jnp.nonzero(missing, size=size, fill_value=total)[0].astype(jnp.int32)
        given = jnp.arange(size) < count
        evicted = jnp.where(given & here[slots], page_of[slots], total)
        arriving = jnp.where(given, pages, total)
        slot_of = slot_of.at[evicted].set(-1, mode="drop").at[arriving].set(slots, mode="drop")
        page_of = page_of.at[jnp.where(given, slots, size)].set(pages, mode="drop")
        used_at = jnp.where((page_of >= 0) & wanted[jnp.maximum(page_of, 0)], now, used_at)
        put = lambda x, new: x.at[layer].set(new)
        new = self.replace(slot_of=put(self.slot_of, slot_of), page_of=put(self.page_of, page_of))
        return new.replace(used_at=put(self.used_at, used_at)), pages, slots, count

    def forget(self, pages: Int[Array, " C"]) -> "Slots":
        """Drop virtual pages whose contents host memory has anew; one outside [0, V) is ignored."""
        layers = jnp.arange(len(self.slot_of))[:, None]
        total, size = self.slot_of.shape[1], self.page_of.shape[1]
        inside = (pages >= 0) & (pages < total)
        slots = jnp.where(inside, self.slot_of[:, jnp.where(inside, pages, 0)], -1)
        slots = jnp.where(slots >= 0, slots, size)
        return self.replace(
            slot_of=self.slot_of.at[:, jnp.where(inside, pages, total)].set(-1, mode="drop"),
            page_of=self.page_of.at[layers, slots].set(-1, mode="drop"),
            dirty=self.dirty.at[layers, slots].set(False, mode="drop"),
        )


@struct.dataclass
class OffloadedStack:
    """The device's side of a stack of sparse layers: all index keys, and a pool of slots for keys and values.

    Counters, per layer: `hits` and `misses` are the distinct virtual pages that calls selected and found here or not,
    `moved` those that were read from host memory, the padding of groups included.
    """

    k: Num[Array, "L D P H"]
    v: Num[Array, "L D P H"]
    index_k: Num[Array, "L X P I"]
    scales: Scales
    slots: Slots
    now: Int[Array, ""]
    hits: Int[Array, " L"]
    misses: Int[Array, " L"]
    moved: Int[Array, " L"]

    @property
    def num_pages(self) -> int:
        """X, pages of host memory."""
        return self.index_k.shape[1]

    @property
    def page_size(self) -> int:
        """P, tokens of a page."""
        return self.k.shape[2]

    @property
    def kv_heads(self) -> int:
        """K, virtual pages of a page."""
        return self.slots.slot_of.shape[1] // self.num_pages

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token, those in host memory included."""
        layers, _, _, width = self.k.shape
        return layers * (2 * self.kv_heads * width * self.k.dtype.itemsize + self.index_k[0, 0, 0].nbytes)

    def write(
        self,
        layer: Int[Array, ""],
        places: Places,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        index_k: Float[Array, "B T I"],
        host: HostPages,
    ) -> "OffloadedStack":
        """Put new tokens into the pool; what host memory has of a page that goes on is brought in first."""
        held = (places.page >= 0) & (places.page < self.num_pages)
        page = jnp.where(held, places.page, self.num_pages)
        written = self._heads(jnp.zeros(self.num_pages, bool).at[page].set(True, mode="drop"))
        begun = jnp.where(places.offset == 0, page, self.num_pages)
        fresh = self._heads(jnp.zeros(self.num_pages, bool).at[begun].set(True, mode="drop"))
        out = self.bring(layer, written & fresh, None).bring(layer, written, host)
        slots, size = out.slots, out.k.shape[1]
        page_of = slots.page_of[layer]
        dirty = slots.dirty[layer] | ((page_of >= 0) & written[jnp.maximum(page_of, 0)])
        virtual = jnp.minimum(page, self.num_pages - 1)[..., None] * self.kv_heads + jnp.arange(self.kv_heads)
        slot = jnp.where(held[..., None], slots.slot_of[layer, virtual], size)
        scale = lambda x: x[layer][:, None]
        put = lambda x, new, s: x.at[layer, slot, places.offset[..., None]].set(stored(new, x.dtype, s), mode="drop")
        keys = stored(index_k, self.index_k.dtype, self.scales.index_k[layer])
        return out.replace(
            k=put(out.k, k, scale(self.scales.k)),
            v=put(out.v, v, scale(self.scales.v)),
            index_k=self.index_k.at[layer, page, places.offset].set(keys, mode="drop"),
            slots=slots.replace(dirty=slots.dirty.at[layer].set(dirty)),
        )

    def bring(self, layer: Int[Array, ""], wanted: Bool[Array, " V"], host: HostPages | None) -> "OffloadedStack":
        """Bring wanted virtual pages into the pool, as many as find a slot; None gives them slots with anything in."""
        now = self.now + 1
        slots, pages, places, count = self.slots.assign(layer, wanted, now)
        out = self.replace(slots=slots, now=now)
        if host is None:
            return out
        size = self.k.shape[1]
        pad = lambda x: jnp.concatenate([x, jnp.zeros(-size % GROUP, jnp.int32)])
        pages, places = pad(jnp.minimum(pages, self.slots.slot_of.shape[1] - 1)), pad(places)

        def group(carry):
            at, k, v = carry
            take = lambda x: jax.lax.dynamic_slice_in_dim(x, at, GROUP)
            new = host.read(layer, take(pages))
            slot = jnp.where(at + jnp.arange(GROUP) < count, take(places), size)
            put = lambda x, i: x.at[layer, slot].set(new[:, i], mode="drop")
            return at + GROUP, put(k, 0), put(v, 1)

        _, k, v = jax.lax.while_loop(lambda carry: carry[0] < count, group, (jnp.int32(0), self.k, self.v))
        return out.replace(k=k, v=v, moved=self.moved.at[layer].add(-(-count // GROUP) * GROUP))

    def count(self, layer: Int[Array, ""], wanted: Bool[Array, " V"]) -> "OffloadedStack":
        """Count a selection: found here, or not."""
        found = jnp.sum(wanted & (self.slots.slot_of[layer] >= 0)).astype(jnp.int32)
        absent = jnp.sum(wanted).astype(jnp.int32) - found
        return self.replace(hits=self.hits.at[layer].add(found), misses=self.misses.at[layer].add(absent))

    def view(self, layer: Int[Array, ""], places: Places, dtype: DTypeLike) -> Pooled:
        """One layer's keys and values, as far as they are here."""
        small = self.k.dtype.itemsize == 1
        scales = (self.scales.k[layer], self.scales.v[layer]) if small else None
        return Pooled(self.k, self.v, scales, layer, self.slots.slot_of[layer], places.table, self.kv_heads, dtype)

    def index_view(self, layer: Int[Array, ""], places: Places, dtype: DTypeLike) -> PagedIndex:
        """One layer's index keys, read in `dtype`."""
        scale = self.scales.index_k[layer] if self.index_k.dtype.itemsize == 1 else None
        return PagedIndex(self.index_k, scale, layer, places.table, dtype)

    def copy_pages(self, source: Int[Array, " C"], target: Int[Array, " C"]) -> "OffloadedStack":
        """Copy index keys; keys and values are copied in host memory, so what is here of the targets is dropped."""
        inside = jnp.where(target >= 0, target, self.num_pages)
        keys = self.index_k.at[:, inside].set(self.index_k[:, source], mode="drop")
        return self.replace(index_k=keys, slots=self.slots.forget(self.virtual(target)))

    def read_pages(self, pages: Int[Array, " C"]) -> tuple[None, None, Num[Array, "L C P I"]]:
        """Index keys; keys and values are in host memory."""
        return None, None, self.index_k[:, pages]

    def write_pages(self, pages: Int[Array, " C"], contents: tuple) -> "OffloadedStack":
        """Put back index keys, and drop what is here of keys and values."""
        inside = jnp.where(pages >= 0, pages, self.num_pages)
        keys = self.index_k.at[:, inside].set(contents[2], mode="drop")
        return self.replace(index_k=keys, slots=self.slots.forget(self.virtual(pages)))

    def virtual(self, pages: Int[Array, " C"]) -> Int[Array, " CK"]:
        """The virtual pages of some pages; those of -1 are outside of all."""
        ids = pages[:, None] * self.kv_heads + jnp.arange(self.kv_heads)
        return jnp.where(pages[:, None] >= 0, ids, -1).reshape(-1)

    def read_slots(self, pages: Int[Array, " C"]) -> Num[Array, "L CK 2 P H"]:
        """The contents of pages that are all here."""
        slots = self.slots.slot_of[:, self.virtual(pages)]
        layers = jnp.arange(len(slots))[:, None]
        return jnp.stack([self.k[layers, slots], self.v[layers, slots]], axis=2)

    def clean(self) -> "OffloadedStack":
        """Host memory has everything."""
        return self.replace(slots=self.slots.replace(dirty=jnp.zeros_like(self.slots.dirty)))

    def _heads(self, pages: Bool[Array, " X"]) -> Bool[Array, " V"]:
        return jnp.repeat(pages, self.kv_heads)
