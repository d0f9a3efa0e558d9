"""The fake model with a tower of one line: what a feature is depends on its patches, their places and their segment."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from support import tiny
from support.fake_model import FakeModel

from m3jax.config import M3Config
from m3jax.media import MERGE, MediaBatch

IMAGE, VIDEO = 60, 61


def seeing_config(image: int = IMAGE, video: int = VIDEO, **changes) -> M3Config:
    """A configuration with those placeholders; of its sizes the fake model reads the vocabulary and the block."""
    extra = {"image_token_index": image, "video_token_index": video}
    return tiny.config("dM", vision_config={}, extra=extra, **changes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FakeSeer:
    """A `FakeModel` that sees; features of padding are NaN, which nobody may read."""

    base: FakeModel
    vision: jax.Array

    @classmethod
    def random(cls, config: M3Config, seed: int = 0):
        base = FakeModel.random(seed, config)
        tower = np.random.default_rng(seed + 1).normal(size=(1176 + 3, base.embed.shape[1])) * 1176**-0.5
        return cls(base, jnp.asarray(tower, jnp.float32))

    @property
    def config(self):
        return self.base.config

    @property
    def mesh(self):
        return None

    def new_cache(self, *sizes, **types):
        return jax.device_put(self.base.new_cache(*sizes, **types), jax.devices()[0])  # committed, as the state stays

    def embed(self, tokens):
        return self.base.embed[tokens]

    def features(self, media: MediaBatch):
        x = jnp.concatenate([media.patches, 10.0 * media.positions], axis=1) @ self.vision  # [X D]
        is_near = (media.segments[:, None] == media.segments) & (media.segments >= 0)  # [X X]
        x = x + is_near @ x / jnp.maximum(is_near.sum(axis=1, keepdims=True), 1)
        x = jnp.where((media.segments >= 0)[:, None], x, jnp.nan)
        return jnp.einsum("rmd,m->rd", x.reshape(-1, MERGE**2, x.shape[1]), jnp.arange(1.0, 5.0) / 3)

    def hidden(self, tokens, *, cache, positions, lengths, embeddings=None):
        return self.base.hidden(tokens, cache, positions, lengths, embeddings)

    def unembed(self, hidden):
        return self.base.unembed(hidden)
