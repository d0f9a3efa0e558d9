"""Reading of a request's JSON: each field has a type and a range, and a field that nobody knows is an error.

A knob that is taken and then ignored makes a wrong answer that looks right, so what cannot be honoured is refused by
its name. Fields that say something about the client and nothing about the answer are known, and read by nobody.
"""

import json
import math
from collections.abc import Collection
from typing import Any

from m3jax.console import did_you_mean
from m3jax.messages import shown
from m3jax.serve.gateway.errors import ApiError, refused

MISSING = object()


def parsed_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a request's body is.

    Raises:
      ApiError: it is none; NaN, infinities and nesting beyond Python's limit are none either.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"JSON has no {name}")

    try:
        value = json.loads(body, parse_constant=refuse)
    except RecursionError:
        raise refused(None, "the body nests too deep to be read") from None
    except ValueError as error:  # also bytes that are not UTF-8
        raise refused(None, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise refused(None, f"the body is {shown(value)}: must be a JSON object")
    return value


class Fields:
    """The fields of one request, each of which is read once.

    Args:
      values: the request's JSON object. A field that is null counts as not given.
    """

    def __init__(self, values: dict[str, Any]):
        self.values = {name: value for name, value in values.items() if value is not None}
        self._read: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """Return a field's value, unchecked; the default where it is not given."""
        self._read.add(name)
        return self.values.get(name, default)

    def is_given(self, name: str) -> bool:
        """True if the request has this field, and not as null."""
        return name in self.values

    def number(self, name: str, default: float | None, least: float, most: float, above: bool = False) -> float | None:
        """Return a finite number within a range; `above` leaves out the lower end."""
        value = self.take(name, default)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if (
            not is_number
            or not math.isfinite(value)
            or not (least < value if above else least <= value)
            or value > most
        ):
            lower = f"above {least:g}" if above else f"from {least:g}"
            raise refused(name, f"{name} = {shown(value)}: must be a number {lower} to {most:g}")
        return float(value)

    def integer(self, name: str, default: int | None, least: int, most: int) -> int | None:
        """Return a whole number within a range, both ends included."""
        value = self.take(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most):
            raise refused(name, f"{name} = {shown(value)}: must be an integer from {least} to {most}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise refused(name, f"{name} = {shown(value)}: must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return a text."""
        value = self.take(name, default)
        if not isinstance(value, str | None):
            raise refused(name, f"{name} = {shown(value)}: must be a text")
        return value

    def one_of(self, name: str, known: Collection[str], default: str | None = None) -> str | None:
        """Return a text that is one of a few."""
        value = self.text(name, default)
        if value is not None and value not in known:
            raise refused(name, f"{name} = {shown(value)}: must be one of {', '.join(known)}")
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """Return a text, or a list of several, none of them empty, as several."""
        value = self.take(name, [])
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or len(values) > most or not all(isinstance(v, str) and v for v in values):
            raise refused(name, f"{name} = {shown(value)}: must be a text that is not empty, or a list of up to {most}")
        return tuple(values)

    def object(self, name: str) -> dict[str, Any] | None:
        """Return a JSON object."""
        value = self.take(name)
        if not isinstance(value, dict | None):
            raise refused(name, f"{name} = {shown(value)}: must be an object")
        return value

    def list(self, name: str) -> list[Any] | None:
        """Return a list."""
        value = self.take(name)
        if not isinstance(value, list | None):
            raise refused(name, f"{name} = {shown(value)}: must be a list")
        return value

    def pass_over(self, *names: str) -> None:
        """Read fields that say nothing about the answer."""
        self._read.update(names)

    def only(self, name: str, allowed: Collection[Any], why: str) -> None:
        """Refuse a field unless its value is one of a few that change nothing."""
        value = self.take(name, MISSING)
        if value is not MISSING and value not in list(allowed):
            raise refused(name, f"{name} = {shown(value)}: {why}")

    def finish(self) -> None:
        """Refuse the first field that nobody has read.

        Raises:
          ApiError: its name, and one that is near it.
        """
        unknown = [name for name in self.values if name not in self._read]
        if unknown:
            near = did_you_mean(unknown[0], self._read)
            raise ApiError(
                400, f"unknown field {shown(unknown[0])}{near}: it would change nothing", unknown[0],
                "unknown_parameter",
            )  # fmt: skip
