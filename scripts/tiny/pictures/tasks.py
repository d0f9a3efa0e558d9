"""Pictures and clips with questions that have one right answer: shapes, colours, counts, numbers, places, motion."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import UInt8
from tiny.dialogues import MODES
from tiny.pictures.draw import (
    COLOURS,
    SHAPES,
    Shape,
    as_bytes,
    background,
    digit_centres,
    draw_number,
    draw_shapes,
    number_reach,
)

KINDS = ("what", "shape", "colour", "count", "number", "place", "side", "motion")
SIDES = (56, 84, 112)  # pixels: 2, 3 or 4 tokens
CLIP_SIDE, CLIP_FRAMES = 56, (4, 6, 8)  # 2 to 4 temporal patches of 4 tokens
MOST_PATCHES = 64  # of a picture, or of all frames of a clip
MOST_TOKENS = MOST_PATCHES // 4
WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
# Of what a token of a picture may show, one or none of each: colour, shape, digit, where in the picture, and which of
# the picture's shapes or digits from the left.
PLACES = ("first", "second", "third", "fourth")
NAMES = (tuple(COLOURS), SHAPES, tuple("0123456789"), ("top", "bottom"), ("left", "right"), PLACES)
_CLEAR = 8.0  # pixels from the middle, where a place has a name
_LEAST_NUMBERS = 10  # numbers below it are one digit
_MOST_TURNS = 3
_COUNTS = ((1, 0.2), (2, 0.3), (3, 0.3), (4, 0.2))  # shapes of a picture, and how likely so many are

Question = tuple[str, str, str]  # kind, question, answer


def is_held_out(colour: str, shape: str) -> bool:
    """Return True if no training picture has a shape of that colour: 6 of the 48 pairs, each shape once."""
    return (list(COLOURS).index(colour) + 3 * SHAPES.index(shape)) % len(COLOURS) == 0


def is_held_out_number(number: int) -> bool:
    """Return True if no training picture has that number: 10 of the 90 with two digits."""
    return number >= _LEAST_NUMBERS and number % 9 == 4


@dataclass(frozen=True)
class Mark:
    """A thing that is seen at a place of a picture or a clip.

    Attributes:
      names: its names, among `NAMES`.
      frame: the number of the frame that shows it.
      x, y: its centre in pixels from the left and from the top.
      half_width, half_height: from there to its ends.
    """

    names: tuple[str, ...]
    frame: int
    x: float
    y: float
    half_width: float
    half_height: float


@dataclass(frozen=True, eq=False)
class PictureTask:
    """A dialogue about one picture or one clip.

    Attributes:
      frames: uint8 [F H W 3], one for a picture; sides are multiples of 28 pixels.
      source_fps: frames that a clip shows a second; None for a picture.
      questions: (kind, question, answer), one a turn.
      reasoning: what is thought before the first answer, where thinking is enabled.
      thinking_mode: "enabled", "disabled" or "adaptive"; in the last nothing is thought.
      is_first: whether the picture stands before the first question, or behind it.
      marks: all that is seen.
    """

    frames: UInt8[np.ndarray, "F H W 3"]
    source_fps: float | None
    questions: tuple[Question, ...]
    reasoning: str
    thinking_mode: str
    is_first: bool
    marks: tuple[Mark, ...]

    @property
    def kind(self) -> str:
        """The kind of its first question."""
        return self.questions[0][0]

    @property
    def is_clip(self) -> bool:
        """True if the task is about a clip, False if about a picture."""
        return self.source_fps is not None

    def messages(self) -> list[dict[str, Any]]:
        """The dialogue in OpenAI's layout, answers included; the picture is a part without an address."""
        messages: list[dict[str, Any]] = []
        for place, (_, question, answer) in enumerate(self.questions):
            parts = [{"type": "video" if self.is_clip else "image"}, {"type": "text", "text": question}]
            if place == 0:
                messages.append({"role": "user", "content": parts if self.is_first else parts[::-1]})
            else:
                messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
            if self.thinking_mode == "enabled":
                messages[-1]["reasoning_content"] = self.reasoning
        return messages


def draw_picture_task(
    rng: np.random.Generator,
    kind: str | None = None,
    thinking_mode: str | None = None,
    *,
    held_out: bool = False,
    most_turns: int = _MOST_TURNS,
) -> PictureTask:
    """Draw a picture or a clip, and questions on it.

    Args:
      rng: the source of all that is random in it.
      kind: of the first question; None draws it.
      thinking_mode: None draws it.
      held_out: show a pair of colour and shape, or a number, that is kept out of training; else none of them.
      most_turns: questions at most.

    Returns:
      The task; the same for an equal generator.
    """
    kind = KINDS[rng.integers(len(KINDS))] if kind is None else kind
    mode = MODES[rng.integers(len(MODES))] if thinking_mode is None else thinking_mode
    draw = {"motion": _draw_clip, "number": _draw_number}.get(kind, _draw_scene)
    source_fps = None
    while True:  # a scene may have no question of the kind: two shapes one above the other have no side
        if draw is _draw_scene:
            frames, questions, seen, marks = _draw_scene(rng, 1 if kind == "what" else None, held_out)
        elif draw is _draw_number:
            frames, questions, seen, marks = _draw_number(rng, held_out)
        else:
            frames, questions, seen, marks = _draw_clip(rng, held_out)
            source_fps = float(rng.choice((1.0, 2.0, 4.0)))
        if first := [question for question in questions if question[0] == kind]:
            break
    chosen = [first[rng.integers(len(first))]]
    others = [question for question in questions if question != chosen[0]]
    count = min(int(rng.integers(most_turns)), len(others))
    chosen += [others[place] for place in rng.permutation(len(others))[:count]]
    is_first = bool(rng.random() < 0.8)
    return PictureTask(frames, source_fps, tuple(chosen), f"I see {seen}.", mode, is_first, tuple(marks))


def called(shape: Shape) -> str:
    """A shape with its colour and its article: "an orange ring"."""
    return f"a{'n' * (shape.colour[0] in 'aeiou')} {shape.colour} {shape.name}"


def _draw_scene(
    rng: np.random.Generator, count: int | None, held_out: bool
) -> tuple[UInt8[np.ndarray, "1 H W 3"], list[Question], str, list[Mark]]:
    """A picture of shapes that do not overlap, the questions that it answers, and what is seen on it, also where."""
    if count is None:
        numbers, shares = zip(*_COUNTS, strict=True)
        count = int(rng.choice(numbers, p=shares))
    sides = SIDES if count == 1 else SIDES[1:]
    height, width = (sides[place] for place in rng.integers(len(sides), size=2))
    smallest, largest = 10.0, min(height, width) / (2.4 if count == 1 else 5.0)
    pairs = _pairs(rng, count, held_out)
    shapes: list[Shape] = []
    while len(shapes) < count:
        colour, name = pairs[len(shapes)]
        radius = rng.uniform(smallest, largest)
        y, x = (rng.uniform(radius + 1.0, side - radius - 1.0) for side in (height, width))
        if all(np.hypot(x - other.x, y - other.y) > radius + other.radius for other in shapes):
            shapes.append(Shape(name, colour, x, y, radius, rng.uniform(-0.25, 0.25)))
        else:
            largest = max(smallest, 0.95 * largest)
    frames, questions = _painted(rng, [shapes], height, width), _scene_questions(rng, shapes, height, width)
    return frames, questions, _seen(shapes), _marks(shapes, 0, height, width)


def _pairs(rng: np.random.Generator, count: int, held_out: bool) -> list[tuple[str, str]]:
    """Draw `count` pairs of colour and shape; the first is a held-out one if that is asked for, the others are not."""
    pairs = []
    while len(pairs) < count:
        colour, shape = tuple(COLOURS)[rng.integers(len(COLOURS))], SHAPES[rng.integers(len(SHAPES))]
        if pairs and rng.random() < 0.3:  # shapes of a picture are often alike, so that counting them means something
            shape = pairs[rng.integers(len(pairs))][1]
        if is_held_out(colour, shape) == (held_out and not pairs):
            pairs.append((colour, shape))
    return pairs


def _scene_questions(rng: np.random.Generator, shapes: Sequence[Shape], height: int, width: int) -> list[Question]:
    """Return all questions about a scene, with their answers."""
    names, colours = [shape.name for shape in shapes], [shape.colour for shape in shapes]
    asked: list[Question] = []
    if len(shapes) == 1:
        asked.append(("what", "What is this?", f"{called(shapes[0])}.".capitalize()))
    unique = [shape for shape in shapes if names.count(shape.name) == 1]
    for shape in shapes:
        if colours.count(shape.colour) == 1:
            asked.append(("shape", f"Which shape is {shape.colour}?", f"{shape.name}.".capitalize()))
        if shape in unique:
            asked.append(("colour", f"What colour is the {shape.name}?", f"{shape.colour}.".capitalize()))
            place = _place(shape.x, shape.y, height, width)
            if len(place) == 2:
                asked.append(("place", f"Where is the {shape.name}?", f"{' '.join(place)}.".capitalize()))
    for one in unique:
        for other in unique:
            if abs(one.x - other.x) >= 14.0:
                answer = "Yes." if one.x < other.x else "No."
                asked.append(("side", f"Is the {one.name} left of the {other.name}?", answer))
    asked.append(("count", "How many shapes are there?", f"{len(shapes)}."))
    name = SHAPES[rng.integers(len(SHAPES))] if rng.random() < 0.3 else names[rng.integers(len(names))]
    asked.append(("count", f"How many {_plural(name)} are there?", f"{names.count(name)}."))
    return asked


def _place(x: float, y: float, height: int, width: int) -> tuple[str, ...]:
    """Name the halves in which a position lies, up and down and to the sides; neither is named near the middle."""
    vertical = ("top" if y < height / 2 else "bottom",) if abs(y - height / 2) >= _CLEAR else ()
    return (*vertical, *(("left" if x < width / 2 else "right",) if abs(x - width / 2) >= _CLEAR else ()))


def _plural(name: str) -> str:
    return name + ("es" if name.endswith("s") else "s")


def _seen(shapes: Sequence[Shape]) -> str:
    """Describe all shapes from left to right."""
    return ", ".join(called(shape) for shape in sorted(shapes, key=lambda shape: shape.x))


def _marks(shapes: Sequence[Shape], frame: int, height: int, width: int) -> list[Mark]:
    """Return a mark for each shape of a frame: its place, and all names that it can be given."""
    marks = []
    for number, shape in zip(PLACES, sorted(shapes, key=lambda shape: shape.x), strict=False):
        names = (shape.colour, shape.name, number, *_place(shape.x, shape.y, height, width))
        marks.append(Mark(names, frame, shape.x, shape.y, shape.radius, shape.radius))
    return marks


def _draw_number(
    rng: np.random.Generator, held_out: bool
) -> tuple[UInt8[np.ndarray, "1 H W 3"], list[Question], str, list[Mark]]:
    """A picture of a number of one or two digits."""
    while True:
        number = int(rng.integers(_LEAST_NUMBERS) if rng.random() < 0.4 else rng.integers(_LEAST_NUMBERS, 100))
        if is_held_out_number(number) == held_out:
            break
    colour = tuple(COLOURS)[rng.integers(len(COLOURS))]
    height, width = (SIDES[place] for place in rng.integers(len(SIDES), size=2))
    slant = rng.uniform(-0.05, 0.2)
    tall = rng.uniform(0.45, 0.75) * min(height, width)
    stroke = tall * rng.uniform(0.05, 0.09)
    while (reach := number_reach(number, tall, stroke, slant) + 1.0) > min(height, width) / 2.0:
        tall, stroke = 0.95 * tall, max(1.0, 0.95 * stroke)
    y, x = (rng.uniform(reach, side - reach) for side in (height, width))
    canvas = background(rng, height, width, _level(rng, [colour]))
    canvas = draw_number(canvas, number, x, y, tall, stroke, slant, _paint(rng, colour))
    questions = [("number", "What number is this?", f"{number}."), ("colour", "What colour is it?", f"{colour}."
                  .capitalize())]  # fmt: skip
    half_digit = tall / 4.0 + stroke
    marks = [
        Mark((colour, digit, place), 0, x + centre, y, half_digit, tall / 2.0 + stroke)
        for digit, place, centre in zip(str(number), PLACES, digit_centres(number, tall), strict=False)
    ]
    return as_bytes(rng, canvas[None], rng.uniform(0.0, 5.0)), questions, str(number), marks


def _draw_clip(
    rng: np.random.Generator, held_out: bool
) -> tuple[UInt8[np.ndarray, "F H W 3"], list[Question], str, list[Mark]]:
    """A clip of one shape that moves to a side."""
    ((colour, name),) = _pairs(rng, 1, held_out)
    count = CLIP_FRAMES[rng.integers(len(CLIP_FRAMES))]
    way = tuple(WAYS)[rng.integers(len(WAYS))]
    radius = rng.uniform(9.0, 13.0)
    path = rng.uniform(14.0, CLIP_SIDE - 2.0 * radius - 2.0)
    across = rng.uniform(radius + 1.0, CLIP_SIDE - radius - 1.0)
    begin = rng.uniform(radius + 1.0, CLIP_SIDE - radius - 1.0 - path)
    along = begin + path * np.linspace(0.0, 1.0, count)
    dx, dy = WAYS[way]
    along = along if dx + dy > 0 else along[::-1]
    first = Shape(name, colour, 0.0, 0.0, radius, rng.uniform(-0.25, 0.25))
    moved = [replace(first, x=a, y=across) if dx else replace(first, x=across, y=a) for a in along]
    questions = [
        ("motion", "Which way does it move?", f"{way}.".capitalize()),
        ("motion", f"Which way does the {name} move?", f"{way}.".capitalize()),
        ("motion", "What moves?", f"{called(first)}.".capitalize()),
        ("colour", f"What colour is the {name}?", f"{colour}.".capitalize()),
    ]
    frames = _painted(rng, [[shape] for shape in moved], CLIP_SIDE, CLIP_SIDE)
    marks = [mark for frame, shape in enumerate(moved) for mark in _marks([shape], frame, CLIP_SIDE, CLIP_SIDE)]
    return frames, questions, called(first), marks


def _painted(
    rng: np.random.Generator, frames: Sequence[Sequence[Shape]], height: int, width: int
) -> UInt8[np.ndarray, "F H W 3"]:
    """Paint frames that show the same shapes, each at its positions, over one background."""
    canvas = background(rng, height, width, _level(rng, [shape.colour for shape in frames[0]]))
    colours = [_paint(rng, shape.colour) for shape in frames[0]]
    return as_bytes(rng, np.stack([draw_shapes(canvas, shapes, colours) for shapes in frames]), rng.uniform(0.0, 5.0))


def _paint(rng: np.random.Generator, colour: str) -> np.ndarray:
    """Draw the shade in which a picture shows a colour."""
    return np.clip(np.array(COLOURS[colour]) + rng.uniform(-14.0, 14.0, size=3), 0.0, 255.0)


def _level(rng: np.random.Generator, colours: Sequence[str]) -> float:
    """The brightness of a background from which all these colours stand out."""
    darkest = 70.0 if "black" in colours else 25.0
    lightest = 175.0 if "white" in colours else 230.0
    return float(rng.uniform(darkest, lightest))
