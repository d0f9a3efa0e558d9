"""Several images and videos in arrays of fixed sizes, as the vision tower reads them, and where their features go."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int, Int32

from m3jax.config import M3Config
from m3jax.media.patches import Grid, chunk_grids, patch_positions
from m3jax.media.placeholders import PlaceholderIds
from m3jax.media.sizes import MERGE, PATCH, PATCH_VALUES, TEMPORAL
from m3jax.messages import shown

_FEWEST = 256  # patches of the smallest bucket
_SEGMENT = 4  # temporal patches of a chunk, where a configuration does not say
NO_SEGMENT = -1


class MediaBatch(NamedTuple):
    """Images, then videos, packed one behind the other and filled up to a bucket: a pytree of arrays.

    A *segment* is an image or a chunk of a video: patches attend to those of their own segment and to no others. Four
    rows of patches that follow one another are a merge block and give one *feature*, so that feature r comes of rows
    4 r to 4 r + 3. Features stand in the order of their placeholders: all images' first, then all videos'.

    Attributes:
      patches: [X 1176], zeros behind the last.
      segments: [X], from 0; -1 for rows that are padding.
      positions: [X 3], temporal patch, row and column inside the segment; they turn queries and keys in the tower.
      image_features, video_features: how many features are images' and videos', as 0-d arrays.
    """

    patches: Float32[np.ndarray, "X P"]
    segments: Int32[np.ndarray, " X"]
    positions: Int32[np.ndarray, "X 3"]
    image_features: Int32[np.ndarray, ""]
    video_features: Int32[np.ndarray, ""]


def batch(images: Iterable[Any] = (), videos: Iterable[Any] = (), config: M3Config | None = None) -> MediaBatch:
    """Pack images and videos for one call of the model.

    Args:
      images: for each a `ProcessedImage`, or its (patches [X 1176], grid (1, h, w)).
      videos: for each a `ProcessedVideo`, or (patches, grids): a row (t, h, w) a chunk, or one row for the clip, which
        is cut into chunks here (the gateway SMG sends such).
      config: the model's, whose `vision_config` says how many temporal patches a chunk has; None is M3's 4.

    Returns:
      Arrays whose first axis is one of few sizes: a program is compiled for each of those, and not for each image.

    Raises:
      ValueError: no image and no video, patches that do not fit their grid, a model without a vision tower, or one
        whose patches are not 14 x 14 pixels of 2 frames merged 2 x 2.
    """
    most = _segment_frames(config)
    still = [_checked(item, f"image {number}", 1) for number, item in enumerate(images, 1)]
    moving = [_checked(item, f"video {number}", most) for number, item in enumerate(videos, 1)]
    for number, (_, grids) in enumerate(still, 1):
        if len(grids) != 1:
            raise ValueError(f"image {number} has grids {shown(grids)}: an image has one, (1, h, w)")
    if not still and not moving:
        raise ValueError("no image and no video: leave `media` out of the call")
    count = lambda items: sum(len(patches) for patches, _ in items)
    total, grids = count(still) + count(moving), [grid for _, grids in still + moving for grid in grids]
    patches = np.zeros((bucket_size(total), PATCH_VALUES), np.float32)
    np.concatenate([patches for patches, _ in still + moving], out=patches[:total])
    segments = np.full(len(patches), NO_SEGMENT, np.int32)
    segments[:total] = np.repeat(np.arange(len(grids)), [t * h * w for t, h, w in grids])
    positions = np.zeros((len(patches), 3), np.int32)
    np.concatenate([patch_positions(grid) for grid in grids], out=positions[:total])
    features = lambda items: np.asarray(count(items) // MERGE**2, np.int32)
    return MediaBatch(patches, segments, positions, features(still), features(moving))


def bucket_size(patches: int) -> int:
    """The smallest bucket that holds so many patches: 256, 320, 384, 448, 512, 640, ..., four for each doubling.

    Args:
      patches: at least 1.
    """
    octave = max(0, (patches - 1).bit_length() - (_FEWEST - 1).bit_length() - 1)
    step = (_FEWEST >> 2) << octave
    return max(_FEWEST, -(-patches // step) * step)


def feature_places(
    tokens: Int[np.ndarray, "B T"], media: MediaBatch, ids: PlaceholderIds | None = None
) -> Int32[np.ndarray, " R"]:
    """Where each feature goes: image features to image placeholders, video features to video placeholders, in order.

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
    ids = ids or PlaceholderIds()
    flat = np.asarray(tokens).reshape(-1)
    places = np.full(len(media.segments) // MERGE**2, -1, np.int32)
    first = 0
    for kind, token, features in (
        ("image", ids.image, int(media.image_features)),
        ("video", ids.video, int(media.video_features)),
    ):
        found = np.flatnonzero(flat == token)
        if len(found) != features:
            raise ValueError(
                f"the tokens have {len(found)} {kind} placeholders (id {token}) for {features} features: expand the "
                "prompt with the images and videos of this batch"
            )
        places[first : first + features] = found
        first += features
    used = slice(0, first)
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


def _segment_frames(config: M3Config | None) -> int:
    """Temporal patches of a chunk; raises ValueError for a model that cuts patches otherwise, or has no eyes."""
    if config is None:
        return _SEGMENT
    vision = config.vision_config
    if vision is None:
        raise ValueError("this model has no vision_config: it takes text alone")
    nested = vision.get("img_token_compression_config") or {}
    for key, ours in (("patch_size", PATCH), ("spatial_merge_size", MERGE), ("temporal_patch_size", TEMPORAL)):
        value = vision.get(key, nested.get(key, ours))
        if value != ours:
            raise ValueError(f"vision_config: {key} = {shown(value)} is not supported, only {ours}")
    most = vision.get("vision_segment_max_frames", _SEGMENT)
    if not isinstance(most, int) or most < 1:
        raise ValueError(f"vision_config: vision_segment_max_frames = {shown(most)}: must be a positive integer")
    return most


def _checked(item: Any, name: str, most: int) -> tuple[Float32[np.ndarray, "X P"], tuple[Grid, ...]]:
    """An item's patches and its grids, each of at most `most` temporal patches."""
    patches, grid = (item.patches, item.grid) if hasattr(item, "patches") else item
    patches, rows = np.asarray(patches), np.atleast_2d(np.asarray(grid))
    if patches.dtype != np.float32 or patches.ndim != 2 or patches.shape[1] != PATCH_VALUES:
        what = f"{patches.dtype} {list(patches.shape)}"
        raise ValueError(f"{name} has patches {what}: must be float32 [X {PATCH_VALUES}]")
    is_grid = rows.dtype.kind in "iu" and rows.ndim == 2 and rows.shape[1] == 3
    if not is_grid or (rows < 1).any() or (rows[:, 1:] % MERGE).any():
        raise ValueError(f"{name} has the grid {shown(grid)}: must be (t, h, w) in patches, h and w even")
    if (total := int(rows.prod(axis=1).sum())) != len(patches):
        raise ValueError(f"{name} has {len(patches)} patches, and its grid {shown(grid)} has {total}")
    grids = [tuple(map(int, row)) for row in rows]
    return patches, tuple(chunk for grid in grids for chunk in chunk_grids(grid, most))
