"""Images and videos of requests on the host: what each place of a prompt stands for, and where its feature lies.

A *segment* is what the tower reads by itself: an image, or a chunk of a video (`m3jax.media.Segment`). A number stands
for its contents: equal contents have the same number wherever they come from, and other contents another one.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64, Shaped

from m3jax.decoding.protocols import TargetConfig
from m3jax.media.packing import Segment, segments
from m3jax.media.placeholders import PlaceholderIds
from m3jax.media.places import segment_places
from m3jax.messages import shown

# Patches in one call of the tower, where the caller does not say: an icon, a picture of 1,024 and of the hub's most
# (2,304 patches, 576 tokens), and a chunk of a video (four pairs of frames of at most 3,072 patches).
MEDIA_PATCHES = (256, 1024, 2304, 12288)
MEDIA_TOKENS = 16384

_MOST_NUMBERS = 1 << 16


@dataclass(frozen=True)
class Media:
    """Images and videos of one prompt.

    Attributes:
      images: in the order of their placeholders: for each what `m3jax.media.process_image` gave, or its
        (patches [X 1176], grid).
      videos: the same, as `m3jax.media.process_video` gave them.

    Raises:
      ValueError: one of them is not a list or tuple.
    """

    images: Sequence[Any] = ()
    videos: Sequence[Any] = ()

    def __post_init__(self) -> None:
        for name in ("images", "videos"):
            if not isinstance(given := getattr(self, name), list | tuple):
                raise ValueError(f"{name} is {shown(given)}: give a list, [] for none")

    def __bool__(self) -> bool:
        """True if the prompt has an image or a video."""
        return bool(self.images or self.videos)

    def segments(self, config: TargetConfig) -> tuple[Segment, ...]:
        """Return the segments that the tower reads: the images, then the chunks of the videos (`m3jax.media.segments`).

        Args:
          config: of the model.

        Raises:
          ValueError: patches that do not fit their grid, or a model that does not see.
        """
        return segments(self.images, self.videos, config)

    def to_arrays(self) -> tuple[dict[str, list[list[int]]], dict[str, np.ndarray]]:
        """Return (grids by kind, patches by name), of which JSON and a row of arrays can be made.

        Each item has to be its (patches, grid).
        """
        grids, patches = {}, {}
        for kind, items in (("images", self.images), ("videos", self.videos)):
            grids[kind] = [list(map(int, grid)) for _, grid in items]
            patches |= {f"{kind}.{index}": np.asarray(array) for index, (array, _) in enumerate(items)}
        return grids, patches

    @classmethod
    def from_arrays(
        cls, grids: Mapping[str, Sequence[Sequence[int]]], arrays: Mapping[str, Shaped[np.ndarray, "..."]]
    ) -> "Media":
        """Return what `to_arrays` was called of.

        Args:
          grids: by kind; a kind that is not there has no items.
          arrays: the patches among them.

        Raises:
          KeyError: a grid without patches.
        """
        return cls(
            **{
                kind: tuple((arrays[f"{kind}.{index}"], tuple(grid)) for index, grid in enumerate(of_kind))
                for kind, of_kind in grids.items()
            }
        )


@dataclass(frozen=True, eq=False)
class PlacedSegment:
    """A segment in a prompt.

    Attributes:
      segment: its patches and grid.
      places: of its features in the prompt, ascending.
      number: of its contents; feature j has the key `keys[j]`.
    """

    segment: Segment
    places: Int32[np.ndarray, " F"]
    number: int

    @property
    def keys(self) -> Int64[np.ndarray, " F"]:
        """Negative numbers, one a feature, that replace the placeholders' ids in the key of a page."""
        return -2 - (self.number + np.arange(len(self.places), dtype=np.int64))

    def is_in(self, start: int, stop: int) -> bool:
        """Return True if a feature of the segment is at one of the places from `start` to `stop`."""
        return bool(self.places[0] < stop and self.places[-1] >= start)


class Numbers:
    """The numbers of images' and videos' contents, so far apart that no two features share a key.

    The numbers of the last 65,536 contents are remembered. Contents that were forgotten get a new number, never that of
    others; the only effect is that their old pages are not found again.
    """

    def __init__(self) -> None:
        self._of_digest: OrderedDict[bytes, int] = OrderedDict()
        self._next = 0

    def of(self, segment: Segment) -> int:
        """Return the number of a segment's contents."""
        digest = _digest(segment)
        if digest not in self._of_digest:
            self._of_digest[digest], self._next = self._next, self._next + segment.features
        self._of_digest.move_to_end(digest)
        number = self._of_digest[digest]
        if len(self._of_digest) > _MOST_NUMBERS:
            self._of_digest.popitem(last=False)
        return number


def _digest(segment: Segment) -> bytes:
    """Return the SHA-256 of all that a segment's features and places depend on: patches, grid, image or video."""
    header = np.array([segment.is_video, *segment.grid], np.int64)
    return hashlib.sha256(header.tobytes() + segment.patches.tobytes()).digest()


class FeatureRows:
    """The rows of the device's features, and the segment that holds each.

    The features of a segment come and go together, the least recently used first. Rows that follow one another need not
    belong together, so nothing is ever moved.

    Args:
      num_rows: F, features that the device has room for.
    """

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._rows: OrderedDict[int, Int32[np.ndarray, " _"]] = OrderedDict()  # by number, the oldest use first
        self.computed = self.dropped = 0

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    def rows(self, number: int) -> Int32[np.ndarray, " _"]:
        """Return the rows in which the features of a segment lie; this counts as a use of the segment."""
        self._rows.move_to_end(number)
        return self._rows[number]

    def take(self, number: int, count: int, kept: Collection[int]) -> Int32[np.ndarray, " _"] | None:
        """Give rows to the features of a segment that has none.

        Args:
          number: of the segment.
          count: its features.
          kept: segments that must stay.

        Returns:
          Its rows; None, and nothing changed, where those that must stay leave too few.
        """
        droppable = [other for other in self._rows if other not in kept]
        dropped, room = [], len(self._free)
        while room < count and droppable:
            dropped.append(droppable.pop(0))
            room += len(self._rows[dropped[-1]])
        if room < count:
            return None
        for other in dropped:
            self._free += self._rows.pop(other).tolist()
        self.dropped += len(dropped)
        self.computed += 1
        self._rows[number] = np.array([self._free.pop() for _ in range(count)], np.int32)
        return self._rows[number]

    def forget(self) -> None:
        """Drop every segment, as new weights of the tower need it."""
        for rows in self._rows.values():
            self._free += rows.tolist()
        self.dropped += len(self._rows)
        self._rows.clear()

    def statistics(self) -> dict[str, int]:
        """Return counters: rows in all, rows in use, segments in them, segments computed and dropped so far."""
        used = self.num_rows - len(self._free)
        return dict(
            rows=self.num_rows, used=used, segments=len(self._rows), computed=self.computed, dropped=self.dropped
        )


class Placer:
    """A finder of the places of images and videos in prompts, which also numbers their contents.

    Args:
      config: the model's.
      can_see: whether the model has a tower.
      sizes: patches in its calls, ascending; () where the engine serves text alone.
    """

    def __init__(self, config: TargetConfig, can_see: bool, sizes: tuple[int, ...]):
        self._config, self._can_see, self._sizes = config, can_see, sizes
        self._numbers = Numbers()
        self._ids, self._fault = None, None
        if can_see:
            try:
                self._ids = PlaceholderIds.of_config(config)
            except ValueError as error:  # a small random model without room for the placeholders still serves text
                self._fault = error

    def place(self, prompt: tuple[int, ...], media: Media | None) -> tuple[PlacedSegment, ...]:
        """Return the segments of a prompt, each at its places.

        The patches are copied: what the caller does to the array later changes nothing here. For a model without a
        tower a placeholder is a token like others.

        Raises:
          ValueError: placeholders without features or features without placeholders, patches that do not fit their
            grid, a segment that is too large, or media that this model or engine does not take.
        """
        media = Media() if media is None else media
        if not isinstance(media, Media):
            raise ValueError(f"media is {shown(media)}: give m3jax.decoding.Media(images=[...], videos=[...])")
        if media and not self._sizes:
            why = "this engine has media_patches = ()" if self._can_see else "the model has no vision tower"
            raise ValueError(f"{why} and takes text alone: leave the images and videos out")
        if not self._can_see:
            return ()
        found = media.segments(self._config)
        if self._ids is None:
            if found:
                raise self._fault
            return ()
        places = segment_places(prompt, found, self._ids)
        for segment in found:
            if len(segment.patches) > self._sizes[-1]:
                kind = "a chunk of a video" if segment.is_video else "an image"
                raise ValueError(
                    f"{kind} has {len(segment.patches)} patches, grid {segment.grid}, and this engine takes up to "
                    f"{self._sizes[-1]}: make it smaller (max_long_side), or the engine with a larger media_patches"
                )
        copies = [segment._replace(patches=segment.patches.copy()) for segment in found]
        return tuple(
            PlacedSegment(copy, where, self._numbers.of(copy)) for copy, where in zip(copies, places, strict=True)
        )


def as_media(found: Sequence[Segment]) -> Media:
    """Return segments as images and videos, (patches, grid) each; a chunk of a video is a video of its own."""
    still, moving = (
        tuple((segment.patches, segment.grid) for segment in found if segment.is_video == is_video)
        for is_video in (False, True)
    )
    return Media(still, moving)


def prefix_keys(prompt: tuple[int, ...], placed: Sequence[PlacedSegment]) -> tuple[int, ...]:
    """Return the keys of a prompt's pages: its tokens, with a feature's key in place of each placeholder."""
    if not placed:
        return prompt
    keys = np.array(prompt, np.int64)
    for one in placed:
        keys[one.places] = one.keys
    return tuple(keys.tolist())
