"""Keys and values in host memory, with the recently used ones on the device (docs/cache.md).

The unit is a virtual page: one KV head's part of a page, P tokens. KV heads choose different blocks, so bringing in a
whole page would also bring in heads that did not choose it.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from m3jax import ops
from m3jax.arrays import without_checks
from m3jax.cache.layer_pages import LayerCall, ReadByViews
from m3jax.cache.storage import FLOAT8, HostPages, Places, Scales, held_page, stored
from m3jax.msa import PagedIndex
from m3jax.msa.schedules import gather, invariant_reading
from m3jax.msa.views import Pooled
from m3jax.numerics import UNSEEN, accumulator, merge_two

# A pass has some of the blocks of a selection, often not the query's own: the checks of a whole selection refuse it.
_attend_to_some = without_checks(ops.attend_selected)

GROUP = 8  # virtual pages that are brought in together


@struct.dataclass
class Slots:
    """The places of virtual pages in every layer: V virtual pages, D slots of the device's pool.

    `page_of` is -1 for a free slot and `slot_of` is -1 for a page that is not here. A dirty slot has tokens that host
    memory does not have; it is never given away.
    """

    slot_of: Int[Array, "L V"]
    page_of: Int[Array, "L D"]
    used_at: Int[Array, "L D"]
    dirty: Bool[Array, "L D"]

    @classmethod
    def empty(cls, layers: int, pages: int, slots: int) -> "Slots":
        """Return slots that are all free."""
        none = lambda n: jnp.full((layers, n), -1, jnp.int32)
        return cls(none(pages), none(slots), none(slots), jnp.zeros((layers, slots), bool))

    def assign(
        self, layer: Int[Array, ""], wanted: Bool[Array, " V"], now: Int[Array, ""]
    ) -> tuple["Slots", Int[Array, " D"], Int[Array, " D"], Int[Array, ""]]:
        """Give slots to wanted pages that have none, the least recently used slots first, as long as there are some.

        Returns:
          (slots, pages, their slots, count): the first `count` pages have to be read into the slots beside them.
        """
        slot_of, page_of, used_at, dirty = (x[layer] for x in (self.slot_of, self.page_of, self.used_at, self.dirty))
        num_slots, num_pages = len(page_of), len(slot_of)
        is_taken = page_of >= 0  # [D]
        # A dirty slot holds the only copy of its tokens, and one that this call wants is read next.
        is_kept = dirty | (is_taken & wanted[jnp.maximum(page_of, 0)])  # [D]
        is_missing = wanted & ~self.here(layer)  # [V]
        count = jnp.minimum(jnp.sum(is_missing), jnp.sum(~is_kept)).astype(jnp.int32)
        # Free slots first, then those that were used longest ago, those to keep last.
        last_used = jnp.where(is_kept, jnp.iinfo(jnp.int32).max, jnp.where(is_taken, used_at, -1))
        slots = jnp.argsort(last_used).astype(jnp.int32)  # [D]
        pages = jnp.nonzero(is_missing, size=num_slots, fill_value=num_pages)[0].astype(jnp.int32)  # [D]
        is_given = jnp.arange(num_slots) < count
        evicted = jnp.where(is_given & is_taken[slots], page_of[slots], num_pages)
        arriving = jnp.where(is_given, pages, num_pages)
        slot_of = slot_of.at[evicted].set(-1, mode="drop").at[arriving].set(slots, mode="drop")
        page_of = page_of.at[jnp.where(is_given, slots, num_slots)].set(pages, mode="drop")
        used_at = jnp.where((page_of >= 0) & wanted[jnp.maximum(page_of, 0)], now, used_at)
        assigned = self.replace(
            slot_of=self.slot_of.at[layer].set(slot_of),
            page_of=self.page_of.at[layer].set(page_of),
            used_at=self.used_at.at[layer].set(used_at),
        )
        return assigned, pages, slots, count

    def here(self, layer: Int[Array, ""]) -> Bool[Array, " V"]:
        """Return True for the virtual pages that have a slot in a layer."""
        return self.slot_of[layer] >= 0

    def forget(self, pages: Int[Array, " C"]) -> "Slots":
        """Drop virtual pages whose contents in host memory have changed; a page outside [0, V) is ignored."""
        layers = jnp.arange(len(self.slot_of))[:, None]  # [L 1]
        num_pages, num_slots = self.slot_of.shape[1], self.page_of.shape[1]
        is_page = (pages >= 0) & (pages < num_pages)
        slots = jnp.where(is_page, self.slot_of[:, jnp.where(is_page, pages, 0)], -1)  # [L C]
        slots = jnp.where(slots >= 0, slots, num_slots)
        return self.replace(
            slot_of=self.slot_of.at[:, jnp.where(is_page, pages, num_pages)].set(-1, mode="drop"),
            page_of=self.page_of.at[layers, slots].set(-1, mode="drop"),
            dirty=self.dirty.at[layers, slots].set(False, mode="drop"),
        )


@struct.dataclass
class OffloadedStack(ReadByViews):
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
    def num_kv_heads(self) -> int:
        """K, virtual pages of a page."""
        return self.slots.slot_of.shape[1] // self.num_pages

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one token takes, those in host memory included."""
        layers, _, _, width = self.k.shape
        return float(layers * (2 * self.num_kv_heads * width * self.k.dtype.itemsize + self.index_k[0, 0, 0].nbytes))

    def write(
        self,
        call: LayerCall,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        index_k: Float[Array, "B T I"] | None,
    ) -> "OffloadedStack":
        """Put new tokens into the pool; a page that earlier calls began is first brought in from host memory."""
        layer, places = call.layer, call.places
        page = held_page(places, self.num_pages)  # [B T]
        # A page that begins in this call is all new: nothing of it is in host memory, so it gets a slot and no copy.
        begun_page = jnp.where(places.offset == 0, page, self.num_pages)
        is_written = self._virtual_flags(jnp.zeros(self.num_pages, bool).at[page].set(True, mode="drop"))  # [V]
        is_begun = self._virtual_flags(jnp.zeros(self.num_pages, bool).at[begun_page].set(True, mode="drop"))
        pool = self.give_slots(layer, is_begun).bring(layer, is_written, places.host)

        slots, num_slots = pool.slots, pool.k.shape[1]
        page_of = slots.page_of[layer]  # [D]
        dirty = slots.dirty[layer] | ((page_of >= 0) & is_written[jnp.maximum(page_of, 0)])
        heads = jnp.arange(self.num_kv_heads)
        virtual_page = jnp.minimum(page, self.num_pages - 1)[..., None] * self.num_kv_heads + heads  # [B T K]
        slot = jnp.where((page < self.num_pages)[..., None], slots.slot_of[layer, virtual_page], num_slots)

        def scatter(
            memory: Num[Array, "L D P H"], new: Float[Array, "B T K H"], scale: Float[Array, "L K"]
        ) -> Num[Array, "L D P H"]:
            new = stored(new, memory.dtype, scale[layer][:, None])  # [B T K H]
            return memory.at[layer, slot, places.offset[..., None]].set(new, mode="drop")

        index_k = stored(index_k, self.index_k.dtype, self.scales.index_k[layer])
        return pool.replace(
            k=scatter(pool.k, k, self.scales.k),
            v=scatter(pool.v, v, self.scales.v),
            index_k=self.index_k.at[layer, page, places.offset].set(index_k, mode="drop"),
            slots=slots.replace(dirty=slots.dirty.at[layer].set(dirty)),
        )

    def give_slots(self, layer: Int[Array, ""], wanted: Bool[Array, " V"]) -> "OffloadedStack":
        """Give slots to wanted virtual pages, as long as there are some; what the slots hold is not changed."""
        now = self.now + 1
        slots, *_ = self.slots.assign(layer, wanted, now)
        return self.replace(slots=slots, now=now)

    def bring(self, layer: Int[Array, ""], wanted: Bool[Array, " V"], host: HostPages) -> "OffloadedStack":
        """Copy wanted virtual pages from host memory into the pool, as many as find a slot."""
        now = self.now + 1
        slots, pages, target_slots, count = self.slots.assign(layer, wanted, now)
        num_slots = self.k.shape[1]
        pad_to_groups = lambda x: jnp.concatenate([x, jnp.zeros(-num_slots % GROUP, jnp.int32)])
        pages = pad_to_groups(jnp.minimum(pages, self.slots.slot_of.shape[1] - 1))
        target_slots = pad_to_groups(target_slots)

        # Groups of one size, so that a program reads any number of pages; behind the last one slots are dropped.
        def bring_group(state):
            first, k, v = state
            in_group = lambda x: jax.lax.dynamic_slice_in_dim(x, first, GROUP)
            contents = host.read(layer, in_group(pages))  # [GROUP 2 P H]
            slot = jnp.where(first + jnp.arange(GROUP) < count, in_group(target_slots), num_slots)
            k = k.at[layer, slot].set(contents[:, 0], mode="drop")
            v = v.at[layer, slot].set(contents[:, 1], mode="drop")
            return first + GROUP, k, v

        _, k, v = jax.lax.while_loop(lambda state: state[0] < count, bring_group, (jnp.int32(0), self.k, self.v))
        moved = self.moved.at[layer].add(-(-count // GROUP) * GROUP)
        return self.replace(slots=slots, now=now, k=k, v=v, moved=moved)

    def insert_backend(self, call: LayerCall, q: Float[Array, "B T N H"], rotated: int, dtype: DTypeLike) -> str:
        """Return "xla": no kernel writes into the pool, so the model norms and rotates, and `write` follows."""
        return "xla"

    def attend_selected(
        self, call: LayerCall, q: Float[Array, "B T N H"], blocks: Int[Array, "B K T J"]
    ) -> tuple[Float[Array, "B T N H"], "OffloadedStack"]:
        """Attend to the selected blocks, in as many passes as the room in the pool makes necessary.

        A decode step needs one pass. A chunk of a long prompt can select more pages than the pool has: each pass brings
        in some, attends over those alone, and the passes are merged by log-sum-exp. What a pass brings in depends on
        what the pool has, and so on other requests: the schedule "invariant" copies in passes and attends once.

        Raises:
          ValueError: the schedule "mask", which reads all blocks.
        """
        layer, places, schedule = call.layer, call.places, call.schedule
        positions, lengths = call.positions, call.lengths
        if schedule == "mask":
            raise ValueError(f"schedule {schedule!r} reads all blocks: it needs a cache without host memory")
        view = self.view(layer, places, q.dtype)
        row_ids, head_ids = jnp.arange(blocks.shape[0])[:, None, None, None], jnp.arange(blocks.shape[1])[:, None, None]
        pages, is_page = view.virtual_page(row_ids, head_ids, jnp.maximum(blocks, 0))  # [B K T J] each
        is_chosen = is_page & (blocks >= 0)
        num_pages = self.slots.slot_of.shape[1]
        wanted = jnp.zeros(num_pages, bool).at[jnp.where(is_chosen, pages, num_pages)].set(True, mode="drop")  # [V]

        if schedule == "invariant":
            read = partial(self.read_invariant, layer=layer, places=places, dtype=q.dtype)
            pool, out, _ = invariant_reading(read, self.count(layer, wanted), q, blocks, positions, lengths)
            return out, pool

        def attend_pass(state):
            pool, remaining, out, lse = state
            pool = pool.bring(layer, remaining, places.host)
            is_here = remaining & pool.slots.here(layer)  # [V]
            blocks_here = jnp.where(is_chosen & is_here[pages], blocks, -1)
            # No kernel reads keys and values through the pool's slots: "auto" is XLA here.
            part = _attend_to_some(
                q, pool.view(layer, places, q.dtype), blocks_here, positions, lengths, schedule=schedule
            )
            return pool, remaining & ~is_here, *merge_two(out, lse, *part)

        dtype = accumulator(q.dtype)
        nothing = jnp.zeros(q.shape, dtype), jnp.full(q.shape[:-1], UNSEEN, dtype)
        state = self.count(layer, wanted), wanted, *nothing
        pool, _, out, _ = jax.lax.while_loop(lambda state: jnp.any(state[1]), attend_pass, state)
        return out.astype(q.dtype), pool

    @staticmethod
    def read_invariant(
        pool: "OffloadedStack",
        rows: Int[Array, " C"],
        blocks: Int[Array, "C K 1 J"],
        *,
        layer: Int[Array, ""],
        places: Places,
        dtype: DTypeLike,
    ) -> tuple["OffloadedStack", Float[Array, "C K 1 J P H"], Float[Array, "C K 1 J P H"]]:
        """Return keys and values of the selected blocks, copied from the pool in as many passes as its room requires.

        Args:
          pool: before.
          rows: of each query.
          blocks: that it keeps; what is read for a slot of -1 means nothing.
          layer: which of the stack.
          places: of the call.
          dtype: of the model.

        Returns:
          (pool, keys, values).
        """
        head_ids = jnp.arange(blocks.shape[1])[:, None, None]
        view = pool.view(layer, places, dtype)
        pages, is_page = view.virtual_page(rows[:, None, None, None], head_ids, jnp.maximum(blocks, 0))  # [C K 1 J]
        is_chosen = is_page & (blocks >= 0)
        num_pages = pool.slots.slot_of.shape[1]
        wanted = jnp.zeros(num_pages, bool).at[jnp.where(is_chosen, pages, num_pages)].set(True, mode="drop")  # [V]

        def copy_pass(state):
            pool, remaining, keys, values = state
            pool = pool.bring(layer, remaining, places.host)
            is_here = remaining & pool.slots.here(layer)  # [V]
            is_copied = (is_chosen & is_here[pages])[..., None, None]  # [C K 1 J 1 1]
            new_keys, new_values = gather(pool.view(layer, places, dtype), rows, blocks)
            keys, values = jnp.where(is_copied, new_keys, keys), jnp.where(is_copied, new_values, values)
            return pool, remaining & ~is_here, keys, values

        nothing = jnp.zeros((*blocks.shape, view.block_size, view.width), dtype)
        state = jax.lax.while_loop(lambda state: jnp.any(state[1]), copy_pass, (pool, wanted, nothing, nothing))
        pool, _, keys, values = state
        return pool, keys, values

    def attend_all(
        self, call: LayerCall, q: Float[Array, "B T N H"]
    ) -> tuple[Float[Array, "B T N H"], "OffloadedStack"]:
        """Raise ValueError: dense attention reads all blocks, and the pool has room for selected ones alone.

        Raises:
          ValueError: always.
        """
        raise ValueError("dense attention reads all blocks: it needs a cache without host memory")

    def after_layer(self) -> "OffloadedStack":
        """Return the same pages: they hold the keys of every layer."""
        return self

    def count(self, layer: Int[Array, ""], wanted: Bool[Array, " V"]) -> "OffloadedStack":
        """Add the selected pages to the layer's hits, if they are in the pool, or else to its misses."""
        hits = jnp.sum(wanted & self.slots.here(layer)).astype(jnp.int32)
        misses = jnp.sum(wanted).astype(jnp.int32) - hits
        return self.replace(hits=self.hits.at[layer].add(hits), misses=self.misses.at[layer].add(misses))

    def view(self, layer: Int[Array, ""], places: Places, dtype: DTypeLike) -> Pooled:
        """Return a view of one layer's keys and values, as far as they are in the pool."""
        scales = (self.scales.k[layer], self.scales.v[layer]) if self.k.dtype == FLOAT8 else None
        return Pooled(self.k, self.v, scales, layer, self.slots.slot_of[layer], places.table, self.num_kv_heads, dtype)

    def index_view(self, layer: Int[Array, ""], places: Places, dtype: DTypeLike) -> PagedIndex:
        """Return a view of one layer's index keys, read in `dtype`."""
        scale = self.scales.index_k[layer] if self.index_k.dtype == FLOAT8 else None
        return PagedIndex(self.index_k, scale, layer, places.table, dtype)

    def copy_pages(self, source: Int[Array, " C"], target: Int[Array, " C"]) -> "OffloadedStack":
        """Copy index keys; keys and values are copied in host memory, so the pool drops its copies of the targets."""
        return self.write_pages(target, self.read_pages(source))

    def read_pages(self, pages: Int[Array, " C"]) -> tuple[None, None, Num[Array, "L C P I"]]:
        """Return (None, None, index keys) of pages: keys and values are in host memory."""
        return None, None, self.index_k[:, pages]

    def write_pages(self, pages: Int[Array, " C"], contents: tuple) -> "OffloadedStack":
        """Put back index keys, and drop the pool's copies of keys and values."""
        target = jnp.where(pages >= 0, pages, self.num_pages)
        index_k = self.index_k.at[:, target].set(contents[2], mode="drop")
        return self.replace(index_k=index_k, slots=self.slots.forget(self.virtual_page_ids(pages)))

    def virtual_page_ids(self, pages: Int[Array, " C"]) -> Int[Array, " CK"]:
        """Return the ids of the virtual pages of some pages; -1 for those of page -1."""
        ids = pages[:, None] * self.num_kv_heads + jnp.arange(self.num_kv_heads)  # [C K]
        return jnp.where(pages[:, None] >= 0, ids, -1).reshape(-1)

    def read_slots(self, pages: Int[Array, " C"]) -> Num[Array, "L CK 2 P H"]:
        """Return the contents of pages, all of which have to be in the pool."""
        slots = self.slots.slot_of[:, self.virtual_page_ids(pages)]  # [L C*K]
        layers = jnp.arange(len(slots))[:, None]
        return jnp.stack([self.k[layers, slots], self.v[layers, slots]], axis=2)  # [L C*K 2 P H]

    def clean(self) -> "OffloadedStack":
        """Return the pool without dirty slots: host memory has everything that was written."""
        return self.replace(slots=self.slots.replace(dirty=jnp.zeros_like(self.slots.dirty)))

    def _virtual_flags(self, of_page: Bool[Array, " X"]) -> Bool[Array, " V"]:
        """Repeat the flag of each page for each of its virtual pages."""
        return jnp.repeat(of_page, self.num_kv_heads)
