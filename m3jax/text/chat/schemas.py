"""JSON schemas of tools, by jsonschema: broken ones are refused, and arguments are held against the others.

Schemas come in the dialects of many clients. They are put into that of 2020-12 first: Python's names of the types,
`nullable`, and the older way to write `prefixItems`.
"""

import json
from functools import lru_cache
from itertools import count, islice
from typing import Any

from m3jax.messages import printable, shortened, shown

# Some benchmarks' files use Python's names of the types.
ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
ALIASES |= {"list": "array", "tuple": "array", "dict": "object"}
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_ANY = "any"  # of vLLM's clients; it says nothing

# Keywords whose value is a schema, a list of schemas, or an object of schemas by name.
_PARTS = frozenset({"anyOf", "oneOf", "allOf", "not", "if", "then", "else"})  # of what the schema itself describes
_ONE = frozenset({"items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not"})
_ONE |= {"if", "then", "else", "unevaluatedItems", "unevaluatedProperties"}
_SEVERAL = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
# A schema with one of these may take its members' names from elsewhere.
_OTHER_MEMBERS = _PARTS | {"$ref", "patternProperties", "additionalProperties", "dependentSchemas"}

_MOST_STEPS = 10_000  # references that are followed for one call
_MOST_PROBLEMS, _MOST_LINE = 8, 160


def check_schema(schema: Any, location: str) -> None:
    """Raise ValueError for a schema that is broken.

    Args:
        schema: of a tool's parameters; JSON.
        location: its place in the request, for errors.
    """
    if fault := _fault(json.dumps(schema)):
        raise ValueError(shortened(f"{location}: {fault}"))


def problems_of(arguments: Any, schema: Any) -> tuple[str, ...]:
    """Return what is wrong with the arguments of a call, one line each and at most eight; nothing if they are valid.

    Args:
        arguments: of the call.
        schema: the tool's, checked; True for one that takes anything.
    """
    if schema is True:
        return ()
    from jsonschema import Draft202012Validator, validators

    steps = count(1)

    def follow(validator: Any, ref: str, *rest: Any) -> Any:
        # jsonschema would look for others on the network.
        if not ref.startswith("#"):
            raise ValueError(f"$ref = {shown(ref)} leads out of the schema")
        # Alternatives of alternatives, each a reference, would take time exponential in the schema's length.
        if next(steps) > _MOST_STEPS:
            raise ValueError(f"more than {_MOST_STEPS} references were followed")
        return Draft202012Validator.VALIDATORS["$ref"](validator, ref, *rest)

    # Without $dynamicRef and its anchors, which tools do not use.
    checker = validators.extend(Draft202012Validator, {"$ref": follow, "$dynamicRef": lambda *_: ()})
    try:
        errors = list(islice(checker(standard_schema(schema, "")).iter_errors(arguments), _MOST_PROBLEMS))
    except Exception as error:  # a pattern that is none of Python's, references in a circle: what a schema makes of it
        return (_line("arguments", f"cannot be checked: {error or type(error).__name__}"),)
    return tuple(_line(_path("arguments", error.absolute_path), _message(error)) for error in errors)


@lru_cache(maxsize=1024)
def _fault(text: str) -> str:
    """Return what is wrong with a schema, given as JSON, or "": cached because each turn of a dialogue asks again."""
    try:
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import best_match
    except ModuleNotFoundError:
        raise ValueError("tools need jsonschema, which is not installed: pip install 'm3jax[chat]'") from None
    try:
        schema = standard_schema(json.loads(text), "parameters")
    except ValueError as error:
        return str(error)
    error = best_match(Draft202012Validator(Draft202012Validator.META_SCHEMA).iter_errors(schema))
    return "" if error is None else _line(_path("parameters", error.absolute_path), _message(error))


def standard_schema(schema: Any, location: str, is_part: bool = False) -> Any:
    """Return a copy of a schema in the dialect of 2020-12.

    Args:
        schema: or anything else, which is returned as it is.
        location: its path, for errors.
        is_part: True if it describes, with others, one value.

    Raises:
        ValueError: an unknown type, or a required name that no property has.
    """
    if not isinstance(schema, dict):
        return schema
    standard = {}
    for keyword, value in schema.items():
        inner = f"{location}.{keyword}"
        if keyword in _NAMED and isinstance(value, dict):
            standard[keyword] = {name: standard_schema(each, f"{inner}.{name}") for name, each in value.items()}
        elif keyword in _SEVERAL and isinstance(value, list):
            parts = (standard_schema(each, f"{inner}.{number}", keyword in _PARTS) for number, each in enumerate(value))
            standard[keyword] = list(parts)
        else:
            standard[keyword] = standard_schema(value, inner, keyword in _PARTS) if keyword in _ONE else value
    standard.pop("$schema", None)
    types = standard.get("type")
    names = types if isinstance(types, list) else [types]
    if types is not None:
        unknown = [name for name in names if name not in (*_TYPES, *ALIASES, _ANY)]
        if unknown or not names:
            raise ValueError(f"{location}.type = {shown(types)}: must be one of {', '.join(_TYPES)}, or a list of them")
        standard["type"] = sorted({ALIASES.get(name, name) for name in names})
        if _ANY in names:
            del standard["type"]
        elif standard.get("nullable") is True:
            standard["type"] = sorted({*standard["type"], "null"})
            standard |= {"enum": [*standard["enum"], None]} if isinstance(standard.get("enum"), list) else {}
    if isinstance(standard.get("items"), list):
        standard["prefixItems"] = standard.pop("items")
        if "additionalItems" in standard:
            standard["items"] = standard.pop("additionalItems")
    has_all_members = not is_part and all(standard.get(keyword) in (None, False) for keyword in _OTHER_MEMBERS)
    required = standard.get("required") if has_all_members else None
    for name in required if isinstance(required, list) else ():
        if isinstance(name, str) and name not in standard.get("properties", {}):
            raise ValueError(f"{location}.required: no property is called {shown(name)}; add it to the properties")
    return standard


def _message(error: Any) -> str:
    """Return what jsonschema says is wrong, without a long value, which it would begin with."""
    if len(error.message) <= _MOST_LINE // 2:
        return error.message
    return f"{shown(error.instance)} does not fit {error.validator} = {shown(error.validator_value)}"


def _path(start: str, steps: Any) -> str:
    return ".".join([start, *map(str, steps)])


def _line(location: str, message: str) -> str:
    return printable(shortened(f"{location}: {message}", _MOST_LINE))
