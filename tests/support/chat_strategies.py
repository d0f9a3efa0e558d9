"""Conversations for the tests of chat: texts that look like markup, JSON arguments with their schema, message lists."""

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

NAMESPACE = "]<]minimax[>["
THINK, END_THINK = "<mm:think>", "</mm:think>"
CONTROL = (NAMESPACE, THINK, END_THINK, "]~!b[", "]~b]", "[e~[", "]<]image[>[", "]<]video[>[")

# What a reader of markup may take for its own, or for another type: parts of markers, tags, entities, words.
FRAGMENTS = (
    *(NAMESPACE[:length] for length in range(1, len(NAMESPACE))),
    *("<", ">", "</", "/>", "<item>", "</item>", "<tool_call>", "</invoke>", '<invoke name="f">', "&lt;", "&amp;"),
    *("<mm:thin", "</mm:", "</", "[e~", "]~b", "\n", "\r\n", "\t", " ", '"', "'", "\\", "\\n", "\\u0041", "{", "}"),
    *("null", "None", "true", "1", "-0", "1e3", "[]", "{}", "é", "ü", "中", "🦜", "\u2028", "\x00", "\x7f", "a", "Z"),
)


def texts(max_size: int = 8) -> st.SearchStrategy[str]:
    """Any text, mostly of fragments of markup, that holds no whole special token."""
    parts = st.one_of(st.sampled_from(FRAGMENTS), st.text(st.characters(exclude_categories=["Cs"]), max_size=4))
    return st.lists(parts, max_size=max_size).map("".join).filter(lambda text: not any(t in text for t in CONTROL))


def keys() -> st.SearchStrategy[str]:
    """Names of parameters and of members of objects: all but what would be another tag of the grammar."""
    letters = st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"], exclude_characters="<>/\"'[]~")
    names = st.one_of(
        st.sampled_from(["city", "a", "n_2", "x-y", "k.1", "$text", "größe"]), st.text(letters, max_size=6)
    )
    return names.filter(lambda key: key.strip() == key != "" and key.split()[0] not in ("invoke", "tool_call", "item"))


def json_values(nulls: bool = False) -> st.SearchStrategy[Any]:
    """Any value of JSON, nested and empty ones too.

    Args:
        nulls: also null, in lists and objects. The wire leaves a null member of an object out.
    """
    numbers = st.one_of(
        st.integers(-10, 10), st.integers(-(10**25), 10**25), st.floats(allow_nan=False, allow_infinity=False)
    )
    scalars = st.one_of(texts(), st.booleans(), numbers, *([st.none()] if nulls else []))
    nested = lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys(), inner, max_size=3))
    return st.recursive(scalars, nested, max_leaves=6)


def arguments(nulls: bool = False) -> st.SearchStrategy[dict[str, Any]]:
    """The arguments of a call, as an object; with `nulls` as in `json_values`."""
    return st.dictionaries(keys(), json_values(nulls), max_size=4)


def schema_of(value: Any) -> dict[str, Any]:
    """The JSON schema that says the type of everything in a value, so that the wire gives the very value back."""
    if isinstance(value, dict):
        return {"type": "object", "properties": {key: schema_of(member) for key, member in value.items()}}
    if isinstance(value, list):
        return {"type": "array", "prefixItems": [schema_of(item) for item in value]} if value else {"type": "array"}
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return {"type": names[type(value)]}


def names() -> st.SearchStrategy[str]:
    """Names of functions."""
    return st.one_of(
        st.sampled_from(["look_up", "get-weather", "ns.add"]), st.from_regex(r"[A-Za-z_][\w.-]{0,8}", fullmatch=True)
    )


def tool(name: str, parameters: dict[str, Any], description: str = "") -> dict[str, Any]:
    """A tool as a request has it."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def tools_for(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A tool for each function that the messages call, of the schema of its last call's arguments."""
    found = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            found[call["function"]["name"]] = json.loads(arguments) if isinstance(arguments, str) else arguments
    return [tool(name, schema_of(arguments)) for name, arguments in found.items()]


@st.composite
def tool_calls(draw, nulls: bool = False) -> list[dict[str, Any]]:
    """One to three calls of functions of distinct names, with ids; arguments as objects, or as JSON text."""
    drawn = draw(
        st.lists(st.tuples(names(), arguments(nulls), st.booleans()), min_size=1, max_size=3, unique_by=lambda c: c[0])
    )
    first = draw(st.integers(0, 9))
    return [
        {
            "id": f"call_{first + place}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(given, ensure_ascii=False) if as_text else given},
        }
        for place, (name, given, as_text) in enumerate(drawn)
    ]


def contents(media: bool = True) -> st.SearchStrategy[str | list[Any]]:
    """A message's content: a text, or parts in the spellings that clients use."""
    text_parts = texts().flatmap(lambda text: st.sampled_from([text, {"type": "text", "text": text}]))
    images = st.sampled_from(
        [
            {"type": "image"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
            {"type": "input_image", "image_url": "https://example.org/a.png"},
            {"type": "video"},
            {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}},
        ]
    )
    return st.one_of(texts(), st.lists(st.one_of(text_parts, images) if media else text_parts, max_size=3))


@st.composite
def assistant_messages(draw, calls: bool | None = None, nulls: bool = False) -> dict[str, Any]:
    """A turn of the assistant: reasoning or none, content or none, calls or none.

    Args:
        calls: whether there are any; None is either.
        nulls: as in `json_values`.
    """
    message: dict[str, Any] = {"role": "assistant"}
    has_calls = draw(st.booleans()) if calls is None else calls
    message |= (
        draw(st.sampled_from([{}, {"content": None}]))
        if has_calls and draw(st.booleans())
        else {"content": draw(contents(media=False))}
    )
    if draw(st.booleans()):
        message[draw(st.sampled_from(["reasoning", "reasoning_content"]))] = draw(texts())
    if has_calls:
        message["tool_calls"] = draw(tool_calls(nulls))
    return message


@st.composite
def message_lists(draw, max_turns: int = 4, media: bool = True, nulls: bool = False) -> list[dict[str, Any]]:
    """A whole conversation that can be put in order: root and system or none, turns, every call with its result.

    Args:
        max_turns: of a user's and an assistant's messages.
        media: also images and videos.
        nulls: as in `json_values`.
    """
    messages = [{"role": "root", "content": draw(texts())}] if draw(st.booleans()) else []
    if role := draw(st.sampled_from(["", "system", "developer"])):
        messages.append({"role": role, "content": draw(contents(media))})
    for _ in range(draw(st.integers(0, max_turns))):
        if draw(st.booleans()):
            messages.append({"role": "user", "content": draw(contents(media))})
            continue
        messages.append(draw(assistant_messages(nulls=nulls)))
        for call in draw(st.permutations(messages[-1].get("tool_calls", []))):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": draw(contents(media))})
    return messages
