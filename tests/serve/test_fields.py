"""The fields of requests at the ends of their ranges, and the options of the servers' commands."""

import json
import math

import jsonschema
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from support.embedded import TOKENIZER
from support.options import wrong_defaults

from m3jax.serve import command
from m3jax.serve.gateway.app import ENDPOINTS
from m3jax.serve.gateway.chat_completions import includes_usage, tool_choice
from m3jax.serve.gateway.errors import ApiError
from m3jax.serve.gateway.fields import (
    Fields,
    FixedField,
    FlagField,
    IntegerField,
    ListField,
    NumberField,
    ObjectField,
    TextField,
    TextsField,
    UnionField,
    UnreadField,
    object_schema,
    parsed_body,
)
from m3jax.serve.gateway.gateway import thinking_mode
from m3jax.serve.gateway.http import OPENAI
from m3jax.serve.gateway.messages import fields_of_messages
from m3jax.serve.gateway.prompts import tokens_of
from m3jax.serve.gateway.sampling import (
    CONSTRAINT_FIELDS,
    Model,
    check_constraints,
    limit_tokens,
    response_format,
    sampling_fields,
    sampling_params,
    set_constraints,
)
from m3jax.serve.worker import command as worker_command

VOCAB, CONTEXT = 50, 100
MODEL = Model("m", CONTEXT, VOCAB, (1,), can_see=False, block_size=8, defaults={})
LARGE = 10**400  # no float
SCHEMA = {"type": "object"}


@pytest.fixture(autouse=True)
def _(unchecked):
    """What JSON gives is no annotation's."""


def test_options_have_the_defaults_that_help_says():
    for parser in (command.parser(), command.gateway_parser(), command.verify_parser(), worker_command.parser()):
        assert wrong_defaults(parser) == [], parser.prog


# A field, values that it takes and what they become, values that it refuses, and a part of what it then says.
KINDS = {
    "number": (
        NumberField(least=-2.0, most=2.0), {-2: -2.0, 2.0: 2.0, 0: 0.0},
        [-2.01, 2.01, LARGE, -LARGE, True, "1", math.nan, [1]], "must be a number from -2 to 2",
    ),
    "number above": (
        NumberField(least=0.0, most=1.0, is_above=True), {1e-300: 1e-300, 1: 1.0}, [0, 0.0, -1, 1.5],
        "must be a number above 0 to 1",
    ),
    "integer": (
        IntegerField(least=-1, most=7), {-1: -1, 7: 7, 0: 0}, [-2, 8, 5.0, True, "3", LARGE],
        "must be an integer from -1 to 7",
    ),
    "flag": (FlagField(), {True: True, False: False}, [0, 1, "true", [], 1.0], "must be true or false"),
    "text": (TextField(), {"": "", "a": "a"}, [1, True, ["a"], {}], "must be a text"),
    "one of some": (TextField(known=("a", "b")), {"a": "a", "b": "b"}, ["c", "", "A"], "must be one of a, b"),
    "texts": (
        TextsField(most=2), {"a": ("a",), ("a", "b"): ("a", "b"), (): ()}, ["", ["a", "b", "c"], ["a", ""], [1], 1, {}],
        "must be a text that is not empty, or a list of up to 2",
    ),
    "object": (ObjectField(), {}, [[], "a", 1, True], "must be an object"),
    "list": (ListField(least=2), {(1, 2): [1, 2]}, [[1], [], {}, "ab", 2], "must be a list of at least 2"),
    "list of objects": (
        ListField(of={"type": "object"}), {(): []}, [[{}, 1], [None]], r"x\[[01]\] = .*: must be an object"
    ),
    "fixed": (
        FixedField(allowed=(1, False, "auto"), about="changes nothing"), {1: 1, "auto": "auto"},
        [True, 0, 1.0, "Auto", None, []], "changes nothing",
    ),
    "any": (UnionField(schemas=({"type": "string"},)), {"a": "a", 1: 1}, [], ""),
    "unread": (UnreadField(), {"a": "a", 1: 1}, [], ""),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_what_a_field_takes_and_what_it_refuses(name):
    field, taken, refused, reason = KINDS[name]
    for value, expected in taken.items():
        value = list(value) if isinstance(value, tuple) else value
        found = field.checked("x", value)
        assert found == expected and type(found) is type(expected), value
    for value in refused:
        with pytest.raises(ApiError, match=reason) as caught:
            field.checked("x", value)
        assert (caught.value.status, caught.value.field) == (400, "x") and "x" in str(caught.value)


TIERS = ["auto", "default"]
# Fields that change nothing, by path: the values that ask for what happens in any case. No value does where none is.
FIXED = {
    "/v1/chat/completions": {
        "service_tier": TIERS, "store": [False], "modalities": [["text"]], "reasoning_split": [True],
        "functions": [], "function_call": [],
    },
    "/v1/completions": {"suffix": [""]},
    "/v1/messages": {"service_tier": ["auto", "standard_only"]},
    "/v1/messages/count_tokens": {"service_tier": ["auto", "standard_only"]},
    "/v1/responses": {
        "service_tier": TIERS, "store": [False], "background": [False], "truncation": ["disabled"],
        "include": [[], ["reasoning.encrypted_content"]], "previous_response_id": [], "conversation": [], "prompt": [],
    },
    "/tokenize": {"add_generation_prompt": [True]},
    "/detokenize": {},
}  # fmt: skip


def test_what_fields_that_change_nothing_take_at_each_endpoint():
    """Clients send them as they stand in their own documents: what holds in any case is taken, all else refused."""
    given = (True, False, 0, "", "auto", "default", "standard_only", "disabled", [], ["text"], ["audio"], {})
    for endpoint in ENDPOINTS:
        fixed = {name: field for name, field in endpoint.table(MODEL).items() if isinstance(field, FixedField)}
        expected = FIXED[endpoint.path]
        assert {name: list(field.allowed) for name, field in fixed.items()} == expected, endpoint.path
        for name, field in fixed.items():
            for value in given:
                if any(value == each and type(value) is type(each) for each in expected[name]):
                    assert field.checked(name, value) == value, (endpoint.path, name)
                else:
                    with pytest.raises(ApiError, match=name):
                        field.checked(name, value)


def test_flags_are_off_but_where_a_protocol_has_them_on():
    on = {
        (endpoint.path, name)
        for endpoint in ENDPOINTS
        for name, field in endpoint.table(MODEL).items()
        if isinstance(field, FlagField) and field.default
    }
    assert on == {
        ("/v1/chat/completions", "parallel_tool_calls"), ("/v1/responses", "parallel_tool_calls"),
        ("/v1/completions", "skip_special_tokens"),
    }  # fmt: skip


def test_schemas_say_the_ranges():
    schemas = {name: field.schema() for name, (field, *_) in KINDS.items()}
    text = {"type": "string", "minLength": 1}
    assert schemas == {
        "number": {"type": "number", "minimum": -2.0, "maximum": 2.0},
        "number above": {"type": "number", "exclusiveMinimum": 0.0, "maximum": 1.0},
        "integer": {"type": "integer", "minimum": -1, "maximum": 7}, "flag": {"type": "boolean"},
        "text": {"type": "string"}, "one of some": {"type": "string", "enum": ["a", "b"]},
        "texts": {"anyOf": [text, {"type": "array", "items": text, "maxItems": 2}]}, "object": {"type": "object"},
        "list": {"type": "array", "items": {}, "minItems": 2},
        "list of objects": {"type": "array", "items": {"type": "object"}},
        "fixed": {"enum": [1, False, "auto"]}, "any": {"anyOf": [{"type": "string"}]}, "unread": {},
    }  # fmt: skip
    table = {
        "n": IntegerField(least=1, most=2, default=1, about="how many"), "m": TextField(known=("a",), is_required=True),
        "none": FixedField(about="not here"), "s": TextsField(most=1), "u": UnreadField(),
    }  # fmt: skip
    assert object_schema(table) == {
        "type": "object", "required": ["m"], "additionalProperties": {"type": "null"},
        "properties": {
            "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 2, "default": 1, "description": "how many"},
            "m": {"type": "string", "enum": ["a"]}, "none": {"type": "null", "description": "not here"},
            "s": {"anyOf": [text, {"type": "array", "items": text, "maxItems": 1}, {"type": "null"}]},
            "u": {"description": "of the client alone: it changes nothing"},
        },
    }  # fmt: skip
    assert "required" not in object_schema({"u": UnreadField()})


def test_fields_of_a_request():
    """Null is as good as nothing; a default stands in; what lacks or is in no table is named."""
    table = {"n": IntegerField(least=1, most=2, default=1), "m": TextField(is_required=True, about="of the model")}
    fields = Fields({"m": "a", "n": None}, table)
    assert (fields["n"], fields["m"], "n" in fields, "m" in fields) == (1, "a", False, True)
    for values, field, code, reason in (
        ({"m": None}, "m", None, "m: must be given; of the model"),
        ({"m": "a", "k": 1}, "k", "unknown_parameter", "unknown field 'k'"),
        ({"m": "a", "n": 3, "k": 1}, "n", None, "must be an integer from 1 to 2"),
    ):
        with pytest.raises(ApiError, match=reason) as caught:
            Fields(values, table)
        assert (caught.value.status, caught.value.field) == (400, field)
        assert code is None or caught.value.code == code
    for body, reason in (
        (b"[1]", "must be a JSON object"), (b"{", "not valid JSON"), (b'{"a": NaN}', "JSON has no NaN"),
        (b"[" * 100_000, "nests too deep"), (b"\xff", "not valid JSON"),
    ):  # fmt: skip
        with pytest.raises(ApiError, match=reason):
            parsed_body(body)
    assert parsed_body(b'{"a": 1}') == {"a": 1}


# Of each field of sampling: its default, its least and its most; "above" is the least that is left out.
RANGES = {
    "temperature": (1.0, 0.0, 2.0), "top_p": (1.0, "above 0", 1.0), "top_k": (0, -1, VOCAB), "min_p": (0.0, 0.0, 1.0),
    "frequency_penalty": (0.0, -2.0, 2.0), "presence_penalty": (0.0, -2.0, 2.0),
    "repetition_penalty": (1.0, "above 0", 100.0), "min_tokens": (0, 0, CONTEXT), "n": (1, 1, 128),
    "seed": (None, 0, 2**31 - 1),
}  # fmt: skip


def test_ranges_of_sampling():
    """OpenAI's, and vLLM's for what OpenAI does not have; a checkpoint's own defaults where it has some."""
    fields = sampling_fields(MODEL)
    for name, (default, least, most) in RANGES.items():
        field = fields[name]
        lower = f"above {field.least:g}" if getattr(field, "is_above", False) else field.least
        assert (field.default, lower, field.most) == (default, least, most), name
        assert type(field.default) in (type(default), type(None)), name
    assert (fields["stop"].most, fields["ignore_eos"].default, fields["stop_token_ids"].default) == (16, False, ())
    assert fields.keys() == {*RANGES, "stop", "ignore_eos", "stop_token_ids", "logit_bias"}
    own = Model(
        "m", CONTEXT, VOCAB, (1,), False, 8, dict(temperature=0.5, top_p=0.25, top_k=7, min_p=0.1, repetition_penalty=2)
    )
    found = sampling_fields(own, "stop_sequences", max_temperature=1.0)
    assert [found[name].default for name in own.defaults] == list(own.defaults.values())
    assert found["temperature"].most == 1.0 and "stop_sequences" in found and "stop" not in found
    assert fields_of_messages(MODEL)["temperature"].most == 1.0


def asked(**values):
    return sampling_params(Fields(values, sampling_fields(MODEL)), MODEL)


def test_ids_and_biases_at_the_ends_of_the_vocabulary():
    params = asked(stop_token_ids=[0, VOCAB - 1], logit_bias={"0": -100, str(VOCAB - 1): 100}, top_k=-1, seed=2**31 - 1)
    assert list(params.stop_token_ids) == [0, VOCAB - 1] and dict(params.logit_bias) == {0: -100.0, VOCAB - 1: 100.0}
    assert (params.top_k, params.seed, params.skip_special_tokens) == (0, 2**31 - 1, False)
    assert asked(seed=0).seed == 0 and len({asked().seed for _ in range(4)}) == 4
    for values, reason in (
        (dict(stop_token_ids=[VOCAB]), "must be token ids from 0 to 49"), (dict(stop_token_ids=[True]), "from 0 to 49"),
        (dict(logit_bias={str(VOCAB): 1}), "a token id from 0 to 49"), (dict(logit_bias={"-1": 1}), "a token id"),
        (dict(logit_bias={"1": True}), "a number from -100 to 100"), (dict(logit_bias={"²": 1}), "a token id"),
        (dict(logit_bias={"0000000001": 1}), "a token id"),
    ):  # fmt: skip
        with pytest.raises(ApiError, match=reason):
            asked(**values)


def test_room_for_an_answer():
    """A context of 100: 99 tokens leave room for one, 100 for none; a limit above the room is cut to it."""
    for length, limit, expected in ((99, None, 1), (99, 5, 1), (40, 60, 60), (40, 61, 60), (40, 59, 59)):
        params = asked()
        limit_tokens(params, MODEL, length, limit, "prompt")
        assert params.max_tokens == expected, (length, limit)
    with pytest.raises(ApiError, match="the prompt has 100 tokens, and the model's context is 100") as caught:
        limit_tokens(asked(), MODEL, 100, None, "prompt")
    assert (caught.value.code, caught.value.field) == ("context_length_exceeded", "prompt")
    limit_tokens(asked(min_tokens=60), MODEL, 40, None, "prompt")
    with pytest.raises(ApiError, match="min_tokens = 61: at most 60 tokens can come"):
        limit_tokens(asked(min_tokens=61), MODEL, 40, None, "prompt")


def constrained(**values) -> pb.SamplingParams:
    params = pb.SamplingParams()
    set_constraints(Fields(values, CONSTRAINT_FIELDS), params)
    return params


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}), ({"response_format": {"type": "text"}}, {}), ({"structured_outputs": None}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, {"json_schema": SCHEMA}),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"grammar": "start: A", "regex": None}}, {"grammar": "start: A"}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    ],
)  # fmt: skip
def test_constraints_of_a_request(fields, expected):
    params = constrained(**fields)
    kind = params.WhichOneof("constraint")
    found = {} if kind is None else {kind: getattr(params, kind)}
    if kind == "json_schema":
        found[kind] = json.loads(found[kind])
    if kind == "choice":
        found[kind] = list(found[kind].choices)
    assert found == expected
    check_constraints(params, False)
    if kind is None:
        check_constraints(params, True)
    else:
        with pytest.raises(ApiError, match="response_format and a forced tool_choice"):
            check_constraints(params, True)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"response_format": {"type": "xml"}}, "type = 'xml': must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "schema = 3: must be a JSON"),
        ({"response_format": {"type": "json_schema"}}, "schema = None: must be a JSON schema"),
        ({"structured_outputs": {}}, "one of regex, grammar, choice, json"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "one of regex, grammar, choice, json"),
        ({"structured_outputs": {"xml": "a"}}, "one of regex, grammar, choice, json"),
        ({"structured_outputs": {"regex": 3}}, "regex = 3 has another type"),
        ({"structured_outputs": {"choice": []}}, "choice = [] has another type"),
        ({"structured_outputs": {"choice": ["a", 3]}}, "choice = ['a', 3] has another type"),
        ({"structured_outputs": {"choice": "ab"}}, "choice = 'ab' has another type"),
        ({"structured_outputs": {"json": [1]}}, "json = [1] has another type"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "give one of the two"),
    ],
)  # fmt: skip
def test_constraints_that_are_refused(fields, says):
    with pytest.raises(ApiError) as caught:
        constrained(**fields)
    assert says in str(caught.value) and caught.value.status == 400
    assert caught.value.field == ("structured_outputs" if "structured_outputs" in fields else "response_format")
    with pytest.raises(ApiError, match="text: type = 'xml'"):
        response_format({"type": "xml"}, pb.SamplingParams(), "text")


def test_the_schemas_of_constraints_say_what_is_taken():
    inside = object_schema(CONSTRAINT_FIELDS)["properties"]["structured_outputs"]
    inside = next((each for each in inside.get("anyOf", [inside]) if "properties" in each), inside)
    assert inside["properties"] == {
        "regex": {"type": ["string", "null"]}, "grammar": {"type": ["string", "null"]},
        "choice": {"type": ["array", "null"], "items": {"type": "string"}, "minItems": 1},
        "json": {"type": ["string", "object", "null"]},
    }  # fmt: skip
    assert inside["additionalProperties"] == {"type": "null"}


def test_the_ranges_of_whole_numbers():
    """Each protocol's own, besides those of sampling, which all have. A conversation is not empty."""
    of_sampling = sampling_fields(MODEL).keys()
    own = lambda table: [(name, field) for name, field in table.items() if name not in of_sampling]
    ranges, fewest = {}, {}
    for endpoint in ENDPOINTS:
        fields = own(endpoint.table(MODEL))
        ranges[endpoint.path] = {
            name: (field.default, field.least, field.most) for name, field in fields if isinstance(field, IntegerField)
        }
        fewest[endpoint.path] = {name: field.least for name, field in fields if isinstance(field, ListField)}
    limit = (None, 1, 1 << 24)
    assert ranges == {
        "/v1/chat/completions": dict(max_completion_tokens=limit, max_tokens=limit, top_logprobs=(None, 0, 20)),
        "/v1/completions": dict(max_tokens=(16, 0, 1 << 24), logprobs=(None, 0, 20), best_of=(None, 1, 128)),
        "/v1/messages": dict(max_tokens=limit), "/v1/messages/count_tokens": dict(max_tokens=limit),
        "/v1/responses": dict(max_output_tokens=limit), "/tokenize": {}, "/detokenize": {},
    }  # fmt: skip
    assert fewest == {
        "/v1/chat/completions": dict(messages=1, tools=0), "/v1/completions": {}, "/v1/responses": dict(tools=0),
        "/v1/messages": dict(messages=1, tools=0), "/v1/messages/count_tokens": dict(messages=1, tools=0),
        "/tokenize": dict(messages=0, tools=0), "/detokenize": dict(tokens=0),
    }  # fmt: skip


# Of a field: values that are taken, and values that are not. The reader is where what stands inside is checked.
INSIDE = {
    "prompt": (
        lambda fields: tokens_of(TOKENIZER, fields["prompt"], "prompt", 50, 100),
        ["a", [0], [49], [[49], "a"], ["a", "b"]], ["", [], [50], [-1], [[]], ["a", ""], [[1], [50]], [["a"]], [True],
         5],
    ),
    "tokens": (
        lambda fields: tokens_of(TOKENIZER, [fields["tokens"]], "tokens", 50, 100), [[0, 49]], [[50], [-1], ["a"]],
    ),
    "stop_token_ids": (lambda fields: sampling_params(fields, MODEL), [[], [0, 49]], [[50], [-1], ["a"], [1.5]]),
    "logit_bias": (
        lambda fields: sampling_params(fields, MODEL), [{}, {"7": -100}, {"7": 100}, {"7": 0.5}],
        [{"7": -100.5}, {"7": 100.5}, {"7": "1"}, {"7": None}],
    ),
    "stream_options": (
        includes_usage,
        [{}, {"include_usage": True}, {"include_usage": False, "include_obfuscation": True}],
        [{"include_usage": 1}, {"include_obfuscation": None}, {"other": True}],
    ),
    "chat_template_kwargs": (
        lambda fields: thinking_mode(fields, "adaptive"),
        [{}, {"thinking_mode": "enabled"}, {"enable_thinking": False}, {"thinking_mode": "adaptive"}],
        [{"thinking_mode": "on"}, {"enable_thinking": 1}, {"thinking_mode": None}, {"tools": []}],
    ),
    "thinking": (
        lambda fields: thinking_mode(fields, "adaptive"), [{"type": "disabled"}, {"type": "enabled", "more": 1}],
        [{}, {"type": "on"}, {"type": None}],
    ),
    "tool_choice": (
        tool_choice, ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
        ["any", "", {"type": "tool", "name": "f"}, {"function": {"name": "f"}}, 1, []],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
def test_what_stands_inside_a_field_is_read_as_it_is_described(name):
    """The document and OpenAI's readers take the same values, at the ends of what they take and beyond them."""
    reader, taken, refused = INSIDE[name]
    tables = [endpoint.table(MODEL) for endpoint in ENDPOINTS if endpoint.style is OPENAI]
    tables = [table for table in tables if name in table and not isinstance(table[name], FixedField | TextField)]
    others = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a", "tokens": [1]}
    for table in tables:
        described = jsonschema.Draft202012Validator(object_schema(table)["properties"][name])
        stream = {"stream": True} if name == "stream_options" else {}
        base = {other: value for other, value in others.items() if other in table and table[other].is_required}
        for value in taken:
            assert described.is_valid(value), value
            reader(Fields({**base, **stream, name: value}, table))
        for value in refused:
            assert not described.is_valid(value), value
            with pytest.raises(ApiError) as caught:
                reader(Fields({**base, **stream, name: value}, table))
            assert caught.value.status == 400
    assert tables


def test_what_each_request_must_have():
    """All else may be left out."""
    required = {
        endpoint.path: {name for name, field in endpoint.table(MODEL).items() if field.is_required}
        for endpoint in ENDPOINTS
    }
    assert required == {
        "/v1/chat/completions": {"messages"}, "/v1/completions": {"prompt"}, "/v1/responses": {"input"},
        "/v1/messages": {"messages", "max_tokens"}, "/v1/messages/count_tokens": {"messages"},
        "/tokenize": set(), "/detokenize": {"tokens"},
    }  # fmt: skip
