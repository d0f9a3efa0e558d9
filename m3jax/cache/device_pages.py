"""One stack of layers' pages on the device: keys, values and index keys, and how attention writes and reads them."""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from m3jax import ops
from m3jax.cache.layer_pages import LayerCall, ReadByViews
from m3jax.cache.storage import FLOAT8, Places, Scales, held_page, stored
from m3jax.msa import Paged, PagedIndex
from m3jax.ops import Heads
from m3jax.parallel import spec

KV_AXES = ("layers", "pages", "kv_heads", None, None)
INDEX_AXES = ("layers", "pages", None, None)
_LOGICAL_AXES = {  # by a leaf's path, as `jax.tree_util.keystr` writes it
    ".k": KV_AXES,
    ".v": KV_AXES,
    ".index_k": INDEX_AXES,
    ".scales.k": ("layers", "kv_heads"),
    ".scales.v": ("layers", "kv_heads"),
    ".scales.index_k": ("layers",),
}


@struct.dataclass
class StackCache(ReadByViews):
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
    def num_kv_heads(self) -> int:
        """K, KV heads of a page."""
        return self.k.shape[2]

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
        call: LayerCall,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        index_k: Float[Array, "B T I"] | None,
    ) -> "StackCache":
        """Put new tokens in their places; a token whose page is not held here is dropped."""
        layer, places = call.layer, call.places
        page = held_page(places, self.num_pages)  # [B T]

        def scatter(
            memory: Num[Array, "L X K P H"], new: Float[Array, "B T K H"], scale: Float[Array, "L K"]
        ) -> Num[Array, "L X K P H"]:
            new = stored(new, memory.dtype, scale[layer][:, None])  # [B T K H]
            # An index on each side of ":" puts the indexed axes first: what is set is [B T K H].
            return memory.at[layer, page, :, places.offset].set(new, mode="drop")

        k, v = scatter(self.k, k, self.scales.k), scatter(self.v, v, self.scales.v)
        if index_k is None:
            return self.replace(k=k, v=v)
        index_k = stored(index_k, self.index_k.dtype, self.scales.index_k[layer])
        return self.replace(k=k, v=v, index_k=self.index_k.at[layer, page, places.offset].set(index_k, mode="drop"))

    def insert_backend(self, call: LayerCall, q: Float[Array, "B T N H"], rotated: int, dtype: DTypeLike) -> str:
        """Return the backend whose kernel does `insert`; "xla" if the model norms and rotates, and `write` follows."""
        index = None if self.index_k is None else self.index_view(call.layer, call.places, dtype)
        return ops.insert_backend(q, self.view(call.layer, call.places, dtype), index, rotated, call.backend)

    def insert(
        self,
        call: LayerCall,
        projections: Heads,
        norms: Heads,
        cos: Float[Array, "B T R"],
        sin: Float[Array, "B T R"],
        *,
        eps: float,
        dtype: DTypeLike,
        backend: str,
    ) -> tuple[Heads, "StackCache"]:
        """Norm, rotate and write a layer's projections by a kernel (`m3jax.ops.insert`).

        Returns:
          The queries, rounded to `dtype`, and the pages with the new tokens.
        """
        layer, places, slots, lengths = call.layer, call.places, call.positions, call.lengths
        if places.share is not None:  # a token of another device's page is normed and rotated here, and not written
            slots, lengths = places.share.slots(slots, lengths), places.share.lengths(lengths)
        ones = jnp.ones_like(self.scales.k[layer])  # [K]; only float8 is scaled
        k_scale, v_scale = (self.scales.k[layer], self.scales.v[layer]) if self.k.dtype == FLOAT8 else (ones, ones)
        index, index_scale = None, ones  # index keys have one head; the kernel reads its scale from the first place
        if self.index_k is not None:
            index = self.index_view(layer, places, dtype)
            index_scale = ones * self.scales.index_k[layer] if self.index_k.dtype == FLOAT8 else ones
        q, index_q, k, v, index_k = ops.insert(
            projections, norms, cos, sin, self.view(layer, places, dtype), index, slots, lengths,
            eps=eps, scales=jnp.stack([k_scale, v_scale, index_scale]), backend=backend,
        )  # fmt: skip
        return Heads(q=q, index_q=index_q), self.replace(k=k, v=v, index_k=index_k)

    def view(self, layer: Int[Array, ""] | int, places: Places, dtype: DTypeLike) -> Paged:
        """Return a view of one layer's keys and values, read in `dtype`."""
        scales = (self.scales.k[layer], self.scales.v[layer]) if self.k.dtype == FLOAT8 else None
        return Paged(self.k, self.v, scales, layer, places.table, dtype, places.share)

    def index_view(self, layer: Int[Array, ""] | int, places: Places, dtype: DTypeLike) -> PagedIndex:
        """Return a view of one layer's index keys, read in `dtype`."""
        scale = self.scales.index_k[layer] if self.index_k.dtype == FLOAT8 else None
        return PagedIndex(self.index_k, scale, layer, places.table, dtype, places.share)

    def after_layer(self) -> "StackCache":
        """Return the same pages: they hold the keys of every layer."""
        return self

    def partition_specs(self, mesh: Mesh) -> list[PartitionSpec]:
        """Return the partition of each array of these pages over a mesh, in the order of `jax.tree.leaves`."""
        named_arrays, _ = jax.tree_util.tree_flatten_with_path(self)
        return [spec(x.shape, _LOGICAL_AXES[jax.tree_util.keystr(path)], mesh) for path, x in named_arrays]

    def copy_pages(self, source: Int[Array, " C"], target: Int[Array, " C"]) -> "StackCache":
        """Copy whole pages, all layers; a target outside the pool is dropped."""
        return self.write_pages(target, self.read_pages(source))

    def read_pages(self, pages: Int[Array, " C"]) -> tuple[Array, Array, Array | None]:
        """Return the contents of pages: k, v [L C K P H] and index keys [L C P I]."""
        return self.k[:, pages], self.v[:, pages], None if self.index_k is None else self.index_k[:, pages]

    def write_pages(self, pages: Int[Array, " C"], contents: tuple[Array, Array, Array | None]) -> "StackCache":
        """Put back what `read_pages` gave; a page outside the pool is dropped."""
        pages = jnp.where(pages >= 0, pages, self.num_pages)  # -1 would be the last page; behind the end it is dropped
        k, v, index_k = contents
        k, v = self.k.at[:, pages].set(k, mode="drop"), self.v.at[:, pages].set(v, mode="drop")
        if self.index_k is not None:
            index_k = self.index_k.at[:, pages].set(index_k, mode="drop")
        return self.replace(k=k, v=v, index_k=index_k)
