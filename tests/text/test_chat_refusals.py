"""Refusals of what a conversation cannot express: one line that names the message, the call and what to do."""

from typing import Any

import pytest
from support import chat_strategies as drawn
from support.chat_messages import HI, assistant, call, result, user

from m3jax.assets import embedded_path
from m3jax.text import ChatTemplate

TEMPLATE = ChatTemplate.from_folder(embedded_path())
F = {"name": "f", "arguments": {"a": "x"}}
CALLS = assistant(None, call("1"), call("2"))
DEEP: Any = []
for _ in range(70):
    DEEP = [DEEP]

PARTS_LISTED = (
    r"\(user\), part 1: type = 'input_audio' would not reach the model: it is one of text, input_text, output_text, "
    "image, image_url, input_image, video, video_url, input_video$"
)
A_CALL_HAS = r"call 1: 'name' = 'g' would not reach the model.* \(a call has id, type, index, function\)$"

REFUSED_MESSAGES = {
    "no list": ("Hi", "messages is a list of messages, got 'Hi'"),
    "one message": (HI, "messages is a list of messages, got {"),
    "no object": (["Hi"], "message 1: a message is an object with a role, got 'Hi'"),
    "no role": ([{"content": "a"}], "1: role = None: must be one of root, system, developer, user, assistant, tool$"),
    "unknown role": ([HI, {"role": "ai", "content": "a"}], "message 2: role = 'ai': must be one of"),
    "role of the wrong type": ([{"role": ["user"], "content": "a"}], r"message 1: role = \['user'\]"),
    "no content": ([{"role": "user"}], r"message 1 \(user\): has no content"),
    "content null": ([user(None)], "has no content; give a text"),
    "content is an object": ([HI, CALLS, result("1", {"a": 1})], r"message 3 \(tool\): content is a text or a list of"),
    "content is a number": ([user(3)], "content is a text or a list of parts, got 3"),
    "a later system message that is none": ([HI, {"role": "system", "content": 3}], r"2 \(system\): content is"),
    "root later": ([HI, {"role": "root", "content": "a"}], r"message 2 \(root\): only the first message can be root"),
    "a name": ([user("a") | {"name": "Ann"}], r"'Ann' would not reach .* \(such a message has role, content\)$"),
    "reasoning of a user": ([user("a") | {"reasoning": "b"}], "'reasoning' = 'b' would not reach the model"),
    "a field of an assistant": (
        [assistant("a") | {"audio": "b"}], "has role, content, reasoning_content, reasoning, tool_calls.$"
    ),
    "a field of a result": ([CALLS, result("1") | {"status": 1}], "has role, content, tool_call_id, name.$"),
    "an unknown part": ([user([{"type": "input_audio"}])], PARTS_LISTED),
    "a part without type": ([user([{"text": "a"}])], "part 1: type = None"),
    "an output of a user": ([user([{"output": "a"}])], r"\(user\), part 1: type = None would not reach"),
    "an output of a bad type": ([CALLS, result("1", [{"type": ["text"], "output": "a"}])], "type = \\['text'\\] would"),
    "an output and a text": (
        [CALLS, result("1", [{"type": "text", "text": "a", "output": "b"}])],
        r"'text' = 'a' would not reach .* \(a part with an output has type, output\)$",
    ),
    "an output not of JSON": ([CALLS, result("1", [{"output": {1}}])], r"part 1: output: \{1\} is a set, which JSON"),
    "a part that is a number": ([user(["a", 3])], "part 2: a part is a text or an object"),
    "a text part without text": ([user([{"type": "text"}])], "part 1: text = None: must be a text"),
    "a hint in a part": (
        [user([{"type": "text", "text": "a", "cache_control": {"type": "x"}}])],
        r"'cache_control' = .* \(a text part has type, text\)$",
    ),
    "two reasonings": ([assistant("a", reasoning="b", reasoning_content="c")], "say different things"),
    "reasonings that are no texts": ([assistant("a", reasoning=1, reasoning_content=2)], "reasoning_content = 2: must"),
    "reasoning is no text": ([assistant("a", reasoning=["b"])], r"reasoning = \['b'\]: must be a text or null"),
    "text before reasoning": ([assistant("a<mm:think>b</mm:think>c")], "is not one <mm:think>...</mm:think> in front"),
    "reasoning twice in the content": ([assistant("a</mm:think>b</mm:think>c")], "give it as reasoning_content"),
    "reasoning around an image": ([assistant(["a</mm:think>", {"type": "image"}])], "give it as reasoning_content"),
    "calls are no list": ([assistant() | {"tool_calls": {"id": "1"}}], r"\(assistant\): tool_calls is a list"),
    "a call is no object": ([assistant(None, "f")], r"\(assistant\), call 1: a call is an object, got 'f'"),
    "a call of something else": ([assistant(None, call() | {"type": "custom"})], "type = 'custom': only functions"),
    "a call's place": ([assistant(None, call() | {"index": 1})], "index = 1, but it is number 0 of the list"),
    "a call without a name": ([assistant(None, {"function": {"arguments": {}}})], "call 1: name = None: must be a"),
    "a name that ends its tag": ([assistant(None, call("1", 'f">'))], "name = 'f\">': must be a text of one line"),
    "a field beside the function": ([assistant(None, call() | {"name": "g"})], A_CALL_HAS),
    "a field in the function": ([assistant(None, {"function": F | {"x": 1}})], "'x' = 1 .*n has name, arguments.$"),
    "no arguments": ([assistant(None, {"function": {"name": "f"}})], r"call 1 \(f\): arguments = None: must be an"),
    "invalid JSON": ([HI, assistant(None, call(), call("2", "g", "{"))], r"message 2 \(assistant\), call 2 \(g\): arg"),
    "empty JSON": ([assistant(None, call("1", "f", ""))], r"call 1 \(f\): arguments = '' are not valid JSON"),
    "JSON of a list": ([assistant(None, call("1", "f", "[]"))], r"arguments = '\[\]': must be an object, or its JSON"),
    "a key twice": ([assistant(None, call("1", "f", '{"a": 1, "a": 2}'))], "not valid JSON: the key 'a' stands twice"),
    "NaN in JSON": ([assistant(None, call("1", "f", '{"a": NaN}'))], "not valid JSON: it has no NaN"),
    "too large for a float": ([assistant(None, call("1", "f", '{"a": 1e999}'))], "arguments: a = inf: JSON has no"),
    "infinite": ([assistant(None, call("1", "f", {"a": [float("inf")]}))], r"arguments: a\.0 = inf: JSON has no such"),
    "a long integer": ([assistant(None, call("1", "f", '{"a": ' + "1" * 5_000 + "}"))], "not valid JSON: Exceeds the"),
    "no JSON type": ([assistant(None, call("1", "f", {"a": {1}}))], r"arguments: a: \{1\} is a set, which JSON does"),
    "a key that is a number": ([assistant(None, call("1", "f", {"a": {1: 2}}))], "arguments: a: the key 1 is no text"),
    "a key that ends its tag": ([assistant(None, call("1", "f", {"a>b": 1}))], "arguments: 'a>b' cannot be a tag"),
    "a key that closes another": ([assistant(None, call("1", "f", {"/a": 1}))], "'/a' cannot be a tag"),
    "a key that is a call": ([assistant(None, call("1", "f", {"invoke name=": 1}))], "cannot be a tag: it is empty,"),
    "an empty key": ([assistant(None, call("1", "f", {"": 1}))], "'' cannot be a tag"),
    "deep arguments": ([assistant(None, call("1", "f", {"a": DEEP}))], "lists and objects nest deeper than 64"),
    "deep JSON": ([assistant(None, call("1", "f", '{"a":' * 10**5))], "arguments nest too deep"),
    "a result first": ([result()], r"message 1 \(tool\): the message before it calls no tool"),
    "a result after a user": ([assistant(None, call()), HI, result()], "has no result"),
    "a result after an answer": ([HI, assistant("a"), result()], r"message 3 \(tool\): the message before it calls"),
    "a call without its result": ([CALLS, result("1")], r"message 1 \(assistant\): call 2 with the id '2' has no"),
    "calls without results": ([CALLS, HI], r"message 1 \(assistant\): call 1 with the id '1' has no result"),
    "a result without id": ([CALLS, result("1"), result(None)], "result 2 has no tool_call_id; give one to each, or"),
    "a call without id": ([assistant(None, call("1"), call(None)), result("1")], "call 2 has no id; give one to each"),
    "an unknown id": ([CALLS, result("1"), result("3")], "no call has the id '3' of a result; theirs are '1', '2'"),
    "two results of one id": ([CALLS, result("1"), result("1")], "two results have the tool_call_id '1'"),
    "two calls of one id": ([assistant(None, call(), call()), result(), result()], "two calls have the id '1'"),
    "too few results without ids": ([assistant(None, call(None), call(None)), result(None)], "2 calls and 1 results"),
    "an id that is a number": ([assistant(None, call() | {"id": 1})], r"call 1 \(f\): id = 1: must be a text"),
    "a result's id that is a number": ([assistant(None, call()), result() | {"tool_call_id": 1}], "tool_call_id = 1: "),
    "a result's id and name": ([CALLS, result("1") | {"tool_call_id": 1, "name": ""}], "tool_call_id = 1: must be a"),
    "neither calls nor results have all ids": (
        [assistant(None, call("1"), call(None)), result("1"), result(None)], "call 2 has no id; give one to each"
    ),
    "a result of another name": ([assistant(None, call()), result(name="g")], "the result of f is named 'g'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_MESSAGES)
def test_messages_that_are_refused(case):
    messages, message = REFUSED_MESSAGES[case]
    with pytest.raises(ValueError, match=message) as caught:
        TEMPLATE.render(messages)
    assert str(caught.value).isprintable() and len(str(caught.value)) <= 2_000


REFUSED_TOOLS = {
    "no list": ({"f": {}}, "tools is a list of tools, got {'f'"),
    "a text": ("[]", "tools is a list of tools, got '\\[\\]'"),
    "no object": (["f"], "tool 1: a tool is an object, got 'f'"),
    "a bare function": ([{"name": "f", "parameters": {}}], r'tool 1: write it as {"type": "function", "func'),
    "a function of Python": ([print], r"tool 1 \(print\): \*args cannot be given by name"),
    "another type": ([{"type": "web_search"}], "tool 1: type = 'web_search': only functions can be called"),
    "no function": ([{"type": "function"}], "tool 1: function = None: must be an object with a name"),
    "no name": ([{"type": "function", "function": {}}], "tool 1: name = None: must be a text of one line"),
    "a field beside the function": ([drawn.tool("f", {}) | {"cache": 1}], "'cache' = 1 .*tool has type, function.$"),
    "a schema that is a text": ([drawn.tool("f", "{}")], r"tool 1 \(f\): parameters = '{}': must be a JSON"),
    "a schema of a text": ([drawn.tool("f", {"type": "string"})], "must be a JSON schema of an object"),
    "a schema that is null": ([drawn.tool("f", None)], r"\(f\): parameters = None: leave it out, or give a"),
    "properties in a list": ([drawn.tool("f", {"properties": ["a"]})], r"\(f\): properties = \['a'\]: must be an"),
    "a property that is no schema": ([drawn.tool("f", {"properties": {"a": "string"}})], "with a schema for each name"),
    "required is true": ([drawn.tool("f", {"required": True})], "required = True: must be a list of names"),
    "a description in a list": ([drawn.tool("f", {}, ["a"])], r"description = \['a'\]: must be a text"),
    "not JSON": ([drawn.tool("f", {"default": {1}})], r"parameters\.default: \{1\} is a set, which JSON"),
    "the same name twice": ([drawn.tool("f", {})] * 2, "two tools are called 'f'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_TOOLS)
def test_tools_that_are_refused(case):
    tools, message = REFUSED_TOOLS[case]
    with pytest.raises(ValueError, match=message) as caught:
        TEMPLATE.render([HI], tools)
    assert str(caught.value).isprintable() and len(str(caught.value)) <= 2_000
