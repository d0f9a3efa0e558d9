"""A model's part for images and videos: the tower, its features, and their places among the embeddings."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from m3jax import arrays
from m3jax.config import M3Config
from m3jax.execution import Compute
from m3jax.make import Make
from m3jax.media import MediaBatch, PlaceholderIds, feature_places
from m3jax.model.calls import compiled
from m3jax.vision import Vision, VisionConfig, placeholder_places

Tokens = Int[Array, "B T"] | Int[np.ndarray, "B T"]


def vision_of(config: M3Config, make: Make) -> Vision | None:
    """Return the tower that a configuration describes, or None if it describes none."""
    if config.vision_config is None:
        return None
    return Vision(VisionConfig.of(config), config.hidden_size, make)


class WithMedia(nnx.Module):
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
        return placeholder_places(jnp.asarray(tokens), media, self._tower().config)

    def check_media(self, tokens: Tokens, media: MediaBatch) -> None:
        """Raise ValueError as `places` does.

        Args:
          tokens, media: as in `places`.
        """
        config = self._tower().config
        ids = PlaceholderIds(config.image_token_id, config.video_token_id)

        def find_problem(tokens, *media):
            try:
                feature_places(tokens, MediaBatch(*media), ids)
            except ValueError as error:
                return str(error)
            return None

        if arrays.is_checking() or not arrays.is_traced(tokens, media):
            arrays.check_values(find_problem, tokens, *media)

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
        x = self.embed_tokens[...][tokens]  # [B T D]
        if features is None:
            return x
        rows = x.reshape(-1, x.shape[-1])  # [B*T D]
        places = jnp.where(places < 0, len(rows), places)
        return rows.at[places].set(features.astype(x.dtype), mode="drop").reshape(x.shape)
