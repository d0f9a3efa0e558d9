"""A few lines with the model's contract, so that the decoding tests compile in a moment."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from m3jax.decoding import loop


@dataclass(frozen=True)
class FakeConfig:
    vocab_size: int = 64
    max_position_embeddings: int = 4096
    index_block_size: int = 16
    eos_token_id: tuple[int, ...] = (1,)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FakeModel:
    """Hidden state t mixes the embeddings of tokens 0 to t, later ones more; the cache holds embeddings [B S D]."""

    embed: jax.Array
    head: jax.Array
    config: FakeConfig = field(default=FakeConfig(), metadata={"static": True})
    mesh: None = field(default=None, metadata={"static": True})

    @classmethod
    def random(cls, seed=0, config=FakeConfig(), width=16):
        rng = np.random.default_rng(seed)
        embed, head = rng.normal(size=(2, config.vocab_size, width)).astype(np.float32)
        return cls(jnp.asarray(embed), jnp.asarray(head), config)

    def hidden(self, tokens, cache=None, positions=None, lengths=None):
        rows, count = tokens.shape
        if cache is None:
            cache = jnp.zeros((rows, count, self.embed.shape[1]))
            positions = jnp.broadcast_to(jnp.arange(count), (rows, count))
            lengths = jnp.full(rows, count)
        slots = cache.shape[1]
        valid = (positions >= 0) & (positions < lengths[:, None])
        at = jnp.where(valid, positions, slots)
        cache = cache.at[jnp.arange(rows)[:, None], at].set(self.embed[tokens], mode="drop")
        age = positions[:, :, None] - jnp.arange(slots)
        weights = jnp.where((age >= 0) & valid[:, :, None], 0.7 ** jnp.abs(age), 0)
        return jnp.einsum("bts,bsd->btd", weights, cache), cache

    def unembed(self, hidden):
        return jnp.einsum("...d,vd->...v", hidden, self.head)

    def __call__(self, tokens):
        return self.unembed(self.hidden(tokens)[0])


def empty_prefill(model, rows, length):
    vocab, width = model.embed.shape
    part = loop.Prefill(
        jnp.zeros((rows, length, width)), jnp.zeros((rows, vocab), bool), jnp.zeros((rows, vocab), jnp.float32)
    )
    return part, None
