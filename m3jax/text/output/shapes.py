"""JSON schemas reduced to what helps to read a value that was written without types.

A schema becomes a list of `Shape`s, its alternatives: every `anyOf` and `oneOf` is multiplied out, every `allOf` and
`$ref` merged in. A schema that leads back to itself becomes a list that holds itself further down.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from m3jax.messages import shown
from m3jax.text.chat.schemas import ALIASES

# "number" takes whole numbers too, so it is two kinds.
KINDS = {
    **{name: frozenset({name}) for name in {"null", "boolean", "integer", "string", "array", "object"}},
    "number": frozenset({"number", "integer"}),
}
KINDS |= {alias: KINDS[name] for alias, name in ALIASES.items()}
MOST_ALTERNATIVES, MOST_DEPTH = 64, 64


@dataclass(frozen=True, eq=False)
class Shape:
    """One alternative of a schema.

    Attributes:
        kinds: names of the types that it takes; None where it names none.
        members: the values of `enum` or `const`; None where there is neither.
        properties: of an object, the alternatives of each member that it names.
        required: names of members that must be there.
        others: alternatives of members that it does not name; None where there must be none.
        items: alternatives of an array's items, behind the first few.
        first_items: alternatives of each of the first items.
    """

    kinds: frozenset[str] | None = None
    members: tuple[Any, ...] | None = None
    properties: Mapping[str, "Shapes"] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    others: "Shapes | None" = ()
    items: "Shapes" = ()
    first_items: Sequence["Shapes"] = ()


Shapes = Sequence[Shape]  # an empty one allows anything, as does a single Shape()
ANYTHING: Shapes = (Shape(),)


def kinds_of(shapes: Shapes) -> frozenset[str] | None:
    """Return the names of the types that some alternative takes; None if an alternative does not name its types."""
    if not shapes or any(shape.kinds is None for shape in shapes):
        return None
    return frozenset().union(*(shape.kinds for shape in shapes))


def is_only_array(shapes: Shapes) -> bool:
    """True if a value can be an array, and neither an object nor a string."""
    kinds = kinds_of(shapes) or frozenset()
    return "array" in kinds and not kinds & {"object", "string"}


def kind_of(value: Any) -> str:
    """Return the name of a JSON value's type; a float's is "number", whole or not."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names = {int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def member_shapes(shapes: Shapes, name: str, index: int) -> Shapes:
    """Return the alternatives for the element with this name and index (from 0) within a value.

    An element named "item" is one of an array where the value may be an array; else it is a member of an object where
    it may be an object. All elements of what can only be an array are its items.
    """
    kinds = kinds_of(shapes)
    if kinds is None:
        return ANYTHING
    is_item = "array" in kinds and (name == "item" or "object" not in kinds)
    alternatives: list[Shape] = []
    for shape in shapes:
        if is_item and "array" in shape.kinds:
            alternatives += shape.first_items[index] if index < len(shape.first_items) else shape.items or ANYTHING
        elif not is_item and "object" in shape.kinds:
            alternatives += shape.properties.get(name, shape.others or ANYTHING)
    return list(dict.fromkeys(alternatives)) or ANYTHING


def names_member(shapes: Shapes, name: str) -> bool:
    """True if an alternative names this member, or if the name is "item" and an alternative is an array."""
    return any(name in s.properties or (name == "item" and s.kinds and "array" in s.kinds) for s in shapes)


def shapes_of(schema: Any, location: str) -> Shapes:
    """Reduce a JSON schema to its alternatives.

    Args:
        schema: a schema: an object, or a boolean. What it says besides types, `pattern` or `minimum` say, is not read.
        location: the schema's place in the request, for errors.

    Returns:
        Its alternatives. A schema that contradicts itself, or has more than 64 alternatives, says nothing.

    Raises:
        ValueError: something that is no schema, a `$ref` that leads nowhere or out of the schema, or alternatives
            within alternatives deeper than 64.
    """
    reader = _Reader(schema, location)
    shapes = reader.later(schema)
    for inner_schema in reader.queue:  # reading a schema appends the schemas within it to the queue
        reader.now(inner_schema, 0)
    return shapes


class _Reader:
    """Reader that visits each schema within a root once, so that reading ends for one that leads back to itself.

    What a schema says of members and items is read later, and stands as an empty list in its shape until then. Only
    alternatives are read at once; one that leads back to itself by alternatives alone adds nothing to them.
    """

    def __init__(self, root: Any, location: str):
        self.root, self.location = root, location
        self.known: dict[int, list[Shape]] = {}
        self.begun: set[int] = set()
        self.queue: list[Any] = []

    def later(self, schema: Any) -> Shapes:
        """Return the list that will hold the alternatives of a schema once it is read."""
        if id(schema) not in self.known:
            self.known[id(schema)] = []
            self.queue.append(schema)
        return self.known[id(schema)]

    def now(self, schema: Any, depth: int) -> Shapes:
        """Return the list of a schema's alternatives, filled unless the schema is being read further up the stack."""
        self.later(schema)
        if id(schema) not in self.begun:
            self.begun.add(id(schema))
            self.known[id(schema)] += self.alternatives(schema, depth)
        return self.known[id(schema)]

    def alternatives(self, schema: Any, depth: int) -> Shapes:
        if isinstance(schema, bool):
            return ANYTHING
        if not isinstance(schema, dict):
            raise ValueError(f"{self.location}: {shown(schema)} is no JSON schema, which is an object or a boolean")
        if depth > MOST_DEPTH:
            raise ValueError(f"{self.location}: alternatives nest deeper than {MOST_DEPTH}")
        parts: list[Shapes] = [[self.own(schema)]]
        if "$ref" in schema:
            parts.append(self.now(self.target(schema["$ref"]), depth + 1))
        for word in ("anyOf", "oneOf"):
            if choices := self.listed(schema, word):
                parts.append([each for choice in choices for each in self.now(choice, depth + 1)])
        parts += [self.now(part, depth + 1) for part in self.listed(schema, "allOf")]
        merged = parts[0]
        for part in parts[1:]:
            merged = [both for one in merged for other in part if (both := _merged(one, other))]
            if len(merged) > MOST_ALTERNATIVES:
                return ANYTHING
        return merged

    def own(self, schema: dict[str, Any]) -> Shape:
        """Return the shape of the schema's own keywords, without the alternatives that it lists or refers to."""
        properties, others = schema.get("properties", {}), schema.get("additionalProperties")
        if not isinstance(properties, dict):
            raise ValueError(f"{self.location}: properties = {shown(properties)}: must be an object")
        items, first_items = schema.get("items"), self.listed(schema, "prefixItems")
        if isinstance(items, list):  # until draft 2019-09 this was how prefixItems was written
            items, first_items = schema.get("additionalItems"), items
        return Shape(
            kinds=self.kinds(schema),
            members=self.members(schema),
            properties={name: self.later(inner) for name, inner in properties.items()},
            required=frozenset(name for name in self.listed(schema, "required") if isinstance(name, str)),
            others=None if others is False else () if others is None else self.later(others),
            items=() if items is None else self.later(items),
            first_items=[self.later(inner) for inner in first_items],
        )

    def kinds(self, schema: dict[str, Any]) -> frozenset[str] | None:
        """Return the kinds that a schema takes by its own keywords; None if they give none or name an unknown type."""
        types, members = schema.get("type"), self.members(schema)
        names = types if isinstance(types, list) else [types]
        if types is not None and not all(isinstance(name, str) for name in names):
            raise ValueError(f"{self.location}: type = {shown(types)}: must be the name of a type, or a list of them")
        if types is not None:
            known = [KINDS.get(name) for name in names]
            kinds = None if None in known else frozenset().union(*known)
        elif members is not None:
            kinds = frozenset(map(kind_of, members))
        elif schema.get("properties") or isinstance(schema.get("additionalProperties"), dict):
            kinds = KINDS["object"]
        else:
            kinds = KINDS["array"] if "items" in schema or "prefixItems" in schema else None
        takes_null = schema.get("nullable") is True or (members is not None and None in members)
        return kinds | KINDS["null"] if kinds is not None and takes_null else kinds

    def members(self, schema: dict[str, Any]) -> tuple[Any, ...] | None:
        if "const" in schema:
            return (schema["const"],)
        return tuple(self.listed(schema, "enum")) if "enum" in schema else None

    def listed(self, schema: dict[str, Any], word: str) -> list[Any]:
        values = schema.get(word, [])
        if not isinstance(values, list) or (word in schema and not values and word in ("anyOf", "oneOf", "enum")):
            raise ValueError(f"{self.location}: {word} = {shown(values)}: must be a list, and not empty")
        return values

    def target(self, ref: Any) -> Any:
        """Return the schema that a JSON pointer leads to."""
        schema = self.root
        steps = ref[1:].split("/")[1:] if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")) else [None]
        for step in steps:
            step = step and unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(schema, list) and str(step).isdecimal() and int(step) < len(schema):
                schema = schema[int(step)]
            elif isinstance(schema, dict) and step in schema:
                schema = schema[step]
            else:
                raise ValueError(f"{self.location}: $ref = {shown(ref)} leads to no schema within the parameters")
        return schema


def _merged(one: Shape, other: Shape) -> Shape | None:
    """Return a shape that takes the types that both take; None if they have no type in common."""
    kinds = other.kinds if one.kinds is None else one.kinds
    if one.kinds is not None and other.kinds is not None and not (kinds := one.kinds & other.kinds):
        return None
    return replace(
        one,
        kinds=kinds,
        members=other.members if one.members is None else one.members,
        properties={**other.properties, **one.properties},
        required=one.required | other.required,
        others=None if None in (one.others, other.others) else one.others or other.others,
        items=one.items or other.items,
        first_items=one.first_items or other.first_items,
    )
