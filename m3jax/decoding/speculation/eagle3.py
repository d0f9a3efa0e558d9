"""A drafter that is a model of its own: EAGLE3, which goes on from the target's hidden states."""

from dataclasses import asdict, dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from m3jax.cache import Cache
from m3jax.cache.drafted import DraftedCache
from m3jax.decoding.protocols import Identity
from m3jax.decoding.sampling import SamplingParams, filtered_logits, has_distribution
from m3jax.decoding.speculation.drafter import PromptContext
from m3jax.decoding.speculation.verify import DRAFT, Proposal, position_keys
from m3jax.model import M3
from m3jax.model.eagle3 import Eagle3


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Eagle3Drafter:
    """A drafter that proposes tokens with an EAGLE3 model.

    A row's memory is the draft's output at its newest token [B D]. What the draft makes of a token lies in that token's
    slot of the row's pages (`DraftedCache`).

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
        """The layers at which it reads the target's residual stream."""
        return self.draft.config.taps

    def check(self, model: M3) -> None:
        """Raise ValueError if the draft was not made for such a target."""
        self.draft.config.check_fits(model.config)

    def join(self, model: M3, cache: Cache) -> DraftedCache:
        """Return the target's cache with pages for the draft's layer too."""
        layer = self.draft.config.as_layer(cache.page_size)
        return DraftedCache.join(cache, layer, str(self.draft.dtype), model.mesh)

    def identity(self) -> Identity:
        """Return the draft's configuration and dtype."""
        return {"draft": asdict(self.draft.config), "dtype of the draft": str(self.draft.dtype)}

    def begin(self, model: M3, batch: int, max_length: int) -> Float[np.ndarray, "B D"]:
        """Return zeros: no row has a newest token yet."""
        return np.zeros((batch, self.draft.config.hidden_size), self.draft.dtype)

    def read_prompt(
        self,
        model: M3,
        cache: DraftedCache,
        tokens: Int32[Array, "C T"],
        start: Int32[Array, "C"],
        lengths: Int32[Array, "C"],
        context: PromptContext,
        taps: Float[Array, "C T A D"],
        first_token: Int32[Array, "C"],
    ) -> tuple[DraftedCache, Float[Array, "C D"]]:
        """Fill the slots after those of the piece's tokens: that of the next token is known too.

        The first slot needs the feature of the token before the piece. Inside a page that slot was filled together with
        that token; at a page's beginning the page before has the feature, as its edge.
        """
        width = tokens.shape[1]
        counts = jnp.clip(lengths - start, 0, width)  # tokens of the piece that are not padding
        features = self.draft.features(taps)  # [C T D]
        cache = self._keep_edges(cache, features, start, counts)
        edge = cache.edge(start)[:, None].astype(features.dtype)  # [C 1 D]
        features = jnp.concatenate([edge, features], axis=1)  # [C T+1 D]
        # The feature of position p goes into the slot of the token after it, p + 1: slots run from `start` on.
        slots = start[:, None] + jnp.arange(width + 1, dtype=jnp.int32)  # [C T+1]
        tokens = jnp.concatenate([tokens, context.following[:, None]], axis=1)  # [C T+1]
        tokens = jnp.where(slots == lengths[:, None], jnp.maximum(first_token, 0)[:, None], tokens)
        is_unfilled = (slots > start[:, None]) | (start % cache.page_size == 0)[:, None]
        is_valid = is_unfilled & (slots > 0) & (slots <= lengths[:, None])
        filled = jnp.minimum(lengths, start + width) + 1
        output, cache = self._run_draft(model, cache, features, tokens, slots, is_valid, filled)
        return cache, jnp.take_along_axis(output, counts[:, None, None], axis=1)[:, 0]

    def propose(
        self,
        model: M3,
        cache: DraftedCache,
        memory: Float[Array, "B D"],
        sampling: SamplingParams,
        newest_token: Int32[Array, "B"],
        lengths: Int32[Array, "B"],
        is_live: Bool[Array, "B"],
        count: int,
    ) -> tuple[Proposal, DraftedCache]:
        """Pick the first proposal from the memory, and each later one after a step of the draft on the one before."""

        def propose_next(carry, index):
            output, token, draft_pages = carry
            feature = self.draft.recur(output)[:, None]  # [B 1 D]
            output, stepped = self._run_draft(
                model,
                cache.replace(draft=draft_pages),
                feature,
                tokens=jnp.maximum(token, 0)[:, None],
                slots=(lengths + index)[:, None],
                is_valid=is_live[:, None],
                lengths=lengths + index + 1,
            )
            output = output.squeeze(1)  # [B 1 D] -> [B D]
            token, log_q = self._pick(model, output, sampling, lengths + index + 1)
            return (output, token, stepped.draft), (token, log_q)

        first = self._pick(model, memory, sampling, lengths + 1)
        start = memory, first[0], cache.draft
        (_, _, draft_pages), later = lax.scan(propose_next, start, jnp.arange(1, count, dtype=jnp.int32))
        # The scan stacks proposals in front of the rows: [K-1 B ...] and the first [B ...] become [B K ...].
        join = lambda one, others: jnp.moveaxis(jnp.concatenate([one[None], others]), 0, 1)
        tokens, log_q = jax.tree.map(join, first, later)
        return Proposal(tokens, log_q), cache.replace(draft=draft_pages)

    def learn(
        self,
        model: M3,
        cache: DraftedCache,
        memory: Float[Array, "B D"],
        taps: Float[Array, "B X A D"],
        tokens: Int32[Array, "B X"],
        lengths: Int32[Array, "B"],
        counts: Int32[Array, "B"],
    ) -> tuple[DraftedCache, Float[Array, "B D"]]:
        """Fill the slots of the new tokens again, now with the target's own features."""
        features = self.draft.features(taps)  # [B X D]
        cache = self._keep_edges(cache, features, lengths, counts)
        column = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        slots, is_new = lengths[:, None] + 1 + column, column < counts[:, None]  # [B X]
        filled = lengths + counts + 1
        output, cache = self._run_draft(model, cache, features, jnp.maximum(tokens, 0), slots, is_new, filled)
        last_column = jnp.maximum(counts - 1, 0)[:, None, None]
        newest_output = jnp.take_along_axis(output, last_column, axis=1)[:, 0]  # [B D]
        return cache, jnp.where((counts > 0)[:, None], newest_output, memory)

    def _run_draft(
        self,
        model: M3,
        cache: DraftedCache,
        features: Float[Array, "B T D"],
        tokens: Int32[Array, "B T"],
        slots: Int32[Array, "B T"],
        is_valid: Bool[Array, "B T"],
        lengths: Int32[Array, "B"],
    ) -> tuple[Float[Array, "B T D"], DraftedCache]:
        """Return the draft's output at each slot, and the cache with its keys and values there if the slot is valid."""
        slots = jnp.where(is_valid, slots, -1)
        output, draft_pages = self.draft.cached(
            features,
            tokens,
            slots,
            lengths,
            places=cache.places(slots, lengths),
            pages=cache.draft,
            embedding=model.embed_tokens[...],
            compute=model.compute,
        )
        return output, cache.replace(draft=draft_pages)

    def _keep_edges(
        self,
        cache: DraftedCache,
        features: Float[Array, "B T D"],
        first_position: Int32[Array, "B"],
        counts: Int32[Array, "B"],
    ) -> DraftedCache:
        """Keep, of `counts` features from a position on, those of the last tokens of pages."""
        column = jnp.arange(features.shape[1], dtype=jnp.int32)
        positions = jnp.where(column < counts[:, None], first_position[:, None] + column, -1)  # [B T]
        return cache.with_edges(features, cache.places(positions, first_position + counts))

    def _pick(
        self, model: M3, output: Float[Array, "B D"], sampling: SamplingParams, positions: Int32[Array, "B"]
    ) -> tuple[Int32[Array, "B"], Float32[Array, "B V"] | None]:
        """Return the token that the draft proposes for a position, and log q over the target's tokens if it is drawn.

        The token is -1 where the draft's logits have no distribution.
        """
        logits = self.draft.logits(output, model.lm_head[...], model.compute)  # [B V'], the draft's vocabulary
        logits = logits.astype(jnp.float32)
        target_ids = None if self.draft.target_ids is None else self.draft.target_ids[...]  # [V']
        log_q = None
        if self.sample:
            filtered = filtered_logits(logits, sampling)
            keys = position_keys(sampling.seed, positions, DRAFT)
            token = jax.vmap(jax.random.categorical)(keys, filtered)
            log_q = jax.nn.log_softmax(filtered)
            if target_ids is not None:  # tokens that the draft does not know have no probability
                unknown = jnp.full((len(log_q), self.draft.config.vocab_size), -jnp.inf, log_q.dtype)
                log_q = unknown.at[:, target_ids].set(log_q)  # [B V]
        else:
            token = jnp.argmax(logits, axis=-1)
        token = token.astype(jnp.int32) if target_ids is None else target_ids[token]
        return jnp.where(has_distribution(logits), token, -1), log_q
