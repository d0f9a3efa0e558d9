"""Training rows of dialogues about pictures: tokens, patches that some of them stand for, and what those show."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int32
from tiny.dialogues import written_tokens
from tiny.pictures.features import Naming, Pictures
from tiny.pictures.tasks import MOST_PATCHES, MOST_TOKENS, NAMES, PictureTask, draw_picture_task

from m3jax.media import PlaceholderIds, ProcessedImage, ProcessedVideo, Segment, expand_tokens, segment_places
from m3jax.media.frames import timestamps
from m3jax.media.packing import NO_SEGMENT
from m3jax.media.patches import Grid, patch_positions, patch_rows
from m3jax.media.sizes import FACTOR, PATCH, PATCH_VALUES, TEMPORAL
from m3jax.text import ChatTemplate, Tokenizer
from m3jax.train.run import Batch, Batches

_ROOM = 256  # tokens that the longest dialogue about a picture has
_TOKENS_A_PICTURE = 72  # of a row: as many pictures as it has room for
# Where in `NAMES` each name stands: its group, and which of that.
_PLACE_OF_NAME = {name: (number, place) for number, group in enumerate(NAMES) for place, name in enumerate(group)}
_SEEN = 0.7  # of what a mark covers: a token that has only its edge does not show it


def grid_of(task: PictureTask) -> Grid:
    """A task's picture or clip in patches: (temporal patches, rows, columns)."""
    frames, height, width, _ = task.frames.shape
    return -(-frames // TEMPORAL), height // PATCH, width // PATCH


def task_tokens(
    task: PictureTask, tokenizer: Tokenizer, template: ChatTemplate, ids: PlaceholderIds
) -> tuple[Int32[np.ndarray, " T"], Bool[np.ndarray, " T"]]:
    """A dialogue's tokens with all placeholders of its picture, and which of them the assistant writes.

    Args:
      task: the dialogue.
      tokenizer: of the model.
      template: how a dialogue becomes text.
      ids: of the placeholders.
    """
    tokens, is_written, _ = written_tokens(template, tokenizer, task.messages(), None, task.thinking_mode)
    t, h, w = grid = grid_of(task)
    rows = np.empty((t * h * w, 0), np.float32)  # the prompt asks how many there are, not what they hold
    if task.is_clip:
        seconds = timestamps(range(len(task.frames)), task.source_fps)
        media = {"videos": [ProcessedVideo(rows, (grid,), seconds, tuple(range(len(task.frames))))]}
    else:
        media = {"images": [ProcessedImage(rows, grid)]}
    expanded = np.array(expand_tokens(tokens, **media, encode=tokenizer.encode, ids=ids), np.int32)
    (place,) = np.flatnonzero(tokens == (ids.video if task.is_clip else ids.image))
    added = np.zeros(len(expanded) - len(tokens), bool)
    return expanded, np.concatenate([is_written[:place], added, is_written[place:]])


def task_places(task: PictureTask, tokens: Int32[np.ndarray, " T"], ids: PlaceholderIds) -> Int32[np.ndarray, " F"]:
    """Return where the features of a task's picture go among the tokens of its dialogue, or of its beginning.

    Args:
      task: the dialogue.
      tokens: of `task_tokens`.
      ids: of the placeholders.
    """
    t, h, w = grid = grid_of(task)
    (places,) = segment_places(tokens, [Segment(np.empty((t * h * w, 0), np.float32), grid, task.is_clip)], ids)
    return places


def packed_pictures(tasks: Sequence[PictureTask], places: Sequence[Int32[np.ndarray, " _"]], capacity: int) -> Pictures:
    """Pictures in arrays of fixed sizes.

    Args:
      tasks: S of them at most.
      places: for each where its features go.
      capacity: S.
    """
    patches = np.zeros((capacity, MOST_PATCHES, PATCH_VALUES), np.uint8)
    segments = np.full((capacity, MOST_PATCHES), NO_SEGMENT, np.int32)
    positions = np.zeros((capacity, MOST_PATCHES, 3), np.int32)
    padded_places = np.full((capacity, MOST_TOKENS), -1, np.int32)
    for number, (task, own_places) in enumerate(zip(tasks, places, strict=True)):
        grid = grid_of(task)
        rows = patch_rows(task.frames.transpose(0, 3, 1, 2).astype(np.float32))  # whole numbers
        patches[number, : len(rows)] = rows.astype(np.uint8)
        segments[number, : len(rows)] = 0
        positions[number, : len(rows)] = patch_positions(grid)
        padded_places[number, : len(own_places)] = own_places
    return Pictures(patches, segments, positions, padded_places)


def shown_names(task: PictureTask) -> tuple[Bool[np.ndarray, "R N"], ...]:
    """Return, for each group of `NAMES`, the names that each token of a picture shows, in the order of its features.

    Args:
      task: the picture.
    """
    t, h, w = grid_of(task)
    rows, columns = (h * PATCH) // FACTOR, (w * PATCH) // FACTOR
    shown = [np.zeros((t, rows, columns, len(group)), bool) for group in NAMES]
    for mark in task.marks:
        reach = _SEEN * np.array([mark.half_height, mark.half_width])
        centre = np.array([mark.y, mark.x])
        (top, left), (bottom, right) = ((centre + side * reach) // FACTOR for side in (-1, 1))
        cells = slice(int(top), int(bottom) + 1), slice(int(left), int(right) + 1)
        for name in mark.names:
            number, place = _PLACE_OF_NAME[name]
            shown[number][(mark.frame // TEMPORAL, *cells, place)] = True
    return tuple(of_group.reshape(-1, of_group.shape[-1]) for of_group in shown)


@dataclass(frozen=True)
class Alternating:
    """Batches of pictures, and one of text after every few; batch i is a function of i alone.

    Pictures need short rows, where one dialogue does not hide among many, and text needs long ones.

    Args:
      pictures: batch i of them is batch i.
      text: one after the other.
      every: how many batches there are for one of text, at least 2.
    """

    pictures: Batches
    text: Batches
    every: int

    def __getitem__(self, index: int) -> Batch:
        turn, place = divmod(index, self.every)
        return self.text[turn] if place == self.every - 1 else self.pictures[index]


@dataclass(frozen=True)
class PictureBatches:
    """Random training batches; batch i is a function of (seed, i) alone, so a run can resume.

    `batches[i]` has the arrays of `RecallBatches`, "pictures" and "naming". A row has as many dialogues as find room,
    one after the other. A weight is 1 where the target is the assistant's own word, the end of its turn included, and 0
    elsewhere; none is recalled.

    Args:
      tokenizer: of the model.
      template: how a dialogue becomes text.
      seq_len: T, at least 256.
      rows: B.
      seed: of all batches, not negative.

    Raises:
      ValueError: rows without room for a dialogue.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    seq_len: int
    rows: int
    seed: int

    def __post_init__(self):
        if self.seq_len < _ROOM:
            raise ValueError(f"seq_len {self.seq_len} has no room for dialogues about pictures; give at least {_ROOM}")

    @cached_property
    def ids(self) -> PlaceholderIds:
        """The placeholders of this tokenizer."""
        return PlaceholderIds.of_tokenizer(self.tokenizer)

    @cached_property
    def name_words(self) -> tuple[Int32[np.ndarray, "N W"], ...]:
        """The token ids of each name, by group, as it stands behind a space; -1 behind them."""
        words = [[self.tokenizer.encode(f" {name}") for name in group] for group in NAMES]
        longest = max(len(ids) for group in words for ids in group)
        return tuple(np.array([ids + [-1] * (longest - len(ids)) for ids in group], np.int32) for group in words)

    def __getitem__(self, index: int) -> Batch:
        rng = np.random.default_rng([self.seed, index, 2])
        most = self.seq_len // _TOKENS_A_PICTURE
        tasks, places, rows = [], [], []
        for number in range(self.rows):
            row, row_tasks, row_places = self._row(rng, most)
            rows.append(row)
            tasks += row_tasks
            places += [number * self.seq_len + own for own in row_places]
        shown = tuple(np.zeros((self.rows * most, MOST_TOKENS, len(group)), bool) for group in NAMES)
        for number, task in enumerate(tasks):
            for of_group, of_task in zip(shown, shown_names(task), strict=True):
                of_group[number, : len(of_task)] = of_task
        batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        pictures = packed_pictures(tasks, places, self.rows * most)
        return batch | {"pictures": pictures, "naming": Naming(shown, self.name_words)}

    def _row(
        self, rng: np.random.Generator, most: int
    ) -> tuple[Batch, list[PictureTask], list[Int32[np.ndarray, " _"]]]:
        """Return dialogues in T + 1 tokens, ends of turns after them, their tasks, and the places of their features."""
        length = self.seq_len + 1
        tokens, counts = np.full(length, self.tokenizer.eos_id, np.int32), np.zeros(length, bool)
        tasks, places, begin = [], [], 0
        while len(tasks) < most:
            task = draw_picture_task(rng)
            ids, is_written = task_tokens(task, self.tokenizer, self.template, self.ids)
            if (end := begin + len(ids)) > length:
                break
            tokens[begin:end], counts[begin:end] = ids, is_written
            tasks.append(task)
            places.append(begin + task_places(task, ids, self.ids))
            begin = end
        row = {
            "tokens": tokens,
            "weights": counts[1:].astype(np.float32),
            "recall": np.zeros(self.seq_len, bool),
            "distance": np.zeros(self.seq_len, np.int32),
            "recent": np.zeros(self.seq_len, np.int32),
        }
        return row, tasks, places
