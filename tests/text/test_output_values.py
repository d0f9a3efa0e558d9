"""The value of a parameter's text: a row for each rule of docs/chat_output.md, with the schema that asks for it."""

import json

import pytest
from support.chat_strategies import tool
from support.outputs import HEAD, TAIL, parser, wire, with_parameters

from m3jax.text import OutputParser

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


@pytest.mark.parametrize("name", ["str", "int", "float", "bool", "list", "dict"])
def test_names_of_pythons_types_are_known(name):
    """As files of benchmarks have them."""
    texts = {"str": "5", "int": "5", "float": "5.5", "bool": "true", "list": ITEMS("a"), "dict": TEXT_OF(a="b")}
    (call,) = parser(with_parameters(p={"type": name})).parse(wire(f"{HEAD}@<p>{texts[name]}@</p>{TAIL}")).tool_calls
    assert type(call.arguments["p"]).__name__ == name


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": 5}, "type = 5: must be the name of a type"),
        ({"type": [None]}, "type = [None]"),
        ("string", "'string' is no JSON schema"),
        ({"properties": []}, "properties = []: must be an object"),
        ({"properties": {"a": 5}}, "5 is no JSON schema"),
        ({"anyOf": []}, "anyOf = []: must be a list, and not empty"),
        ({"oneOf": {"type": "string"}}, "oneOf = {'type': 'string'}: must be a list"),
        ({"enum": "ab"}, "enum = 'ab': must be a list"),
        ({"$ref": "#/$defs/none"}, "$ref = '#/$defs/none' leads to no schema"),
        ({"$ref": "https://example.org/a.json"}, "leads to no schema within the parameters"),
        ({"$ref": 5}, "$ref = 5"),
        ({"items": {"$ref": "#/properties/p/items/1"}}, "leads to no schema"),
    ],
)
def test_what_is_no_schema_is_refused(schema, message):
    """One line that names the tool, before anything is parsed."""
    with pytest.raises(ValueError) as refusal:
        OutputParser([tool("other", {}), tool("f", {"type": "object", "properties": {"p": {"items": schema}}})])
    assert message in str(refusal.value) and str(refusal.value).startswith("tool 2 (f): ")
    assert "\n" not in str(refusal.value)


def test_a_schema_of_many_alternatives_is_read_in_a_moment():
    """Alternatives of alternatives would be 3 ** 30: beyond 64 they say nothing, and each part is read once."""
    definitions = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 3} for n in range(30)} | {
        "d30": {"type": "integer"}
    }
    product = {"allOf": [{"anyOf": [{"type": "object", "required": [f"{n}{m}"]} for m in range(3)]} for n in range(30)]}
    parameters = {"type": "object", "$defs": definitions, "properties": {"p": {"$ref": "#/$defs/d0"}, "q": product}}
    (call,) = parser([tool("f", parameters)]).parse(wire(f"{HEAD}@<p>5@</p>@<q>@<a>b@</a>@</q>{TAIL}")).tool_calls
    assert call.arguments == {"p": "5", "q": {"a": "b"}}
    chain = {f"c{n}": {"$ref": f"#/$defs/c{n + 1}"} for n in range(70)}
    with pytest.raises(ValueError, match="alternatives nest deeper than 64"):
        parser([tool("f", {"type": "object", "$defs": chain, "properties": {"p": chain["c0"]}})])


def test_elements_nest_64_deep():
    """Elements below depth 64 are text, and neither reading nor writing them needs more stack."""
    deep = "@<a>" * 64 + "x" + "@</a>" * 64
    for output, leaf in ((deep, "x"), ("@<a>" * 66 + "x" + "@</a>" * 66, wire("@<a>@<a>x"))):
        (call,) = parser().parse(wire(f"{HEAD}{output}{TAIL}")).tool_calls
        value = call.arguments
        for _ in range(64):
            value = value["a"]
        assert value == leaf
