"""A few lines with the model's contract, so that the decoding tests compile in a moment."""

from dataclasses import asdict, dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@dataclass(frozen=True)
class FakeConfig:
    vocab_size: int = 64
    max_position_embeddings: int = 4096
    index_block_size: int = 16
    index_topk_blocks: int = 4
    eos_token_id: tuple[int, ...] = (1,)

    def to_dict(self):
        return asdict(self)


@struct.dataclass
class FakeCache:
    """Pages [X P D] of embeddings, and the table [B M] that finds them."""

    pages: jax.Array
    table: jax.Array

    @property
    def stacks(self):
        return ()  # of layers, whose types a snapshot would name

    @property
    def num_pages(self):
        return self.pages.shape[0]

    @property
    def page_size(self):
        return self.pages.shape[1]

    def write(self, positions, valid, values):
        block = jnp.clip(positions // self.page_size, 0, self.table.shape[1] - 1)
        page = jnp.take_along_axis(self.table, block, axis=1)  # [B T]
        fits = positions < self.table.shape[1] * self.page_size  # else it would be written into the last page
        page = jnp.where(valid & fits & (page >= 0), page, self.num_pages)
        return self.replace(pages=self.pages.at[page, positions % self.page_size].set(values, mode="drop"))

    def read(self, lengths):
        """[B S D], zero at and past each row's length."""
        x = self.pages[jnp.maximum(self.table, 0)].reshape(len(self.table), -1, self.pages.shape[2])
        return jnp.where((jnp.arange(x.shape[1]) < lengths[:, None])[..., None], x, 0)

    def copy_pages(self, source, target):
        target = jnp.where(target >= 0, target, self.num_pages)
        return self.replace(pages=self.pages.at[target].set(self.pages[source], mode="drop"))

    def read_pages(self, pages):
        return self.pages[pages]

    def write_pages(self, pages, contents):
        pages = jnp.where(pages >= 0, pages, self.num_pages)
        return self.replace(pages=self.pages.at[pages].set(contents, mode="drop"))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FakeModel:
    """Hidden state t mixes the embeddings of tokens 0 to t, later ones more."""

    embed: jax.Array
    head: jax.Array
    config: FakeConfig = field(default=FakeConfig(), metadata={"static": True})
    mesh: None = field(default=None, metadata={"static": True})

    @classmethod
    def random(cls, seed=0, config=FakeConfig(), width=16):
        rng = np.random.default_rng(seed)
        embed, head = rng.normal(size=(2, config.vocab_size, width)).astype(np.float32)
        return cls(jnp.asarray(embed), jnp.asarray(head), config)

    def new_cache(self, pages, batch, blocks, **types):
        assert not any(types.values())
        shape = pages, self.config.index_block_size, self.embed.shape[1]
        return FakeCache(jnp.zeros(shape), jnp.full((batch, blocks), -1, jnp.int32))

    def hidden(self, tokens, cache=None, positions=None, lengths=None, embeddings=None):
        batch, count = tokens.shape
        if cache is None:
            blocks = -(-count // self.config.index_block_size)
            table = jnp.arange(batch * blocks, dtype=jnp.int32).reshape(batch, blocks)
            cache = self.new_cache(batch * blocks, batch, blocks).replace(table=table)
            positions = jnp.broadcast_to(jnp.arange(count), (batch, count))
            lengths = jnp.full(batch, count)
        valid = (positions >= 0) & (positions < lengths[:, None])
        values = self.embed[tokens] if embeddings is None else embeddings
        cache = cache.write(positions, valid, values)
        seen = cache.read(lengths)
        age = positions[:, :, None] - jnp.arange(seen.shape[1])
        weights = jnp.where((age >= 0) & valid[:, :, None], 0.7 ** jnp.abs(age), 0)
        return jnp.einsum("bts,bsd->btd", weights, seen), cache

    def unembed(self, hidden):
        return jnp.einsum("...d,vd->...v", hidden, self.head)

    def __call__(self, tokens):
        return self.unembed(self.hidden(tokens)[0])
