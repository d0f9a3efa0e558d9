"""A drafter without a model: it proposes what followed the last time that a row ended as it does now."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from m3jax.decoding.protocols import Identity, PagedCache, TargetModel
from m3jax.decoding.sampling import SamplingParams
from m3jax.decoding.speculation.drafter import PromptContext
from m3jax.decoding.speculation.verify import Proposal


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptLookup:
    """A drafter that proposes what followed the last time that the row ended as it does now.

    The longest end of the row that occurred before counts, and of equally long matches the latest. If fewer tokens
    follow the match than are asked for, they repeat. A row's memory is its tokens by position [B S].

    Attributes:
      longest: tokens compared at most.
      shortest: tokens that must agree at least; without such a place nothing is proposed.
    """

    longest: int = field(default=4, metadata={"static": True})
    shortest: int = field(default=1, metadata={"static": True})

    taps = ()
    reads_tokens = True

    def __post_init__(self):
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"shortest = {self.shortest}, longest = {self.longest}: need 1 <= shortest <= longest tokens"
            )

    def check(self, model: TargetModel) -> None:
        """Accept any target."""

    def join(self, model: TargetModel, cache: PagedCache) -> PagedCache:
        """Return the cache as it is: nothing is kept in pages."""
        return cache

    def identity(self) -> Identity:
        """Return {}: whatever two engines look up, their pages are the same."""
        return {}

    def begin(self, model: TargetModel, batch: int, max_length: int) -> Int32[np.ndarray, "B S"]:
        """Return room for each row's tokens by position."""
        return np.zeros((batch, max_length), np.int32)

    def read_prompt(
        self,
        model: TargetModel,
        cache: PagedCache,
        tokens: Int32[Array, "C T"],
        start: Int32[Array, "C"],
        lengths: Int32[Array, "C"],
        context: PromptContext,
        taps: None,
        first_token: Int32[Array, "C"],
    ) -> tuple[PagedCache, Int32[Array, "C S"]]:
        """Return the cache as it is, and the prompts' tokens with the first token after each as the rows' memory."""
        prompt_index = jnp.arange(len(first_token))
        next_token = jnp.maximum(first_token, 0)
        return cache, context.all_tokens.at[prompt_index, lengths].set(next_token, mode="drop")

    def propose(
        self,
        model: TargetModel,
        cache: PagedCache,
        memory: Int32[Array, "B S"],
        sampling: SamplingParams,
        newest_token: Int32[Array, "B"],
        lengths: Int32[Array, "B"],
        is_live: Bool[Array, "B"],
        count: int,
    ) -> tuple[Proposal, PagedCache]:
        """Propose the tokens that followed the latest, longest earlier occurrence of the row's end."""
        match_end, match_length = self._find(memory, lengths)
        period = jnp.maximum(lengths - match_end, 1)[:, None]
        position = match_end[:, None] + 1 + jnp.arange(count, dtype=jnp.int32) % period  # [B K]
        tokens = jnp.take_along_axis(memory, jnp.clip(position, 0, memory.shape[1] - 1), axis=1)  # [B K]
        return Proposal(jnp.where((match_length >= self.shortest)[:, None], tokens, -1)), cache

    def learn(
        self,
        model: TargetModel,
        cache: PagedCache,
        memory: Int32[Array, "B S"],
        taps: Float[Array, "B X A D"] | None,
        tokens: Int32[Array, "B X"],
        lengths: Int32[Array, "B"],
        counts: Int32[Array, "B"],
    ) -> tuple[PagedCache, Int32[Array, "B S"]]:
        """Append the new tokens."""
        column = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        position = jnp.where(column < counts[:, None], lengths[:, None] + 1 + column, memory.shape[1])  # [B X]
        return cache, memory.at[jnp.arange(len(memory))[:, None], position].set(tokens, mode="drop")

    def _find(
        self, tokens: Int32[Array, "B S"], last_position: Int32[Array, "B"]
    ) -> tuple[Int32[Array, "B"], Int32[Array, "B"]]:
        """Return the earlier position that ends most like the last one, and how many tokens agree up to there."""
        size = tokens.shape[1]
        agreeing = jnp.zeros(tokens.shape, jnp.int32)  # [B S], tokens that agree up to each position
        is_agreeing = jnp.arange(size, dtype=jnp.int32) < last_position[:, None]
        for back in range(self.longest):
            row_token = jnp.take_along_axis(tokens, jnp.maximum(last_position - back, 0)[:, None], axis=1)  # [B 1]
            earlier = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :size]  # [B S], shifted right
            is_agreeing &= earlier == row_token
            agreeing += is_agreeing
        # The latest of the best: the last position of the largest count.
        best = size - 1 - jnp.argmax(agreeing[:, ::-1], axis=1).astype(jnp.int32)
        return best, jnp.take_along_axis(agreeing, best[:, None], axis=1)[:, 0]
