"""Conversion of an element of a call to a JSON value: the output has no types, so the tool's schema decides.

The wire writes a member of an object or an item of an array as an element, and every scalar as its bare text: the text
5 is the number or the string, an element without text is "", [], {} or, in an array, null. A value that fits nothing
that the schema takes stays the text that the model wrote, for the tool to refuse: nothing is guessed.
"""

import json
import math
import re
from typing import Any, NoReturn

from m3jax.text.output.shapes import Shape, Shapes, is_only_array, kind_of, kinds_of, member_shapes

# An element as it was read: its text, or the elements in it, by name and in order; each a Node again.
Node = str | list[tuple[str, Any]]

MOST_DEPTH = 64
MOST_WORD = 64  # characters; a longer text is a string wherever the schema takes one, so that it can stream
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": True, "false": False}
_DIGITS = {"1": True, "0": False}
_MOST_DIGITS = 4_000  # Python refuses to read an integer of 4,300
_EXACT = 2**53


def value_of(node: Node, shapes: Shapes) -> Any:
    """Convert an element of a call to a JSON value.

    Args:
        node: its text, or the elements in it.
        shapes: the schema's alternatives for it.

    Returns:
        What JSON can hold; finite numbers only.
    """
    return _scalar(node, shapes) if isinstance(node, str) else _structure(node, shapes)


def joined_value(nodes: list[Node], shapes: Shapes) -> Any:
    """Read elements of one name, the first of which is the value unless they can only be parts of an array.

    Args:
        nodes: one or more, in order.
        shapes: the schema's alternatives for each.

    Returns:
        As `value_of`. An array that was written in several elements has the items of all; text that is no JSON array
        is one item.
    """
    if len(nodes) == 1 or not is_only_array(shapes):
        return value_of(nodes[0], shapes)
    items_so_far: list[Any] = []
    for node in nodes:
        if isinstance(node, str) and isinstance(items := _scalar(node, shapes), list):
            items_so_far += items
            continue
        for item in [node] if isinstance(node, str) else [inner for _, inner in node]:
            items_so_far.append(value_of(item, member_shapes(shapes, "item", len(items_so_far))))
    return items_so_far


def _scalar(text: str, shapes: Shapes) -> Any:
    """Return the value of an element that has only text."""
    kinds = kinds_of(shapes)
    if kinds is None or kinds == {"string"} or ("string" in kinds and len(text) > MOST_WORD):
        return text
    word = text.strip()
    for shape in shapes:
        for member in shape.members or ():
            if text == member or (not isinstance(member, str) and word == written(member)):
                return member
    if "null" in kinds and word.lower() == "null":
        return None
    if "boolean" in kinds and word.lower() in _WORDS:
        return _WORDS[word.lower()]
    # Where a string may stand, only digits are a whole number: 1e5 may be a name, 5.0 a version.
    is_text = "string" in kinds and "number" not in kinds and not _INTEGER.fullmatch(word)
    if "integer" in kinds and not is_text and (number := _number(word, is_whole="number" not in kinds)) is not None:
        return number
    if "string" in kinds:
        return text
    if not word and kinds & {"array", "object", "null"}:
        return [] if "array" in kinds else {} if "object" in kinds else None
    if "boolean" in kinds and word in _DIGITS:
        return _DIGITS[word]
    return _json(text, kinds) if word[:1] in ("[", "{") else text


def written(value: Any) -> str:
    """Return the text of a scalar other than a string in the output format: null, true, false, or a number."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _number(word: str, is_whole: bool) -> int | float | None:
    """Return the number in a text, as an int if it has neither point nor exponent; None if it is not a number.

    Args:
        word: without space around it.
        is_whole: only whole numbers, always as an int.
    """
    if len(word) > _MOST_DIGITS or not _NUMBER.fullmatch(word):
        return None
    if _INTEGER.fullmatch(word):
        return int(word)
    number = float(word)
    if is_whole:
        return int(number) if number.is_integer() and abs(number) < _EXACT else None
    return number if math.isfinite(number) else None


def _json(text: str, kinds: frozenset[str]) -> Any:
    """Return the object or array that a text is in JSON, if the schema takes that type; else the text."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return text
    return value if kind_of(value) in kinds and not _is_deep(value, MOST_DEPTH) else text


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def _finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _refuse(text)


def _is_deep(value: Any, most: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most < 0 or any(_is_deep(each, most - 1) for each in inner)


def _structure(elements: list[tuple[str, Node]], shapes: Shapes) -> Any:
    """Return the value of an element that has elements in it: an array or an object.

    Where the schema takes both, or says neither, elements that are all named "item" are an array's.
    """
    kinds = kinds_of(shapes) or frozenset()
    is_array = all(name == "item" for name, _ in elements)
    if ("array" in kinds) != ("object" in kinds):
        is_array = "array" in kinds
    if is_array:
        return [value_of(node, member_shapes(shapes, "item", index)) for index, (_, node) in enumerate(elements)]
    objects = [shape for shape in shapes if shape.kinds and "object" in shape.kinds]
    objects = [shape for shape in objects if _fits(elements, shape)] or objects
    nodes: dict[str, list[Node]] = {}
    for name, node in elements:
        nodes.setdefault(name, []).append(node)
    return {name: joined_value(each, member_shapes(objects or shapes, name, 0)) for name, each in nodes.items()}


def _fits(elements: list[tuple[str, Node]], shape: Shape) -> bool:
    """True if elements can be an object of this alternative, by their names and scalars; no deeper one is checked."""
    names = {name for name, _ in elements}
    if not shape.required <= names or (shape.others is None and not names <= shape.properties.keys()):
        return False
    return all(_is_taken(node, shape.properties[name]) for name, node in elements if name in shape.properties)


def _is_taken(node: Node, shapes: Shapes) -> bool:
    """True if the schema takes an element's type and, where it lists values, a scalar's value."""
    kinds = kinds_of(shapes)
    if kinds is None:
        return True
    if not isinstance(node, str):
        return bool(kinds & {"array", "object"})
    value = _scalar(node, shapes)
    members = [shape.members for shape in shapes]
    return kind_of(value) in kinds and (None in members or any(value in each for each in members))
