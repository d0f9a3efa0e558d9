"""A grammar of M3's tool calls, made from the tools' schemas, for calls that are forced.

The grammar takes a part of what the schemas take, and never more: what the parser (`m3jax.text.ToolCallParser`) reads
from a text of the grammar is valid. Where a schema says something that the grammar cannot hold, it is refused by name.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from m3jax.messages import printable, shown
from m3jax.text.chat.calls import ordered_tools
from m3jax.text.chat.schemas import standard_schema
from m3jax.text.output.marks import BLOCK, MOST_NAME, NAMESPACE
from m3jax.text.output.shapes import kind_of
from m3jax.text.output.values import written

_MOST_DEPTH = 64  # of alternatives within alternatives, and of values within values
_MOST_ALTERNATIVES = 256  # of one value

# Keywords that say nothing of which values are valid, for these and for what begins with "x-".
_NOTES = frozenset({"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"})
_NOTES |= {"$comment", "$schema", "$id", "$defs", "definitions", "format", "contentEncoding", "contentMediaType"}
_NOTES |= {"nullable", "strict"}
# The others, by the kind of value that they speak of.
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_KIND = {
    "string": ("minLength", "maxLength", "pattern"),
    "integer": _NUMBERS,
    "number": _NUMBERS,
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
}
_KNOWN = {"type", "enum", "const", *(word for words in _OF_KIND.values() for word in words)}

# A text without the namespace marker. What a union with other types reads as a number or a word is no string there.
_NO_MARKER = r"~/(?s:.*)\]<\]minimax\[>\[(?s:.*)/"
_NO_WORD = r"~/\s*((?i:true|false|null)|[+-]?[0-9.](?s:.*))\s*/"
# In JSON within an element: no text that could begin the marker.
_JSON_TEXT = r"^([^\]]|\]+[^\]<])*\]*$"


def tool_grammar(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any], parallel: bool = True
) -> str | None:
    """Return the grammar of an answer that calls tools, in llguidance's Lark syntax.

    A gateway sends it as `SamplingParams.grammar`, with `grammar_from_first_token` unset: the worker lets the model
    reason first, and the grammar begins behind `</mm:think>`. The answer is one block of calls and no other text.

    Args:
      tools: of the request, in OpenAI's layout.
      choice: OpenAI's `tool_choice`: "required" for one call or more, a name or {"type": "function", "function":
        {"name": ...}} for one call of that tool. "auto" and "none" force nothing.
      parallel: OpenAI's `parallel_tool_calls`: False is one call.

    Returns:
      The grammar; None where nothing is forced.

    Raises:
      ValueError: no tools, an unknown name, or a schema that says what the grammar cannot hold, by keyword.
    """
    if choice in ("auto", "none"):
        return None
    ordered = ordered_tools(tools)
    name = None if choice == "required" else _chosen(choice)
    called = [tool["function"] for tool in ordered if name in (None, tool["function"]["name"])]
    if not called:
        known = ", ".join(printable(tool["function"]["name"]) for tool in ordered) or "none"
        raise ValueError(f"tool_choice: no tool is called {shown(name)}; the tools are {known}")
    calls = _Calls()
    names = [calls.call(function) for function in called]
    repeated = "+" if name is None and parallel else ""
    return "\n".join(
        [
            f"start: {_literal(BLOCK + chr(10))} call{repeated} {_literal(NAMESPACE + '</tool_call>')}",
            f"call: {' | '.join(names)}",
            *calls.lines,
        ]
    )


def _chosen(choice: Any) -> str:
    """Return the name in a tool choice."""
    name = choice
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
    if not isinstance(name, str):
        raise ValueError(f"tool_choice = {shown(choice)}: must be auto, none, required or the name of a tool")
    return name


def _literal(text: str) -> str:
    """Return a text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def _opening(name: str) -> str:
    """Return what opens an element, in two terminals.

    Where an element may follow or not, another marker may stand in its place, alone. llguidance reads the longest
    terminal that may come and never goes back, so in one with the name the marker would leave nothing but the element.
    """
    return f"{_literal(NAMESPACE)} {_literal(f'<{name}>')}"


class _Calls:
    """Rules of a grammar as they are made.

    The rule of a value ends with the namespace marker of the tag that closes its element: a string is the shortest text
    before one.

    Attributes:
      lines: rules and terminals.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._rule_of: dict[int, str] = {}  # by schema, also while it is made: it may lead back to itself
        self._kept: list[Any] = []  # schemas whose ids are in use
        self._number = self._depth = 0

    def call(self, function: Mapping[str, Any]) -> str:
        """Add the rule of a tool's call, and return its name."""
        root = standard_schema(function.get("parameters", {}), "parameters")
        location = f"tool {printable(function['name'])}"
        own, bodies = self._new("call"), []
        for flat in _alternatives(root, root, location):
            _check_known(flat, location)
            bodies.append(self._object(flat, root, location, is_root=True))
        opened = _literal(f'{NAMESPACE}<invoke name="{function["name"]}">')
        self.lines.append(f"{own}: {opened} ({' | '.join(bodies)}) {_literal('</invoke>' + chr(10))}")
        return own

    def _new(self, kind: str) -> str:
        self._number += 1
        return f"{kind}_{self._number}"

    def _value(self, schema: Any, root: Any, location: str) -> str:
        """Return the name of the rule of a value, with the marker behind it."""
        if id(schema) in self._rule_of:
            return self._rule_of[id(schema)]
        if self._depth >= _MOST_DEPTH:
            raise ValueError(f"{location}: values nest deeper than {_MOST_DEPTH}")
        own = self._rule_of[id(schema)] = self._new("value")
        self._kept.append(schema)
        self._depth += 1
        flats = list(_alternatives(schema, root, location))
        for flat in flats:
            _check_known(flat, location)
        kinds = set().union(*map(_kinds, flats))
        _check_told_apart(flats, location)
        rules = []
        for flat in flats:
            rules += self._rules_of(flat, kinds, root, location)
        if not rules:
            raise ValueError(f"{location}: {shown(schema)} leaves no value that a call can have")
        self.lines.append(f"{own}: {' | '.join(rules)}")
        self._depth -= 1
        return own

    def _rules_of(self, flat: Mapping[str, Any], kinds: set[str], root: Any, location: str) -> Iterator[str]:
        """Yield what the values of one alternative are, each with the marker behind it.

        Args:
          flat: a schema without alternatives.
          kinds: of values that may stand in this place, by all alternatives.
          root: of references.
          location: for errors.
        """
        marker = _literal(NAMESPACE)
        if "enum" in flat or "const" in flat:
            members = [flat["const"]] if "const" in flat else flat["enum"]
            for member in members:
                if isinstance(member, dict | list) or not _takes(flat, member):
                    continue
                if isinstance(member, str) and NAMESPACE in member:
                    raise ValueError(f"{location}: a value of enum has the namespace marker, which would end the call")
                yield _literal((member if isinstance(member, str) else written(member)) + NAMESPACE)
            return
        for kind in sorted(_kinds(flat)):
            if kind == "string":
                yield from self._string(flat, kinds, location)
            elif kind in ("integer", "number"):
                numbers = {word: flat[word] for word in _NUMBERS if word in flat}
                plain = {"x-guidance": {"whitespace_flexible": False}, "type": kind}
                yield f"%json {json.dumps(plain | numbers)} {marker}"
            elif kind == "boolean":
                yield f'("true" | "false") {marker}'
            elif kind == "null":
                yield f'"null" {marker}'
            elif kind == "array":
                yield self._array(flat, root, location)
            elif "array" not in kinds:  # an empty element would be an array where it may be either
                yield self._object(flat, root, location)

    def _string(self, flat: Mapping[str, Any], kinds: set[str], location: str) -> Iterator[str]:
        """Add the rule of a string and yield its name, if any string is left beside the other kinds."""
        terms = [_NO_MARKER]
        fewest, most = flat.get("minLength", 0), flat.get("maxLength")
        if kinds & {"array", "object"}:
            fewest = max(1, fewest)  # at an empty element either could begin
        if most is not None and fewest > most:
            return
        terms.append(f"/(?s:.{{{fewest},{'' if most is None else most}}})/")
        if "pattern" in flat:
            terms.append(_pattern(flat["pattern"], location))
        if kinds != {"string"}:
            terms.append(_NO_WORD)
        own = self._new("string")
        self.lines.append(f"{own}[suffix={_literal(NAMESPACE)}]: {own.upper()}")
        self.lines.append(f"{own.upper()}: {' & '.join(terms)}")
        yield own

    def _array(self, flat: Mapping[str, Any], root: Any, location: str) -> str:
        """Add the rule of an array and return its name: elements of the name "item", and the marker."""
        item = lambda schema: f"{_opening('item')} {self._value(schema, root, location)} {_literal('</item>')}"
        own, first = self._new("array"), flat.get("prefixItems", [])
        fewest, most = flat.get("minItems", 0), flat.get("maxItems")
        rest = flat.get("items", True)
        parts = ""
        if rest is not False and (most is None or most > len(first)):
            element = self._new("item")
            self.lines.append(f"{element}: {item({} if rest is True else rest)}")
            bounds = f"{max(0, fewest - len(first))},{'' if most is None else most - len(first)}"
            parts = f"{element}{{{bounds}}}"
        elif fewest > len(first):
            raise ValueError(f"{location}: minItems = {fewest}, and there are {len(first)} items at most")
        for number, schema in reversed(list(enumerate(first[:most]))):
            parts = f"{item({} if schema is True else schema)} {parts}"
            parts = parts if number < fewest else f"({parts})?"
        self.lines.append(f"{own}: {parts} {_literal(NAMESPACE)}")
        return own

    def _object(self, flat: Mapping[str, Any], root: Any, location: str, is_root: bool = False) -> str:
        """Add the rule of an object and return its name: an element for each property, in their order, and the marker.

        Properties that the schema does not name are left out; what names none at all is JSON in one text, which the
        parser reads where an object is wanted.
        """
        own, properties, required = self._new("object"), flat.get("properties", {}), flat.get("required", [])
        if missing := [name for name in required if name not in properties]:
            raise ValueError(f"{location}: required {shown(missing[0])} is no property; add it to the properties")
        if not properties and flat.get("additionalProperties", True) is not False and not is_root:
            self.lines.append(f"{own}: %json {json.dumps(_free_object())} {_literal(NAMESPACE)}")
            return own
        elements = []
        for name, schema in properties.items():
            if not re.fullmatch(rf"[^<>]{{1,{MOST_NAME - 1}}}", name):
                raise ValueError(f"{location}: property {shown(name)}: a name in a call has no < or > and is not empty")
            if schema is False:
                continue
            value = self._value({} if schema is True else schema, root, f"{location}, {printable(name)}")
            element = f"{_opening(name)} {value} {_literal(f'</{name}>')}"
            elements.append(element if name in required else f"({element})?")
        self.lines.append(f"{own}: {' '.join((*elements, _literal(NAMESPACE)))}")
        return own


def _free_object() -> dict[str, Any]:
    """Return the schema of any object in JSON whose texts hold nothing that could begin the namespace marker."""
    anything = {"$ref": "#/$defs/anything"}
    members = {"type": "object", "patternProperties": {_JSON_TEXT: anything}, "additionalProperties": False}
    kinds = [{"type": "string", "pattern": _JSON_TEXT}, *({"type": kind} for kind in ("number", "boolean", "null"))]
    kinds += [{"type": "array", "items": anything}, members]
    return members | {"x-guidance": {"whitespace_flexible": False}, "$defs": {"anything": {"anyOf": kinds}}}


def _alternatives(schema: Any, root: Any, location: str, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield a schema's alternatives, in which no reference, anyOf, oneOf or allOf is left at the top.

    Raises:
      ValueError: a reference that leads nowhere, alternatives that nest too deep, parts of allOf that cannot be merged,
        or of oneOf that may both be met.
    """
    if depth > _MOST_DEPTH:
        raise ValueError(f"{location}: alternatives nest deeper than {_MOST_DEPTH}")
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise ValueError(f"{location}: {shown(schema)} is no schema that a call's grammar can hold")
    own = {word: value for word, value in schema.items() if word not in ("$ref", "anyOf", "oneOf", "allOf")}
    parts = [[own]]
    if "$ref" in schema:
        parts.append(list(_alternatives(_target(schema["$ref"], root, location), root, location, depth + 1)))
    for word in ("anyOf", "oneOf"):
        if word in schema:
            flats = [flat for each in schema[word] for flat in _alternatives(each, root, location, depth + 1)]
            if word == "oneOf" and not all(_exclude(a, b) for i, a in enumerate(flats) for b in flats[:i]):
                raise ValueError(
                    f"{location}: two schemas of oneOf may both be met; give them different types, or a required "
                    "property with a const of each, or write anyOf"
                )
            parts.append(flats)
    parts += [list(_alternatives(each, root, location, depth + 1)) for each in schema.get("allOf", ())]
    merged = parts[0]
    for part in parts[1:]:
        if len(merged) * len(part) > _MOST_ALTERNATIVES:
            raise ValueError(f"{location}: more than {_MOST_ALTERNATIVES} alternatives, by anyOf, oneOf and allOf")
        merged = [both for one in merged for other in part if (both := _merged(one, other, location)) is not None]
    # A schema that was not changed stays the same object: the rules of schemas are told apart by it.
    yield from [schema] if merged == [schema] else merged


def _target(ref: Any, root: Any, location: str) -> Any:
    """Return the schema that a JSON pointer leads to."""
    schema = root
    steps = ref[2:].split("/") if isinstance(ref, str) and ref.startswith("#/") else [] if ref == "#" else [None]
    for step in steps:
        name = step and step.replace("~1", "/").replace("~0", "~")
        if not isinstance(schema, Mapping) or name not in schema:
            raise ValueError(f"{location}: $ref = {shown(ref)} leads to no schema within the parameters")
        schema = schema[name]
    return schema


def _merged(one: Mapping[str, Any], other: Mapping[str, Any], location: str) -> Mapping[str, Any] | None:
    """Return a schema that says what both say; None if no value has the types of both."""
    if not _says(one) or not _says(other):
        return other if not _says(one) else one
    merged = {**one, **other}
    for word in one.keys() & other.keys() - _NOTES:
        a, b = one[word], other[word]
        if word == "type":
            merged["type"] = sorted(_kinds({"type": a}) & _kinds({"type": b}))
            if not merged["type"]:
                return None
        elif word == "required":
            merged[word] = [*a, *(name for name in b if name not in a)]
        elif word == "properties" and all(a[name] == b[name] for name in a.keys() & b.keys()):
            merged[word] = {**a, **b}
        elif a != b:
            raise ValueError(f"{location}: {word} is said twice, by allOf or beside $ref or anyOf: say it once")
    return merged


def _says(schema: Mapping[str, Any]) -> bool:
    """True if a schema has a keyword that is not a note."""
    return any(word not in _NOTES and not word.startswith("x-") for word in schema)


def _exclude(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if no value can be of both schemas: by their types, by their members, or by a property of both."""
    kinds, others = (_kinds(each) | ({"integer"} if "number" in _kinds(each) else set()) for each in (one, other))
    are_typed = all(each.keys() & {"type", "enum", "const"} for each in (one, other))
    if are_typed and not kinds & others:
        return True
    members, of_other = (_members(each) for each in (one, other))
    if members is not None and of_other is not None and not members & of_other:
        return True
    both = set(one.get("required", ())) & set(other.get("required", ()))
    for name in both:
        inner = [each.get("properties", {}).get(name, {}) for each in (one, other)]
        if all(isinstance(each, Mapping) for each in inner):
            members, of_other = map(_members, inner)
            if members is not None and of_other is not None and not members & of_other:
                return True
    return False


def _check_told_apart(flats: Sequence[Mapping[str, Any]], location: str) -> None:
    """Raise ValueError for two arrays, or two objects, that the parser could take for one another.

    A call has no types: the parser reads an item by the schemas of all arrays that may stand in its place, and a member
    by those of all objects that fit by their names and listed values.
    """
    for kind in ("array", "object"):
        alike = [flat for flat in flats if kind in _kinds(flat) and not flat.keys() & {"enum", "const"}]
        for number, one in enumerate(alike):
            for other in alike[:number]:
                if kind == "array" or not _are_told_apart(one, other):
                    raise ValueError(
                        f"{location}: two schemas of an {kind} in one place: a call cannot say which it means; merge "
                        "them, or give objects a required property with a const of each"
                    )


def _are_told_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if no object can be of both schemas by its names and listed values, or if it is read alike by both."""
    names, of_other = (each.get("properties", {}) for each in (one, other))
    if _exclude(one, other) or all(names[name] == of_other[name] for name in names.keys() & of_other.keys()):
        return True
    is_no_other = lambda this, that: (
        that.get("additionalProperties") is False
        and any(name not in that.get("properties", {}) for name in this.get("required", ()))
    )
    return is_no_other(one, other) and is_no_other(other, one)


def _members(schema: Mapping[str, Any]) -> set[str] | None:
    """Return the values that a schema lists, as JSON; None if it lists none."""
    if "const" in schema:
        return {json.dumps(schema["const"])}
    return {json.dumps(member) for member in schema["enum"]} if "enum" in schema else None


def _kinds(flat: Mapping[str, Any]) -> set[str]:
    """Return the kinds of value that a schema without alternatives takes; {"string"} where it says nothing.

    Any value may be a text, so a call writes one where the schema leaves it open.
    """
    types = flat.get("type")
    if types is not None:
        return set(types) if isinstance(types, list) else {types}
    if "const" in flat or "enum" in flat:
        return {kind_of(member) for member in ([flat["const"]] if "const" in flat else flat["enum"])}
    for kind, words in _OF_KIND.items():
        if any(word in flat for word in words):
            return {kind}
    return {"string"}


def _takes(flat: Mapping[str, Any], member: Any) -> bool:
    """True if a value that a schema lists has one of the schema's types."""
    kind, kinds = kind_of(member), _kinds(flat)
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _check_known(flat: Mapping[str, Any], location: str) -> None:
    """Raise ValueError for a keyword that the grammar cannot hold."""
    for word in flat:
        if word not in _KNOWN and word not in _NOTES and not word.startswith("x-"):
            raise ValueError(f"{location}: a grammar cannot hold {shown(word)}; leave it out, or do not force the call")
    listed = flat.keys() & {"enum", "const"}
    if listed and (others := flat.keys() & {word for words in _OF_KIND.values() for word in words}):
        raise ValueError(f"{location}: {min(others)} beside {min(listed)}: leave it out, the values are listed")


def _pattern(pattern: str, location: str) -> str:
    """Return a JSON schema's pattern, which may match anywhere in a text, as a terminal of the whole text."""
    from llguidance import regex_to_lark

    if _has_top_level_bar(pattern):
        raise ValueError(f"{location}: pattern = {shown(pattern)}: put the alternatives into one group")
    begin, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    inner = pattern[1 if begin else 0 : len(pattern) - 1 if end else None]
    return f"/{'' if begin else '(?s:.*)'}({regex_to_lark(inner, use_ascii='dw')}){'' if end else '(?s:.*)'}/"


def _has_top_level_bar(pattern: str) -> bool:
    """True if a pattern has a | that is in no group and in no set of characters."""
    bare = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", pattern)
    depth = 0
    for letter in bare:
        depth += (letter == "(") - (letter == ")")
        if letter == "|" and depth == 0:
            return True
    return False
