"""Python functions as tools: the name, the description and the JSON schema that a request has of a tool.

What transformers' `get_json_schema` makes of a function is made of it here too, without the schema of its result.
"""

import inspect
import json
import re
import types
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from m3jax.messages import printable, shown

_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_CONTAINERS = {list: "array", tuple: "array", dict: "object"}
_BY_HAND = "give the tool as an object with a JSON schema of its own"
_ARGS, _SECTION = re.compile(r"(\s*)(?:Args|Arguments):\s*"), re.compile(r"\s*(?:Args|Arguments|Returns|Raises):")
_ENTRY = re.compile(r"\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)")  # "name: what it is", "name (int): what it is"
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def function_tool(function: Callable[..., Any], location: str) -> dict[str, Any]:
    """Return the tool that calls a Python function, as a request has it.

    Args:
        function: with a docstring that says what it does and, under "Args:", what each parameter is; every parameter is
            annotated, and can be given by name. One with a default value need not be given. A description that ends in
            (choices: ["tea", "coffee"]) names all values of its parameter.
        location: its location in the request, for errors.

    Returns:
        {"type": "function", "function": {"name", "description", "parameters": a JSON schema}}.

    Raises:
        ValueError: something that is no such function; one line says what it lacks.

    Source:
        `transformers.utils.get_json_schema` of transformers 5.23, whose "return" is left out.
    """
    name = getattr(function, "__name__", None)
    if inspect.isclass(function) or not isinstance(name, str):
        raise ValueError(f"{location}: {shown(function)} is no function: give a function, or {_BY_HAND}")
    location = f"{location} ({printable(name)})"
    description, about = _docstring(function)
    if not description:
        raise ValueError(f"{location}: it has no docstring, and the model would not know what it does; write one")
    try:
        parameters = inspect.signature(function).parameters
        hints = get_type_hints(function)
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(f"{location}: its annotations cannot be read ({printable(str(error))}); {_BY_HAND}") from None
    properties = {}
    for parameter in parameters.values():
        where = f"{location}: {printable(str(parameter).partition(':')[0].partition('=')[0].strip())}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"{where} cannot be given by name, as a call does: write out its parameters, or {_BY_HAND}"
            )
        if parameter.annotation is parameter.empty:
            raise ValueError(f"{where} has no annotation: say its type, as in {printable(parameter.name)}: str")
        if not about.get(parameter.name):
            raise ValueError(f"{where} has no description: say under Args: in the docstring what it is")
        properties[parameter.name] = _with_description(
            _schema_of(hints[parameter.name], where), about[parameter.name], where
        )
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required := [each.name for each in parameters.values() if each.default is each.empty]:
        schema["required"] = required
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return what a docstring in Google's style says before its sections, and what it says of each parameter."""
    lines = (inspect.getdoc(function) or "").strip().splitlines()
    end = next((number for number, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    start = next((number for number, line in enumerate(lines) if _ARGS.fullmatch(line)), len(lines))
    about: dict[str, list[str]] = {}
    indentation = name = None
    for line in filter(str.strip, lines[start + 1 :]):
        depth = len(line) - len(line.lstrip())
        if depth <= len(_ARGS.fullmatch(lines[start])[1]):
            break  # the next section
        indentation = depth if indentation is None else indentation
        entry = _ENTRY.fullmatch(line) if depth <= indentation else None
        if entry is not None:
            name, line = entry[1], entry[2]
            about[name] = []
        if name is not None:
            about[name].append(line.strip())
    described = {name: " ".join(filter(None, parts)) for name, parts in about.items()}
    return "\n".join(lines[:end]).strip(), described


def _with_description(schema: dict[str, Any], description: str, where: str) -> dict[str, Any]:
    """Return a parameter's schema with its description, and with the values that this lists."""
    choices = _CHOICES.search(description)
    if choices is None:
        return schema | {"description": description}
    try:
        values = json.loads(choices[1])
    except ValueError:
        values = None
    if not isinstance(values, list) or not values:
        raise ValueError(f'{where}: {shown(choices[0])}: write a JSON list, as in (choices: ["tea", "coffee"])')
    values = [value.strip() if isinstance(value, str) else value for value in values]
    return schema | {"enum": values, "description": description[: choices.start()].strip()}


def _schema_of(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of an annotation."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return {}
    if kind in (Union, types.UnionType):
        return _union(parts, where)
    if kind is Literal:
        return _enumeration(parts, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enumeration([member.value for member in kind], where)
    name = (_SCALARS | _CONTAINERS).get(kind) if isinstance(kind, type) else None
    if name is None or (kind is tuple and (len(parts) == 1 or ... in parts)):
        raise ValueError(
            f"{where}: the type {shown(hint)} has no JSON schema here: take int, float, str, bool, None, Any, an Enum, "
            f"Literal, list, tuple of a fixed length, dict or unions of them, or {_BY_HAND}"
        )
    schema: dict[str, Any] = {"type": name}
    if kind is list and parts:
        schema["items"] = _schema_of(parts[0], where)
    elif kind is tuple and parts:
        schema["prefixItems"] = [_schema_of(part, where) for part in parts]
    elif kind is dict and parts:
        schema["additionalProperties"] = _schema_of(parts[1], where)
    return schema


def _union(parts: Sequence[Any], where: str) -> dict[str, Any]:
    """Return the JSON schema of a union; None among its types makes it nullable."""
    schemas = [_schema_of(part, where) for part in parts if part is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        names = sorted({schema["type"] for schema in schemas})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": schemas}
    return schema | ({"nullable": True} if type(None) in parts else {})


def _enumeration(values: Sequence[Any], where: str) -> dict[str, Any]:
    """Return the JSON schema of a few values, with each of their types once."""
    values = list(values)
    if not values or any(type(value) not in _SCALARS for value in values):
        raise ValueError(
            f"{where}: its values are {shown(values)}: must be int, float, str, bool or None, at least one"
        )
    kinds = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}
