"""How attention writes and reads the keys of a stack of layers, wherever they are: the protocol, and one call's own."""

from typing import Protocol, runtime_checkable

from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from m3jax import ops
from m3jax.cache.storage import Places
from m3jax.msa import SelectionRules, contiguous, contiguous_index
from m3jax.ops import Heads


@runtime_checkable
class LayerPages(Protocol):
    """Keys, values and index keys of a stack of layers.

    A layer of a call writes what it brings, selects among all that its rows have, and attends to it. Three kinds are
    in this room: a cache's pages on the device (`m3jax.cache.StackCache`), pages in host memory with a pool on the
    device (`m3jax.cache.OffloadedStack`), and those that a call without a cache has just made (`CallPages`). All
    methods return new pages; `layer` counts within the stack.
    """

    def write(
        self,
        layer: Int[Array, ""],
        places: Places,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        index_k: Float[Array, "B T I"] | None,
    ) -> "LayerPages":
        """Put new tokens in their places; a token whose page is not held here is dropped."""
        ...

    def insert_backend(
        self, layer: Int[Array, ""], places: Places, q: Float[Array, "B T N H"], rotated: int, dtype: DTypeLike,
        backend: str,
    ) -> str:  # fmt: skip
        """The backend whose kernel norms, rotates and writes in one go; "xla" where there is none, and `write` follows.

        Pages that name a kernel's backend also have its `insert` (`m3jax.cache.StackCache`).
        """
        ...

    def select(
        self,
        layer: Int[Array, ""],
        places: Places,
        index_q: Float[Array, "B T K I"],
        positions: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        rules: SelectionRules,
        schedule: str,
        backend: str,
    ) -> Int[Array, "B K T J"]:
        """The blocks that each query keeps (`m3jax.msa.select_blocks`)."""
        ...

    def attend_selected(
        self,
        layer: Int[Array, ""],
        places: Places,
        q: Float[Array, "B T N H"],
        blocks: Int[Array, "B K T J"],
        positions: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        schedule: str,
        backend: str,
    ) -> tuple[Float[Array, "B T N H"], "LayerPages"]:
        """Attention over the selected blocks (`m3jax.msa.sparse_attention`)."""
        ...

    def attend_all(
        self,
        layer: Int[Array, ""],
        places: Places,
        q: Float[Array, "B T N H"],
        positions: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        schedule: str,
        backend: str,
    ) -> tuple[Float[Array, "B T N H"], "LayerPages"]:
        """Attention over every block (`m3jax.msa.dense_attention`)."""
        ...

    def after_layer(self) -> "LayerPages":
        """What the next layer of the stack gets."""
        ...


@struct.dataclass
class CallPages:
    """The keys of a call that brings all of them: what a layer writes is there for that layer alone."""

    heads: Heads | None = None
    block_size: int = struct.field(pytree_node=False, default=1)

    def write(self, layer, places, k, v, index_k):
        """Keep what the layer brings; nothing was there before."""
        return self.replace(heads=Heads(None, k, v, None, index_k))

    def insert_backend(self, layer, places, q, rotated, dtype, backend):
        """No kernel: there are no pages to write into."""
        return "xla"

    def select(self, layer, places, index_q, positions, lengths, rules, schedule, backend):
        """The blocks that each query keeps of those just written."""
        index = contiguous_index(self.heads.index_k, self.block_size)
        return ops.select(index_q, index, positions, lengths, rules, schedule=schedule, backend=backend)

    def attend_selected(self, layer, places, q, blocks, positions, lengths, schedule, backend):
        """Attention over the selected ones of the blocks just written."""
        view = contiguous(self.heads.k, self.heads.v, self.block_size)
        out, _ = ops.attend_selected(q, view, blocks, positions, lengths, schedule=schedule, backend=backend)
        return out, self

    def attend_all(self, layer, places, q, positions, lengths, schedule, backend):
        """Attention over the blocks just written."""
        view = contiguous(self.heads.k, self.heads.v, self.block_size)
        out, _ = ops.attend_all(q, view, positions, lengths, schedule=schedule, backend=backend)
        return out, self

    def after_layer(self):
        """Empty pages: the next layer writes its own keys."""
        return self.replace(heads=None)
