"""Constraints: what a grammar lets through is valid, and nothing of it is said before the reasoning has ended."""

import asyncio
import json
import re

import jsonschema
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2 as protocol
from support.embedded import TOKENIZER
from support.schemas import OBJECTS, VALUES, allowed, walk
from support.workers import answer, answers, generate_request, shared_worker

from m3jax.serve.constraints import Constraints, tool_grammar
from m3jax.text import ToolCallParser

EOS, NAMESPACE, THINK, END_THINK = (
    1,
    *map(TOKENIZER.backend.token_to_id, ("]<]minimax[>[", "<mm:think>", "</mm:think>")),
)
TURN = TOKENIZER.backend.token_to_id("]~b]")
CLOSING = [TOKENIZER.backend.token_to_id(text) for text in '"}]']
CONSTRAINTS = Constraints(TOKENIZER, 2048, (EOS,))
SEEDS = st.integers(0, 2**16)


def tool(name="f", **parameters):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def text_of(tokens):
    return TOKENIZER.decode(tokens, skip_special_tokens=False)


def calls_of(tools, tokens):
    """Return the calls of an answer that is nothing but valid calls."""
    message = ToolCallParser(tools).parse(text_of(tokens))
    assert not message.faults and not message.content.strip()
    assert all(call.is_whole and not call.problems for call in message.tool_calls), message
    return message.tool_calls


@given(VALUES, SEEDS)
def test_any_answer_under_a_json_schema_is_valid(schema, seed):
    guide = CONSTRAINTS.guide("json_schema", json.dumps(schema), ())
    jsonschema.validate(json.loads(text_of(walk(guide, EOS, seed, CLOSING))), schema)


@given(OBJECTS, SEEDS)
def test_any_forced_call_has_valid_arguments(schema, seed):
    """As m3jax's own parser reads it. What a call cannot say without types is refused before."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    try:
        grammar = tool_grammar(tools, "f")
    except ValueError as error:
        assert "cannot say which" in str(error) or "leaves no value" in str(error)
        assume(False)
    guide = CONSTRAINTS.guide("grammar", grammar, ())
    (call,) = calls_of(tools, walk(guide, EOS, seed, [NAMESPACE, *CLOSING]))
    assert call.name == "f"


def test_each_kind_of_constraint_is_kept_by_the_model():
    tag = {
        "type": "tag",
        "begin": "<n>",
        "content": {"type": "json_schema", "json_schema": {"enum": [7]}},
        "end": "</n>",
    }
    kinds = {
        "regex": ("[a-c]{3}x", r"[a-c]{3}x"),
        "grammar": ('start: "a" /b{1,3}/ "c"', r"ab{1,3}c"),
        "structural_tag": (json.dumps({"format": {"type": "sequence", "elements": [tag]}}), r"<n>7</n>"),
        "choice": (protocol.ChoiceConstraint(choices=['say "no"', "yes\n"]), r'(say "no"|yes\n)'),
    }
    requests = [generate_request(max_tokens=60, logit_bias={}, **{kind: given}) for kind, (given, _) in kinds.items()]
    gbnf = generate_request(max_tokens=60, grammar='root ::= "on" | "off"')
    *found, (by_gbnf,) = answers(shared_worker(), *requests, gbnf)
    for (complete,), (_, pattern) in zip(found, kinds.values(), strict=True):
        assert re.fullmatch(pattern, TOKENIZER.decode(complete.output_ids)), TOKENIZER.decode(complete.output_ids)
    assert TOKENIZER.decode(by_gbnf.output_ids) in ("on", "off")
    free = answer(shared_worker())
    constraint = protocol.SamplingParams(json_object=False, temperature=0, max_tokens=8)
    assert constraint.WhichOneof("constraint") == "json_object"
    assert answer(shared_worker(), json_object=False).output_ids == free.output_ids
    whole = answer(shared_worker(), json_object=True, max_tokens=200, logit_bias={token: 20.0 for token in CLOSING})
    assert isinstance(json.loads(TOKENIZER.decode(whole.output_ids)), dict)


def test_a_group_shares_a_guide():
    """The continuations take turns, each with a matcher of its own."""
    request = generate_request(n=4, temperature=2.0, seed=1, regex="([0-9]|[a-z]){6}", max_tokens=20)
    (group,) = answers(shared_worker(), request)
    texts = [TOKENIZER.decode(complete.output_ids) for complete in group]
    assert all(re.fullmatch("[0-9a-z]{6}", text) for text in texts) and len(set(texts)) == 4


# Reasoning


def phases():
    template_pair = [THINK, END_THINK]  # in the instructions at the beginning of each prompt
    return {
        "enabled": [*template_pair, TURN, 50, THINK],
        "disabled": [*template_pair, TURN, 50, END_THINK],
        "adaptive": [*template_pair, TURN, 50],
        "no dialogue": [50, 51],
    }


def test_reasoning_is_free_before_the_grammar_but_for_the_end():
    guide = CONSTRAINTS.guide("regex", "ab", phases()["enabled"])
    (ab,) = TOKENIZER.encode("ab")  # a text that must come is written as the tokenizer writes it
    for new in ([], [400, 401]):
        tokens = allowed(guide.bits(new))
        assert len(tokens) == 2047 and EOS not in tokens
    begun = allowed(guide.bits([400, END_THINK]))
    assert begun.tolist() == [ab]
    assert allowed(guide.bits([400, END_THINK, ab])).tolist() == [EOS]
    assert allowed(guide.bits([400])).size == 2047  # asked again: the answer follows from the tokens alone


def test_the_grammar_begins_where_the_prompt_leaves_the_reasoning():
    grammar_only = {"ab"}
    for name, extra in (("disabled", set()), ("no dialogue", set()), ("adaptive", {"<mm:think>", "</mm:think>"})):
        tokens = allowed(CONSTRAINTS.guide("regex", "ab", phases()[name]).bits([]))
        assert {text_of([token]) for token in tokens} == grammar_only | extra, name
    adaptive = CONSTRAINTS.guide("regex", "ab", phases()["adaptive"])
    assert {text_of([token]) for token in allowed(adaptive.bits([END_THINK]))} == grammar_only
    assert allowed(adaptive.bits([THINK, 400])).size == 2047
    assert {text_of([token]) for token in allowed(adaptive.bits([THINK, 400, END_THINK]))} == grammar_only
    at_once = CONSTRAINTS.guide("regex", "ab", phases()["enabled"], from_first_token=True)
    assert {text_of([token]) for token in allowed(at_once.bits([]))} == grammar_only


def test_the_worker_lets_the_model_reason_first():
    prompt = tuple(TOKENIZER.encode("]~b]user\nSay it.[e~[\n]~b]ai\n<mm:think>"))
    found = answer(shared_worker(), prompt=prompt, regex="ok", max_tokens=60, logit_bias={END_THINK: 3.0})
    text = text_of(found.output_ids)
    assert re.fullmatch(r"(?s:.+)</mm:think>ok\[e~\[", text), text
    at_once = answer(shared_worker(), prompt=prompt, regex="ok", grammar_from_first_token=True, max_tokens=60)
    assert text_of(at_once.output_ids) == "ok[e~["


def test_a_limit_of_llguidance_is_an_error_and_not_an_end():
    """It would let an answer end in the middle, as if it were whole."""
    guide = CONSTRAINTS.guide("regex", "ab", ())
    guide._start.consume_token(700)  # what no grammar takes: the matcher is in error from now on
    assert guide._start.is_error()
    assert not guide.bits([]).any()


# Tool calls


WEATHER = tool(
    "get_weather",
    properties={
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
        "where": {"$ref": "#/$defs/place"},
        "free": {"type": "object"},
    },
    required=["city", "days", "where"],
    **{
        "$defs": {
            "place": {"type": "object", "properties": {"inside": {"$ref": "#/$defs/place"}, "x": {"type": "number"}}}
        }
    },
)


def test_the_model_is_forced_to_call():
    properties = {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 14}}
    tools = [tool("get_weather", properties=properties, required=["city", "days"])]
    grammar = tool_grammar(tools, "required", parallel=False)
    found = answer(shared_worker(), grammar=grammar, max_tokens=90)
    assert found.finish_reason == "stop"
    (call,) = calls_of(tools, found.output_ids[:-1])
    assert call.arguments.keys() == {"city", "days"}


def test_nothing_is_forced_by_auto_and_none():
    assert tool_grammar([WEATHER], "auto") is None and tool_grammar([WEATHER], "none") is None


def test_many_tools_make_a_grammar_that_is_taken():
    """As many as coding agents send."""
    member = {"type": "object", "properties": {name: {"type": "string"} for name in "abcdef"}, "required": ["a"]}
    properties = {f"p{number}": member if number % 3 == 0 else {"type": ["string", "null"]} for number in range(12)}
    tools = [tool(f"tool_{number}", properties=properties, required=["p1"]) for number in range(40)]
    guide = CONSTRAINTS.guide("grammar", tool_grammar(tools, "required"), ())
    assert calls_of(tools, walk(guide, EOS, 0, [NAMESPACE]))


@pytest.mark.parametrize(
    ("tools", "choice", "reason"),
    [
        ([], "required", "no tool"),
        ([WEATHER], "other", "get_weather"),
        ([WEATHER], {"type": "function"}, "tool_choice"),
        ([tool(properties={"a": {"type": "array", "uniqueItems": True}})], "f", "uniqueItems"),
        ([tool(properties={"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}})], "f", "oneOf"),
        ([tool(properties={"a": {"anyOf": [{"type": "array"}, {"type": "array", "maxItems": 1}]}})], "f", "array"),
        ([tool(properties={"a<b": {"type": "integer"}})], "f", "a<b"),
        ([tool(properties={"a": {"enum": ["]<]minimax[>["]}})], "f", "marker"),
        ([tool(properties={"a": {"type": "string", "pattern": "a|b"}})], "f", "one group"),
    ],
)
def test_what_a_call_cannot_be_forced_to_is_refused(tools, choice, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        tool_grammar(tools, choice)


def test_parts_of_allof_are_one_schema():
    named = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    other = {"properties": {"b": {"enum": ["x"]}}, "required": ["b"]}
    tools = [tool(properties={"v": {"allOf": [named, other], "description": "both"}}, required=["v"])]
    guide = CONSTRAINTS.guide("grammar", tool_grammar(tools, "f"), ())
    (call,) = calls_of(tools, walk(guide, EOS, 0, [NAMESPACE]))
    assert call.arguments["v"].keys() == {"a", "b"}
    with pytest.raises(ValueError, match="minimum is said twice"):
        tool_grammar([tool(properties={"a": {"allOf": [{"minimum": 1}, {"minimum": 2}]}})], "f")


# Structural tags


SMG_TAG = {
    "format": {
        "type": "sequence",
        "elements": [
            {
                "type": "optional",
                "content": {
                    "type": "tag",
                    "begin": "<mm:think>",
                    "content": {"type": "any_text", "excludes": ["<mm:think>", "</mm:think>", "]<]minimax[>["]},
                    "end": "</mm:think>",
                },
            },
            {
                "type": "triggered_tags",
                "triggers": ["<call>"],
                "tags": [
                    {
                        "type": "tag",
                        "begin": "<call>",
                        "content": {
                            "type": "sequence",
                            "elements": [
                                {"type": "any_text", "excludes": ["]<]", "</a>", "<invoke", "</call>"]},
                                {"type": "const_string", "value": "]<]</a>"},
                            ],
                        },
                        "end": "</call>",
                    }
                ],
                "at_least_one": True,
                "stop_after_first": True,
            },
        ],
    }
}


def accepts(kind, constraint, text):
    matcher = CONSTRAINTS.matcher(kind, constraint)
    return matcher.consume_tokens(TOKENIZER.encode(text)) and matcher.is_accepting()


def test_the_structural_tags_that_smg_sends():
    tag = json.dumps(SMG_TAG)
    for text in ("<call>x]<]</a></call>", "<mm:think>why</mm:think><call>]<]</a></call>"):
        assert accepts("structural_tag", tag, text), text
    for text in ("", "<call></call>", "text <call>x]<]</a></call>", "<call><invoke]<]</a></call>"):
        assert not accepts("structural_tag", tag, text), text


def test_the_formats_of_structural_tags():
    integer = {"type": "json_schema", "json_schema": {"type": "integer"}}
    tag = {"type": "tag", "begin": "<i>", "content": integer, "end": ["</i>", "</>"]}
    of = lambda **format: json.dumps({"type": "structural_tag", "format": format})
    cases = [
        (of(type="const_string", value="a"), ["a"], ["b", ""]),
        (of(type="regex", pattern="[ab]/c"), ["a/c"], ["a"]),
        (of(type="grammar", grammar='root ::= "x" | "y"'), ["x", "y"], ["z"]),
        (of(type="or", elements=[{"type": "const_string", "value": "p"}, integer]), ["p", "12"], ["q"]),
        (of(type="star", content=tag), ["", "<i>1</i><i>2</>"], ["<i>a</i>"]),
        (of(type="plus", content=tag), ["<i>1</i>"], [""]),
        (of(type="repeat", content=tag, min=2, max=2), ["<i>1</i><i>2</i>"], ["<i>1</i>"]),
        (of(type="any_text"), ["", "a\nb"], []),
        (of(type="tags_with_separator", tags=[tag], separator=","), ["", "<i>1</i>,<i>2</i>"], ["<i>1</i><i>2</i>"]),
        (of(type="triggered_tags", tags=[tag], triggers=["<i"]), ["text", "a<i>1</i>b<i>2</i>"], ["a<i>b</i>", "a<i"]),
        (
            json.dumps(
                {"structures": [{"begin": "<i>", "schema": {"type": "integer"}, "end": "</i>"}], "triggers": ["<i"]}
            ),
            ["text <i>5</i>"],
            ["<i>x</i>"],
        ),
    ]
    for text, taken, refused in cases:
        assert all(accepts("structural_tag", text, each) for each in taken), text
        assert not any(accepts("structural_tag", text, each) for each in refused), text


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ("{", "no JSON"),
        ("[]", "must be an object"),
        ('{"format": {"type": "other"}}', "'other'"),
        ('{"format": {"type": "json_schema", "style": "xml", "json_schema": {}}}', "style"),
        ('{"format": {"type": "triggered_tags", "triggers": ["<x"], "tags": []}}', "<x"),
        (
            '{"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "any_text"}]}}',
            "must be the last",
        ),
        (json.dumps({"format": {"type": "optional", "content": 5}}), "None"),
    ],
)
def test_structural_tags_that_are_refused(tag, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        CONSTRAINTS.guide("structural_tag", tag, ())


def test_a_guide_reads_only_the_new_tokens():
    """Whatever it was asked before: a request is taken back, copied and begun again."""
    rng = np.random.default_rng(0)
    fresh = lambda: CONSTRAINTS.guide("regex", "(abc|abd|[0-9]+x){2,9}", ())
    tokens = walk(fresh(), EOS, 3)
    guide = fresh()
    for length in rng.integers(0, len(tokens) + 1, 40).tolist():
        np.testing.assert_array_equal(guide.bits(tokens[:length]), fresh().bits(tokens[:length]))


def test_a_tokenizer_is_read_once_for_many_threads():
    constraints = Constraints(TOKENIZER, 2048, (EOS,))

    async def run():
        return await asyncio.gather(*(asyncio.to_thread(constraints.prepare) for _ in range(4)))

    assert len({id(found) for found in asyncio.run(run())}) == 1
