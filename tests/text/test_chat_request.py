"""A request in order: nothing that a user sent disappears in silence, and what has two spellings is one text."""

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from support import chat_strategies as drawn
from support.chat_messages import HI, assistant, call, result, user

from m3jax.assets import embedded_path
from m3jax.text import ChatTemplate
from m3jax.text.chat import ordered_messages, ordered_tools

TEMPLATES = [ChatTemplate.from_folder(embedded_path())]
if official := os.environ.get("M3_CHAT_TEMPLATE"):
    TEMPLATES.append(ChatTemplate.from_file(official))
F = {"name": "f", "arguments": {"a": "x"}}


# A request with every property that one can have.
REQUEST = {
    "messages": [
        {"role": "root", "content": "root"},
        {"role": "developer", "content": [{"type": "input_text", "text": "developer"}, "more"]},
        user(["text", {"type": "text", "text": "part"}, {"type": "image_url", "image_url": {"url": "data:"}}]),
        assistant(
            "said",
            {"index": 0, **call("1", "f", {"s": "x", "n": 1, "f": 1.5, "b": True, "z": None, "o": {"k": "v"}})},
            call("2", "g", '{"a": ["x", 2, false, null, [], {}, {"q": "w"}], "e": ""}'),
            {"id": "3", "name": "flat", "arguments": {"deep": [[["x"]]]}},
            reasoning_content="thought",
            reasoning="thought",
        ),
        result("2", [{"type": "text", "text": "two"}, {"type": "input_image", "image_url": "data:"}], name="g"),
        result("1", "one", name="f"),
        result("3", [{"output": "three"}]),
        assistant(
            [{"type": "output_text", "text": "<mm:think>why</mm:think>because", "annotations": []}], refusal=None
        ),
        user([{"type": "video_url", "video_url": {"url": "data:"}}, {"type": "image"}, {"type": "video"}]),
        assistant("", reasoning=""),
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": "é",
                "strict": True,
                "parameters": {
                    "type": "object",
                    "properties": {"s": {"type": "string", "enum": ["x", None, 1]}, "o": {"type": ["object", "null"]}},
                    "required": ["s"],
                    "additionalProperties": False,
                },
            },
        },
        {"function": {"name": "g"}},
    ],
}
MEDIA = ("image_url", "video_url")  # what addresses a medium is for who reads it; the template writes its place


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value in a request, containers too."""
    if path:
        yield path
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        yield from places(member, (*path, key))


def altered(request: dict, path: tuple, other: Any) -> dict:
    """A copy of a request with another value at a path, or, where the path ends in None, one more field or item."""
    request = copy.deepcopy(request)
    container = request
    for key in path[:-1]:
        container = container[key]
    if path[-1] is None and isinstance(container, list):
        container.append(other)
    else:
        container["unheard-of" if path[-1] is None else path[-1]] = other
    return request


def assert_noticed(request: dict, path: tuple, other: Any) -> None:
    """Every template writes another text for the other value, or the request is refused."""
    changed = altered(request, path, other)
    for template in TEMPLATES:
        try:
            text = template.render(**changed)
        except ValueError as error:
            assert str(error).isprintable() and len(str(error)) <= 2_000, error
            continue
        assert text != template.render(**request), f"{other!r} at {path} disappears in the text of {template.name}"


PLACES = [path for path in places(REQUEST) if not any(name in path for name in MEDIA)]


@pytest.mark.parametrize("other", ["other", 7])
def test_no_property_of_a_request_disappears(other):
    """Each value of the request above is replaced, one after the other."""
    for path in PLACES:
        if path not in (("messages",), ("tools",)):
            assert_noticed(REQUEST, path, other)


def test_no_field_that_is_unheard_of_disappears():
    """Each object and list of the request gets one more entry; what a part of a medium has is for who reads that."""
    for path in PLACES:
        container = REQUEST
        for key in path:
            container = container[key]
        is_medium = isinstance(container, dict) and "content" in path and "text" not in container
        if isinstance(container, dict | list) and not is_medium:
            assert_noticed(REQUEST, (*path, None), "other")


@given(messages=drawn.message_lists(nulls=True))
def test_any_request_is_left_as_it_was_and_order_is_kept(messages):
    """Putting in order changes a copy, and changes nothing the second time."""
    before = copy.deepcopy(messages)
    once = ordered_messages(messages)
    assert messages == before
    assert ordered_messages(once) == once
    assert [message["role"] for message in once] == [message["role"] for message in messages]


# What is written otherwise

SAME = {
    "arguments as JSON text": (
        [assistant(None, call("1", "f", '{"a": {"b": [1, "é"]}}'))],
        [assistant(None, call("1", "f", {"a": {"b": [1, "é"]}}))],
    ),
    "no arguments, as JSON text": ([assistant(None, call("1", "f", " {} "))], [assistant(None, call("1", "f", {}))]),
    "a call without its inner object": (
        [assistant(None, {"id": "1", "type": "function", **F})],
        [assistant(None, {"id": "1", "type": "function", "function": F})],
    ),
    "image_url": ([user([{"type": "image_url", "image_url": {"url": "a"}}])], [user([{"type": "image"}])]),
    "input_image": ([user([{"type": "input_image", "image_url": "a"}])], [user([{"type": "image"}])]),
    "video_url": ([user([{"type": "video_url", "video_url": {"url": "a"}}])], [user([{"type": "video"}])]),
    "a bare text among parts": ([user(["a", {"type": "text", "text": "b"}])], [user("ab")]),
    "reasoning": ([assistant("a", reasoning="b")], [assistant("a", reasoning_content="b")]),
    "reasoning twice": ([assistant("a", reasoning="b", reasoning_content="b")], [assistant("a", reasoning="b")]),
    "reasoning, and an empty one": (
        [assistant("a", reasoning="b", reasoning_content="")],
        [assistant("a", reasoning="b")],
    ),
    "empty reasoning and reasoning in the content": (
        [assistant("<mm:think>\nwhy\n</mm:think>\n\nHello", reasoning_content="")],
        [assistant("Hello", reasoning_content="why")],
    ),
    "reasoning in the content without its first mark": (
        [assistant("why</mm:think>Hello", reasoning=None)],
        [assistant("Hello", reasoning_content="why")],
    ),
    "the mark of no reasoning": ([assistant("</mm:think>Hello")], [assistant("Hello")]),
    "reasoning in parts": (
        [assistant(["<mm:thi", {"type": "text", "text": "nk>why</mm:think>Hello"}])],
        [assistant("Hello", reasoning_content="why")],
    ),
    "an output": (
        [assistant(None, call()), result("1", [{"output": "a"}, {"type": "output", "output": "b"}, {"output": 5}])],
        [assistant(None, call()), result("1", "ab5")],
    ),
    "system messages behind the first": (
        [
            {"role": "system", "content": "not the first either"},
            HI,
            {"role": "developer", "content": "b"},
            assistant("a"),
        ],
        [HI, assistant("a")],
    ),
    "no content": ([{"role": "assistant", "tool_calls": [call()]}], [assistant("", call())]),
    "results in another order": (
        [assistant(None, call("1"), call("2")), result("2", "b"), result("1", "a")],
        [assistant(None, call("1"), call("2")), result("1", "a"), result("2", "b")],
    ),
    "no ids": (
        [assistant(None, call(None), call(None)), result(None, "a"), result(None, "b")],
        [assistant(None, call("1"), call("2")), result("1", "a"), result("2", "b")],
    ),
    "ids that come again in another turn": (
        [assistant(None, call("1")), result("1", "a"), assistant(None, call("1")), result("1", "b")],
        [assistant(None, call("3")), result("3", "a"), assistant(None, call("4")), result("4", "b")],
    ),
    "fields that say nothing": (
        [assistant("a", refusal=None, annotations=[], audio=None, function_call=None, tool_calls=None)],
        [assistant("a")],
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_two_spellings_are_one_text(case):
    for template in TEMPLATES:
        one, other = (template.render([HI, *messages]) for messages in SAME[case])
        assert one == other, template.name


def test_a_medium_keeps_what_addresses_it():
    part = {"type": "image_url", "image_url": {"url": "data:", "detail": "low"}}
    assert ordered_messages([user([part])])[0]["content"] == [part | {"type": "image"}]


def test_white_space_is_kept():
    """In what is said and thought, in results and in arguments, at both ends."""
    blank = " \n\ta \n "
    for template in TEMPLATES:
        turns = [user(blank), assistant(blank, call("1", "f", {"k": blank, "l": [blank]}), reasoning=blank)]
        text = template.render([*turns, result("1", blank), user([blank])])
        assert text.count(blank) == 7, text


def test_marks_in_what_users_and_tools_say_are_text():
    """Only the assistant's content is looked at for reasoning."""
    said = "<mm:think>x</mm:think>y"
    for template in TEMPLATES:
        text = template.render([user(said), assistant("ok", call()), result("1", said), assistant(said, reasoning="r")])
        assert f"]~b]user\n{said}[e~[" in text and f"<response>{said}</response>" in text
        assert f"<mm:think>r</mm:think>{said}[e~[" in text


def test_calls_at_the_end_may_wait_for_their_results():
    """So a conversation can be shown, or trained on, up to any of its turns."""
    assert len(ordered_messages([HI, assistant(None, call("1"), call("2"))])) == 2


def test_no_tools_are_no_tools():
    assert ordered_tools(None) == ordered_tools([]) == []
    for template in TEMPLATES:
        assert template.render([HI], []) == template.render([HI]) == template.render([HI], None)
