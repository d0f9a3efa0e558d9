"""POST /v1/messages, as Anthropic's own client sees it."""

import pytest
from support.embedded import TOKENIZER
from support.serving import CALL, NAME, clients

TOOLS = [
    {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"name": "get_time", "input_schema": {"type": "object"}},
]
HI = [{"role": "user", "content": "Hi"}]
THINK = {"type": "enabled", "budget_tokens": 1024}


def ask(server, **fields):
    return server.anthropic.messages.create(**{"model": NAME, "max_tokens": 200, "messages": HI} | fields)


def prompt_of(request) -> str:
    return TOKENIZER.decode(request.tokenized.input_ids, skip_special_tokens=False)


def test_answer(scripted):
    server, worker = scripted
    worker.script = lambda request, index: "Hm.</mm:think>Yes: 🙂."
    message = ask(server, thinking=THINK, system=[{"type": "text", "text": "Be brief."}])
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("Hm.", "Yes: 🙂.")
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    assert "Be brief." in prompt_of(worker.requests[0]) and prompt_of(worker.requests[0]).endswith("<mm:think>")
    again = ask(server, thinking=THINK, system="Be brief.")
    usage = again.usage
    assert usage.cache_read_input_tokens > 0
    assert usage.cache_read_input_tokens + usage.input_tokens == message.usage.input_tokens
    ask(server)
    assert prompt_of(worker.requests[2]).endswith("</mm:think>")  # without a word about it, no thinking


def test_stream_is_the_answer(scripted):
    """The client puts the same message together from the events as it gets whole."""
    server, worker = scripted
    worker.script = lambda request, index: f"Hm, well.</mm:think>I will look. {CALL}"
    whole = ask(server, thinking=THINK, tools=TOOLS)
    with server.anthropic.messages.stream(
        model=NAME, max_tokens=200, messages=HI, thinking=THINK, tools=TOOLS
    ) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "message_delta" in kinds
    strip = lambda message: [block.model_dump(exclude={"id"}) for block in message.content]
    assert strip(streamed) == strip(whole)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.content[2].input == {"city": "Paris, the city of light"} and whole.content[3].input == {}
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_tool_round_trip(scripted):
    """The answer's blocks and their results go back as they came, in any order, with a picture and an error."""
    server, worker = scripted
    worker.script = lambda request, index: f"Hm.</mm:think>{CALL}"
    first = ask(server, thinking=THINK, tools=TOOLS)
    calls = [block for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[1].id, "content": "no clock", "is_error": True},
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": [{"type": "text", "text": "Sunny."}]},
        {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
    ]
    worker.script = lambda request, index: "It is sunny."
    history = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    assert ask(server, messages=history, tools=TOOLS).content[0].text == "It is sunny."
    prompt = prompt_of(worker.requests[1])
    assert "<mm:think>Hm.</mm:think>" in prompt and "Go on." in prompt
    assert prompt.index("Sunny.") < prompt.index("Error: no clock")  # the order of the calls


def test_tool_choice(scripted):
    server, worker = scripted
    worker.script = lambda request, index: CALL
    for choice, count in (
        ({"type": "any"}, 2),
        ({"type": "any", "disable_parallel_tool_use": True}, 1),
        ({"type": "tool", "name": "get_weather"}, 2),
        ({"type": "none"}, 0),
    ):
        message = ask(server, tools=TOOLS, tool_choice=choice)
        assert sum(block.type == "tool_use" for block in message.content) == count
    assert [bool(request.sampling_params.grammar) for request in worker.requests] == [True, True, True, False]


def test_ends(scripted):
    server, worker = scripted
    worker.script = lambda request, index: "one two three STOP four"
    stopped = ask(server, stop_sequences=["STOP"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == (
        "stop_sequence", "STOP", "one two three ",
    )  # fmt: skip
    assert ask(server, max_tokens=2).stop_reason == "max_tokens"


def test_count_tokens(scripted):
    server, _ = scripted
    fields = {"messages": HI, "tools": TOOLS, "system": "Be brief."}
    counted = server.anthropic.messages.count_tokens(model=NAME, **fields).input_tokens
    assert counted == ask(server, **fields).usage.input_tokens


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages"),
        ({"messages": [*HI, {"role": "assistant", "content": "The answer is"}]}, "messages"),
        ({"thinking": {"type": "sometimes"}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
    ],
)
def test_bad_fields(scripted, fields, name):
    server, _ = scripted
    with pytest.raises(clients.anthropic.BadRequestError) as raised:
        ask(server, **fields)
    assert raised.value.body["type"] == "error"
    assert raised.value.body["error"]["type"] == "invalid_request_error" and name in raised.value.message


def test_unknown_model(scripted):
    server, _ = scripted
    with pytest.raises(clients.anthropic.NotFoundError):
        ask(server, model="other")
    assert server.anthropic.models.list().data[0].id == NAME
