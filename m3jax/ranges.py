"""The ranges of numbers that a user gives, as data: command lines look before they import anything large."""

import math
from collections.abc import Mapping

from m3jax.messages import shown

MAX_ID = 2**31 - 1  # of a token, and what top-k can be
MAX_SEED = 2**32 - 1

# Of the numbers of `m3jax.decoding.Sampling`: lowest, highest, and True if the lowest itself is refused.
SAMPLING = {
    "temperature": (0.0, math.inf, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (0.0, math.inf, True),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
}
# Of integers: lowest and highest.
INTEGERS = {"top_k": (0, MAX_ID), "seed": (0, MAX_SEED), "max_new_tokens": (1, MAX_ID), "min_tokens": (0, MAX_ID)}


def check_number(name: str, value: object, low: float, high: float, open_low: bool) -> None:
    """Raise ValueError unless a value is a finite number from `low` to `high`.

    Args:
      name: what it is called in the error.
      value: to be checked.
      low, high: of the range.
      open_low: whether `low` itself is refused.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        upper = "finite" if high == math.inf else f"at most {high:g}"
        raise ValueError(f"{name} = {shown(value)}: must be {'above' if open_low else 'at least'} {low:g} and {upper}")


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raise ValueError unless a value is an integer from `low` to `high`; the arguments are those of `check_number`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        what = f"at least {low}" if low and high == MAX_ID else f"from {low} to {high}"
        raise ValueError(f"{name} = {shown(value)}: must be an integer {what if low == 0 else 'of ' + what}")


def check_given(values: Mapping[str, object]) -> None:
    """Raise ValueError for the first of some numbers by name that is outside its range; None is not given.

    Args:
      values: names that have a range here, and others, which are passed over.
    """
    for name, value in values.items():
        if value is not None and name in SAMPLING:
            check_number(name, value, *SAMPLING[name])
        if value is not None and name in INTEGERS:
            check_integer(name, value, *INTEGERS[name])
