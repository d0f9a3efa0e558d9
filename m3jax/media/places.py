"""The tokens that features of images and videos stand for: one search, and checks that prompt and media fit."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Int32, Shaped

from m3jax.media.packing import MediaBatch, Segment, pack_layout
from m3jax.media.placeholders import PlaceholderIds
from m3jax.media.sizes import MERGE


def find_places(tokens: Shaped[Any, "B T"], media: MediaBatch, ids: PlaceholderIds) -> Int[Any, " R"]:
    """Return each feature's place in the tokens, unchecked: the placeholders of its kind, image or video, in order.

    This is the only search for placeholders. It is written in what numpy and jax.numpy have in common, and runs on
    numpy arrays as well as inside a compiled program.

    Args:
      tokens: an array of either library, with the placeholders of all rows' media, expanded.
      media: their patches, packed in the order in which the rows have them; only the counts and R = X / 4 are read.
      ids: of the placeholders.

    Returns:
      The place b T + t of each feature in the flattened tokens; -1 for features of padding, and for those that have no
      placeholder.
    """
    xp = tokens.__array_namespace__()
    flat = tokens.reshape(-1)  # [B*T]
    feature = xp.arange(media.segments.shape[0] // MERGE**2, dtype=xp.int32)  # [R]
    of_videos = feature - media.image_features  # index of the feature among the videos', negative for images'

    def place_of(token, index):
        # Placeholder number `index` stands where the count of placeholders first reaches index + 1.
        return xp.searchsorted(xp.cumsum(flat == token), index + 1)

    places = xp.where(of_videos < 0, place_of(ids.image, feature), place_of(ids.video, of_videos))
    has_place = (of_videos < media.video_features) & (places < flat.shape[0])
    return xp.where(has_place, places, -1).astype(xp.int32)


def feature_places(
    tokens: Int[np.ndarray, "B T"], media: MediaBatch, ids: PlaceholderIds | None = None
) -> Int32[np.ndarray, " R"]:
    """Return `find_places` of tokens and media that fit together.

    Args:
      tokens: [B T], with the placeholders of all rows' media, expanded.
      media: their patches, packed in the order in which the rows have them.
      ids: of the placeholders; None is M3's.

    Returns:
      [R], R = X / 4: the place b T + t of each feature in the flattened tokens, -1 for features of padding.

    Raises:
      ValueError: more placeholders than features or fewer, or placeholders of one image or pair of frames that do not
        stand together, as where two images of different sizes changed places.
    """
    ids, tokens = ids or PlaceholderIds(), np.asarray(tokens)
    images, videos = int(media.image_features), int(media.video_features)
    for kind, token, features in (("image", ids.image, images), ("video", ids.video, videos)):
        if (count := np.count_nonzero(tokens == token)) != features:
            raise ValueError(
                f"the tokens have {count} {kind} placeholders (id {token}) for {features} features: expand the "
                "prompt with the images and videos of this batch"
            )
    places = find_places(tokens, media, ids)
    # Placeholders of one image, or of one pair of frames, are contiguous in the prompt. Equal counts alone would not
    # notice two images of different sizes that changed places.
    used = slice(0, images + videos)
    segments, pairs = media.segments[:: MERGE**2][used], media.positions[:: MERGE**2, 0][used]
    same_run = (np.diff(segments) == 0) & (np.diff(pairs) == 0)
    torn = np.flatnonzero(same_run & (np.diff(places[used]) != 1))
    if len(torn):
        before, behind = places[torn[0]], places[torn[0] + 1]
        raise ValueError(
            f"segment {segments[torn[0]]} (images, then chunks of videos, from 0) has placeholders at {before} and "
            f"{behind} and none between: are images in another order than in the prompt?"
        )
    return places


def segment_places(
    tokens: Sequence[int] | Int[np.ndarray, "T"], found: Sequence[Segment], ids: PlaceholderIds | None = None
) -> list[Int32[np.ndarray, "_"]]:
    """Return `feature_places` of one prompt whose segments are not packed: an array for each segment.

    Args:
      tokens: [T] of the prompt, expanded.
      found: its segments, images' before videos'.
      ids: of the placeholders; None is M3's.

    Raises:
      ValueError: as `feature_places`.
    """
    layout = pack_layout(found, sum(len(segment.patches) for segment in found))
    places = feature_places(np.asarray(tokens, np.int64)[None], layout, ids)
    return np.split(places, np.cumsum([segment.features for segment in found])[:-1]) if found else []
