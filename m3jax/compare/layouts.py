"""Alignment of an engine's array with its quantity: axes in the order tokens, heads, rest, and no padding.

Letters: B prompts, T tokens of the longest one (or more, where an engine pads further), X the tokens of all prompts,
one after the other and without padding; those of `Quantity.axes` besides.
"""

import itertools
from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Shaped

from m3jax.compare.quantities import Quantity

Tensor = Shaped[np.ndarray, "..."]
# Axes whose length the model's configuration does not give: scored blocks, slots of a selection, tapped layers.
_FREE = frozenset({"M", "J", "C"})


class Rows(NamedTuple):
    """The tokens that a dump's arrays have.

    Attributes:
      is_token: of a padded array, which places are no padding.
      places: (prompt, position) of each token, in the order in which arrays have them.
    """

    is_token: Bool[np.ndarray, "B T"]
    places: Int[np.ndarray, "X 2"]


class Layout(NamedTuple):
    """One order in which an array may have its axes.

    Attributes:
      axes: of each of the array's axes: a letter, "1", or several letters with * between them, which are one axis.
      parts: the number of slices that one letter is divided into across ranks; 1 where none is divided.
      divided: the divided letter.
    """

    axes: tuple[str, ...]
    parts: int = 1
    divided: str | None = None


def aligned(
    wanted: Quantity, ranks: list[Tensor], dumped: Rows, sizes: Mapping[str, int], axes: str | None = None
) -> Tensor:
    """Return an array with its axes in its quantity's order, and without padding.

    Args:
      wanted: the quantity that the array holds.
      ranks: as each rank has it, whole or a slice.
      dumped: the tokens of the array.
      sizes: of the letters that are known.
      axes: the array's axes, where they are known; else the first layout that fits is taken, tokens before heads.

    Raises:
      ValueError: no layout fits, or ranks that all have the whole have different numbers.
    """
    spelled = [tuple(axes.split())] if axes else [*layouts(wanted.axes)]
    # An engine may pad rows further than the longest prompt; layouts without such padding are tried first.
    for most, spelling in itertools.product((dumped.is_token.shape[1], None), spelled):
        if (layout := _fit(spelling, ranks, dumped, sizes, most)) is not None:
            return _in_order(wanted, _joined(wanted, ranks, layout, sizes), layout, dumped, sizes)
    shape = "" if len(ranks) == 1 else f" on each of {len(ranks)} ranks"
    known = {letter: size for letter, size in sizes.items() if any(letter in axis for axis in wanted.axes)}
    count, longest = len(dumped.is_token), dumped.is_token.shape[1]
    need = ", ".join(f"{letter} = {size}" for letter, size in known.items())
    hint = "" if known or len(wanted.axes) < 3 else "; --config FOLDER says the model's sizes"
    axes = " ".join(wanted.axes)
    raise ValueError(
        f"{wanted.name} has shape {list(ranks[0].shape)}{shape}, which cannot be aligned with [{axes}] "
        f"for X = {len(dumped.places)} tokens of {count} prompts of up to {longest}{f', {need}' if need else ''}{hint}"
    )


def layouts(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the orders of axes in which engines store a quantity, the usual ones first.

    Args:
      axes: in the quantity's order.
    """
    rest = axes[1:]
    tokens = (("B", "T"), ("X",), ("1", "X"), ("B*T",))
    yield from ((*first, *rest) for first in tokens)
    if len(rest) == 2:
        if rest[1] not in _FREE:
            yield from ((*first, "*".join(rest)) for first in tokens)
        yield from ((*first[:-1], rest[0], first[-1], rest[1]) for first in tokens)  # heads before tokens
    if rest == ("I",):  # one head for all
        yield from ((*first, "1", "I") for first in tokens)
        yield from ((*first[:-1], "1", first[-1], "I") for first in tokens)


def _fit(
    spelling: tuple[str, ...], ranks: list[Tensor], dumped: Rows, sizes: Mapping[str, int], most: int | None
) -> Layout | None:
    """Return a layout of this spelling that has the array's shape: whole on each rank, else with one letter divided.

    Args:
      spelling, ranks, dumped, sizes: as in `aligned` and `Layout`.
      most: the greatest length of a padded row; None for any length.
    """
    shape = ranks[0].shape
    if len(spelling) != len(shape) or any(array.shape != shape for array in ranks):
        return None
    if _is_shape(shape, spelling, dumped, sizes, most):
        return Layout(spelling)
    letters = {letter for axis in spelling for letter in axis.split("*")} - {"B", "T", "X", "1", *_FREE}
    for letter in sorted(letters & sizes.keys()):
        # With more ranks than KV heads, neighbouring ranks hold copies of the same head.
        parts = min(len(ranks), sizes[letter]) if letter == "K" else len(ranks)
        can_divide = parts > 1 and sizes[letter] % parts == 0 and len(ranks) % parts == 0
        if can_divide and _is_shape(shape, spelling, dumped, {**sizes, letter: sizes[letter] // parts}, most):
            return Layout(spelling, parts, letter)
    return None


def _is_shape(
    shape: tuple[int, ...], spelling: tuple[str, ...], dumped: Rows, sizes: Mapping[str, int], most: int | None
) -> bool:
    """True if an array of this shape can have the axes of this spelling."""
    prompts, longest = dumped.is_token.shape
    known = {**sizes, "B": prompts, "X": len(dumped.places), "1": 1}
    for axis, size in zip(spelling, shape, strict=True):
        letters = axis.split("*")
        if "T" in letters:
            width = size if len(letters) == 1 else size // prompts
            fits = width * (prompts if len(letters) == 2 else 1) == size and longest <= width <= (most or width)
        elif any(letter in _FREE for letter in letters):
            fits = size % prod(known.get(letter, 1) for letter in letters) == 0
        elif all(letter in known for letter in letters):
            fits = size == prod(known[letter] for letter in letters)
        else:
            fits = len(letters) == 1  # a fused axis of two unknown sizes cannot be split
        if not fits:
            return False
    return True


def _joined(wanted: Quantity, ranks: list[Tensor], layout: Layout, sizes: Mapping[str, int]) -> Tensor:
    """Return the whole array, joined from the ranks' slices; copies on several ranks are taken once."""
    if layout.divided is None:
        other = [rank for rank, array in enumerate(ranks) if not _same(ranks[0], array)]
        if other:
            raise ValueError(f"{wanted.name}: ranks 0 and {other[0]} both have all of it, and other numbers")
        return ranks[0]
    axis = next(i for i, name in enumerate(layout.axes) if layout.divided in name.split("*"))
    copies = len(ranks) // layout.parts  # neighbouring ranks that hold the same KV head
    return np.concatenate([np.asarray(array) for array in ranks[::copies]], axis=axis)


def _same(first: Tensor, second: Tensor) -> bool:
    # Bytes, not numbers: NaN equals itself, and -0 is not 0.
    return np.ascontiguousarray(first).tobytes() == np.ascontiguousarray(second).tobytes()


def _in_order(wanted: Quantity, array: Tensor, layout: Layout, dumped: Rows, sizes: Mapping[str, int]) -> Tensor:
    """Return an array with the quantity's axes [X ...] instead of the layout's."""
    prompts = len(dumped.is_token)
    known = {**sizes, "B": prompts, "1": 1}
    shape, letters = [], []
    for axis, size in zip(layout.axes, array.shape, strict=True):
        parts = axis.split("*")
        unknown = [letter for letter in parts if len(parts) > 1 and (letter in _FREE or letter == "T")]
        # The one unknown size of a merged axis is what the known ones leave of it.
        rest = prod(known[letter] for letter in parts if letter not in unknown) if len(parts) > 1 else 1
        shape += [size // rest if letter in unknown or len(parts) == 1 else known[letter] for letter in parts]
        letters += parts
    array = np.reshape(array, shape)
    singles = tuple(i for i, letter in enumerate(letters) if letter == "1")
    array = np.squeeze(array, axis=singles)
    letters = [letter for letter in letters if letter != "1"]
    is_padded = "B" in letters
    front = ["B", "T"] if is_padded else ["X"]
    array = np.transpose(array, [letters.index(letter) for letter in (*front, *wanted.axes[1:])])
    if not is_padded:
        return array
    width = dumped.is_token.shape[1]
    return array[:, :width][dumped.is_token]  # [B T ...] -> [X ...]


def cut(wanted: list[Quantity], ranks: list[Tensor], sizes: Mapping[str, int]) -> dict[str, list[Tensor]] | None:
    """Return the parts of a fused projection for each rank; None if their widths do not add up to its last axis.

    Args:
      wanted: the parts in their order.
      ranks: as each rank has the projection.
      sizes: of all letters of the parts.
    """
    count = len(ranks)
    # Heads and hidden widths are divided over the ranks; with fewer KV heads than ranks each has one whole head.
    share = lambda letter: max(sizes[letter] // count, 1) if letter in "NKW" else sizes[letter]
    widths = [prod(share(letter) for letter in part.axes[1:]) for part in wanted]
    if sum(widths) != ranks[0].shape[-1]:
        return None
    ends = np.cumsum(widths)[:-1]
    pieces = [np.split(array, ends, axis=-1) for array in ranks]
    return {part.name: [piece[i] for piece in pieces] for i, part in enumerate(wanted)}
