"""The protocol of whatever computes a model's calls, in the names of the mathematics."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from m3jax.cache import LayerCall, LayerPages
from m3jax.execution.compute import Remat
from m3jax.execution.projections import Projections
from m3jax.execution.tap import Tap
from m3jax.msa import SelectionRules
from m3jax.mxfp8 import MXFP8Array
from m3jax.ops.experts import Activation
from m3jax.weights import StackedLayer, Weight

Tokenwise = Callable[..., PyTree[Array]]


@runtime_checkable
class Execution(Protocol):
    """A way to compute a call of the model: `Fast`, `Divided`, `Tiled`, `TiledOverMesh` or `Ordered`.

    Matrices are multiplied by `m3jax.ops.project`, whatever they are stored as. This protocol has everything else that
    has more than one implementation.
    """

    def call_pages(self, block_size: int) -> LayerPages:
        """Return what a stack writes its keys into in a call without a cache; it is empty before each layer."""
        ...

    def each_token(self, fn: Tokenwise) -> Tokenwise:
        """Return `fn`, a function of arrays [B T ...] that treats each token alone, to be called with all tokens."""
        ...

    def embed(self, tokens: Int[Array, "B T"], table: Float[Array, "V D"]) -> Float[Array, "B T D"]:
        """Return the table's row of each token."""
        ...

    def norm(self, x: Float[Array, "B T D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "B T D"]:
        """Return the norm of x times 1 + weight, rounded once."""
        ...

    def add_norm(
        self, x: Float[Array, "B T D"], update: Float[Array, "B T D"] | None, weight: Float[Array, " D"], eps: float
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """Return x + update and its norm times 1 + weight, each rounded once; without an update, x and its norm."""
        ...

    def attend(
        self, projections: Projections, pages: LayerPages, call: LayerCall, rules: SelectionRules | None, tap: Tap
    ) -> tuple[Float[Array, "B T N H"], LayerPages]:
        """Write a layer's new tokens into its pages and attend (`m3jax.execution.attend.attend`)."""
        ...

    def choose_experts(
        self, logits: Float[Array, "X E"], bias: Float[Array, " E"], top_k: int
    ) -> tuple[Int[Array, "X A"], Float[Array, "X A"]]:
        """Return each token's experts and their weights (`m3jax.execution.plain.choose_experts`)."""
        ...

    def experts(
        self,
        x: Float[Array, "B T D"],
        expert_ids: Int[Array, "B T A"],
        weights: Float[Array, "B T A"],
        matrices: tuple[StackedLayer, StackedLayer, StackedLayer],
        activate: Activation,
        shared: tuple[Weight, Weight, Weight],
        scale: float,
    ) -> Float[Array, "B T D"]:
        """Return each token's weighted sum of experts times `scale`, plus its shared expert; no token is dropped.

        Args:
          x: Tokens.
          expert_ids: Experts of each token.
          weights: Weights of these experts in the sum.
          matrices: Gate, up and down of all experts, in the stack that they are a layer of.
          activate: Function of gate and up, element by element; it rounds its result.
          shared: Gate, up and down of the layer's shared expert.
          scale: Factor of the weighted sum. The shared expert is added as it is.

        Returns:
          The sum, in the accumulator's dtype.
        """
        ...

    def unembed(self, hidden: Float[Array, "... D"], head: Float[Array, "V D"]) -> Float[Array, "... V"]:
        """Return logits, in the accumulator's dtype."""
        ...

    def reads_in_place(
        self, name: str, stack: Float[Array, "L ..."] | MXFP8Array, num_rows: int, dtype: DTypeLike
    ) -> bool:
        """Return True if a kernel reads a layer's matrix where it lies in its stack, in a call of so many tokens.

        Args:
          name: of the parameter, such as "q_proj".
          stack: one matrix a layer.
          num_rows: tokens of the call.
          dtype: of the activations.
        """
        ...

    def stacked(self, stack: Float[Array, "L ..."] | MXFP8Array, layer: Int[Array, ""]) -> StackedLayer:
        """Return one layer's matrix, to be read where it lies."""
        ...

    def prepared(self, layer: nnx.Module) -> nnx.Module:
        """Return one layer with its parameters as products read them."""
        ...

    @property
    def remat(self) -> Remat:
        """The activations that the backward pass recomputes, as of `Compute`."""
        ...

    @property
    def takes_layers_apart(self) -> bool:
        """True if a loop of decode steps may run layers one after the other, each by parameters of its own."""
        ...
