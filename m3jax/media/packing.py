"""Several images and videos in arrays of fixed sizes, as the vision tower reads them, and where their features go."""

from collections.abc import Iterable, Sequence
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


class Segment(NamedTuple):
    """An image, or a chunk of a video: patches that attend to one another and to no others.

    Attributes:
      patches: [X 1176], X = t h w.
      grid: (t, h, w) in patches.
      is_video: True if its features go to video placeholders, False if to image placeholders.
    """

    patches: Float32[np.ndarray, "X P"]
    grid: Grid
    is_video: bool

    @property
    def features(self) -> int:
        """The number of features that it gives, one for every four patches."""
        return len(self.patches) // MERGE**2


def segments(
    images: Iterable[Any] = (), videos: Iterable[Any] = (), config: M3Config | None = None
) -> tuple[Segment, ...]:
    """Images, then the chunks of videos, each with its own patches: the parts that a tower can read one at a time.

    Args:
      images, videos, config: as in `batch`.

    Raises:
      ValueError: as `batch`, but for no image and no video, which gives ().
    """
    most = _segment_frames(config)
    still = [_checked(item, f"image {number}", 1) for number, item in enumerate(images, 1)]
    moving = [_checked(item, f"video {number}", most) for number, item in enumerate(videos, 1)]
    for number, (_, grids) in enumerate(still, 1):
        if len(grids) != 1:
            raise ValueError(f"image {number} has grids {shown(grids)}: an image has one, (1, h, w)")
    parts = []
    for is_video, items in ((False, still), (True, moving)):
        for patches, grids in items:
            ends = np.cumsum([t * h * w for t, h, w in grids])
            pieces = np.split(patches, ends[:-1])
            parts += [Segment(piece, grid, is_video) for piece, grid in zip(pieces, grids, strict=True)]
    return tuple(parts)


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
    parts = segments(images, videos, config)
    if not parts:
        raise ValueError("no image and no video: leave `media` out of the call")
    return pack(parts, bucket_size(sum(len(segment.patches) for segment in parts)))


def pack(parts: Sequence[Segment], size: int) -> MediaBatch:
    """Segments one behind the other in arrays of a given size.

    Args:
      parts: images' before videos'; () gives padding alone.
      size: X, at least as many as there are patches, and a multiple of 4.
    """
    total = sum(len(segment.patches) for segment in parts)
    patches = np.zeros((size, PATCH_VALUES), np.float32)
    if parts:
        np.concatenate([segment.patches for segment in parts], out=patches[:total])
    numbers = np.full(size, NO_SEGMENT, np.int32)
    numbers[:total] = np.repeat(np.arange(len(parts)), [len(segment.patches) for segment in parts])
    positions = np.zeros((size, 3), np.int32)
    if parts:
        np.concatenate([patch_positions(segment.grid) for segment in parts], out=positions[:total])
    features = lambda is_video: np.asarray(sum(s.features for s in parts if s.is_video == is_video), np.int32)
    return MediaBatch(patches, numbers, positions, features(False), features(True))


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
    """Return each feature's place in the tokens: the placeholders of its kind, image or video, in order.

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
    used = slice(0, int(media.image_features) + int(media.video_features))
    numbers, pairs = media.segments[:: MERGE**2][used], media.positions[:: MERGE**2, 0][used]
    places = np.full(len(media.segments) // MERGE**2, -1, np.int32)
    places[used] = _places(np.asarray(tokens).reshape(-1), numbers, pairs, int(media.image_features), ids)
    return places


def segment_places(
    tokens: Sequence[int] | Int[np.ndarray, "T"], placeholders: Sequence[Segment], ids: PlaceholderIds | None = None
) -> list[Int32[np.ndarray, "_"]]:
    """Return `feature_places` of one prompt whose segments have not been packed: an array for each segment.

    Args:
      tokens: [T] of the prompt, expanded.
      placeholders: its segments, images' before videos'.
      ids: of the placeholders; None is M3's.

    Raises:
      ValueError: as `feature_places`.
    """
    counts = [segment.features for segment in placeholders]
    numbers = np.repeat(np.arange(len(placeholders)), counts)
    of_pairs = [np.repeat(np.arange(t), h * w // MERGE**2) for _, (t, h, w), _ in placeholders]
    pairs = np.concatenate([np.zeros(0, np.int64), *of_pairs])
    image_features = sum(segment.features for segment in placeholders if not segment.is_video)
    places = _places(np.asarray(tokens, np.int64), numbers, pairs, image_features, ids)
    return np.split(places, np.cumsum(counts)[:-1]) if placeholders else []


def _places(
    tokens: Int[np.ndarray, " T"],
    segments: Int[np.ndarray, " F"],
    pairs: Int[np.ndarray, " F"],
    image_features: int,
    ids: PlaceholderIds | None,
) -> Int32[np.ndarray, " F"]:
    """Return the place of each feature in the tokens, images' first.

    Args:
      tokens: of all rows.
      segments: of each feature, its segment.
      pairs: of each feature, its pair of frames within the segment.
      image_features: how many of the F features are images'.
      ids: of the placeholders; None is M3's.
    """
    ids = ids or PlaceholderIds()
    places = []
    for medium, token, features in (
        ("image", ids.image, image_features),
        ("video", ids.video, len(segments) - image_features),
    ):
        placeholders = np.flatnonzero(tokens == token).astype(np.int32)
        if len(placeholders) != features:
            raise ValueError(
                f"the tokens have {len(placeholders)} {medium} placeholders (id {token}) for {features} features: "
                "expand the prompt with the images and videos of this batch"
            )
        places.append(placeholders)
    places = np.concatenate(places)
    # Placeholders of one image, or of one pair of frames, are contiguous in the prompt. Equal counts alone would not
    # notice two images of different sizes that changed places.
    same_run = (np.diff(segments) == 0) & (np.diff(pairs) == 0)
    torn = np.flatnonzero(same_run & (np.diff(places) != 1))
    if len(torn):
        before, behind = places[torn[0]], places[torn[0] + 1]
        raise ValueError(
            f"segment {segments[torn[0]]} (images, then chunks of videos, from 0) has placeholders at {before} and "
            f"{behind} and none between: are images in another order than in the prompt?"
        )
    return places


def _segment_frames(config: M3Config | None) -> int:
    """Return the most temporal patches of a chunk; raise ValueError for other patches or a model without vision."""
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
    """Return an item's patches and the grids of its chunks, each of at most `most` temporal patches."""
    patches, grid = (item.patches, item.grid) if hasattr(item, "patches") else item
    patches, rows = np.asarray(patches), np.atleast_2d(np.asarray(grid))
    if patches.dtype != np.float32 or patches.ndim != 2 or patches.shape[1] != PATCH_VALUES:
        given = f"{patches.dtype} {list(patches.shape)}"
        raise ValueError(f"{name} has patches {given}: must be float32 [X {PATCH_VALUES}]")
    is_grid = rows.dtype.kind in "iu" and rows.ndim == 2 and rows.shape[1] == 3
    if not is_grid or (rows < 1).any() or (rows[:, 1:] % MERGE).any():
        raise ValueError(f"{name} has the grid {shown(grid)}: must be (t, h, w) in patches, h and w even")
    if (total := int(rows.prod(axis=1).sum())) != len(patches):
        raise ValueError(f"{name} has {len(patches)} patches, and its grid {shown(grid)} has {total}")
    grids = [tuple(map(int, row)) for row in rows]
    return patches, tuple(chunk for grid in grids for chunk in chunk_grids(grid, most))
