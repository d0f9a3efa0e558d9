"""The protocol by which attention writes and reads the keys of a stack of layers, and the pages of a single call."""

from typing import ClassVar, Protocol, runtime_checkable

from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from m3jax import ops
from m3jax.arrays import without_checks
from m3jax.cache.storage import Places
from m3jax.msa import SelectionRules
from m3jax.msa.views import Contiguous, ContiguousIndex, IndexView
from m3jax.ops import Heads

# A model's arrays are checked where it is called, not again in each layer.
_attend_selected, _attend_all = without_checks(ops.attend_selected), without_checks(ops.attend_all)


@struct.dataclass
class LayerCall:
    """One layer of a call, as the pages of its stack see it.

    Attributes:
      layer: counted within the stack.
      places: the slots that the tokens are written to, and the pages of their rows' past.
      positions: absolute position of each token; < 0 or >= lengths marks padding.
      lengths: valid tokens of each row after this call.
      given_blocks: blocks that tokens attend to in place of a selection; -1 first where one is made.
      schedule: of attention: "auto", or one of `m3jax.msa.SCHEDULES`.
      backend: one of `m3jax.ops.BACKENDS`.
    """

    layer: Int[Array, ""]
    places: Places
    positions: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    given_blocks: Int[Array, "B K T J"] | None = None
    schedule: str = struct.field(pytree_node=False, default="auto")
    backend: str = struct.field(pytree_node=False, default="auto")


@runtime_checkable
class LayerPages(Protocol):
    """The keys, values and index keys of a stack of layers, wherever they are held.

    A layer of a call writes its new tokens, selects among all that its rows have, and attends to the selection. Three
    classes implement it: a cache's pages on the device (`m3jax.cache.StackCache`), pages in host memory with a pool on
    the device (`m3jax.cache.OffloadedStack`), and those that a call without a cache has just made (`CallPages`). The
    methods that change pages return new ones.
    """

    def write(
        self,
        call: LayerCall,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        index_k: Float[Array, "B T I"] | None,
    ) -> "LayerPages":
        """Put new tokens in their places; a token whose page is not held here is dropped."""
        ...

    def insert_backend(self, call: LayerCall, q: Float[Array, "B T N H"], rotated: int, dtype: DTypeLike) -> str:
        """Return the backend whose kernel norms, rotates and writes in one go; "xla" if `write` has to follow.

        Pages that name a kernel's backend also have its `insert` (`m3jax.cache.StackCache`).
        """
        ...

    def select(self, call: LayerCall, index_q: Float[Array, "B T K I"], rules: SelectionRules) -> Int[Array, "B K T J"]:
        """Return the blocks that each query keeps (`m3jax.msa.select_blocks`)."""
        ...

    def index_view(self, layer: Int[Array, ""], places: Places, dtype: DTypeLike) -> IndexView:
        """Return a view of one layer's index keys, by which blocks are scored."""
        ...

    def attend_selected(
        self, call: LayerCall, q: Float[Array, "B T N H"], blocks: Int[Array, "B K T J"]
    ) -> tuple[Float[Array, "*Y N H"], "LayerPages"]:
        """Attend to the selected blocks (`m3jax.msa.sparse_attention`); return the outputs of this device's tokens."""
        ...

    def attend_all(self, call: LayerCall, q: Float[Array, "B T N H"]) -> tuple[Float[Array, "*Y N H"], "LayerPages"]:
        """Attend to every block (`m3jax.msa.dense_attention`); return the outputs of this device's tokens."""
        ...

    def after_layer(self) -> "LayerPages":
        """Return the pages that the next layer of the stack gets."""
        ...


class ReadByViews:
    """Pages whose keys `m3jax.ops` reads where they lie, through views of one layer.

    A class that inherits from it has `view(layer, places, dtype)`, a `m3jax.msa.BlockView` of keys and values, and
    `index_view(layer, places, dtype)`, a `m3jax.msa.IndexView`.
    """

    def select(self, call, index_q, rules):
        """Return the blocks that each query keeps of all that its row has."""
        index = self.index_view(call.layer, call.places, index_q.dtype)
        return ops.select(
            index_q, index, call.positions, call.lengths, rules, schedule=call.schedule, backend=call.backend
        )

    def attend_selected(self, call, q, blocks):
        """Attend to the selected blocks; the pages stay as they are."""
        view = self.view(call.layer, call.places, q.dtype)
        out, _ = _attend_selected(
            q, view, blocks, call.positions, call.lengths, schedule=call.schedule, backend=call.backend
        )
        return out, self

    def attend_all(self, call, q):
        """Attend to every block; the pages stay as they are."""
        view = self.view(call.layer, call.places, q.dtype)
        out, _ = _attend_all(q, view, call.positions, call.lengths, schedule=call.schedule, backend=call.backend)
        return out, self


@struct.dataclass
class CallPages(ReadByViews):
    """The keys of a call without a cache: what a layer writes is there for that layer alone.

    Attributes:
      heads: what the layer that runs has written.
      block_size: P.
      read_by_kernels: whether kernels may read them. Classes for training, whose attention is XLA's, say no.
    """

    read_by_kernels: ClassVar[bool] = True
    heads: Heads | None = None
    block_size: int = struct.field(pytree_node=False, default=1)

    def write(self, call, k, v, index_k):
        """Return pages that hold the layer's keys and values; nothing was there before."""
        return self.replace(heads=Heads(k=k, v=v, index_k=index_k))

    def insert_backend(self, call, q, rotated, dtype):
        """Return "xla": there are no pages for a kernel to write into."""
        return "xla"

    def view(self, layer, places, dtype):
        """Return a view of the keys and values just written."""
        return Contiguous.of_tokens(self.heads.k, self.heads.v, self.block_size)

    def index_view(self, layer, places, dtype):
        """Return a view of the index keys just written."""
        return ContiguousIndex.of_tokens(self.heads.index_k, self.block_size)

    def after_layer(self):
        """Return empty pages: the next layer writes its own keys."""
        # A scan's carry: pages that still held keys would be arrays of another structure than those it began with.
        return self.replace(heads=None)
