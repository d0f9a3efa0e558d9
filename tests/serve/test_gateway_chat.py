"""POST /v1/chat/completions, as OpenAI's own client sees it, and what MiniMax's provider verifier expects."""

import json

import pytest
from support.serving import CALL, NAME, NS, clients

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]
HI = [{"role": "user", "content": "Hi"}]


def ask(server, **fields):
    return server.openai.chat.completions.create(**{"model": NAME, "messages": HI} | fields)


def says(worker, *texts):
    worker.script = lambda request, index: texts[index % len(texts)]


def thinking(mode):
    return {"chat_template_kwargs": {"thinking_mode": mode}}


def joined(chunks, name):
    return "".join(getattr(chunk.choices[0].delta, name, None) or "" for chunk in chunks if chunk.choices)


def test_answer(scripted):
    server, worker = scripted
    says(worker, "Fine, thanks: 5 € and 🙂.")
    answer = ask(server)
    assert answer.choices[0].message.content == "Fine, thanks: 5 € and 🙂."
    assert answer.choices[0].finish_reason == "stop" and answer.model == NAME and answer.object == "chat.completion"
    sent = worker.requests[0].sampling_params
    assert (sent.temperature, sent.max_tokens) == (0.5, 4096 - answer.usage.prompt_tokens)  # the model's own defaults
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream(scripted):
    """Every chunk has id, choices and object; the reason stands in the last one alone, counts come behind it."""
    server, worker = scripted
    says(worker, "<mm:think>Well: 🙂.</mm:think>Fine, thanks: 5 € and 🙂.")
    whole = ask(server)
    events = server.events(
        "/v1/chat/completions", {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert events.pop() == "[DONE]"
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    first, second = whole.usage.model_dump(exclude_none=True), events[-1]["usage"]
    assert second["prompt_tokens_details"].pop("cached_tokens") == first["prompt_tokens"] - 1  # the second time
    assert first["prompt_tokens_details"].pop("cached_tokens") == 0
    assert first == second
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0]["role"] == "assistant" and all("role" not in delta for delta in deltas[1:])
    assert not [delta for delta in deltas if delta.get("content") and delta.get("reasoning_content")]
    assert "".join(delta.get("content", "") for delta in deltas) == "Fine, thanks: 5 € and 🙂."
    assert [delta.get("reasoning") for delta in deltas] == [delta.get("reasoning_content") for delta in deltas]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Well: 🙂."
    assert "�" not in json.dumps(events, ensure_ascii=False)


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({}, "adaptive"),
        (thinking("enabled"), "enabled"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "disabled"),
        ({"thinking": {"type": "disabled"}}, "disabled"),
        ({"thinking": {"type": "enabled"}}, "enabled"),
        ({"thinking": {"type": "disabled"}, **thinking("enabled")}, "enabled"),
        ({"reasoning_effort": "none"}, "disabled"),
        ({"reasoning_effort": "minimal"}, "adaptive"),
        ({"reasoning_effort": "max"}, "enabled"),
        ({"reasoning_effort": "other"}, "adaptive"),
    ],
)
def test_thinking_mode(scripted, fields, mode):
    """Each way of saying it sets the mode in the prompt, and the parser's: enabled, the prompt has begun to think."""
    from support.embedded import TOKENIZER

    server, worker = scripted
    says(worker, "Hm.</mm:think>Yes.")
    message = ask(server, extra_body=fields).choices[0].message
    prompt = TOKENIZER.decode(worker.requests[0].tokenized.input_ids, skip_special_tokens=False)
    endings = {"enabled": "<mm:think>", "disabled": "</mm:think>", "adaptive": "ai\n"}
    assert prompt.endswith(endings[mode])
    if mode == "enabled":
        assert (message.reasoning_content, message.reasoning, message.content) == ("Hm.", "Hm.", "Yes.")


def test_calls(scripted):
    server, worker = scripted
    says(worker, f"<mm:think>Weather.</mm:think>{CALL}")
    choice = ask(server, tools=TOOLS).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather", "get_time"]
    assert [call.function.arguments for call in calls] == ['{"city":"Paris, the city of light"}', "{}"]
    assert calls[0].id != calls[1].id
    # The second step: results in any order, linked by their ids.
    says(worker, "Sunny.")
    results = [{"role": "tool", "tool_call_id": call.id, "content": call.function.name} for call in calls]
    history = [*HI, choice.message.model_dump(exclude_none=True), *reversed(results), *HI]
    assert ask(server, messages=history, tools=TOOLS).choices[0].message.content == "Sunny."


def test_streamed_calls(scripted):
    """Arguments come in pieces of 5 to 200 characters, and a name is never null."""
    server, worker = scripted
    city = "Llanfairpwllgwyngyll " * 40
    says(worker, f"Wait. {CALL.replace('Paris, the city of light', city)}")
    chunks = [chunk.choices[0] for chunk in ask(server, tools=TOOLS, stream=True)]
    parts = [call for choice in chunks for call in choice.delta.tool_calls or ()]
    pieces = [part.function.arguments for part in parts if part.index == 0 and part.function.arguments]
    assert json.loads("".join(pieces)) == {"city": city}
    assert len(pieces) > 4 and all(5 <= len(piece) <= 200 for piece in pieces)
    starts = [part for part in parts if part.id]
    assert [(part.index, part.function.name) for part in starts] == [(0, "get_weather"), (1, "get_time")]
    assert "".join(part.function.arguments for part in parts if part.index == 1) == "{}"
    assert chunks[-1].finish_reason == "tool_calls"
    raw = server.events("/v1/chat/completions", {"messages": HI, "tools": TOOLS, "stream": True})
    assert '"name":null' not in json.dumps(raw, separators=(",", ":"))


def test_no_calls_and_one(scripted):
    """`none` shows no tools and returns no call; without parallel calls only the first one comes."""
    server, worker = scripted
    says(worker, f"Well. {CALL}")
    choice = ask(server, tools=TOOLS, tool_choice="none").choices[0]
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
    assert NS not in choice.message.content
    choice = ask(server, tools=TOOLS, parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    assert len(worker.requests[0].tokenized.input_ids) < len(worker.requests[1].tokenized.input_ids)


def test_forced_calls_end_as_openai_says(scripted):
    """A call that was required ends with tool_calls, one that was named with stop; both have a grammar."""
    server, worker = scripted
    says(worker, CALL)
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert ask(server, tools=TOOLS, tool_choice="required").choices[0].finish_reason == "tool_calls"
    assert ask(server, tools=TOOLS, tool_choice=named).choices[0].finish_reason == "stop"
    assert all("get_weather" in request.sampling_params.grammar for request in worker.requests)


def test_undeclared_call_is_parsed(scripted):
    server, worker = scripted
    says(worker, CALL)
    assert ask(server).choices[0].message.tool_calls[0].function.name == "get_weather"


def test_limits(scripted):
    """The newer limit beats the older, an answer has exactly so many tokens, and huge limits are cut to the room."""
    server, worker = scripted
    says(worker, "one two three four five six seven eight nine ten")
    answer = ask(server, max_completion_tokens=3, max_tokens=5)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")
    for most in (512_000, 524_288):
        assert ask(server, max_tokens=most).choices[0].finish_reason == "stop"
    with pytest.raises(clients.openai.BadRequestError, match="4096") as raised:
        ask(server, messages=[{"role": "user", "content": "long " * 5000}])
    assert raised.value.code == "context_length_exceeded" and raised.value.param == "messages"


def test_several_answers(scripted):
    server, worker = scripted
    says(worker, "One.", "Two.", "Three.")
    answer = ask(server, n=3)
    assert [choice.message.content for choice in answer.choices] == ["One.", "Two.", "Three."]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    one = ask(server, n=1).usage
    assert answer.usage.prompt_tokens == one.prompt_tokens and answer.usage.completion_tokens > one.completion_tokens
    chunks = [chunk.choices[0] for chunk in ask(server, n=3, stream=True)]
    texts = ["".join(each.delta.content or "" for each in chunks if each.index == index) for index in range(3)]
    assert texts == ["One.", "Two.", "Three."]
    assert sorted(each.index for each in chunks if each.finish_reason) == [0, 1, 2]


@pytest.mark.parametrize("tokens_per_chunk", [1, 7])
def test_stop_strings(scripted, tokens_per_chunk):
    """Nothing at or behind a stop string comes, also where it runs over tokens, and what waited for one does come."""
    server, worker = scripted
    worker.tokens_per_chunk = tokens_per_chunk
    says(worker, "It is well and good. END of it. E")
    assert ask(server, stop="END").choices[0].message.content == "It is well and good. "
    assert joined(list(ask(server, stop=["nowhere", "D of"], stream=True)), "content") == "It is well and good. EN"
    assert ask(server, stop="EX").choices[0].message.content.endswith("of it. E")


def test_parser_gives_back_what_it_held(scripted):
    """The beginning of a mark at the end is text; a broken call leaks no marks."""
    server, worker = scripted
    says(worker, "1 < 2 and ]<]mini")
    assert ask(server).choices[0].message.content == "1 < 2 and ]<]mini"
    assert joined(list(ask(server, stream=True)), "content") == "1 < 2 and ]<]mini"
    says(worker, "</mm:think></mm:think>Two closers.")
    assert ask(server).choices[0].message.content == "Two closers."
    says(worker, CALL.replace(NS, NS, 1)[: len(CALL) // 2])
    cut = ask(server, tools=TOOLS, max_tokens=30).choices[0]
    assert cut.finish_reason == "length" and NS not in (cut.message.content or "")


def test_logprobs(scripted):
    """There is one entry a token, in a stream as in the whole, and alternatives as many as were asked for."""
    server, worker = scripted
    says(worker, "Fine 🙂.")
    whole = ask(server, logprobs=True, top_logprobs=2)
    found = whole.choices[0].logprobs.content
    assert len(found) == whole.usage.completion_tokens
    assert bytes(byte for each in found[:-1] for byte in each.bytes).decode() == "Fine 🙂."
    assert [len(each.top_logprobs) for each in found] == [2] * len(found)
    chunks = list(ask(server, logprobs=True, top_logprobs=2, stream=True))
    parts = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    assert parts == found
    assert ask(server).choices[0].logprobs is None
    assert ask(server, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"seed": 666}, None),  # the worker's own refusal
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages"),
        ({"messages": [*HI, {"role": "assistant", "content": "Hello"}]}, "messages"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "all"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "tools": TOOLS, "tool_choice": "required"}, "response_format"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"chat_template_kwargs": {"thinking_mode": "no"}}}, "chat_template_kwargs"),
        ({"reasoning_effort": "none", "extra_body": {"thinking": {"type": "enabled"}}}, "reasoning_effort"),
    ],
)
def test_bad_fields(scripted, fields, field):
    """What no table of fields can say is 400 with the field's name too, as a stream or not."""
    server, _ = scripted
    for stream in (False, True) if "stream_options" not in fields else (False,):
        with pytest.raises(clients.openai.BadRequestError) as raised:
            ask(server, stream=stream, **fields)
        assert raised.value.param == field and raised.value.type == "invalid_request_error"
        assert (field or "seed") in raised.value.message


CALLED = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "a", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}]}  # fmt: skip

NO_CONTENT = {name: value for name, value in CALLED.items() if name != "content"}


@pytest.mark.parametrize(
    ("history", "is_good"),
    [
        ([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, *HI], True),
        ([CALLED, {"role": "tool", "tool_call_id": "a", "content": "noon"}], True),
        ([{**CALLED, "content": ""}, {"role": "tool", "tool_call_id": "a", "content": "noon"}], True),
        ([NO_CONTENT, {"role": "tool", "tool_call_id": "a", "content": "noon"}], True),
        ([{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, *HI], True),
        ([{"role": "root", "content": "a"}, {"role": "developer", "content": "b"}, *HI], True),
        ([CALLED, *HI], False),
    ],
)
def test_histories(scripted, history, is_good):
    server, _ = scripted
    status, _, text = server.ask("/v1/chat/completions", {"messages": history})
    assert status == (200 if is_good else 400), text


ITEMS = {"type": "array", "items": {"type": "object", "properties": {"c": {"type": "string"}}}}
DEEP = {"type": "object", "properties": {"b": {"type": "object", "properties": {"items": ITEMS}}}}


@pytest.mark.parametrize(
    "tool",
    [
        {"name": "get-all.items"},
        {"name": "f", "description": None},
        {"name": "deep", "parameters": {"type": "object", "properties": {"a": DEEP}}},
    ],
)
def test_tools_of_all_kinds(scripted, tool):
    server, _ = scripted
    tools = [{"type": "function", "function": {**tool, "name": f"{tool['name']}{number}"}} for number in range(30)]
    assert server.ask("/v1/chat/completions", {"messages": HI, "tools": tools})[0] == 200
