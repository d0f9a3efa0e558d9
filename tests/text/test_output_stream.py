"""Properties of any output: rendered and parsed it is itself, cut anywhere it is the same, and it takes linear time."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from support import chat_strategies as drawn
from support.chat_wire import said
from support.outputs import (
    HEAD,
    TAIL,
    TOOLS,
    cuts,
    fed,
    is_beginning,
    joined,
    outputs,
    parser,
    runs,
    wire,
    with_parameters,
)

from m3jax.assets import embedded_path
from m3jax.text import ChatTemplate, OutputParser, ReasoningParser, Tokenizer, ToolCallParser

OFFICIAL_FILE = os.environ.get("M3_CHAT_TEMPLATE")
needs_official = pytest.mark.skipif(not OFFICIAL_FILE, reason="M3_CHAT_TEMPLATE names MiniMax-M3's template, if at all")
HI = {"role": "user", "content": "Hi"}


@cache
def template(of: str) -> ChatTemplate:
    return ChatTemplate.from_folder(embedded_path()) if of == "embedded" else ChatTemplate.from_file(OFFICIAL_FILE)


def written(of: str, message: dict, tools: list[dict], mode: str) -> str:
    """Return the text that a model must write for a message: the prompt with it, less the prompt that asks for it."""
    asked = template(of).render([HI], tools, mode)
    text = template(of).render([HI, message], tools, mode, add_generation_prompt=False)
    return text.removeprefix(asked).removesuffix("[e~[\n")


def as_parsed(value: object) -> object:
    """A value as the wire carries it: a member that is null is left out."""
    if isinstance(value, dict):
        return {key: as_parsed(member) for key, member in value.items() if member is not None}
    return [as_parsed(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("of", ["embedded", pytest.param("official", marks=needs_official)])
@given(drawn.assistant_messages(nulls=True), st.sampled_from(["adaptive", "by reasoning"]), st.data())
def test_a_message_that_is_rendered_and_parsed_is_itself(of, message, mode, data):
    """Reasoning, content, names and arguments of any turn, in one piece and in several; types by the schema."""
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if mode == "by reasoning":
        mode = "enabled" if reasoning else "disabled"
    tools = drawn.tools_for([message])
    output = written(of, message, tools, mode)
    reader = OutputParser(tools, mode)
    parsed = reader.parse(output)
    assert (parsed.reasoning, parsed.content, parsed.faults) == (reasoning, said(message.get("content")), ())
    called = [call["function"] for call in message.get("tool_calls", [])]
    for call, function in zip(parsed.tool_calls, called, strict=True):
        given = function["arguments"]
        given = as_parsed(json.loads(given) if isinstance(given, str) else given)
        assert call.name == function["name"] and repr(call.arguments) == repr(given)
    events = fed(reader, data.draw(cuts(output)))
    arguments = [text for kind, *_, text in joined(events) if kind == "arguments"]
    assert [json.loads(text) for text in arguments] == [call.arguments for call in parsed.tool_calls]
    # What was parsed is the same prompt again: nothing of a turn is lost or added on its way through a client.
    assert written(of, parsed.as_dict(), tools, mode) == output


@given(outputs(), st.sampled_from(["enabled", "disabled", "adaptive"]), st.data())
def test_any_text_is_parsed_and_cut_anywhere_it_is_the_same(output, mode, data):
    """No text makes a parser raise; arguments of a call that ended are an object; pieces have 5 to 200 characters."""
    same_id = lambda: "id"
    for reader in (OutputParser(TOOLS, mode, same_id), ToolCallParser(TOOLS, same_id), ReasoningParser(mode)):
        whole = fed(reader, [output])
        faults = reader.faults
        pieces = data.draw(cuts(output))
        events = fed(reader, pieces)
        assert joined(events) == joined(whole), pieces
        assert reader.faults == faults
        for run in runs(events):
            sizes = [len(event.text) for event in run]
            assert max(sizes) <= 200 and (len(run) == 1 or min(sizes) >= 5), run
        ended = {event.index for event in events if event.kind == "tool_call_end"}
        for kind, index, *_, text in joined(events):
            if kind == "arguments":
                text.encode()
                assert index not in ended or isinstance(json.loads(text), dict)


@given(outputs(), st.data())
def test_the_beginning_of_an_output_is_never_taken_back(output, data):
    """Events of a beginning are the first of the whole's; parameters that were whole stay what they were."""
    reader = OutputParser(TOOLS, new_id=lambda: "id")
    place = data.draw(st.integers(0, len(output)))
    whole, message = fed(reader, [output]), reader.parse(output)
    assert is_beginning(reader.feed(output[:place]), whole)
    first = reader.parse(output[:place])
    assert len(first.tool_calls) <= len(message.tool_calls)
    for call, later in zip(first.tool_calls, message.tool_calls, strict=False):
        assert call.name == later.name and call.arguments.items() <= later.arguments.items()


@given(drawn.texts(), st.integers(1, 300))
def test_escapes_and_characters_are_whole_in_every_piece(text, times):
    """A piece of arguments is text that UTF-8 can hold, and no escape is parted: each decodes by itself."""
    output = wire(HEAD) + f"{drawn.NAMESPACE}<s>" + (text + '\\"\x01\ud800🦜') * times + wire("@</s>" + TAIL)
    pieces = [event.text for event in fed(parser(TOOLS), [output]) if event.kind == "arguments"]
    for piece in pieces:
        piece.encode()
        json.loads('"' + piece.removeprefix('{"s":"').removesuffix('"}' if piece is pieces[-1] else "") + '"')
    assert json.loads("".join(pieces)) == {"s": json.loads(json.dumps((text + '\\"\x01\ud800🦜') * times))}


@pytest.mark.parametrize("length", [5, 64, 65, 5_000])
@pytest.mark.parametrize(
    "schema", [{"type": "string"}, {}, {"type": ["string", "null"]}, {"type": ["string", "array"]}]
)
def test_a_long_string_comes_in_pieces_as_it_is_written(schema, length):
    """Also where the schema takes null besides, or says nothing: at most 64 characters wait, and an event's."""
    reader = parser(with_parameters(s=schema))
    reader.feed(wire(HEAD + "@<s>"))
    text, sent = "x" * length, 0
    for start in range(0, length, 10):
        sent += sum(len(event.text) for event in reader.feed(text[start : start + 10]))
        assert sent >= start - 74
    pieces = [event.text for event in fed(reader, [wire("@</s>" + TAIL)]) if event.kind == "arguments"]
    assert sum(map(len, pieces)) + sent == length + len('{"s":""}')


@pytest.mark.parametrize("piece", [1, 7, 100])
@pytest.mark.parametrize(("length", "is_word"), [(63, True), (64, True), (65, False)])
def test_a_word_has_64_characters_in_pieces_too(length, is_word, piece):
    """A longer text is a string."""
    reader, text, early = parser(with_parameters(s={"type": ["string", "integer", "null"]})), "7" * length, ""
    reader.feed(wire(HEAD + "@<s>"))
    for start in range(0, length, piece):
        early += "".join(event.text for event in reader.feed(text[start : start + piece]))
    rest = "".join(event.text for event in fed(reader, [wire("@</s>" + TAIL)]) if event.kind == "arguments")
    assert json.loads(early + rest) == {"s": int(text) if is_word else text}
    assert not (early and is_word)


def test_other_values_come_when_they_are_whole():
    reader = parser(with_parameters(a={"type": "array"}, n={"type": "integer"}))
    reader.feed(wire(HEAD))
    assert reader.feed(wire("@<n>1234567890123")) == reader.feed("4567890") == []
    events = reader.feed(wire("@</n>@<a>" + "@<item>some text@</item>" * 50))
    assert "".join(event.text for event in events) in '{"n":12345678901234567890'
    assert reader.feed(wire("@</a>")) == []  # more items may follow in another <a>
    assert sum(len(event.text) for event in reader.feed(wire("@</invoke>"))) > 500


@cache
def tokenizer(kind: str) -> Tokenizer:
    """The embedded one, its marks being special tokens, tokens that are not special, or none."""
    settings = json.loads((Path(embedded_path()) / "tokenizer.json").read_text(encoding="utf-8"))
    marks = (drawn.NAMESPACE, drawn.THINK, drawn.END_THINK)
    for token in settings["added_tokens"]:
        token["special"] = token["content"] in marks and kind == "special"
    if kind == "none":
        settings["added_tokens"] = [token for token in settings["added_tokens"] if token["content"] not in marks]
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(settings)))


@pytest.mark.parametrize("kind", ["special", "not special", "none"])
def test_marks_may_be_special_tokens_or_not(kind):
    """vLLM #45718, and a gateway's fault: special tokens were left out of the text. They belong to it."""
    output = wire(f"<mm:think>wäre</mm:think>so {HEAD}@<s>größe 🦜 <b>@</s>{TAIL}")
    ids = tokenizer(kind).encode(output)
    assert (kind == "none") == (len(tokenizer(kind).encode(drawn.NAMESPACE)) > 1)
    stream = tokenizer(kind).stream(skip_special_tokens=False)
    pieces = [*(stream.push(token) for token in ids), stream.flush()]
    assert joined(fed(parser(TOOLS), pieces)) == joined(fed(parser(TOOLS), [output]))
    assert parser(TOOLS).parse(output).tool_calls[0].arguments == {"s": "größe 🦜 <b>"}


MEASURE = r"""
import sys, time, tracemalloc
from m3jax.text import OutputParser

NS = "]<]minimax[>["
schema = {"type": "object", "properties": {"s": {"type": "string"}, "o": {"type": "object"}, "n": {"type": "integer"}}}
tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
head = f'{NS}<tool_call>\n{NS}<invoke name="f">'


def seconds(text, size):
    parser, start = OutputParser(tools), time.process_time()
    for place in range(0, len(text), size):
        parser.feed(text[place : place + size])
    parser.finish()
    return time.process_time() - start


def quickest(text, size):
    # Of up to three runs: what else the machine does makes a run slower, never quicker.
    taken = [seconds(text, size)]
    while len(taken) < 3 and min(taken) > 1e-6 * len(text):
        taken.append(seconds(text, size))
    return min(taken)


# A part of a megabyte, and the seconds that a whole one would take.
file = (head + NS + "<s>" + 'a "line" of a file\n' * 6_000)[:100_000] + f"{NS}</s>{NS}</invoke>{NS}</tool_call>"
for size in (1, 4, 100, len(file)):
    print("a string", size, 10 * quickest(file, size))
inside = head + NS + "<s>"
for name, begin, part in (
    ("marker after marker", inside, NS), ("tags that do not end", inside, NS + "<" + 500 * "a"),
    ("brackets", inside, "]<"), ("tags", inside, NS + "<a>"), ("tags in stray text", head, "x<s><x>"),
    ("tags that close nothing", head, "x" + NS + "</q>"), ("depth", head, NS + "<o>"),
    ("digits", head + NS + "<n>", "7"),
    ("parts of JSON", head + NS + "<o>", '{"a":['), ("false blocks", "", NS + "<tool_call> "), ("smaller", "", "<mm:"),
    ("calls", NS + "<tool_call>", f'{NS}<invoke name="f">{NS}</invoke>\n'), ("thoughts", "", "<mm:think>a</mm:think>"),
):
    text = (begin + part * (10_000 // len(part)))
    print(name, 3, 100 * quickest(text, 3))
pieces = ["a piece of a long string, "] * 5_000
parser = OutputParser(tools)
parser.feed(inside)
tracemalloc.start()
for piece in pieces:
    parser.feed(piece)
print("memory", 0, tracemalloc.get_traced_memory()[1] / 100_000)
"""


def test_a_megabyte_takes_less_than_four_seconds_and_no_memory():
    """Whatever the size of the pieces, and whatever the text looks like; a string that streams is not kept."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", MEASURE], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measured = [line.rsplit(" ", 2) for line in done.stdout.splitlines()]
    assert len(measured) == 18
    slow = [line for line in measured if float(line[2]) > (4 if line[0] != "memory" else 1)]
    assert not slow, slow


@pytest.mark.parametrize(
    ("end", "whole", "cut"),
    [
        ("]<]minimax[>[", "]<]minimax[>[", ""),
        ("]<]minimax[>[<tool_", "]<]minimax[>[<tool_", ""),
        ("]<]minimax[>[<tool_call>", "", ""),
        ("]<]mini", "]<]mini", "]<]mini"),
        (" list[0]", " list[0]", " list[0]"),
    ],
)
def test_a_cut_output_shows_no_marker_with_which_a_call_would_have_begun(end, whole, cut):
    """Whoever stops an answer sees its text; where nobody stopped it the model wrote the marker as text."""
    for is_cut, expected in ((False, whole), (True, cut)):
        parser = OutputParser()
        events = [*parser.feed(f"</mm:think>Hello{end}"), *parser.finish(is_cut=is_cut)]
        assert "".join(event.text for event in events) == f"Hello{expected}", is_cut
