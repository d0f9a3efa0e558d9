"""Protocols of the model that decoding serves and of its cache; `M3` and `Cache` implement them."""

from typing import Any, Protocol, runtime_checkable

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Int32, PyTree

from m3jax.cache.storage import HostPages
from m3jax.media.packing import MediaBatch

# Where keys and values are in host memory, the pages of each stack of layers (`Cache.host`); None for a stack on the
# device.
HostStacks = tuple[HostPages | None, ...]

# What a cache keeps of some pages: arrays in whatever structure it writes back.
PageContents = PyTree[Array | np.ndarray]

# What a request can have recorded of each new token: choices that the layers made, of experts and of blocks; the tokens
# that the draw could have given (`m3jax.decoding.support`), and its log-probability among these.
CHOICES = ("expert_ids", "blocks")
SUPPORT, DRAWN_LOGPROBS = OF_DRAWS = ("support", "drawn_logprobs")
RECORDS = (*CHOICES, *OF_DRAWS)

# What two engines must have in common to exchange pages: numbers, strings, and dictionaries of them.
Identity = dict[str, Any]


@runtime_checkable
class PagedCache(Protocol):
    """Pages of P tokens and the table that finds those of each row: a pytree, donated from call to call.

    What an engine reports of its storage and exchanges with another (`Engine.bytes_per_token`, `offload`, `export`)
    asks for more: there it must be a `Cache`.

    Attributes:
      table: page ids of B rows, M blocks each; -1 where a row has no page.
    """

    table: Int[Array, "B M"]

    @property
    def num_pages(self) -> int:
        """X, the pages of the pool."""
        ...

    @property
    def page_size(self) -> int:
        """P, tokens of a page."""
        ...

    def replace(self, **changes: object) -> "PagedCache":
        """Return the same cache with some attributes changed: `table`; `host`, where the cache is offloaded."""
        ...

    def copy_pages(self, source: Int32[Array, "C"], target: Int32[Array, "C"]) -> "PagedCache":
        """Copy whole pages, all layers; a target of -1 is dropped."""
        ...

    def read_pages(self, pages: Int32[Array, "C"]) -> PageContents:
        """Return the contents of pages."""
        ...

    def write_pages(self, pages: Int32[Array, "C"], contents: PageContents) -> "PagedCache":
        """Put back what `read_pages` gave, to other pages; a page of -1 is dropped."""
        ...


@runtime_checkable
class TargetConfig(Protocol):
    """The part of a model's configuration (`M3Config`) that decoding reads.

    Attributes:
      vocab_size: V.
      max_position_embeddings: tokens of the model's context.
      index_block_size: P, tokens of a block and of a page.
      index_topk_blocks: J, blocks that a token selects.
      eos_token_id: where a continuation ends by default.
    """

    vocab_size: int
    max_position_embeddings: int
    index_block_size: int
    index_topk_blocks: int
    eos_token_id: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return every setting, to compare with another model's."""
        ...


@runtime_checkable
class TargetModel(Protocol):
    """The model that an engine serves: a pytree of parameters, passed to jitted functions as an argument.

    Attributes:
      config: its numbers.
      mesh: the devices over which it lies; None for the first one.
    """

    config: TargetConfig
    mesh: Mesh | None

    def new_cache(self, pages: int, batch: int, blocks: int, **types: object) -> PagedCache:
        """Return an empty pool of `pages`, with a table for `batch` rows of `blocks`; `types` are `Cache.pool`'s."""
        ...

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        cache: PagedCache,
        positions: Int[Array, "B T"],
        lengths: Int[Array, "B"],
    ) -> tuple[Float[Array, "B T D"], PagedCache]:
        """Write tokens at their positions and give the hidden state of each; see `M3.__call__`."""
        ...

    def unembed(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Return the logits of hidden states."""
        ...


def is_invariant(model: TargetModel) -> bool:
    """Return True if a token's bits depend on its own row alone (`M3.with_invariance`)."""
    return getattr(getattr(model, "compute", None), "invariant", False)


def sees(model: TargetModel) -> bool:
    """Return True if a model has a vision tower: then it is a `SeeingModel`."""
    return getattr(model, "vision", None) is not None


@runtime_checkable
class SeeingModel(TargetModel, Protocol):
    """A target that reads images and videos; `hidden` and `run` take `embeddings` [B T D] in place of its own.

    Attributes:
      vision: the tower; not None.
    """

    vision: object

    def features(self, media: MediaBatch) -> Float[Array, "R D"]:
        """Return a feature for every four patches; those of padding mean nothing. See `M3.features`."""
        ...

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return the embeddings of tokens."""
        ...


@runtime_checkable
class NamedModel(TargetModel, Protocol):
    """A target whose values have names: its calls take `edits`, and return values and the residual stream of layers."""

    def run(
        self,
        tokens: Int[Array, "B T"],
        *,
        names: tuple[str, ...],
        residual_layers: tuple[int, ...],
        logits: bool,
        cache: PagedCache,
        positions: Int[Array, "B T"],
        lengths: Int[Array, "B"],
    ) -> Any:
        """Return an object with the attributes hidden, cache, values and residuals; see `M3.run`."""
        ...

    def recorded_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return names of values in full, without "*"; ValueError for one that cannot be recorded."""
        ...
