"""Comparison of an output with the stored one: how much differs, where, and both values."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Shaped

Tensor = Shaped[np.ndarray, "..."]


class Gap(NamedTuple):
    """Numbers that are not the expected ones.

    Attributes:
      wrong: True at the numbers that differ too much.
      place: of the one that is farthest beyond what is allowed.
      bound: the allowed difference, in words; "" where bits are compared.
    """

    wrong: Bool[np.ndarray, "..."]
    place: tuple[int, ...]
    bound: str


def difference(
    expected: Tensor,
    actual: Tensor,
    tolerance: Mapping[str, Any],
    dtype: str,
    slack: Tensor | float = 0.0,
    axes: str | None = None,
) -> str | None:
    """Return what is wrong with an output, in one line; None if it agrees.

    Args:
      expected: as stored.
      actual: the implementation's output.
      tolerance: one of `TOLERANCES`.
      dtype: the narrowest floating type of the computation that gave it.
      slack: an additional allowed error of each number.
      axes: a letter of each axis, as in "B K T J"; a place is then "b=0 k=1 t=27" and not [0, 1, 27].
    """
    if expected.shape != actual.shape:
        return f"found shape {list(actual.shape)}, expected {list(expected.shape)}"
    if tolerance["compare"] == "blocks":
        return _first_other_set(expected, actual, axes)
    gap = farthest(expected, actual, tolerance, dtype, slack)
    if gap is None:
        return None
    return (
        f"{gap.wrong.sum()} of {expected.size} numbers differ{gap.bound}; the farthest at {_named(gap.place, axes)}: "
        f"{both_values(expected, actual, gap.place)}"
    )


def farthest(
    expected: Tensor, actual: Tensor, tolerance: Mapping[str, Any], dtype: str, slack: Tensor | float = 0.0
) -> Gap | None:
    """Return the numbers that are farther from the expected ones than is allowed; None if there are none.

    Args:
      expected, actual: of one shape. NaN agrees with NaN, and an infinity with itself.
      tolerance, dtype, slack: as in `difference`; the tolerance is not that of sets.
    """
    if expected.size == 0:
        return None
    exact = tolerance["compare"] == "bits"
    if exact and expected.dtype.kind in "iub":
        wrong, bound = expected != actual, ""
        # As int64: a difference of uint8 would wrap around.
        gap = np.abs(expected.astype(np.int64) - actual.astype(np.int64))
    else:
        # A dtype without a tolerance of its own has bfloat16's.
        rtol, atol = (0.0, 0.0) if exact else tolerance.get(dtype, tolerance["bfloat16"])
        expected, actual = expected.astype(np.float64), actual.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.abs(expected - actual)
            allowed = atol + rtol * np.abs(expected) + slack
            same = (expected == actual) | (np.isnan(expected) & np.isnan(actual))
            wrong = ~(same | (np.isfinite(gap) & (gap <= allowed)))
            # NaN or an infinity on one side alone is farther off than any number.
            gap = np.where(wrong, np.where(np.isnan(gap), np.inf, gap - allowed), -1.0)
        bound = f" beyond rtol {rtol:.2g}, atol {atol:.2g} ({dtype})"
    if not wrong.any():
        return None
    index = np.unravel_index(np.argmax(np.where(wrong, gap, -1)), gap.shape)
    return Gap(wrong, tuple(int(i) for i in index), bound)


def both_values(expected: Tensor, actual: Tensor, index: tuple[Any, ...]) -> str:
    """Return the expected number and the one that was found at a place, in words."""
    return f"expected {expected[index].astype(np.float64):.9g}, found {actual[index].astype(np.float64):.9g}"


def other_sets(expected: Int[np.ndarray, "... J"], actual: Int[np.ndarray, "... J"]) -> Bool[np.ndarray, "..."]:
    """Return a mask of the selections whose sorted ids, repetitions included, are not the expected ones."""
    return np.any(np.sort(expected, axis=-1) != np.sort(actual, axis=-1), axis=-1)


def ids_in(selection: Int[np.ndarray, " J"]) -> list[int]:
    """Return the ids of a selection in ascending order, without its unused slots."""
    return sorted(int(i) for i in selection if i >= 0)


def _named(position: tuple[int, ...], axes: str | None) -> str:
    """Return a place in words: each index with the letter of its axis, where those are known."""
    if not axes or not position:
        return str(list(position))
    return " ".join(f"{axis.lower()}={index}" for axis, index in zip(axes.split(), position, strict=False))


def _first_other_set(expected: Tensor, actual: Tensor, axes: str | None) -> str | None:
    """Return in words how many selections differ as sets, and the first of them; None if none does."""
    wrong = other_sets(expected, actual)
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{wrong.sum()} of {wrong.size} selections differ; the first at {_named(index, axes)}: "
        f"expected blocks {ids_in(expected[index])}, found {ids_in(actual[index])}"
    )
