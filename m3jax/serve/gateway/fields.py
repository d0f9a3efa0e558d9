"""The fields of a request's JSON as tables: each has a type and a range, and a field that nobody knows is an error.

A knob that is taken and then ignored makes a wrong answer that looks right, so what cannot be honoured is refused by
its name. A table is the only place that says what a field may be: `Fields` checks requests by it, and the OpenAPI
document (`m3jax.serve.gateway.openapi`) is written from it. What stands inside a list or an object, such as a message,
is checked where it is read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as attribute
from typing import Any

from m3jax.console import did_you_mean
from m3jax.messages import shown
from m3jax.serve.gateway.errors import ApiError, refused


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


@dataclass(frozen=True, kw_only=True)
class RequestField:
    """A field of a request; the classes below say of which type.

    Attributes:
      about: what it does, for the document.
      default: its value where it is not given; None says that there is none.
      is_required: True if a request without it is refused.
    """

    about: str = ""
    default: Any = None
    is_required: bool = False

    def checked(self, name: str, value: Any) -> Any:
        """Return a value as the handlers take it.

        Args:
          name: of the field.
          value: as JSON gave it, not null.

        Raises:
          ApiError: 400, another type or out of its range.
        """
        raise NotImplementedError

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the values that `checked` takes."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class NumberField(RequestField):
    """A finite number from `least` to `most`; `is_above` leaves out the lower end."""

    least: float
    most: float
    is_above: bool = False

    def checked(self, name: str, value: Any) -> float:
        """As `RequestField.checked`."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # An integer may be too large for a float, so the range is asked for first.
        if not is_number or not (self.least < value if self.is_above else self.least <= value) or value > self.most:
            lower = f"above {self.least:g}" if self.is_above else f"from {self.least:g}"
            raise refused(name, f"{name} = {shown(value)}: must be a number {lower} to {self.most:g}")
        return float(value)

    def schema(self) -> dict[str, Any]:
        """As `RequestField.schema`."""
        lower = "exclusiveMinimum" if self.is_above else "minimum"
        return {"type": "number", lower: self.least, "maximum": self.most}


@dataclass(frozen=True, kw_only=True)
class IntegerField(RequestField):
    """A whole number from `least` to `most`, both included; 5.0 is none."""

    least: int
    most: int

    def checked(self, name: str, value: Any) -> int:
        """As `RequestField.checked`."""
        if isinstance(value, bool) or not isinstance(value, int) or not self.least <= value <= self.most:
            raise refused(name, f"{name} = {shown(value)}: must be an integer from {self.least} to {self.most}")
        return value

    def schema(self) -> dict[str, Any]:
        """As `RequestField.schema`."""
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True, kw_only=True)
class FlagField(RequestField):
    """True or false."""

    default: bool = False

    def checked(self, name: str, value: Any) -> bool:
        """As `RequestField.checked`."""
        if not isinstance(value, bool):
            raise refused(name, f"{name} = {shown(value)}: must be true or false")
        return value

    def schema(self) -> dict[str, Any]:
        """As `RequestField.schema`."""
        return {"type": "boolean"}


@dataclass(frozen=True, kw_only=True)
class TextField(RequestField):
    """A text; one of `known` if there are any."""

    known: tuple[str, ...] = ()

    def checked(self, name: str, value: Any) -> str:
        """As `RequestField.checked`."""
        if not isinstance(value, str):
            raise refused(name, f"{name} = {shown(value)}: must be a text")
        if self.known and value not in self.known:
            raise refused(name, f"{name} = {shown(value)}: must be one of {', '.join(self.known)}")
        return value

    def schema(self) -> dict[str, Any]:
        """As `RequestField.schema`."""
        return {"type": "string", **({"enum": list(self.known)} if self.known else {})}


@dataclass(frozen=True, kw_only=True)
class TextsField(RequestField):
    """A text that is not empty, or a list of up to `most` of them."""

    most: int
    default: tuple[str, ...] = ()

    def checked(self, name: str, value: Any) -> tuple[str, ...]:
        """As `RequestField.checked`; always several."""
        values = [value] if isinstance(value, str) else value
        is_list = isinstance(values, list) and len(values) <= self.most
        if not is_list or not all(isinstance(each, str) and each for each in values):
            raise refused(
                name, f"{name} = {shown(value)}: must be a text that is not empty, or a list of up to {self.most}"
            )
        return tuple(values)

    def schema(self) -> dict[str, Any]:
        """As `RequestField.schema`."""
        text = {"type": "string", "minLength": 1}
        return {"anyOf": [text, {"type": "array", "items": text, "maxItems": self.most}]}


@dataclass(frozen=True, kw_only=True)
class ObjectField(RequestField):
    """A JSON object; what is in it is checked where it is read, and `inside` says it for the document."""

    inside: Mapping[str, Any] = attribute(default_factory=dict)

    def checked(self, name: str, value: Any) -> dict[str, Any]:
        """As `RequestField.checked`."""
        if not isinstance(value, dict):
            raise refused(name, f"{name} = {shown(value)}: must be an object")
        return value

    def schema(self) -> dict[str, Any]:
        """As `RequestField.schema`."""
        return {"type": "object", **self.inside}


@dataclass(frozen=True, kw_only=True)
class ListField(RequestField):
    """A list of `least` entries or more.

    Attributes:
      of: schema of an entry. Objects are told from other values here; what is in them is checked where they are read.
    """

    of: Mapping[str, Any] = attribute(default_factory=dict)
    least: int = 0

    def checked(self, name: str, value: Any) -> list[Any]:
        """As `RequestField.checked`."""
        if not isinstance(value, list) or len(value) < self.least:
            size = f" of at least {self.least}" if self.least else ""
            raise refused(name, f"{name} = {shown(value)}: must be a list{size}")
        wrong = [number for number, each in enumerate(value) if not isinstance(each, dict)]
        if wrong and self.of.get("type") == "object":
            raise refused(name, f"{name}[{wrong[0]}] = {shown(value[wrong[0]])}: must be an object")
        return value

    def schema(self) -> dict[str, Any]:
        """As `RequestField.schema`."""
        return {"type": "array", "items": dict(self.of), **({"minItems": self.least} if self.least else {})}


@dataclass(frozen=True, kw_only=True)
class UnionField(RequestField):
    """A value of one of several types, which the reader of the field checks; `schemas` say them."""

    schemas: tuple[Mapping[str, Any], ...]

    def checked(self, name: str, value: Any) -> Any:
        """As `RequestField.checked`: the value."""
        return value

    def schema(self) -> dict[str, Any]:
        """As `RequestField.schema`."""
        return {"anyOf": [dict(each) for each in self.schemas]}


@dataclass(frozen=True, kw_only=True)
class FixedField(RequestField):
    """A field of the protocol that changes nothing here: any value but the `allowed` ones would be ignored.

    Attributes:
      allowed: values that ask for what happens in any case.
      about: what is said of another value.
    """

    allowed: tuple[Any, ...] = ()

    def checked(self, name: str, value: Any) -> Any:
        """As `RequestField.checked`."""
        # 1 is not True here, though Python has them equal.
        if not any(value == each and type(value) is type(each) for each in self.allowed):
            raise refused(name, f"{name} = {shown(value)}: {self.about}")
        return value

    def schema(self) -> dict[str, Any]:
        """As `RequestField.schema`."""
        return {"enum": list(self.allowed)} if self.allowed else {"not": {}}


@dataclass(frozen=True, kw_only=True)
class UnreadField(RequestField):
    """A field that says something about the client and nothing about the answer; nobody reads it."""

    about: str = "of the client alone: it changes nothing"

    def checked(self, name: str, value: Any) -> Any:
        """As `RequestField.checked`: the value."""
        return value

    def schema(self) -> dict[str, Any]:
        """As `RequestField.schema`."""
        return {}


Table = Mapping[str, RequestField]


class Fields:
    """The fields of one request, checked.

    Args:
      values: the request's JSON object. A field that is null counts as not given.
      table: of all fields that it may have.

    Attributes:
      given: the values as they came, without those that are null.

    Raises:
      ApiError: 400, the first field that is wrong, that lacks, or that is in no table, by its name.
    """

    def __init__(self, values: Mapping[str, Any], table: Table):
        self.given = {name: value for name, value in values.items() if value is not None}
        self._table = table
        self._values = {name: table[name].checked(name, value) for name, value in self.given.items() if name in table}
        for name, each in table.items():
            if each.is_required and name not in self.given:
                raise refused(name, f"{name}: must be given" + (f"; {each.about}" if each.about else ""))
        if unknown := [name for name in self.given if name not in table]:
            near = did_you_mean(unknown[0], table)
            message = f"unknown field {shown(unknown[0])}{near}: it would change nothing"
            raise ApiError(400, message, unknown[0], "unknown_parameter")

    def __getitem__(self, name: str) -> Any:
        """The value of a field, or its default."""
        return self._values.get(name, self._table[name].default)

    def __contains__(self, name: str) -> bool:
        """True if the request has this field, and not as null."""
        return name in self.given


def object_schema(table: Table) -> dict[str, Any]:
    """Return the JSON schema of the requests that a table of fields takes; as there, null is as good as no field."""
    properties = {}
    for name, each in table.items():
        described = {"description": each.about} if each.about else {}
        default = {} if each.default in (None, ()) else {"default": each.default}
        own = each.schema()
        if not each.is_required and own:
            own = {"type": "null"} if own == {"not": {}} else _or_null(own)
        properties[name] = {**own, **default, **described}
    required = [name for name in properties if table[name].is_required]
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": {"type": "null"},
        **({"required": required} if required else {}),
    }


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that takes null too."""
    if "enum" in schema:
        kind = {"type": [schema["type"], "null"]} if "type" in schema else {}
        return {**schema, **kind, "enum": [*schema["enum"], None]}
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {**schema, "type": [schema["type"], "null"]}
