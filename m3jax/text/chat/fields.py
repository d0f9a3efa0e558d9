"""Fields of a request: those that no template would show to the model are refused, and JSON values are copied."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from m3jax.messages import shown

MOST_DEPTH = 64
# A parameter's name stands between < and >; with / in front it would close a tag, with "invoke name=" open a call.
_TAG = re.compile(r"(?!/|invoke name=)[^<>]+")


def check_fields(fields: Any, known: Collection[str], location: str, called: str) -> None:
    """Raise ValueError unless `fields` is an object in which every field that is not empty is known.

    Args:
        fields: of a message, a part, a call or a tool.
        known: fields that are shown, or that say how to show others.
        location: its place in the request, for errors.
        called: the name for it in the error, such as "a tool".
    """
    if not isinstance(fields, Mapping):
        raise ValueError(f"{location}: {called} is an object, got {shown(fields)}")
    for name, value in fields.items():
        is_empty = value is None or value is False or (isinstance(value, str | list | dict) and not value)
        if name not in known and not is_empty:
            raise ValueError(
                f"{location}: {shown(name)} = {shown(value)} would not reach the model: leave it out, or say it in the "
                f"content ({called} has {', '.join(known)})"
            )


def json_copy(value: Any, location: str, path: tuple[str | int, ...] = (), are_tags: bool = False) -> Any:
    """Copy a value that JSON can hold.

    Args:
        value: None, bool, int, float, str, or lists and dicts of them.
        location: its place in the request, for errors.
        path: keys and indices that lead to `value` within the whole.
        are_tags: True if the keys become tags.

    Returns:
        Its copy.

    Raises:
        ValueError: a value of another type, NaN or infinite, a key that is no text or can be no tag, or lists and
            objects that nest deeper than 64.
    """
    named = f"{location}{': ' if path else ''}{'.'.join(map(str, path))}"
    if len(path) > MOST_DEPTH:
        raise ValueError(f"{location}: lists and objects nest deeper than {MOST_DEPTH}")
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                raise ValueError(f"{named}: the key {shown(key)} is no text")
            if are_tags and not _TAG.fullmatch(key):
                raise ValueError(f"{named}: {shown(key)} cannot be a tag: it is empty, holds < or >, or is another's")
        return {key: json_copy(member, location, (*path, key), are_tags) for key, member in value.items()}
    if type(value) is list:
        return [json_copy(item, location, (*path, number), are_tags) for number, item in enumerate(value)]
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{named} = {value}: JSON has no such number")
    if value is not None and type(value) not in (bool, int, float, str):
        raise ValueError(f"{named}: {shown(value)} is a {type(value).__name__}, which JSON does not have")
    return value
