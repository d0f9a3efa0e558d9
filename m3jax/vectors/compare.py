"""Whether an output is the stored one: what differs, where, and both values."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped

Tensor = Shaped[np.ndarray, "..."]


def difference(
    expected: Tensor, found: Tensor, tolerance: Mapping[str, Any], dtype: str, slack: Tensor | float = 0.0
) -> str | None:
    """What is wrong with an output, in one line; None if it agrees.

    Args:
      expected: as stored.
      found: what an implementation gave.
      tolerance: one of `TOLERANCES`.
      dtype: the narrowest floating type of the computation that gave it.
      slack: what each number may be off besides.
    """
    if expected.shape != found.shape:
        return f"found shape {list(found.shape)}, expected {list(expected.shape)}"
    if tolerance["compare"] == "blocks":
        return _differing_sets(expected, found)
    if expected.size == 0:
        return None
    exact = tolerance["compare"] == "bits"
    if exact and expected.dtype.kind in "iub":
        wrong, bound = expected != found, ""
        gap = np.abs(expected.astype(np.int64) - found.astype(np.int64))
    else:
        rtol, atol = (0.0, 0.0) if exact else tolerance.get(dtype, tolerance["bfloat16"])
        expected, found = expected.astype(np.float64), found.astype(np.float64)
        with np.errstate(invalid="ignore"):
            gap = np.abs(expected - found)
            allowed = atol + rtol * np.abs(expected) + slack
            same = (expected == found) | (np.isnan(expected) & np.isnan(found))
            wrong = ~(same | (np.isfinite(gap) & (gap <= allowed)))
            gap = np.where(wrong, np.where(np.isnan(gap), np.inf, gap - allowed), -1.0)
        bound = f" beyond rtol {rtol:.2g}, atol {atol:.2g} ({dtype})"
    if not wrong.any():
        return None
    place = np.unravel_index(np.argmax(np.where(wrong, gap, -1)), gap.shape)
    values = f"expected {expected[place]:.9g}, found {found[place]:.9g}"
    return f"{wrong.sum()} of {wrong.size} numbers differ{bound}; the farthest at {[int(i) for i in place]}: {values}"


def _differing_sets(expected: Tensor, found: Tensor) -> str | None:
    """The first selection of a query that is another set, or has an id twice."""
    ordered, given = np.sort(expected, axis=-1), np.sort(found, axis=-1)
    wrong = np.any(ordered != given, axis=-1)
    if not wrong.any():
        return None
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    ids = lambda x: [int(i) for i in x[place] if i >= 0]
    return (
        f"{wrong.sum()} of {wrong.size} selections differ; the first at {list(place)}: "
        f"expected blocks {ids(ordered)}, found {ids(given)}"
    )
