"""Pictures of shapes and numbers as arrays of bytes, drawn by signed distances: no font, no library, the same anywhere.

A shape is a function from places to their signed distance from its outline, in pixels, negative inside; a pixel is
covered by half a pixel less that distance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8

# What each colour is drawn in, up to some noise.
COLOURS = {
    "red": (214, 40, 40),
    "green": (34, 150, 60),
    "blue": (36, 84, 214),
    "yellow": (240, 215, 40),
    "orange": (245, 135, 20),
    "purple": (140, 50, 170),
    "black": (12, 12, 12),
    "white": (250, 250, 250),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")

# A digit is lit segments of a display: a on top, then clockwise, g in the middle. Ends as (x, y), y downwards.
_SEGMENTS = {
    "a": ((-1, -2), (1, -2)),
    "b": ((1, -2), (1, 0)),
    "c": ((1, 0), (1, 2)),
    "d": ((-1, 2), (1, 2)),
    "e": ((-1, 0), (-1, 2)),
    "f": ((-1, -2), (-1, 0)),
    "g": ((-1, 0), (1, 0)),
}
_LIT = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")
_DIGIT_STEP = 3.2  # from one digit's centre to the next one's, in half widths

Plane = Float[np.ndarray, "H W"]


@dataclass(frozen=True)
class Shape:
    """A shape in a picture.

    Attributes:
      name: one of `SHAPES`.
      colour: one of `COLOURS`.
      x, y: its centre in pixels from the left and from the top.
      radius: of the circle that it fits in, in pixels.
      angle: by which it is turned, in radians.
    """

    name: str
    colour: str
    x: float
    y: float
    radius: float
    angle: float = 0.0


def distance(name: str, x: Plane, y: Plane, radius: float) -> Plane:
    """The signed distance from a shape's outline (of a cross and a star: a bound of it).

    Args:
      name: one of `SHAPES`.
      x, y: places from its centre, y downwards.
      radius: of the circle that it fits in.
    """
    match name:
        case "circle":
            return np.hypot(x, y) - radius
        case "ring":
            return np.abs(np.hypot(x, y) - 0.75 * radius) - 0.25 * radius
        case "square":
            return np.maximum(np.abs(x), np.abs(y)) - 0.8 * radius
        case "cross":
            long, short = np.maximum(np.abs(x), np.abs(y)), np.minimum(np.abs(x), np.abs(y))
            return np.maximum(short - 0.28 * radius, long - 0.95 * radius)
        case "triangle":
            return _half_planes(x, y, 3).max(axis=0) - 0.5 * radius
        case "star":
            # Inside a star of five points is what lies on the inner side of all its lines but one.
            return np.sort(_half_planes(x, -y, 5), axis=0)[-2] - np.cos(np.pi * 0.4) * radius
    raise ValueError(f"no shape {name!r}: there are {', '.join(SHAPES)}")


def _half_planes(x: Plane, y: Plane, sides: int) -> Float[np.ndarray, "N H W"]:
    """Return the coordinates of places along each outward normal of a regular polygon; one normal points down."""
    angles = np.pi * (0.5 + 2.0 * np.arange(sides) / sides)
    return np.cos(angles)[:, None, None] * x + np.sin(angles)[:, None, None] * y


def background(rng: np.random.Generator, height: int, width: int, level: float) -> Float[np.ndarray, "H W 3"]:
    """Grey that is a little tinted and grows lighter towards one side.

    Args:
      rng: the source of the tint and the side.
      height, width: in pixels.
      level: its mean brightness, 0 to 255.
    """
    slope_y, slope_x = rng.uniform(-14.0, 14.0, size=2)
    rows = np.linspace(-slope_y, slope_y, height)[:, None, None]
    columns = np.linspace(-slope_x, slope_x, width)[None, :, None]
    return level + rng.uniform(-8.0, 8.0, size=3) + rows + columns


def draw_shapes(
    canvas: Float[np.ndarray, "H W 3"], shapes: Sequence[Shape], colours: Sequence[Float[np.ndarray, " 3"]]
) -> Float[np.ndarray, "H W 3"]:
    """A canvas with shapes on it, the later ones over the earlier ones.

    Args:
      canvas: not changed.
      shapes: that are drawn.
      colours: what each is drawn in.
    """
    canvas = canvas.copy()
    for shape, colour in zip(shapes, colours, strict=True):
        turn = np.cos(shape.angle), np.sin(shape.angle)

        def outline(x: Plane, y: Plane, shape: Shape = shape, turn: tuple[float, float] = turn) -> Plane:
            return distance(shape.name, turn[0] * x + turn[1] * y, turn[0] * y - turn[1] * x, shape.radius)

        _cover(canvas, outline, shape.x, shape.y, shape.radius, colour)
    return canvas


def draw_number(
    canvas: Float[np.ndarray, "H W 3"],
    number: int,
    x: float,
    y: float,
    height: float,
    stroke: float,
    slant: float,
    colour: Float[np.ndarray, " 3"],
) -> Float[np.ndarray, "H W 3"]:
    """A canvas with a number on it, in the digits of a display.

    Args:
      canvas: not changed.
      number: not negative.
      x, y: its centre in pixels.
      height: of a digit, between the centres of its strokes.
      stroke: half of a stroke's width.
      slant: pixels to the right for each pixel upwards.
      colour: of the strokes.
    """
    digits, half = [int(digit) for digit in str(number)], height / 4.0
    centres = digit_centres(number, height)

    def strokes(x: Plane, y: Plane) -> Plane:
        lines = [
            _line_distance(x + slant * y - centre, y, *(np.multiply(end, half) for end in _SEGMENTS[segment]))
            for centre, digit in zip(centres, digits, strict=True)
            for segment in _LIT[digit]
        ]
        return np.min(lines, axis=0) - stroke

    canvas = canvas.copy()
    _cover(canvas, strokes, x, y, number_reach(number, height, stroke, slant), colour)
    return canvas


def digit_centres(number: int, height: float) -> Float[np.ndarray, " N"]:
    """Return the offset of each digit's centre to the right of the number's centre, in pixels.

    Args:
      number, height: as in `draw_number`.
    """
    count = len(str(number))
    return (np.arange(count) - (count - 1) / 2.0) * _DIGIT_STEP * height / 4.0


def number_reach(number: int, height: float, stroke: float, slant: float) -> float:
    """The most pixels from a number's centre to what is drawn of it, to a side or up.

    Args:
      number, height, stroke, slant: as in `draw_number`.
    """
    half, digits = height / 4.0, len(str(number))
    return max(height / 2.0, half * (1.0 + _DIGIT_STEP * (digits - 1) / 2.0) + abs(slant) * height / 2.0) + stroke


def _line_distance(x: Plane, y: Plane, begin: Float[np.ndarray, " 2"], end: Float[np.ndarray, " 2"]) -> Plane:
    """The distance from a line with two ends, each (x, y)."""
    (x0, y0), (dx, dy) = begin, (end[0] - begin[0], end[1] - begin[1])
    along = np.clip(((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy), 0.0, 1.0)
    return np.hypot(x - x0 - along * dx, y - y0 - along * dy)


def _cover(
    canvas: Float[np.ndarray, "H W 3"],
    outline: Callable[[Plane, Plane], Plane],
    x: float,
    y: float,
    reach: float,
    colour: Float[np.ndarray, " 3"],
) -> None:
    """Paint, in place, what lies inside an outline; only pixels within its reach are looked at."""
    top, left = (max(0, int(centre - reach - 1.0)) for centre in (y, x))
    bottom, right = (int(centre + reach + 2.0) for centre in (y, x))
    part = canvas[top:bottom, left:right]
    rows = np.arange(top, top + part.shape[0])[:, None] + 0.5 - y
    columns = np.arange(left, left + part.shape[1])[None, :] + 0.5 - x
    cover = np.clip(0.5 - outline(columns + 0.0 * rows, rows + 0.0 * columns), 0.0, 1.0)[..., None]  # [H W 1]
    part += cover * (colour - part)


def as_bytes(
    rng: np.random.Generator, canvas: Float[np.ndarray, "*F H W 3"], noise: float
) -> UInt8[np.ndarray, "*F H W 3"]:
    """A canvas as an image's bytes.

    Args:
      rng: the source of the noise.
      canvas: brightness, 0 to 255.
      noise: its standard deviation.
    """
    noisy = canvas + noise * rng.standard_normal(canvas.shape, np.float32)
    return np.clip(np.rint(noisy), 0.0, 255.0).astype(np.uint8)
