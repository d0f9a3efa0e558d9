"""A model's part for images and videos: the tower, its features, and their places among the embeddings."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from m3jax import arrays
from m3jax.config import M3Config
from m3jax.execution import Compute
from m3jax.make import Make
from m3jax.media import MediaBatch, PlaceholderIds, feature_places, find_places
from m3jax.model.calls import compiled
from m3jax.vision import Vision, VisionConfig

Tokens = Int[Array, "B T"] | Int[np.ndarray, "B T"]


def vision_of(config: M3Config, make: Make) -> Vision | None:
    """Return the tower that a configuration describes, or None if it describes none."""
    if config.vision_config is None:
        return None
    return Vision(VisionConfig.of(config), config.hidden_size, make)


def join_features(
    x: Float[Array, "B T D"], features: Float[Array, "R D"], rows: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Return what the first layer reads: the embedding of each token, or the feature that stands in its place.

    This is the only place where features and embeddings meet: in the model's own call, in training, and in the chunks
    of the engine, which may begin and end inside an image.

    Args:
      x: embeddings of the tokens.
      features: of images and videos, those of these tokens among them.
      rows: the row of the feature that each token stands for; -1 for a token of text.
    """
    feature = features[jnp.maximum(rows, 0)]  # [B T D]
    return jnp.where(rows[..., None] >= 0, feature, x)


class WithTower(nnx.Module):
    """A model with embeddings, `embed_tokens` [V D], and a tower, `vision`, which is None where it takes text alone."""

    embed_tokens: nnx.Param
    vision: Vision | None
    compute: Compute

    @compiled()
    def features(self, media: MediaBatch) -> Float[Array, "R D"]:
        """Return the features of images and videos: the output of the tower and the projector.

        Args:
          media: from `m3jax.media.batch`; one program is compiled for each of its sizes X.

        Returns:
          R = X / 4 rows in the model's dtype, in the order of their placeholders; zeros for padding.

        Raises:
          ValueError: the model has no tower.
        """
        return self._tower()(media, self.compute.tower_backend)

    def places(self, tokens: Tokens, media: MediaBatch) -> Int[Array, " R"]:
        """Return the place of each feature among the tokens: `m3jax.media.feature_places`, also while tracing.

        Args:
          tokens: with the placeholders of all rows' media, expanded.
          media: theirs, in the order in which the rows have them.

        Returns:
          The place b T + t of each feature in the flattened tokens, -1 for features of padding.

        Raises:
          ValueError: no tower; where the arrays are at hand, or under `m3jax.checks()`, also placeholders that are not
            those of the media.
        """
        self.check_media(tokens, media)
        return find_places(jnp.asarray(tokens), media, self._placeholder_ids())

    def check_media(self, tokens: Tokens, media: MediaBatch) -> None:
        """Raise ValueError as `places` does.

        Args:
          tokens, media: as in `places`.
        """
        ids = self._placeholder_ids()

        def find_problem(tokens, *media):
            try:
                feature_places(tokens, MediaBatch(*media), ids)
            except ValueError as error:
                return str(error)
            return None

        if arrays.is_checking() or not arrays.is_traced(tokens, media):
            arrays.check_values(find_problem, tokens, *media)

    def _placeholder_ids(self) -> PlaceholderIds:
        """Return the ids of the tower's placeholders; ValueError without a tower."""
        config = self._tower().config
        return PlaceholderIds(config.image_token_id, config.video_token_id)

    def _tower(self) -> Vision:
        if self.vision is None:
            raise ValueError("this model has no vision tower: it takes text alone")
        return self.vision

    @compiled()
    def embed(
        self,
        tokens: Int[Array, "B T"],
        features: Float[Array, "R D"] | None = None,
        places: Int[Array, " R"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the input of the first layer: the tokens' embeddings, with features in place of placeholders.

        Args:
          tokens: token ids.
          features: as from `features`; any number of rows.
          places: where in the flattened tokens each row goes, b T + t; rows with a negative place go nowhere.
        """
        x = self.execution().embed(tokens, self.embed_tokens[...])  # [B T D]
        if features is None:
            return x
        target = jnp.where(places < 0, tokens.size, places)  # one past the last token is dropped
        row = jnp.arange(len(features), dtype=jnp.int32)
        rows = jnp.full(tokens.size, -1, jnp.int32).at[target].set(row, mode="drop")  # [B*T]
        return join_features(x, features.astype(x.dtype), rows.reshape(tokens.shape))
