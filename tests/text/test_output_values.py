"""The value of a parameter's text: a row for each rule of docs/chat_output.md, with the schema that asks for it."""

import json
import sys

import pytest
from support.chat_strategies import tool
from support.outputs import HEAD, TAIL, fed, parser, wire, with_parameters

from m3jax.text import OutputParser
from m3jax.text.chat import schemas
from m3jax.text.output import Message

BIG = 10**25
ANY_OF = lambda *names: {"anyOf": [{"type": name} for name in names]}
POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": False}
TREE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
}
SHAPES = {
    "oneOf": [
        {"type": "object", "properties": {"kind": {"const": "count"}, "value": {"type": "integer"}}},
        {"type": "object", "properties": {"kind": {"const": "text"}, "value": {"type": "string"}}},
    ]
}
TEXT_OF = lambda **members: "".join(f"@<{name}>{value}@</{name}>" for name, value in members.items())
ITEMS = lambda *values: "".join(f"@<item>{value}@</item>" for value in values)

VALUES = [
    # A string keeps its every character; so does what the schema says nothing of.
    ({"type": "string"}, " 5 \n", " 5 \n"),
    ({"type": "string"}, "null", "null"),
    ({"type": "string"}, "&lt;b&gt; &amp;amp;", "&lt;b&gt; &amp;amp;"),
    ({"type": "string"}, "", ""),
    ({"type": "string", "enum": ["a", "b"]}, "c", "c"),
    ({"type": "string"}, TEXT_OF(a="1"), wire(TEXT_OF(a="1"))),
    ({}, "5", "5"),
    ({}, "true", "true"),
    ({}, "null", "null"),
    (True, "[1]", "[1]"),
    ({"description": "anything"}, ITEMS("1", "2"), ["1", "2"]),
    ({}, TEXT_OF(a="1", b=ITEMS("x")), {"a": "1", "b": ["x"]}),
    ({"type": "any"}, "5", "5"),
    ({"anyOf": [{}, {"type": "null"}]}, "null", "null"),
    # Numbers, as a template writes them and as models do.
    ({"type": "integer"}, "5", 5),
    ({"type": "integer"}, " -018956\n", -18956),
    ({"type": "integer"}, "5.0", 5),
    ({"type": "integer"}, str(BIG), BIG),
    ({"type": "integer"}, "5.5", "5.5"),
    # With a point or an exponent it is read as a float64, which does not tell all whole numbers from 2**53 on apart.
    ({"type": "integer"}, "9007199254740991.0", 2**53 - 1),
    ({"type": "integer"}, "-9007199254740991.0", 1 - 2**53),
    ({"type": "integer"}, "9007199254740992.0", "9007199254740992.0"),
    ({"type": "integer"}, "9007199254740993.0", "9007199254740993.0"),
    ({"type": "integer"}, "-1e16", "-1e16"),
    ({"type": "integer"}, "9007199254740993", 2**53 + 1),
    # A word has up to 64 characters, the space around it too; what is longer is a string where one may stand.
    ({"type": ["string", "null"]}, " " * 60 + "null", None),
    ({"type": ["string", "null"]}, " " * 61 + "null", " " * 61 + "null"),
    ({"type": ["integer", "string"]}, "7" * 64, int("7" * 64)),
    ({"type": ["integer", "string"]}, "7" * 65, "7" * 65),
    ({"type": "integer"}, "7" * 65, int("7" * 65)),
    ({"type": "integer"}, "1_000", "1_000"),
    ({"type": "integer"}, "٣", "٣"),
    ({"type": "integer"}, "true", "true"),
    ({"type": "integer"}, "null", "null"),
    ({"type": "integer"}, "9" * 5000, "9" * 5000),
    ({"type": "number"}, "5", 5),
    ({"type": "number"}, "5.0", 5.0),
    ({"type": "number"}, "1e+25", 1e25),
    ({"type": "number"}, "-.5", -0.5),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "number"}, "five", "five"),
    # Booleans and null.
    ({"type": "boolean"}, "true", True),
    ({"type": "boolean"}, "False", False),
    ({"type": "boolean"}, "1", True),
    ({"type": "boolean"}, "0", False),
    ({"type": "boolean"}, "yes", "yes"),
    ({"type": "null"}, "", None),
    ({"type": "null"}, "Null", None),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "None", "None"),
    ({"type": ["string", "null"]}, "", ""),
    ({"type": "string", "nullable": True}, "null", None),
    ({"type": ["integer", "null"]}, "", None),
    # A union is the narrowest type that the text spells, whatever order they are listed in.
    (ANY_OF("string", "integer"), "5", 5),
    (ANY_OF("integer", "string"), "5 pm", "5 pm"),
    (ANY_OF("integer", "string"), "1e5", "1e5"),
    (ANY_OF("string", "integer"), "5.0", "5.0"),
    ({"type": "integer"}, "1e5", 100000),
    (ANY_OF("string", "number"), "1e5", 1e5),
    (ANY_OF("boolean", "integer"), "1", 1),
    (ANY_OF("string", "array"), "[1]", "[1]"),
    (ANY_OF("string", "array"), ITEMS("1"), ["1"]),
    (ANY_OF("string", "number"), "7" * 65, "7" * 65),
    ({"type": ["string", "integer", "null"]}, "-3", -3),
    # Values that are listed.
    ({"enum": ["1", "a"]}, "1", "1"),
    ({"enum": [1, 2, "auto"]}, "2", 2),
    ({"enum": [1, 2, "auto"]}, "auto", "auto"),
    ({"enum": [1, 2]}, "3", 3),
    ({"enum": ["on", None]}, "null", None),
    ({"enum": [True, "1"]}, "true", True),
    # A member is taken before any rule of kinds: the text "5" where it is one, and 5 is not.
    ({"enum": ["5", 7]}, "5", "5"),
    ({"enum": ["5", 7]}, "7", 7),
    ({"enum": ["null", None, True]}, "null", "null"),
    ({"enum": [None, "null", True]}, "null", None),
    ({"const": 7}, "7", 7),
    # Arrays.
    ({"type": "array", "items": {"type": "integer"}}, ITEMS("1", "x", "3"), [1, "x", 3]),
    ({"type": "array", "items": {"type": "integer"}}, "@<n>1@</n>@<n>2@</n>", [1, 2]),
    ({"type": "array"}, "", []),
    ({"type": "array"}, " \n", []),
    ({"type": "array"}, '[1, "a", {"b": null}]', [1, "a", {"b": None}]),
    ({"type": "array"}, "[1, NaN]", "[1, NaN]"),
    ({"type": "array"}, "[1e999]", "[1e999]"),
    ({"type": "array"}, '{"a": 1}', '{"a": 1}'),
    ({"type": "array"}, "[" * 70 + "]" * 70, "[" * 70 + "]" * 70),
    ({"type": "array"}, "[" * 9000, "[" * 9000),
    ({"type": "array"}, "a, b", "a, b"),
    ({"type": "array", "items": {"type": ["string", "null"]}}, ITEMS("", "null", "a"), ["", None, "a"]),
    ({"type": "array", "items": {"type": ["integer", "null"]}}, ITEMS("", "1"), [None, 1]),
    ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, ITEMS("1", "2", "3"), [1, "2", "3"]),
    ({"type": "array", "prefixItems": [{}], "items": {"type": "integer"}}, ITEMS("1", "2", "3"), ["1", 2, 3]),
    ({"items": [{"type": "integer"}], "additionalItems": {"type": "boolean"}}, ITEMS("1", "true"), [1, True]),
    ({"type": "array", "items": {"type": "array", "items": {"type": "number"}}}, ITEMS(ITEMS("1"), ""), [[1], []]),
    # Objects.
    (POINT, TEXT_OF(x="1.5", y="2"), {"x": 1.5, "y": "2"}),
    (POINT, "", {}),
    (POINT, '{"x": 1}', {"x": 1}),
    (POINT, "1, 2", "1, 2"),
    (POINT, TEXT_OF(x="1") + TEXT_OF(x="2"), {"x": 1}),
    (POINT, ITEMS("1"), {"item": "1"}),
    ({"additionalProperties": {"type": "integer"}}, TEXT_OF(a="1", b="2"), {"a": 1, "b": 2}),
    ({"type": "object"}, TEXT_OF(a="1", b=TEXT_OF(c="x")), {"a": "1", "b": {"c": "x"}}),
    ({"type": "object", "properties": {"item": {"type": "integer"}}}, ITEMS("1"), {"item": 1}),
    ({"type": "integer"}, TEXT_OF(a="1"), {"a": "1"}),
    # Alternatives, parts and references.
    ({"anyOf": [POINT, NAMED]}, TEXT_OF(name="5"), {"name": "5"}),
    ({"anyOf": [NAMED, POINT]}, TEXT_OF(x="5"), {"x": 5}),
    (SHAPES, TEXT_OF(kind="count", value="5"), {"kind": "count", "value": 5}),
    (SHAPES, TEXT_OF(kind="text", value="5"), {"kind": "text", "value": "5"}),
    ({"anyOf": [POINT, {"type": "array", "items": {"type": "integer"}}]}, ITEMS("1"), [1]),
    # What the first alternative says nothing of is any value, a structure too; the second takes no text there.
    *[({"anyOf": [{"type": "object", "properties": {"a": {}, "b": {"type": "string"}}},
                  {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}]},
       TEXT_OF(a=text, b="5"), {"a": a, "b": b})
      for text, a, b in (("x", "x", "5"), (TEXT_OF(c="1"), {"c": "1"}, "5"), ("1", "1", 5))],
    ({"allOf": [POINT, {"properties": {"y": {"type": "integer"}}}]}, TEXT_OF(x="1", y="2"), {"x": 1, "y": 2}),
    ({"allOf": [{"type": ["integer", "string"]}, {"type": "integer"}]}, "5", 5),
    ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "5", "5"),
    ({"$ref": "#/$defs/number"}, "5", 5),
    ({"$ref": "#/$defs/a~1b%20c"}, "true", True),
    ({"$ref": "#/$defs/tree", "description": "a tree"}, TEXT_OF(value="1", children=ITEMS(TEXT_OF(value="2"))),
     {"value": 1, "children": [{"value": 2}]}),
    ({"$ref": "#/$defs/circle"}, "5", "5"),
    ({"$ref": "#/$defs/round"}, "5", 5),
    ({"$ref": "#/$defs/expression"}, TEXT_OF(left="1", right=TEXT_OF(left="2", right="x")),
     {"left": 1, "right": {"left": 2, "right": "x"}}),
]  # fmt: skip
DEFINITIONS = {
    "number": {"type": "integer"},
    "a/b c": {"type": "boolean"},
    "tree": TREE,
    "circle": {"$ref": "#/$defs/circle"},
    "round": {"anyOf": [{"$ref": "#/$defs/round"}, {"type": "integer"}]},
    "expression": {
        "anyOf": [
            {"type": "integer"},
            {"type": "object", "properties": {side: {"$ref": "#/$defs/expression"} for side in ("left", "right")}},
        ]
    },
}
IDS = [f"{number}: {json.dumps(schema)[:60]} of {text[:20]!r}" for number, (schema, text, _) in enumerate(VALUES)]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES, ids=IDS)
def test_a_text_is_a_value_by_its_schema(schema, text, value):
    """Within the tool's parameters, and as deep as an item: the same rules; what fits nothing stays as it was."""
    parameters = {"type": "object", "$defs": DEFINITIONS, "properties": {"p": schema, "list": {"items": schema}}}
    output = wire(f"{HEAD}@<p>{text}@</p>@<list>@<item>{text}@</item>@</list>{TAIL}")
    (call,) = parser([tool("f", parameters)]).parse(output).tool_calls
    assert repr(call.arguments["p"]) == repr(value) and type(call.arguments["p"]) is type(value)
    assert repr(call.arguments["list"]) == repr([value])


@pytest.mark.parametrize(
    ("schema", "faults"),
    [
        ({"type": "array"}, ()), ({"type": ["array", "null"]}, ()), (ANY_OF("object", "array"), ("n",)),
        ({"type": "object"}, ("n",)), ({"type": "string"}, ()), ({}, ("n",)),
    ],
)  # fmt: skip
def test_only_in_an_array_elements_have_one_name_without_a_fault(schema, faults):
    message = parser(with_parameters(p=schema)).parse(wire(f"{HEAD}@<p>@<n>1@</n>@<n>2@</n>@</p>{TAIL}"))
    (call,) = message.tool_calls
    assert call.is_whole and message.faults == tuple(f"a second <{name}> in call 0 is dropped" for name in faults)


@pytest.mark.parametrize("name", ["str", "int", "float", "bool", "list", "dict"])
def test_names_of_pythons_types_are_known(name):
    """As files of benchmarks have them."""
    texts = {"str": "5", "int": "5", "float": "5.5", "bool": "true", "list": ITEMS("a"), "dict": TEXT_OF(a="b")}
    (call,) = parser(with_parameters(p={"type": name})).parse(wire(f"{HEAD}@<p>{texts[name]}@</p>{TAIL}")).tool_calls
    assert type(call.arguments["p"]).__name__ == name


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": 5}, "parameters.properties.p.items.type = 5: must be one of null, boolean,"),
        ({"type": "strin"}, "parameters.properties.p.items.type = 'strin': must be one of null, boolean,"),
        ({"type": []}, "items.type = []: must be one of"),
        ({"type": ["string", "strin"]}, "items.type = ['string', 'strin']: must be one of"),
        ({"anyOf": [{}, {"$defs": {"a": {"type": "x"}}}]}, "items.anyOf.1.$defs.a.type = 'x': must be one of"),
        ({"properties": {"a": {}}, "required": ["b"]}, "items.required: no property is called 'b'; add it"),
        ({"required": ["b"], "additionalProperties": False}, "items.required: no property is called 'b'; add it"),
        ({"required": [5]}, "items.required.0: 5 is not of type 'string'"),
        ({"minLength": -1}, "items.minLength: -1 is less than the minimum of 0"),
        ({"minimum": "x" * 500}, "items.minimum: 'xxx"),
        ({"type": [None]}, "type = [None]"),
        ("string", "items: 'string' is not of type 'object', 'boolean'"),
        ({"properties": []}, "items.properties: [] is not of type 'object'"),
        ({"properties": {"a": 5}}, "items.properties.a: 5 is not of type 'object', 'boolean'"),
        ({"anyOf": []}, "items.anyOf: [] should be non-empty"),
        ({"oneOf": {"type": "string"}}, "items.oneOf: {'type': 'string'} is not of type 'array'"),
        ({"enum": "ab"}, "items.enum: 'ab' is not of type 'array'"),
        ({"$ref": "#/$defs/none"}, "$ref = '#/$defs/none' leads to no schema"),
        ({"$ref": "https://example.org/a.json"}, "leads to no schema within the parameters"),
        ({"enum": []}, "enum = []: must be a list, and not empty"),
        ({"$ref": 5}, "items.$ref: 5 is not of type 'string'"),
        ({"items": {"$ref": "#/properties/p/items/1"}}, "leads to no schema"),
    ],
)
def test_what_is_no_schema_is_refused(schema, message):
    """One line that names the tool, before anything is parsed."""
    with pytest.raises(ValueError) as refusal:
        OutputParser([tool("other", {}), tool("f", {"type": "object", "properties": {"p": {"items": schema}}})])
    assert message in str(refusal.value) and str(refusal.value).startswith("tool 2 (f): ")
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {}, "b": {}}},
        {"required": ["a"], "additionalProperties": {"type": "integer"}},
        {"allOf": [{"properties": {"a": {}}}], "required": ["a"]},
        {"type": "string", "pattern": r"^\p{L}+$", "format": "no such", "example": "x", "x-order": 1},
        {"properties": {"type": {"type": "string"}, "required": {"enum": ["type"]}, "items": {}}},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "items": [{}, {"type": "int"}],
            "additionalItems": False,
        },
    ],
)
def test_what_is_a_schema_is_taken(schema):
    """Names that are required by alternatives, patterns of other languages, keywords that are names, older dialects."""
    OutputParser([tool("f", {"type": "object", "properties": {"p": schema}})])


PROBLEMS = [
    ({"type": "integer"}, "@<p>three@</p>", "arguments.p: 'three' is not of type 'integer'"),
    ({"type": "array", "items": {"type": "integer"}}, f"@<p>{ITEMS('1', 'x')}@</p>", "arguments.p.1: 'x' is not of"),
    ({"type": "string", "enum": ["a", "b"]}, "@<p>c@</p>", "arguments.p: 'c' is not one of ['a', 'b']"),
    ({"type": "int", "minimum": 5}, "@<p>4@</p>", "arguments.p: 4 is less than the minimum of 5"),
    ({}, "", "arguments: 'p' is a required property"),
    ({}, "@<p>1@</p>@<q>2@</q>", "arguments: Additional properties are not allowed ('q' was unexpected)"),
    ({"type": "string", "maxLength": 5}, f"@<p>{'x' * 999}@</p>", "does not fit maxLength = 5"),
    ({"type": "string", "pattern": r"^\p{L}+$"}, "@<p>a@</p>", r"arguments: cannot be checked: bad escape \p"),
    ({"$ref": "#/$defs/circle"}, "@<p>a@</p>", "arguments: cannot be checked: "),
    ({"type": "int", "nullable": True}, "@<p>null@</p>", ""),
    ({"type": "any"}, "@<p>1@</p>", ""),
    ({"type": ["str", "null"]}, "@<p>null@</p>", ""),
    ({"items": [{"type": "integer"}], "additionalItems": False}, f"@<p>{ITEMS('1')}@</p>", ""),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "problem"), PROBLEMS)
def test_arguments_that_break_their_schema_are_reported_with_the_call(schema, text, problem):
    """And are there all the same, whether the output is parsed at once or its events are put together."""
    parameters = {"type": "object", "properties": {"p": schema}, "required": ["p"], "additionalProperties": False}
    reader = parser([tool("f", parameters | {"$defs": DEFINITIONS})])
    message = reader.parse(wire(HEAD + text + TAIL))
    (call,) = message.tool_calls
    assert call.is_whole and [*call.arguments] == [name for name in "pq" if f"<{name}>" in text]
    assert len(call.problems) == bool(problem) and problem in "".join(call.problems), call.problems
    assert all(each.isprintable() and len(each) <= 160 for each in call.problems)
    (streamed,) = Message.of(fed(reader, wire(HEAD + text + TAIL))).tool_calls
    assert (streamed.arguments, streamed.problems) == (call.arguments, call.problems)


def test_a_call_of_a_tool_that_nobody_declared_is_reported_with_it():
    """One that breaks off too; of other calls that break off nothing can be said, nor where a tool takes anything."""
    tools = [tool("g", {"type": "object", "properties": {"p": {}}, "required": ["p"]})]
    for output, name, problems in (
        (HEAD + TAIL, "f", ("no tool is called 'f'",)),
        (HEAD, "f", ("no tool is called 'f'",)),
        (HEAD.replace('"f"', "g"), "g", ()),
    ):
        (call,) = parser(tools).parse(wire(output)).tool_calls
        assert (call.name, call.problems) == (name, problems)
    (call,) = parser([{"function": {"name": "f"}}]).parse(wire(f"{HEAD}@<p>1@</p>{TAIL}")).tool_calls
    assert call.problems == ()


def test_a_tool_that_takes_anything_is_not_checked(monkeypatch):
    """Its schema is True; a server whose tools have no parameters needs no jsonschema. One of False takes nothing."""
    assert schemas.problems_of({"a": 1}, False) == ("arguments: False schema does not allow {'a': 1}",)
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    assert schemas.problems_of({"a": 1}, True) == ()


def test_references_are_followed_up_to_their_limit(monkeypatch):
    """As often as the arguments make it, and to nowhere out of the schema."""
    monkeypatch.setattr(schemas, "_MOST_STEPS", 3)
    schema = {"$defs": {"n": {"type": "integer"}}, "items": {"$ref": "#/$defs/n"}}
    assert schemas.problems_of([1, 2, 3], schema) == ()
    assert schemas.problems_of([1, 2, "x"], schema) == ("arguments.2: 'x' is not of type 'integer'",)
    assert schemas.problems_of([1] * 4, schema) == (
        "arguments: cannot be checked: more than 3 references were followed",
    )
    (problem,) = schemas.problems_of([1], {"items": {"$ref": "https://a/b"}})
    assert problem == "arguments: cannot be checked: $ref = 'https://a/b' leads out of the schema"


def test_at_most_eight_problems_of_a_call_are_reported():
    parameters = {
        "type": "object",
        "properties": {f"p{n}": {} for n in range(20)},
        "required": [f"p{n}" for n in range(20)],
    }
    (call,) = parser([tool("f", parameters)]).parse(wire(HEAD + TAIL)).tool_calls
    assert len(call.problems) == 8


def test_a_schema_of_many_alternatives_is_read_in_a_moment():
    """Alternatives of alternatives would be 3 ** 30: beyond 64 they say nothing, and each part is read once."""
    definitions = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 3} for n in range(30)} | {
        "d30": {"type": "integer"}
    }
    product = {"allOf": [{"anyOf": [{"type": "object", "required": [f"{n}{m}"]} for m in range(3)]} for n in range(30)]}
    parameters = {"type": "object", "$defs": definitions, "properties": {"p": {"$ref": "#/$defs/d0"}, "q": product}}
    (call,) = parser([tool("f", parameters)]).parse(wire(f"{HEAD}@<p>5@</p>@<q>@<a>b@</a>@</q>{TAIL}")).tool_calls
    assert call.arguments == {"p": "5", "q": {"a": "b"}}
    assert call.problems == ("arguments: cannot be checked: more than 10000 references were followed",)
    chain = {f"c{n}": {"$ref": f"#/$defs/c{n + 1}"} for n in range(70)}
    chained = lambda count: {"type": "object", "$defs": chain, "properties": {"p": chain[f"c{69 - count}"]}}
    chain["c70"] = {"type": "integer"}
    with pytest.raises(ValueError, match="alternatives nest deeper than 64"):
        parser([tool("f", chained(64))])
    (call,) = parser([tool("f", chained(63))]).parse(wire(f"{HEAD}@<p>5@</p>{TAIL}")).tool_calls
    assert call.arguments == {"p": 5}


def test_elements_nest_64_deep():
    """Elements below depth 64 are text, and neither reading nor writing them needs more stack."""
    deep = "@<a>" * 64 + "x" + "@</a>" * 64
    for output, leaf in ((deep, "x"), ("@<a>" * 66 + "x" + "@</a>" * 66, wire("@<a>@<a>x"))):
        (call,) = parser().parse(wire(f"{HEAD}{output}{TAIL}")).tool_calls
        value = call.arguments
        for _ in range(64):
            value = value["a"]
        assert value == leaf


@pytest.mark.parametrize(
    "keyword",
    ["additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then", "unevaluatedItems",
     "unevaluatedProperties"],
)  # fmt: skip
def test_a_schema_in_a_keyword_is_in_the_standard_dialect_too(keyword):
    """Python's names of types, and those that say nothing, wherever a schema stands in another."""
    given = {"type": "dict", keyword: {"type": "list", "items": {"type": "any"}}}
    assert schemas.standard_schema(given, "parameters") == {
        "type": ["object"],
        keyword: {"type": ["array"], "items": {}},
    }
