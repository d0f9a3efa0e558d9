"""Random drafts for the tiny model, and drafters that know the target."""

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from support import tiny
from support.engines import CONFIG

from m3jax.cache.drafted import DraftedCache
from m3jax.decoding import Eagle3Drafter
from m3jax.decoding.speculation.verify import Proposal
from m3jax.model import eagle3

__all__ = ["CONFIG", "Coached", "Knowing", "config", "draft", "join", "model"]


def config(**changes) -> eagle3.Eagle3Config:
    """A draft of the tiny model that shares its embedding and head."""
    values = dict(
        hidden_size=CONFIG.hidden_size, vocab_size=CONFIG.vocab_size, draft_vocab_size=CONFIG.vocab_size,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, intermediate_size=32, taps=(0, 1, 2),
        own_embedding=False, own_head=False,
    )  # fmt: skip
    return eagle3.Eagle3Config(**values | changes)


@cache
def model():
    return tiny.model(CONFIG)


def draft(seed: int = 0, dtype: str = "float32", **changes) -> eagle3.Eagle3:
    """Random weights, norms included, drawn by numpy."""
    rng = np.random.default_rng(seed)
    settings = config(**changes)

    def fill(leaf):
        if leaf.dtype == jnp.int32:
            return jnp.asarray(np.sort(rng.permutation(settings.vocab_size)[: leaf.size]), jnp.int32)
        scale = 0.5 if leaf.ndim == 1 else float(np.prod(leaf.shape[:-1])) ** -0.5
        return jnp.asarray(rng.normal(size=leaf.shape) * scale + (leaf.ndim == 1), dtype)

    return jax.tree.map(fill, eagle3.abstract(settings))


def join(drafter: Eagle3Drafter, batch: int, blocks: int) -> DraftedCache:
    """A cache of the tiny model and the draft in which every row has its pages, in no order."""
    cache = model().new_cache(batch * blocks, batch, blocks)
    table = np.random.default_rng(1).permutation(batch * blocks).reshape(batch, blocks).astype(np.int32)
    return drafter.join(model(), cache).replace(table=jnp.asarray(table))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Knowing:
    """Asks the target what it will say, and says so or not: at position p the first `right[p % R]` are right."""

    right: jax.Array

    taps = ()
    reads_tokens = False

    @classmethod
    def of(cls, *right: int) -> "Knowing":
        """A pattern, repeated to eight: the same shape for all."""
        return cls(jnp.asarray((right * 8)[:8], jnp.int32))

    def check(self, model):
        pass

    def join(self, model, cache):
        return cache

    def identity(self):
        return {}

    def begin(self, model, batch, max_length):
        return np.zeros((batch, 0), np.float32)

    def read_prompt(self, model, cache, tokens, start, lengths, context, taps, first_token):
        return cache, jnp.zeros((len(first_token), 0))

    def propose(self, model, cache, memory, sampling, newest_token, lengths, is_live, count):
        def step(carry, index):
            token, written = carry
            positions, end = jnp.where(is_live, lengths + index, -1)[:, None], lengths + index + is_live
            hidden, written = model.hidden(token[:, None], cache=written, positions=positions, lengths=end)
            token = jnp.argmax(model.unembed(hidden[:, 0]), -1).astype(jnp.int32)
            return (token, written), token

        tokens = jax.lax.scan(step, (newest_token, cache), jnp.arange(count, dtype=jnp.int32))[1].T  # [B K]
        wrong = jnp.arange(count) >= self.right[lengths % len(self.right)][:, None]
        return Proposal((tokens + wrong) % model.config.vocab_size), cache  # what was written is forgotten

    def learn(self, model, cache, memory, taps, tokens, lengths, counts):
        return cache, memory


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coached(Eagle3Drafter):
    """EAGLE3, whose first `right[p % R]` proposals at position p are in place of its own what the target will say.

    Of a negative number all are what the target will not say. The numbers are data: a random draft, one that is always
    right, one that is always wrong and anything between share compiled programs.
    """

    right: jax.Array | None = None

    @classmethod
    def of(cls, draft: eagle3.Eagle3, *right: int, sample: bool = False) -> "Coached":
        return cls(draft, sample=sample, right=Knowing.of(*right).right)

    def propose(self, model, cache, memory, sampling, newest_token, lengths, is_live, count):
        asked = dict(sampling=sampling, newest_token=newest_token, lengths=lengths, is_live=is_live, count=count)
        own, drafted = super().propose(model, cache, memory, **asked)
        known, _ = Knowing.of(count).propose(model, cache, None, **asked)
        right = self.right[lengths % len(self.right)][:, None]  # [B 1]
        tokens = jnp.where(jnp.arange(count) < right, known.tokens, own.tokens)  # [B K]
        wrong = (known.tokens + 1) % model.config.vocab_size
        return own._replace(tokens=jnp.where(right < 0, wrong, tokens)), drafted
