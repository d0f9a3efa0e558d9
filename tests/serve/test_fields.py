"""The fields of requests at the ends of their ranges, and the options of the servers' commands."""

import math
from pathlib import Path

import pytest
from support.options import wrong_defaults

from m3jax.media import LIMITS
from m3jax.serve import command
from m3jax.serve.gateway import chat_completions, completions, gateway, http, loading, prompts, sources, workers
from m3jax.serve.gateway.app import ENDPOINTS
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
from m3jax.serve.gateway.gateway import Settings
from m3jax.serve.gateway.prompts import tokens_of
from m3jax.serve.gateway.sampling import Model, limit_tokens, sampling_fields, sampling_params
from m3jax.serve.worker import command as worker_command
from m3jax.serve.worker import worker

VOCAB, CONTEXT = 50, 100
MODEL = Model("m", CONTEXT, VOCAB, (1,), can_see=False, block_size=8, defaults={})
LARGE = 10**400  # no float


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
    assert list(object_schema(table, ["u"])["properties"]) == ["u"] and "required" not in object_schema(table, ["u"])


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


def asked(**values):
    return sampling_params(Fields(values, sampling_fields(MODEL)), MODEL)


def test_ids_and_biases_at_the_ends_of_the_vocabulary():
    params = asked(stop_token_ids=[0, VOCAB - 1], logit_bias={"0": -100, str(VOCAB - 1): 100}, top_k=-1, seed=2**31 - 1)
    assert list(params.stop_token_ids) == [0, VOCAB - 1] and dict(params.logit_bias) == {0: -100.0, VOCAB - 1: 100.0}
    assert (params.top_k, params.seed, params.skip_special_tokens) == (0, 2**31 - 1, False)
    assert asked(seed=0).seed == 0 and len({asked().seed for _ in range(4)}) == 4
    for values, reason in (
        (dict(stop_token_ids=[VOCAB]), "must be token ids from 0 to 49"), (dict(stop_token_ids=[-1]), "from 0 to 49"),
        (dict(stop_token_ids=[True]), "from 0 to 49"), (dict(logit_bias={str(VOCAB): 1}), "a token id from 0 to 49"),
        (dict(logit_bias={"-1": 1}), "a token id"), (dict(logit_bias={"1": 100.5}), "a number from -100 to 100"),
        (dict(logit_bias={"1": -100.5}), "from -100"), (dict(logit_bias={"1": True}), "from -100"),
        (dict(logit_bias={"²": 1}), "a token id"), (dict(logit_bias={"0000000001": 1}), "a token id"),
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


def test_prompts_that_are_token_ids():
    ids = lambda value: tokens_of(None, value, "prompt", VOCAB, CONTEXT)
    assert ids([0, VOCAB - 1]) == [[0, VOCAB - 1]] and ids([[1], [2, 3]]) == [[1], [2, 3]]
    for value, reason in (
        ([VOCAB], "integers from 0 to 49"), ([-1], "integers from 0 to 49"), ([[1], [True]], "integers from 0"),
        ([], "and not empty"), ([[]], "at least one"), (5, "must be a text"), ([1.0], "integers from 0|must be"),
    ):  # fmt: skip
        with pytest.raises(ApiError, match=reason):
            ids(value)


def test_limits_of_the_servers():
    """Of the hosted API, of protocols, or of this host's memory; docs/serving.md has those that a client meets."""
    assert prompts.MOST == {"image": 200, "video": 20}
    assert sources.MOST_BYTES == {"image": 30 << 20, "video": 50 << 20} and LIMITS.video_bytes == 50 << 20
    assert (sources._MOST_URL_BYTES["video"], sources._MOST_REDIRECTS, loading._MOST_BYTES) == (250 << 20, 3, 256 << 20)
    assert (chat_completions.MOST_TOKENS, worker.MAX_REQUESTS) == (1 << 24, 1024)
    assert (workers._MOST_BLOCKS, workers._MOST_AHEAD, workers._BLOCK) == (65_536, 8, 64)
    assert (completions._AT_ONCE, completions.NEW_TOKENS, Settings().most_prompts) == (32, 16, 1024)


def test_times_of_the_servers():
    """In seconds: what clients meet is in docs/serving.md, the others are how long another process may be silent."""
    assert (http._BODY_SECONDS, Settings().ping_seconds, sources._SECONDS) == (60.0, 10.0, 20.0)
    assert (gateway._PROGRESS_SECONDS, workers._RETRY_SECONDS, worker_command._PREFILL_SECONDS) == (0.25, 2.0, 600.0)
    documented = (Path(__file__).resolve().parents[2] / "docs/serving.md").read_text(encoding="utf-8")
    assert "a ping every 10 seconds" in documented and "a body took more than 60 seconds" in documented
    # How hard a client wants the model to think, in OpenAI's words and their order.
    words = "none, minimal, low, medium, high, xhigh, max"
    assert gateway.THINKING_FIELDS["reasoning_effort"].about.startswith(f"{words}; ")
    assert gateway.THINKING_MODES == ("adaptive", "enabled", "disabled")
