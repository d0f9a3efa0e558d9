"""The size that an image or a frame is resized to: multiples of 28 pixels, by rules that are data."""

import math
from dataclasses import dataclass
from typing import NamedTuple

PATCH, MERGE, TEMPORAL = 14, 2, 2  # pixels of a patch's side, patches of a merge block's side, frames of a patch
FACTOR = PATCH * MERGE  # a side is a multiple of this: a token of the language model is a merge block, 28 x 28 pixels
PATCH_VALUES = 3 * TEMPORAL * PATCH * PATCH  # 1176 numbers


class Size(NamedTuple):
    """Height and width in pixels."""

    height: int
    width: int

    @property
    def area(self) -> int:
        """The area in pixels."""
        return self.height * self.width

    @property
    def tokens(self) -> int:
        """The number of merge blocks, each of which becomes one token; the sides must be multiples of 28."""
        return self.area // FACTOR**2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the hosted API that are held to here.

    Source: MiniMax's provider verifier (bytes, frames a second), its size rule in vLLM (pixels).
    """

    aspect: int = 200  # long side over short side
    image_bytes: int = 30 << 20
    video_bytes: int = 50 << 20  # in a data URL
    image_pixels: int = 12_845_056  # 3584 x 3584, under a long-side tier
    video_pixels: int = 301_056_000  # height x width x frames, under a long-side tier
    short_side: int = 112  # an image below it is enlarged, under a long-side tier
    fewest_fps: float = 0.2  # frames a second that a request may ask for of a video
    most_fps: float = 5.0


LIMITS = Limits()
LONG_SIDE_TIERS = {"low": 504, "default": 1008, "high": 2016}  # the hosted API's `detail` of a video


@dataclass(frozen=True, kw_only=True)
class AreaRule:
    """Sides are rounded to multiples of 28, then held between a least and a largest area.

    `min_side` is what a rounded side is raised to before its area is looked at. Without it a side below 14 pixels
    counts as 0, so that a thin image is taken for one that is too small: 13 x 2600 becomes 28 x 812, not 28 x 2604.
    `short_side` is what the short side is raised to before all that, by a resize of its own.
    """

    min_pixels: int = 4 * FACTOR**2
    max_pixels: int = 576 * FACTOR**2
    min_side: int = 0
    short_side: int = 0

    def stages(self, size: Size) -> tuple[Size, ...]:
        """The sizes through which an image goes, the last one its own."""
        staged = raised_size(size, self) if min(size) < self.short_side else None
        return (area_size(size, self),) if staged is None else (staged, area_size(staged, self))


@dataclass(frozen=True, kw_only=True)
class CapRule:
    """Sides are raised to multiples of 28, and shrunk so that neither is above a cap.

    `raise_first` raises them before they are shrunk, and once more after that; without it they are shrunk, rounded to
    pixels, and raised.
    """

    cap: int
    raise_first: bool = True

    def stages(self, size: Size) -> tuple[Size, ...]:
        """The one size to which an image goes."""
        return (cap_size(size, self),)


@dataclass(frozen=True, kw_only=True)
class TierRule:
    """The long side is shrunk to a tier, or else a short side below 112 enlarged to that, then both are rounded to 28.

    Source: MiniMax's size rule `max_long_side_pixel`, as vLLM has it.
    """

    long_side: int

    def stages(self, size: Size) -> tuple[Size, ...]:
        """The one size to which an image goes."""
        return (tier_size(size, self.long_side),)


SizeRule = AreaRule | CapRule | TierRule


def target_stages(height: int, width: int, rule: SizeRule) -> tuple[Size, ...]:
    """The sizes through which an image goes under a rule: one, or two where a short side is raised first.

    Args:
      height, width: pixels, at least 1.
      rule: of a preset, or a `TierRule`.

    Raises:
      ValueError: an image without pixels, or one side more than 200 times the other.
    """
    if min(height, width) < 1:
        raise ValueError(f"an image of {height} x {width} pixels (H x W): both sides must be at least 1")
    if max(height, width) > LIMITS.aspect * min(height, width):
        raise ValueError(
            f"an image of {height} x {width} pixels (H x W): one side is more than {LIMITS.aspect} times the other; "
            "crop it"
        )
    return rule.stages(Size(height, width))


def smart_resize(height: int, width: int, rule: AreaRule | None = None) -> Size:
    """The size that the hub's processor gives an image: multiples of 28, of an area between two bounds.

    Args:
      height, width: pixels, at least 1.
      rule: the bounds; None is the hub's for images, 3,136 to 451,584 pixels (4 to 576 tokens).

    Raises:
      ValueError: as `target_stages`.

    Source: transformers `smart_resize` of minimax_m3_vl.
    """
    return target_stages(height, width, rule or AreaRule())[-1]


def area_size(size: Size, rule: AreaRule) -> Size:
    """A size rounded to multiples of 28 (half to even), shrunk or enlarged where its area is out of bounds."""
    rounded = Size(*(max(rule.min_side, round(side / FACTOR) * FACTOR) for side in size))
    if rounded.area > rule.max_pixels:
        shrink = math.sqrt(size.area / rule.max_pixels)
        return Size(*(max(FACTOR, math.floor(side / shrink / FACTOR) * FACTOR) for side in size))
    if rounded.area < rule.min_pixels:
        enlarge = math.sqrt(rule.min_pixels / size.area)
        return Size(*(math.ceil(side * enlarge / FACTOR) * FACTOR for side in size))
    return rounded


def raised_size(size: Size, rule: AreaRule) -> Size:
    """The size at which an image whose short side is too short is resized first, as the SMG gateway does.

    That is the image with its short side raised, if its area is within the bounds; else its final size, if that would
    stay as it is; else the raised image shrunk to 1.25 times the largest area.
    """
    raised = Size(*(math.floor(side * rule.short_side / min(size) + 0.5) for side in size))
    if raised.area <= rule.max_pixels:
        return raised
    final = area_size(raised, rule)
    if _is_allowed(final) and final.area <= rule.max_pixels and area_size(final, rule) == final:
        return final
    shrink = math.sqrt(raised.area / (rule.max_pixels * 1.25))
    short, long = math.ceil(min(raised) / shrink), math.floor(max(raised) / shrink)
    shrunk = Size(short, long) if raised.height <= raised.width else Size(long, short)
    return shrunk if _is_allowed(shrunk) and shrunk.area > rule.max_pixels else raised


def cap_size(size: Size, rule: CapRule) -> Size:
    """A size raised to multiples of 28 with both sides at most a cap, as SGLang's first processor for M3 does."""
    up = lambda side: -(-side // FACTOR) * FACTOR
    if not rule.raise_first:
        scale = min(1.0, rule.cap / max(size))
        return Size(*(up(max(1, round(side * scale))) for side in size))
    height, width = up(size.height), up(size.width)
    if max(height, width) > rule.cap:
        # Both divisions round down, and are made of the sides after the first rounding.
        shrink = lambda side, other: max(1, min(rule.cap, side * rule.cap // other))
        height, width = shrink(height, width), shrink(width, height)
    return Size(up(height), up(width))


def tier_size(size: Size, long_side: int) -> Size:
    """A size under a long-side tier, rounded to multiples of 28."""
    if max(size) > long_side:
        scale = long_side / max(size)
    else:
        scale = max(1.0, LIMITS.short_side / min(size))
    return Size(*(max(FACTOR, round(side * scale / FACTOR) * FACTOR) for side in size))


def _is_allowed(size: Size) -> bool:
    return max(size) <= LIMITS.aspect * min(size)
