"""POST /v1/responses, as OpenAI's own client sees it."""

import json

import pytest
from support.embedded import TOKENIZER
from support.serving import CALL, NAME, clients

from m3jax.serve.gateway import responses
from m3jax.serve.gateway.errors import ApiError
from m3jax.serve.gateway.http import RESPONSES
from m3jax.serve.gateway.responses import _Items
from m3jax.text import Event

TOOLS = [
    {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}},
    {"type": "function", "name": "get_time"},
]


def test_stream_is_the_response(scripted):
    """Deltas, `done` events and the last event say the same, with consecutive numbers."""
    server, worker = scripted
    worker.script = lambda request, index: f"Hm, well.</mm:think>I will look. {CALL}"
    fields = {"model": NAME, "input": "Hi", "tools": TOOLS, "reasoning": {"effort": "high"}}
    whole = server.openai.responses.create(**fields)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (whole.output_text, whole.status) == ("I will look. ", "completed")
    assert json.loads(whole.output[2].arguments) == {"city": "Paris, the city of light"}
    events = list(server.openai.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    strip = lambda response: [item.model_dump(exclude={"id", "call_id"}) for item in response.output]
    assert strip(last) == strip(whole) and last.usage.output_tokens == whole.usage.output_tokens
    deltas = lambda kind: "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
    assert (deltas("output_text"), deltas("reasoning_text")) == ("I will look. ", "Hm, well.")
    assert deltas("function_call_arguments") == "".join(item.arguments for item in whole.output[2:])


def test_events_of_an_item_name_its_place():
    """All that is told of an item between `added` and `done` has its id and its place; its only part is part 0."""
    items = _Items()
    told = [Event("reasoning", "a"), Event("content", "b"), Event("content", "c"), Event("reasoning", "d")]
    told += [Event("tool_call", id="call_1", name="f"), Event("arguments", "{"), Event("arguments", "}")]
    told += [Event("tool_call_end")]
    lines = [line for event in told for line in items.events(event)]
    events = [json.loads(line.partition("data: ")[2]) for line in lines]
    place, ids, kinds = -1, {}, []
    for event in events:
        name = event["type"].removeprefix("response.")
        if name == "output_item.added":
            place += 1
            ids[place] = event["item"]["id"]
            kinds.append([])
        elif name != "output_item.done":
            assert event["item_id"] == ids[place]
            is_part = not name.startswith("function_call")
            assert event.get("content_index") == (0 if is_part else None) and ("content_index" in event) == is_part
        assert event["output_index"] == place
        kinds[place].append(name)
    around = lambda kind, count: [
        "output_item.added", "content_part.added", *[f"{kind}.delta"] * count, f"{kind}.done", "content_part.done",
        "output_item.done",
    ]  # fmt: skip
    of_call = [f"function_call_arguments.{part}" for part in ("delta", "delta", "done")]
    assert kinds == [
        around("reasoning_text", 1), around("output_text", 2), around("reasoning_text", 1),
        ["output_item.added", *of_call, "output_item.done"],
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [item["id"] for item in items.done] == list(ids.values()) and items.close() == []


def test_round_trip(scripted):
    """The output goes back as input, with the functions' results."""
    server, worker = scripted
    worker.script = lambda request, index: f"Hm.</mm:think>{CALL}"
    fields = {"model": NAME, "tools": TOOLS, "instructions": "Be brief.", "reasoning": {"effort": "high"}}
    first = server.openai.responses.create(**fields, input=[{"role": "user", "content": "Hi"}])
    calls = [item for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": call.name} for call in calls]
    worker.script = lambda request, index: "Hm.</mm:think>Done."
    parts = [{"type": "input_text", "text": "Hi, "}, {"type": "input_text", "text": "again"}]
    history = [{"role": "user", "content": parts}, *(item.model_dump() for item in first.output), *results]
    assert server.openai.responses.create(**fields, input=history).output_text == "Done."
    prompt = TOKENIZER.decode(worker.requests[1].tokenized.input_ids, skip_special_tokens=False)
    assert "<mm:think>Hm.</mm:think>]<]minimax[>[<tool_call>" in prompt
    assert "Be brief." in prompt and "Hi, again" in prompt
    assert "<response>get_weather</response>" in prompt


def test_cut(scripted):
    server, worker = scripted
    worker.script = lambda request, index: "one two three four five"
    cut = server.openai.responses.create(model=NAME, input="Hi", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"input": [{"role": "user", "content": 5}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
    ],
)
def test_bad_fields(scripted, fields, name):
    server, _ = scripted
    with pytest.raises(clients.openai.BadRequestError) as raised:
        server.openai.responses.create(**{"model": NAME, "input": "Hi"} | fields)
    assert raised.value.param == name


def call(name: str) -> dict:
    return {"type": "function_call", "call_id": f"id of {name}", "name": name, "arguments": f'{{"of": "{name}"}}'}


def called(name: str) -> dict:
    function = {"name": name, "arguments": f'{{"of": "{name}"}}'}
    return {"id": f"id of {name}", "type": "function", "function": function}


USER, SAID = {"role": "user", "content": "u"}, {"type": "message", "role": "assistant", "content": "a"}
THOUGHT = {"type": "reasoning", "summary": [{"text": "s"}], "content": [{"text": "one"}, {}, {"text": "two"}]}
SUMMARY = {"type": "reasoning", "summary": [{"text": "s"}]}
OUTPUT = {"type": "function_call_output", "call_id": "id of f"}
TURN = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([call("f")], [{**TURN, "tool_calls": [called("f")]}]),
        ([USER, call("f"), call("g")], [USER, {**TURN, "tool_calls": [called("f"), called("g")]}]),
        ([USER, SAID, call("f")], [USER, {**TURN, "content": "a", "tool_calls": [called("f")]}]),
        ([call("f"), SAID], [{**TURN, "tool_calls": [called("f")]}, {**TURN, "content": "a"}]),
        ([SAID, SAID], [{**TURN, "content": "a"}] * 2),
        ([SAID, USER, SAID], [{**TURN, "content": "a"}, USER, {**TURN, "content": "a"}]),
        (
            [USER, THOUGHT, SAID, call("f")],
            [USER, {**TURN, "reasoning_content": "one\ntwo", "content": "a", "tool_calls": [called("f")]}],
        ),
        ([SUMMARY, call("f")], [{**TURN, "reasoning_content": "s", "tool_calls": [called("f")]}]),
        ([{"type": "reasoning"}, SAID], [{**TURN, "content": "a"}]),
        ([SAID, SUMMARY], [{**TURN, "content": "a"}, {**TURN, "reasoning_content": "s"}]),
        ([{**OUTPUT, "output": "42"}], [{"role": "tool", "tool_call_id": "id of f", "content": "42"}]),
        (
            [{**OUTPUT, "output": [{"type": "input_text", "text": "42"}]}],
            [{"role": "tool", "tool_call_id": "id of f", "content": [{"type": "text", "text": "42"}]}],
        ),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,x", "detail": "low"}]}],
            [{"role": "user", "content": [{"type": "image", "image": "data:,x", "detail": "low"}]}],
        ),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]}],
            [{"role": "user", "content": [{"type": "image", "image": "data:,x"}]}],
        ),
    ],
)
def test_items_are_messages_and_those_of_one_turn_one_message(items, messages):
    assert responses._messages(items) == messages


def test_an_error_within_a_stream_is_an_event_with_its_fields():
    """As the Responses API has it: the error's fields stand beside the event's type."""
    error = ApiError(500, "broken")
    name, data = RESPONSES.error_event(error).strip().split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {"type": "error", **error.as_openai()["error"]}
