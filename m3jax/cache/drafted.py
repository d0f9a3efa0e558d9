"""The cache of a target and its draft: one table finds the pages of both.

A draft pairs a position's feature with the token after it. Its key and value of a pair lie in the *token's* slot, so
that a slot depends on the tokens up to it alone, and a page that requests share is right for all of them. Slot 0 has no
feature before it and stays empty. The first slot of a page needs the feature of the token before it, so each page keeps
the feature of its last token, its edge.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from m3jax.cache.device import Cache
from m3jax.cache.device_pages import StackCache
from m3jax.cache.storage import Places
from m3jax.config import M3Config
from m3jax.msa.share import Share
from m3jax.msa.views import Joined, Paged
from m3jax.parallel import sharding


@struct.dataclass
class AfterFirst:
    """A view of pages as blocks of one token each, without the first token of a row."""

    pages: Paged | Joined

    block_size = 1

    @property
    def share(self) -> Share | None:
        """The pages of each row that this device holds; None if it has all."""
        return self.pages.share

    @property
    def num_blocks(self) -> int:
        """S, slots of a row."""
        return self.pages.num_blocks * self.pages.block_size

    @property
    def num_heads(self) -> int:
        """K, the number of KV heads."""
        return self.pages.num_heads

    @property
    def width(self) -> int:
        """H, numbers of a head."""
        return self.pages.width

    def blocks(self, rows, heads, ids):
        """Read single tokens as `[... 1 H]`."""
        page_size = self.pages.block_size

        def pick_token(page):  # [... P H] -> [... 1 H]
            offset = jnp.broadcast_to(ids % page_size, page.shape[:-2])[..., None, None]
            return jnp.take_along_axis(page, offset, axis=-2)

        k, v = self.pages.blocks(rows, heads, ids // page_size)
        return pick_token(k), pick_token(v)

    def run(self, first, count):
        """Read the tokens `first` to `first + count` of every row and head."""
        page_size, num_pages = self.pages.block_size, self.pages.num_blocks
        # A run that is not a whole number of pages can begin inside one.
        pages_read = min(num_pages, -(-count // page_size) + (count % page_size > 0))
        first_page = jnp.minimum(first // page_size, num_pages - pages_read)
        offset = first - first_page * page_size
        k, v = (
            jax.lax.dynamic_slice_in_dim(x, offset, count, axis=2) for x in self.pages.run(first_page, pages_read)
        )  # [B K count H] each
        return k, v

    def present(self, first, count):
        """Return True for tokens that have a page, and False for the first token of a row."""
        slots = first + jnp.arange(count, dtype=jnp.int32)
        is_held = self.pages.present(0, self.pages.num_blocks)  # [B pages]
        # Slot 0 has no feature before it, and so no key. Of a share it is slot 0 if the row's first page is in it.
        has_feature = slots > 0 if self.share is None else (slots > 0) | (self.share.first[:, None] > 0)
        return is_held[:, slots // self.pages.block_size] & has_feature

    def of_row(self, row, multiple=1):
        """Return a view of one row; behind it are tokens of no page."""
        page_size = self.pages.block_size
        return self.replace(pages=self.pages.of_row(row, multiple // math.gcd(multiple, page_size)))

    def joined(self):
        """Return a view of the tokens of all devices."""
        return self.replace(pages=self.pages.joined())


@struct.dataclass
class DraftPages(StackCache):
    """A draft layer's pages; no query sees slot 0."""

    def view(self, layer: Int[Array, ""] | int, places: Places, dtype: DTypeLike) -> AfterFirst:
        """Return a view of one layer's keys and values, read in `dtype`."""
        return AfterFirst(super().view(layer, places, dtype))


@struct.dataclass
class DraftedCache(Cache):
    """A target's cache together with its draft's; `edges` holds the feature of each page's last token."""

    draft: DraftPages = None
    edges: Float[Array, "X D"] = None

    @classmethod
    def join(cls, cache: Cache, layer: M3Config, dtype: str, mesh: Any) -> "DraftedCache":
        """Return a target's cache joined with empty pages for one draft layer, as many as the target's cache has.

        Args:
          cache: the target's.
          layer: the draft's layer (`Eagle3Config.as_layer`).
          dtype: of the draft's keys, values and features.
          mesh: where the target's cache lies.
        """
        pages, size = cache.num_pages, cache.page_size
        assert layer.index_block_size == size  # one table finds the pages of target and draft (T27)
        stack = Cache.pool(layer, pages, 1, 1, dtype, mesh).stacks[0]
        shape = (pages, layer.hidden_size)
        edges = jnp.zeros(shape, dtype, device=sharding(shape, ("pages", None), mesh))
        target_fields = {name: getattr(cache, name) for name in cache.__dataclass_fields__}
        return cls(**target_fields, draft=DraftPages(stack.k, stack.v, None, stack.scales), edges=edges)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of pages that one token takes, the draft's too."""
        draft_bytes = self.draft.k.nbytes + self.draft.v.nbytes + self.edges.nbytes
        return super().bytes_per_token + draft_bytes / (self.num_pages * self.page_size)

    def edge(self, slots: Int[Array, " B"]) -> Float[Array, "B D"]:
        """Return the feature of the last token of the page before the one that holds each row's slot."""
        # In a row's first page there is no page before: what is read for it belongs to slot 0, which no query sees.
        block = jnp.clip(slots // self.page_size - 1, 0, self.table.shape[1] - 1)
        page = jnp.take_along_axis(self.table, block[:, None], axis=1)[:, 0]
        return self.edges[jnp.clip(page, 0, self.num_pages - 1)]

    def with_edges(self, features: Float[Array, "B T D"], places: Places) -> "DraftedCache":
        """Return the cache with the features of those tokens that are the last ones of their pages."""
        is_last = (places.offset == self.page_size - 1) & (places.page >= 0)
        page = jnp.where(is_last, places.page, self.num_pages)
        return self.replace(edges=self.edges.at[page].set(features.astype(self.edges.dtype), mode="drop"))

    def copy_pages(self, source: Int[Array, " C"], target: Int[Array, " C"]) -> "DraftedCache":
        """Copy whole pages, all layers, the draft's too; a target outside the pool is dropped."""
        target_edges = jnp.where(target >= 0, target, self.num_pages)
        edges = self.edges.at[target_edges].set(self.edges[source], mode="drop")
        return super().copy_pages(source, target).replace(draft=self.draft.copy_pages(source, target), edges=edges)

    def read_pages(self, pages: Int[Array, " C"]) -> tuple[Any, tuple[Array, Array, Array]]:
        """Return the contents of pages: the target's, and the draft's k, v [1 C K P H] and edges [C D]."""
        k, v, _ = self.draft.read_pages(pages)
        return super().read_pages(pages), (k, v, self.edges[pages])

    def write_pages(self, pages: Int[Array, " C"], contents: tuple[Any, tuple[Array, Array, Array]]) -> "DraftedCache":
        """Put back what `read_pages` gave; a page below 0 is dropped."""
        target_contents, (k, v, edges) = contents
        edges = self.edges.at[jnp.where(pages >= 0, pages, self.num_pages)].set(edges, mode="drop")
        draft = self.draft.write_pages(pages, (k, v, None))
        return super().write_pages(pages, target_contents).replace(draft=draft, edges=edges)
