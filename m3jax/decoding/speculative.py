"""Drafters: who proposes the tokens that the target then verifies.

A drafter is a pytree with its parameters as leaves and its settings static. What it remembers of each row is a state of
its own; what it remembers of each token lies in the pages, so that it is shared, copied and moved with them.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from m3jax.cache.drafted import DraftedCache
from m3jax.decoding.sampling import SamplingParams, filtered_logits
from m3jax.decoding.verify import DRAFT, Proposal, position_keys
from m3jax.model.eagle3 import Eagle3

MAX_DRAFT_TOKENS = 8


@runtime_checkable
class Drafter(Protocol):
    """What the engine asks of a drafter. B rows, C prompts of a chunk, K proposals, X = 1 + K columns of a target call.

    Attributes:
      taps: where it reads the target's residual stream (`M3.tapped`); () for nowhere.
      reads_tokens: whether a chunk must bring all tokens of its prompts.
    """

    taps: tuple[int, ...]
    reads_tokens: bool

    def check(self, model: Any) -> None:
        """Raise ValueError where it cannot draft for this target."""
        ...

    def join(self, model: Any, cache: Any) -> Any:
        """The target's cache with what the drafter keeps in pages."""
        ...

    def identity(self) -> dict[str, Any]:
        """What two engines' drafters must share to exchange pages."""
        ...

    def begin(self, model: Any, batch: int, length: int) -> Any:
        """The state of B rows of at most `length` tokens: arrays [B ...] on the host."""
        ...

    def read_prompt(
        self, model: Any, cache: Any, chunk: Any, taps: Float[Array, "C T A D"] | None, token: Int32[Array, "C"]
    ) -> tuple[Any, Any]:
        """Take in a chunk of prompts: (cache, state of C rows), which counts where `token` ended the prompt."""
        ...

    def propose(
        self,
        model: Any,
        cache: Any,
        state: Any,
        sampling: SamplingParams,
        newest: Int32[Array, "B"],
        lengths: Int32[Array, "B"],
        live: Bool[Array, "B"],
        count: int,
    ) -> tuple[Proposal, Any]:
        """(K = `count` proposals for the positions after `lengths`, where the newest token stands; cache)."""
        ...

    def learn(
        self,
        model: Any,
        cache: Any,
        state: Any,
        taps: Float[Array, "B X A D"] | None,
        tokens: Int32[Array, "B X"],
        lengths: Int32[Array, "B"],
        counts: Int32[Array, "B"],
    ) -> tuple[Any, Any]:
        """Take in what the target made of the positions from `lengths` on: (cache, state) after `counts` new tokens."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Eagle3Drafter:
    """Drafts with an EAGLE3 model.

    Attributes:
      draft: the model.
      sample: whether proposals to sampled rows are drawn, under the row's own knobs, and verified with their
        distribution; otherwise each is the most probable token and counts as a point mass.
    """

    draft: Eagle3
    sample: bool = field(default=False, metadata={"static": True})

    reads_tokens = False

    @property
    def taps(self) -> tuple[int, ...]:
        """Where it reads the target."""
        return self.draft.config.taps

    def check(self, model: Any) -> None:
        """Raise ValueError where the draft was not made for such a target."""
        self.draft.config.check_fits(model.config)

    def join(self, model: Any, cache: Any) -> DraftedCache:
        """Pages for the draft's layer too."""
        layer = self.draft.config.as_layer(cache.page_size)
        return DraftedCache.join(cache, layer, str(self.draft.dtype), model.mesh)

    def identity(self) -> dict[str, Any]:
        """The draft's configuration and dtype."""
        return {"draft": asdict(self.draft.config), "dtype of the draft": str(self.draft.dtype)}

    def begin(self, model: Any, batch: int, length: int) -> Float[np.ndarray, "B D"]:
        """The draft's output at each row's newest token."""
        return np.zeros((batch, self.draft.config.hidden_size), self.draft.dtype)

    def read_prompt(self, model, cache, chunk, taps, token):
        """Fill the slots after those of the chunk's tokens: that of the next token is known too.

        The first slot needs the feature of the token before the chunk. Within a page it was filled with that token, at
        its beginning the page before has it.
        """
        width, size = chunk.tokens.shape[1], cache.page_size
        found = self.draft.features(taps)
        cache = self._keep_edges(cache, found, chunk.start, jnp.clip(chunk.length - chunk.start, 0, width))
        features = jnp.concatenate([cache.edge(chunk.start)[:, None].astype(found.dtype), found], axis=1)
        slots = chunk.start[:, None] + jnp.arange(width + 1, dtype=jnp.int32)
        tokens = jnp.concatenate([chunk.tokens, chunk.following[:, None]], axis=1)
        tokens = jnp.where(slots == chunk.length[:, None], jnp.maximum(token, 0)[:, None], tokens)
        new = (slots > chunk.start[:, None]) | (chunk.start % size == 0)[:, None]
        valid = new & (slots > 0) & (slots <= chunk.length[:, None])
        lengths = jnp.minimum(chunk.length, chunk.start + width) + 1
        out, cache = self._step(model, cache, features, tokens, slots, valid, lengths)
        last = jnp.clip(chunk.length - chunk.start, 0, width)
        return cache, jnp.take_along_axis(out, last[:, None, None], axis=1)[:, 0]

    def propose(self, model, cache, state, sampling, newest, lengths, live, count):
        """The first proposal comes from the state, each later one from a step after the one before."""

        def step(carry, i):
            output, token, draft = carry
            own = cache.replace(draft=draft)
            feature = self.draft.recur(output)[:, None]
            args = jnp.maximum(token, 0)[:, None], (lengths + i)[:, None], live[:, None], lengths + i + 1
            output, own = self._step(model, own, feature, *args)
            token, log_q = self._pick(model, output[:, 0], sampling, lengths + i + 1)
            return (output[:, 0], token, own.draft), (token, log_q)

        first = self._pick(model, state, sampling, lengths + 1)
        later = jnp.arange(1, count, dtype=jnp.int32)
        (_, _, draft), rest = lax.scan(step, (state, first[0], cache.draft), later)
        join = lambda a, b: jnp.moveaxis(jnp.concatenate([a[None], b]), 0, 1)
        return Proposal(*jax.tree.map(join, first, rest)), cache.replace(draft=draft)

    def learn(self, model, cache, state, taps, tokens, lengths, counts):
        """Fill the slots of the new tokens again, now with the target's own features."""
        features = self.draft.features(taps)
        cache = self._keep_edges(cache, features, lengths, counts)
        column = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        slots, valid = lengths[:, None] + 1 + column, column < counts[:, None]
        end = lengths + counts + 1
        out, cache = self._step(model, cache, features, jnp.maximum(tokens, 0), slots, valid, end)
        last = jnp.maximum(counts - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(out, last, axis=1)[:, 0]
        return cache, jnp.where((counts > 0)[:, None], newest, state)

    def _step(self, model, cache, features, tokens, slots, valid, lengths):
        slots = jnp.where(valid, slots, -1)
        rows = slots, lengths, cache.places(slots, lengths)
        args = cache.draft, model.embed_tokens[...], model.schedule, model.mesh
        out, draft = self.draft.cached(features, tokens, *rows, *args)
        return out, cache.replace(draft=draft)

    def _keep_edges(self, cache, features, first, counts):
        column = jnp.arange(features.shape[1], dtype=jnp.int32)
        positions = jnp.where(column < counts[:, None], first[:, None] + column, -1)
        return cache.with_edges(features, cache.places(positions, first + counts))

    def _pick(self, model, output, sampling, positions):
        """(token, log q or None) after each row's output; no token where the draft's logits have no distribution."""
        logits = self.draft.logits(output, model.lm_head[...]).astype(jnp.float32)
        usable = jnp.isfinite(jnp.max(logits, axis=-1))
        log_q = None
        if self.sample:
            filtered = filtered_logits(logits, sampling)
            keys = position_keys(sampling.seed, positions, DRAFT)
            token = jax.vmap(jax.random.categorical)(keys, filtered)
            log_q = self._over_vocabulary(jax.nn.log_softmax(filtered))
        else:
            token = jnp.argmax(logits, axis=-1)
        ids = self.draft.target_ids
        token = token.astype(jnp.int32) if ids is None else ids[...][token]
        return jnp.where(usable, token, -1), log_q

    def _over_vocabulary(self, log_q):
        """Log-probabilities over the target's tokens; those that the draft does not know have none."""
        ids = self.draft.target_ids
        if ids is None:
            return log_q
        none = jnp.full((len(log_q), self.draft.config.vocab_size), -jnp.inf, log_q.dtype)
        return none.at[:, ids[...]].set(log_q)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptLookup:
    """Proposes what followed the last time that the row ended as it does now: needs no model.

    The longest end that occurred before counts, of those equally long the latest; where fewer tokens follow it than are
    asked for, they repeat.

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

    def check(self, model: Any) -> None:
        """Any target will do."""

    def join(self, model: Any, cache: Any) -> Any:
        """Nothing is kept in pages."""
        return cache

    def identity(self) -> dict[str, Any]:
        """Nothing lies in pages."""
        return {}

    def begin(self, model: Any, batch: int, length: int) -> Int32[np.ndarray, "B S"]:
        """Each row's tokens by position."""
        return np.zeros((batch, length), np.int32)

    def read_prompt(self, model, cache, chunk, taps, token):
        """The prompts' tokens, and the one after them."""
        rows = jnp.arange(len(token))
        return cache, chunk.everything.at[rows, chunk.length].set(jnp.maximum(token, 0), mode="drop")

    def propose(self, model, cache, state, sampling, newest, lengths, live, count):
        """Look for the row's end in its past."""
        start, agree = self._find(state, lengths)
        period = jnp.maximum(lengths - start, 1)[:, None]
        at = start[:, None] + 1 + jnp.arange(count, dtype=jnp.int32) % period
        tokens = jnp.take_along_axis(state, jnp.clip(at, 0, state.shape[1] - 1), axis=1)
        return Proposal(jnp.where((agree >= self.shortest)[:, None], tokens, -1)), cache

    def learn(self, model, cache, state, taps, tokens, lengths, counts):
        """Append the new tokens."""
        column = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        at = jnp.where(column < counts[:, None], lengths[:, None] + 1 + column, state.shape[1])
        return cache, state.at[jnp.arange(len(state))[:, None], at].set(tokens, mode="drop")

    def _find(self, tokens: Int32[Array, "B S"], last: Int32[Array, "B"]):
        """(earlier position that ends most like position `last`, how many tokens agree)."""
        size = tokens.shape[1]
        places = jnp.arange(size, dtype=jnp.int32)
        agree, running = jnp.zeros(tokens.shape, jnp.int32), places < last[:, None]
        for back in range(self.longest):
            own = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0)[:, None], axis=1)
            earlier = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :size]
            running &= earlier == own
            agree += running
        # The latest of the best: the last place of the largest count.
        best = size - 1 - jnp.argmax(agree[:, ::-1], axis=1).astype(jnp.int32)
        return best, jnp.take_along_axis(agree, best[:, None], axis=1)[:, 0]
