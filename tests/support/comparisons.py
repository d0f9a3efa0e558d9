"""Comparisons that say what is wrong: the quantity, the place, both values, and the trap that the test is about."""

import re
import sys
from functools import cache
from pathlib import Path

import numpy as np

TRAPS = Path(__file__).parents[2] / "docs" / "glossary.md"


def assert_close(
    found, expected, what: str = "values", axes: str = "", *, rtol: float = 0.0, atol: float | np.ndarray = 0.0
):
    """Each number is within atol + rtol * |expected| of the expected one; infinities and NaN stand where they should.

    Args:
      found: an array, or what can be one.
      expected: likewise, of the same shape.
      what: the quantity, as in "out of kv_block_major".
      axes: a letter for each axis, as in "B T N H", by which a place is named; where there are not as many axes (rows
        were picked, say) they are counted.
      rtol: relative to the expected value.
      atol: absolute; one number, or one for each place.
    """
    found, expected = _numbers(found), _numbers(expected)
    _check_shapes(found, expected, what)
    with np.errstate(invalid="ignore"):
        error = np.abs(found - expected)
        allowed = atol + rtol * np.where(np.isfinite(expected), np.abs(expected), 0.0)
        is_same = (found == expected) | (np.isnan(found) & np.isnan(expected))
        is_wrong = ~(is_same | (error <= allowed))
    if is_wrong.any():
        # The worst place; one that is not a finite number is worse than any other.
        excess = np.where(is_wrong, np.nan_to_num(error - allowed, nan=np.inf, posinf=np.inf), -1.0)
        place = np.unravel_index(np.argmax(excess), excess.shape)
        detail = f"off by {error[place]:.3g}, allowed are {np.broadcast_to(allowed, error.shape)[place]:.3g}"
        _fail(found, expected, is_wrong, place, what, axes, f"; {detail}")


def assert_equal(found, expected, what: str = "values", axes: str = ""):
    """Each element is the expected one, to the bit of its value; NaN equals NaN. Arguments as in `assert_close`."""
    found, expected = np.asarray(found), np.asarray(expected)
    _check_shapes(found, expected, what)
    is_wrong = found != expected
    if found.dtype.kind not in "iub" and expected.dtype.kind not in "iub":
        is_wrong &= ~((found != found) & (expected != expected))
    if is_wrong.any():
        place = tuple(index[0] for index in np.nonzero(is_wrong))
        _fail(found, expected, is_wrong, place, what, axes, "")


def assert_same_sets(found, expected, what: str = "blocks", axes: str = "B K T"):
    """Each selection holds the expected ids; says which were wrongly kept, and which dropped.

    Args:
      found: ids in ascending order, then -1.
      expected: likewise.
      what: the quantity.
      axes: letters of all axes but the last, which is that of the slots.
    """
    found, expected = np.asarray(found), np.asarray(expected)
    _check_shapes(found, expected, what)
    is_wrong = (found != expected).any(-1)
    if is_wrong.any():
        place = tuple(index[0] for index in np.nonzero(is_wrong))
        kept, right = ({int(x) for x in ids if x >= 0} for ids in (found[place], expected[place]))
        change = f"; wrongly kept {sorted(kept - right)}, dropped {sorted(right - kept)}"
        change = change if kept != right else "; the same ids, in another order"
        _fail(found, expected, is_wrong, place, what, axes, change)


def _numbers(x) -> np.ndarray:
    """Return an array as float64, which holds the numbers of every dtype of the tests."""
    return np.asarray(x).astype(np.float64)


def _check_shapes(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    if found.shape != expected.shape:
        raise AssertionError(f"{what}: found shape {found.shape}, expected {expected.shape}{_traps()}")


def _fail(found, expected, is_wrong, place, what: str, axes: str, detail: str) -> None:
    letters = axes.split()
    letters = letters if len(letters) == len(place) else [f"axis {i}" for i in range(len(place))]
    where = ", ".join(f"{letter} = {int(i)}" for letter, i in zip(letters, place, strict=True))
    raise AssertionError(
        f"{what} is wrong at {int(is_wrong.sum())} of {is_wrong.size} places; at {where or 'the only one'}: found "
        f"{found[place]}, expected {expected[place]}{detail}{_traps()}"
    )


def _traps() -> str:
    """The traps that the running test names in its docstring, each with its sentence of docs/glossary.md."""
    frame = sys._getframe()
    while frame is not None:
        test = frame.f_globals.get(frame.f_code.co_name)
        if frame.f_code.co_name.startswith("test_") and callable(test):
            named = re.findall(r"\bT\d+\b", (test.__doc__ or "").split("\n\n")[0])
            return "".join(f"\n  trap {name}: {_sentences()[name]}" for name in named if name in _sentences())
        frame = frame.f_back
    return ""


@cache
def _sentences() -> dict[str, str]:
    """Return the sentence of docs/glossary.md for each trap, by its number."""
    return dict(re.findall(r'^\| <a id="t\d+"></a>(T\d+) \| (.*) \|$', TRAPS.read_text(encoding="utf-8"), re.MULTILINE))
