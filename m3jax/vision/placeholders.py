"""The places of image and video features among a prompt's tokens, computed inside a compiled program."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from m3jax.media import MediaBatch
from m3jax.vision.config import VisionConfig


def placeholder_places(tokens: Int[Array, "B T"], media: MediaBatch, config: VisionConfig) -> Int[Array, " R"]:
    """Return `m3jax.media.feature_places` of traced tokens: nothing is checked, and spare features have place -1.

    Args:
      tokens: with the placeholders of all rows' media, expanded.
      media: their patches.
      config: the tower's, with the ids of the placeholders.

    Returns:
      The place b T + t of each feature in the flattened tokens; -1 for features of padding.
    """
    flat = tokens.reshape(-1)
    num_features = media.segments.shape[0] // config.merged_patches

    def places_of(is_placeholder: Bool[Array, " BT"]) -> Int[Array, " R"]:
        (places,) = jnp.nonzero(is_placeholder, size=num_features, fill_value=-1)
        return places.astype(jnp.int32)

    feature = jnp.arange(num_features, dtype=jnp.int32)
    of_videos = feature - media.image_features  # index of the feature among the videos', negative for images'
    of_image = places_of(flat == config.image_token_id)
    of_video = places_of(flat == config.video_token_id)[jnp.clip(of_videos, 0, num_features - 1)]
    is_video = (of_videos >= 0) & (of_videos < media.video_features)
    return jnp.where(of_videos < 0, of_image, jnp.where(is_video, of_video, -1))
