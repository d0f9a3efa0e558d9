"""The protocol of a drafter, which proposes the tokens that the target then verifies.

A drafter is a pytree with its parameters as leaves and its settings static. What it remembers of each row is an array
of its own, its memory; what it remembers of each token lies in the pages, so that it is shared, copied and moved with
them.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
from jaxtyping import Array, Bool, Float, Int32, PyTree, Shaped

from m3jax.decoding.protocols import Identity, PagedCache, TargetModel
from m3jax.decoding.sampling import HostOrDevice, SamplingParams
from m3jax.decoding.speculation.verify import Proposal

MAX_DRAFT_TOKENS = 8

# What a drafter remembers of each row: arrays whose first axis is the rows.
DraftMemory = PyTree[Shaped[HostOrDevice, "_ ..."]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptContext:
    """The tokens of C prompts that a drafter reads beyond the piece that a call of the target runs.

    Attributes:
      following: the token after the piece, where the prompt goes on; 0 where it ends.
      all_tokens: every token of each prompt, for a drafter that reads them.
    """

    following: Int32[HostOrDevice, "C"]
    all_tokens: Int32[HostOrDevice, "C S"] | None = None


@runtime_checkable
class Drafter(Protocol):
    """A drafter as the engine uses it.

    B rows, C prompts of a chunk, K proposals, X = 1 + K columns of a target call, A tapped layers.

    Attributes:
      taps: the layers at which it reads the target's residual stream (`NamedModel`); () for none.
      reads_tokens: whether a chunk must bring all tokens of its prompts.
    """

    taps: tuple[int, ...]
    reads_tokens: bool

    def check(self, model: TargetModel) -> None:
        """Raise ValueError if the drafter cannot draft for this target."""
        ...

    def join(self, model: TargetModel, cache: PagedCache) -> PagedCache:
        """Return the target's cache with what the drafter keeps in pages."""
        ...

    def identity(self) -> Identity:
        """Return the settings that two engines' drafters must share to exchange pages."""
        ...

    def begin(self, model: TargetModel, batch: int, max_length: int) -> DraftMemory:
        """Return the memory of `batch` new rows of at most `max_length` tokens, on the host."""
        ...

    def read_prompt(
        self,
        model: TargetModel,
        cache: PagedCache,
        tokens: Int32[Array, "C T"],
        start: Int32[Array, "C"],
        lengths: Int32[Array, "C"],
        context: PromptContext,
        taps: Float[Array, "C T A D"] | None,
        first_token: Int32[Array, "C"],
    ) -> tuple[PagedCache, DraftMemory]:
        """Take in a piece of C prompts.

        Args:
          model: the target, which has read the piece.
          cache: its table has the prompts' rows.
          tokens: the piece.
          start: tokens of each prompt before the piece.
          lengths: tokens of each whole prompt.
          context: the tokens of the prompts beyond the piece that the drafter reads.
          taps: the target's residual stream in the piece; None without taps.
          first_token: the token after each prompt that ends in the piece.

        Returns:
          The cache, and the memory of C rows, which counts where a prompt ended.
        """
        ...

    def propose(
        self,
        model: TargetModel,
        cache: PagedCache,
        memory: DraftMemory,
        sampling: SamplingParams,
        newest_token: Int32[Array, "B"],
        lengths: Int32[Array, "B"],
        is_live: Bool[Array, "B"],
        count: int,
    ) -> tuple[Proposal, PagedCache]:
        """Propose K = `count` tokens for the positions after `lengths`, where the newest token stands."""
        ...

    def learn(
        self,
        model: TargetModel,
        cache: PagedCache,
        memory: DraftMemory,
        taps: Float[Array, "B X A D"] | None,
        tokens: Int32[Array, "B X"],
        lengths: Int32[Array, "B"],
        counts: Int32[Array, "B"],
    ) -> tuple[PagedCache, DraftMemory]:
        """Take in what the target made of the positions from `lengths` on: the first `counts` of `tokens` are new."""
        ...
