"""Schemas of tools, piece by piece: what excludes, what is merged, and where each bound of a call's grammar lies."""

import itertools
import json
import re

import jsonschema
import pytest
from support.embedded import TOKENIZER

from m3jax.serve.constraints import Constraints, tool_grammar
from m3jax.serve.constraints.tool_calls import (
    _alternatives,
    _are_told_apart,
    _check_told_apart,
    _exclude,
    _has_top_level_bar,
    _kinds,
    _members,
    _merged,
    _takes,
    _target,
)

NS = "]<]minimax[>["
CONSTRAINTS = Constraints(TOKENIZER, 2048, (1,))


def schema_with(**properties):
    return {"type": "object", "properties": properties, "required": list(properties)}


ONE, TWO, TEXT, INT = {"const": 1}, {"enum": [2, "x"]}, {"type": "string"}, {"type": "integer"}
PAIRS = [  # of each whether its two schemas are seen to exclude one another
    (TEXT, INT, True), (INT, {"type": "number"}, False), ({"type": "number"}, INT, False),
    ({"type": ["string", "null"]}, {"type": ["null", "array"]}, False), ({"type": "null"}, {"type": ["string"]}, True),
    (ONE, TWO, True), (ONE, {"enum": [1, 2]}, False), (TWO, {"const": 2}, False), (ONE, {"const": "1"}, True),
    (ONE, INT, False), (ONE, {}, False), (TEXT, {"minimum": 3}, False), ({"minLength": 2}, {"minimum": 3}, False),
    (schema_with(k=ONE), schema_with(k=TWO), True), (schema_with(k=ONE), schema_with(k=ONE), False),
    (schema_with(k=ONE), schema_with(k=INT), False), (schema_with(k=INT), schema_with(k=TWO), False),
    (schema_with(k=ONE), schema_with(j=TWO), False), (schema_with(a=TEXT, k=ONE), schema_with(a=TEXT, k=TWO), True),
    (schema_with(k=ONE), {"type": "object", "properties": {"k": TWO}}, False),
    ({"type": "object", "properties": {"k": ONE}}, {"type": "object", "properties": {"k": TWO}}, False),
    (schema_with(k=True), schema_with(k=ONE), False),
]  # fmt: skip
VALUES = [
    None, True, 1, 2, 3, 1.5, "", "x", "1", "yy", [], [1], {}, {"k": 1}, {"k": 2}, {"k": "x"}, {"k": 1, "a": "x"},
    {"k": 2, "a": "x"}, {"j": 2}, {"j": 2, "k": 1}, {"a": "x", "j": "x"}, {"a": 3},
]  # fmt: skip
valid = lambda value, schema: jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize(("one", "other", "exclude"), PAIRS)
def test_schemas_that_exclude_one_another(one, other, exclude):
    """The same in either order, and where it is said no value is of both."""
    assert _exclude(one, other) == _exclude(other, one) == exclude
    if exclude:
        assert not [value for value in VALUES if valid(value, one) and valid(value, other)]
    both = {"oneOf": [one, other]}
    if exclude:
        assert list(_alternatives(both, both, "here")) == [one, other]
    else:
        with pytest.raises(ValueError, match="here: two schemas of oneOf may both be met"):
            list(_alternatives(both, both, "here"))


def test_objects_that_a_call_tells_apart():
    """By a listed value, by a name that one requires and the other forbids, and this of each; else if read alike."""
    closed = lambda **properties: {**schema_with(**properties), "additionalProperties": False}
    some = {"type": "object", "properties": {"a": TEXT}, "additionalProperties": False}
    for one, other, expected in (
        (schema_with(k=ONE, a=TEXT), schema_with(k=TWO, a=INT), True),
        (schema_with(a=TEXT), schema_with(a=INT), False),
        (schema_with(a=TEXT), schema_with(b=INT), True),  # no name of both is read in two ways
        (schema_with(a=TEXT, b=INT), schema_with(a=TEXT, c=INT), True),
        (closed(a=TEXT, b=INT), closed(a=INT, c=INT), True),
        (closed(a=TEXT, b=INT), schema_with(a=INT, c=INT), False),
        (closed(a=TEXT), closed(a=INT, c=INT), False),
        (some, closed(a=INT, c=INT), False),
    ):
        assert _are_told_apart(one, other) == _are_told_apart(other, one) == expected, (one, other)
        if expected:
            _check_told_apart([INT, one, TEXT, other], "here")
        else:
            with pytest.raises(ValueError, match="here: two schemas of an object in one place"):
                _check_told_apart([INT, one, TEXT, other], "here")
    with pytest.raises(ValueError, match="two schemas of an array in one place"):
        _check_told_apart([{"items": INT}, {"type": ["array", "null"]}], "here")
    _check_told_apart([{"enum": [[1]]}, {"enum": [[2]]}, {"type": "array"}], "here")  # what is listed is not read so


MERGED = [
    (INT, {"minimum": 2}), ({"type": ["integer", "string"]}, {"type": ["string", "null"]}), (INT, TEXT),
    (INT, {"title": "t"}), ({"description": "d"}, {"type": "null", "x-y": 1}), ({}, {}),
    (schema_with(k=ONE), {"required": ["a"]}),
    (schema_with(k=ONE), {"required": ["a", "k"], "properties": {"a": TEXT}}),
    ({"minimum": 2, "title": "a"}, {"minimum": 2, "title": "b"}), (schema_with(k=ONE), schema_with(k=ONE)),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), MERGED)
def test_a_merged_schema_says_what_both_say(one, other):
    for a, b in ((one, other), (other, one)):
        merged = _merged(a, b, "here")
        for value in VALUES:
            assert (merged is not None and valid(value, merged)) == (valid(value, a) and valid(value, b)), value
        if merged is not None and "required" in merged:
            assert len(set(merged["required"])) == len(merged["required"])
    assert _merged(INT, TEXT, "here") is None
    for word, values in (("minimum", (1, 2)), ("enum", ([1], [2])), ("properties", ({"k": ONE}, {"k": TWO}))):
        with pytest.raises(ValueError, match=f"here: {word} is said twice"):
            _merged({word: values[0]}, {word: values[1]}, "here")


ROOT = {"$defs": {"i": {"type": "integer", "minimum": 2}, "a/b~c": {"enum": ["x"]}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/i"}, {"$ref": "#/$defs/i", "maximum": 2}, {"$ref": "#/$defs/a~1b~0c"}, True,
        {"anyOf": [TEXT, {"$ref": "#/$defs/i"}]}, {"oneOf": [TEXT, {"type": "null"}], "description": "d"},
        {"anyOf": [INT, TEXT], "minimum": 2}, {"allOf": [{"anyOf": [INT, TEXT]}, {"anyOf": [TEXT, {"type": "null"}]}]},
        {"anyOf": [{"anyOf": [TEXT, {"type": "null"}]}, {"type": "boolean"}]}, {"anyOf": []},
    ],
)  # fmt: skip
def test_the_alternatives_of_a_schema_are_together_the_schema(schema):
    flats = list(_alternatives(schema, ROOT, "here"))
    assert not [flat for flat in flats if flat.keys() & {"$ref", "anyOf", "oneOf", "allOf"}]
    for value in VALUES:
        expected = valid(value, schema if schema is True else {**ROOT, **schema}) if schema != {"anyOf": []} else False
        assert any(valid(value, flat) for flat in flats) == expected, value
    plain = {"type": "integer"}
    assert next(_alternatives(plain, plain, "here")) is plain


def test_how_far_alternatives_go():
    """64 references on end, and 256 alternatives of one value; one more of either is refused."""
    chain = lambda n: {"$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(n)} | {str(n): INT}}
    for length in (62, 63, 64):
        root = chain(length)
        found = _alternatives({"$ref": "#/$defs/0"}, root, "here")
        if length < 64:
            assert list(found) == [INT]
        else:
            with pytest.raises(ValueError, match="here: alternatives nest deeper than 64"):
                list(found)
    listed = lambda n: {"anyOf": [{"const": i} for i in range(n)]}
    assert len(list(_alternatives(listed(256), {}, "here"))) == 256
    for schema in (listed(257), {"allOf": [{"anyOf": [{"title": str(i)} for i in range(16)]}, listed(17)]}):
        with pytest.raises(ValueError, match="here: more than 256 alternatives"):
            list(_alternatives(schema, {}, "here"))
    for ref in ("#/none", "other", "#/$defs/i/minimum/x", None, 3):
        with pytest.raises(ValueError, match="leads to no schema within the parameters"):
            _target(ref, ROOT, "here")
    assert _target("#", ROOT, "here") is ROOT and _target("#/$defs/i", ROOT, "here") is ROOT["$defs"]["i"]


def test_kinds_and_listed_values_of_a_schema():
    for schema, kinds in (
        ({"type": ["null", "array"]}, {"null", "array"}), (INT, {"integer"}), (ONE, {"integer"}), ({}, {"string"}),
        ({"enum": [1.5, "x", None, True]}, {"number", "string", "null", "boolean"}),
        ({"type": "null", "minimum": 1}, {"null"}),
        ({"pattern": "a"}, {"string"}), ({"maxItems": 2}, {"array"}), ({"required": []}, {"object"}),
        ({"multipleOf": 2}, {"integer"}), ({"title": "t"}, {"string"}),
    ):  # fmt: skip
        assert _kinds(schema) == kinds, schema
    assert _members({"const": 1}) == {"1"} and _members({"enum": [1, "1"]}) == {"1", '"1"'} and _members(INT) is None
    takes = [_takes({"type": kind}, value) for kind in ("number", "integer") for value in (1, 1.5, "1")]
    assert takes == [True, True, False, True, False, False]
    for patterns, has_bar in (
        (("a|b", "(a)|b", r"\(a|b\)", "a(b)|(c)"), True),
        (("ab", "(a|b)", "[|]", r"\|", r"[\]|]", "a(b(c|d))"), False),
    ):
        assert [pattern for pattern in patterns if _has_top_level_bar(pattern) != has_bar] == []


def call(**members: str) -> str:
    """The text of a call with the raw texts of its members."""
    inner = "".join(f"{NS}<{name}>{text}{NS}</{name}>" for name, text in members.items())
    return f'{NS}<tool_call>\n{NS}<invoke name="f">{inner}{NS}</invoke>\n{NS}</tool_call>'


def items(*texts: str) -> str:
    return "".join(f"{NS}<item>{text}{NS}</item>" for text in texts)


def grammar_of(**parameters) -> str:
    return tool_grammar([{"type": "function", "function": {"name": "f", "parameters": parameters}}], "f")


def accepts(grammar: str, text: str) -> bool:
    matcher = CONSTRAINTS.matcher("grammar", grammar)
    ids = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


TRIPLE = {"type": "array", "prefixItems": [INT, {"type": "boolean"}], "items": {"enum": ["z"]}}
IS_TEXT_OR_LIST = {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "array", "items": INT}]}


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "abcd", "12"], ["a", "abcde", ""]),
        (TEXT, ["", "true", "5", "a" * 30], [f"a{NS}b"]),
        ({"type": ["string", "integer"]}, ["abc", "5", "-7"], ["true", "5x", "null", "1.5"]),
        ({"type": "string", "pattern": "^a+$"}, ["a", "aaa"], ["", "ab", "ba"]),
        ({"type": "string", "pattern": "a+"}, ["a", "xax"], ["", "b"]),
        ({"type": "string", "pattern": r"^a\$"}, ["a$", "a$b"], ["a", "ba$"]),
        ({"type": "integer", "minimum": 3, "maximum": 5}, ["3", "5"], ["2", "6", "3.5", "x"]),
        ({"type": "number", "exclusiveMinimum": 3}, ["3.5", "4"], ["3", "x"]),
        ({"type": ["boolean", "null"]}, ["true", "false", "null"], ["True", "", "0"]),
        ({"type": "integer", "enum": [1, "x", 2.5, 3]}, ["1", "3"], ["x", "2.5", "2"]),
        ({"enum": ["a", 7, None, True]}, ["a", "7", "null", "true"], ["b", ""]),
        ({"type": "array", "items": INT, "minItems": 1, "maxItems": 3},
         [items("1"), items("1", "2", "3")], ["", items("1", "2", "3", "4"), items("x")]),
        ({"type": "array", "items": INT}, ["", items(*"12345")], [items("x")]),
        (TRIPLE, ["", items("1"), items("1", "true"), items("1", "true", "z", "z")],
         [items("true"), items("1", "true", "1")]),
        ({**TRIPLE, "minItems": 1, "maxItems": 3}, [items("1"), items("1", "true", "z")],
         ["", items("1", "true", "z", "z")]),
        ({**TRIPLE, "minItems": 3}, [items("1", "true", "z")], [items("1", "true")]),
        ({**TRIPLE, "maxItems": 1}, ["", items("1")], [items("1", "true")]),
        ({**TRIPLE, "maxItems": 2}, [items("1", "true")], [items("1", "true", "z")]),
        ({**TRIPLE, "items": False}, ["", items("1", "true")], [items("1", "true", "z")]),
        (IS_TEXT_OR_LIST, ["ab", "", items("1", "2")], ["abc", "5"]),
        ({"type": "object", "properties": {"p": INT, "q": TEXT, "r": False}, "required": ["q"]},
         [f"{NS}<p>1{NS}</p>{NS}<q>a{NS}</q>", f"{NS}<q>a{NS}</q>"],
         ["", f"{NS}<p>1{NS}</p>", f"{NS}<q>a{NS}</q>{NS}<r>a{NS}</r>"]),
        ({"type": "object"}, ["{}", '{"a":["]"]}'], ["", "[1]", '{"a": 1}', f'{{"a":"{NS}"}}']),
        ({"type": "object", "properties": {}, "additionalProperties": False}, [""], ["{}"]),
    ],
)  # fmt: skip
def test_the_bounds_of_what_a_call_may_say(schema, taken, refused):
    grammar = grammar_of(type="object", properties={"a": schema}, required=["a"])
    assert [text for text in taken if not accepts(grammar, call(a=text))] == []
    assert [text for text in refused if accepts(grammar, call(a=text))] == []
    assert not accepts(grammar, call())


def test_members_of_a_call_stand_in_their_order():
    grammar = grammar_of(type="object", properties={"a": INT, "b": INT, "c": INT}, required=["b"])
    for length in range(4):
        for names in itertools.permutations("abc", length):
            is_good = "b" in names and list(names) == sorted(names)
            assert accepts(grammar, call(**dict.fromkeys(names, "1"))) == is_good, names
    either = grammar_of(anyOf=[schema_with(a=INT), schema_with(b=INT)])
    assert [accepts(either, call(**{name: "1"})) for name in "abc"] == [True, True, False]
    assert accepts(grammar_of(type="object"), call()) and accepts(grammar_of(), call())


def test_which_and_how_many_tools_are_called():
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
    calls = lambda names: call().replace(f'{NS}<invoke name="f">{NS}</invoke>\n', "".join(
        f'{NS}<invoke name="{name}">{NS}</invoke>\n' for name in names))  # fmt: skip
    for choice, parallel, taken in (
        ("required", True, {"f", "g", "ff", "fg"}), ("required", False, {"f", "g"}), ("g", True, {"g"}),
        ({"type": "function", "function": {"name": "g"}}, True, {"g"}), ({"name": "f"}, True, {"f"}),
    ):  # fmt: skip
        grammar = tool_grammar(tools, choice, parallel)
        assert {names for names in ("", "f", "g", "ff", "fg") if accepts(grammar, calls(names))} == taken


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"properties": {"a": {"type": "array", "prefixItems": [INT], "items": False, "minItems": 2}}},
         "tool f, a: minItems = 2, and there are 1 items at most"),
        ({"properties": {"": INT}}, "a name in a call has no < or >"),
        ({"properties": {"a": {"type": "integer", "enum": ["x"]}}}, "leaves no value that a call can have"),
        ({"properties": {"a": {"enum": [1], "minimum": 0}}}, "tool f, a: minimum beside enum: leave it out"),
    ],
)  # fmt: skip
def test_what_a_call_cannot_say_is_named(parameters, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        grammar_of(type="object", **parameters)


def test_values_nest_64_deep():
    """By references: what is written out is refused at that depth as JSON. One value beside another is no deeper."""

    def nested(names, depth):
        inner = lambda i: {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}}
        defs = {f"{i}": inner(i) for i in range(depth)} | {f"{depth}": INT}
        return grammar_of(type="object", properties={x: {"$ref": "#/$defs/0"} for x in names}, **{"$defs": defs})

    assert nested("a", 63) and nested("ab", 40)
    with pytest.raises(ValueError, match="values nest deeper than 64"):
        nested("a", 64)
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}}
    grammar = grammar_of(type="object", properties={"a": {"$ref": "#/$defs/tree"}}, **{"$defs": {"tree": tree}})
    inner = f"{NS}<next>{NS}<next>{NS}</next>{NS}</next>"
    assert accepts(grammar, call(a=inner)) and not accepts(grammar, call(a=json.dumps({})))


def test_a_schema_beside_one_that_says_nothing_stays_the_object_that_it_is():
    """By which its rules are found again, however often it is meant."""
    text = {"type": "string", "minLength": 2}
    for silent in ({}, {"description": "a note"}, {"x-order": 1, "title": "t"}):
        assert _merged(silent, text, "here") is text and _merged(text, silent, "here") is text
        assert _merged({"title": "a"}, silent, "here") is silent
