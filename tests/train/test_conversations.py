"""Which tokens of a conversation are learnt, what a file of conversations may hold, and how documents share rows."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.chat_messages import assistant, call, result, user
from support.chat_strategies import message_lists, tools_for
from support.embedded import TOKENIZER

from m3jax.assets import embedded_path
from m3jax.text import ChatTemplate
from m3jax.train.conversations import Example, encode_conversation, load_examples
from m3jax.train.packing import pack, packed_row

TEMPLATE = ChatTemplate.from_folder(embedded_path())
ID = {text: TOKENIZER.backend.token_to_id(text) for text in ("]~b]", "[e~[", "<mm:think>", "</mm:think>")}
HEAD = [ID["]~b]"], *TOKENIZER.encode("ai\n")]


def answers_in(ids: np.ndarray, mode: str) -> np.ndarray:
    """Return True for what the assistant wrote, by the marks of M3's chat alone: from an answer's head to its end."""
    head = HEAD + {"enabled": [ID["<mm:think>"]], "disabled": [ID["</mm:think>"]], "adaptive": []}[mode]
    is_written, place = np.zeros(len(ids), bool), 0
    while place < len(ids):
        if ids[place : place + len(head)].tolist() == head:
            end = place + len(head)
            while ids[end - 1] != ID["[e~["]:
                is_written[end] = True
                end += 1
            place = end
        place += 1
    return is_written


@given(message_lists(media=False), st.sampled_from(["adaptive", "enabled", "disabled"]))
def test_what_is_learnt_is_what_the_assistant_wrote(messages, mode):
    """Of every turn, with its reasoning, calls and end: no prompt, no tool's result, nothing between two turns."""
    try:
        example = encode_conversation(TEMPLATE, TOKENIZER, messages, [1], tools_for(messages), mode)
    except ValueError as error:
        answers = [message for message in messages if message["role"] == "assistant"]
        if not answers:
            assert "nothing to learn" in str(error)
        else:  # a text that runs into a mark, or an answer that the mode does not allow
            assert "special token" in str(error) or mode != "adaptive"
        assume(False)
    np.testing.assert_array_equal(example.is_written, answers_in(example.tokens, mode))
    assert example.is_written.sum() >= sum(message["role"] == "assistant" for message in messages)


def test_a_conversation_by_hand():
    messages = [user("2+2?"), assistant("", call("1", "sum", {"a": 2}), reasoning_content="add"), result("1", "4"),
                assistant("four")]  # fmt: skip
    example = encode_conversation(TEMPLATE, TOKENIZER, messages, [1])
    edges = np.flatnonzero(np.diff(example.is_written.astype(int), prepend=0, append=0)).reshape(-1, 2)
    texts = [TOKENIZER.decode(example.tokens[begin:end], skip_special_tokens=False) for begin, end in edges]
    assert texts[0].startswith("<mm:think>add</mm:think>") and texts[0].endswith("[e~[") and "4" not in texts[0]
    assert texts[1:] == ["</mm:think>four[e~["]


GOOD = json.dumps({"messages": [user("a"), assistant("b")]})
FAULTS = {
    '{"messages": [': "line 2: no JSON",
    "[]": "line 2: []: write",
    '{"messages": []}': "at least one message",
    json.dumps({"messages": [user("a")]}): "line 2: no message of the assistant",
    json.dumps({"messages": [{"role": "judge", "content": "a"}]}): "line 2: message 1: role = 'judge': must be one of",
    json.dumps({"messages": [user([{"type": "image"}]), assistant("b")]}): "line 2: a message has a part of type image",
    json.dumps({"messages": [user("a " * 90), assistant("b")]}): "tokens, and a row 64: shorten it",
    json.dumps({"messages": [user("a"), assistant("b")], "thinking_mode": "enabled"}): "line 2: message 2 (assistant)",
    "\udcff": "line 2: no JSON",
}


@pytest.mark.parametrize("line", FAULTS)
def test_a_line_that_cannot_be_learnt(line, tmp_path):
    path = tmp_path / "talks.jsonl"
    path.write_bytes(f"{GOOD}\n{line}\n".encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError) as raised:
        load_examples(path, TEMPLATE, TOKENIZER, [1], 64)
    message = str(raised.value)
    assert FAULTS[line] in message and str(path) in message and "\n" not in message


def test_a_file_without_a_conversation(tmp_path):
    path: Path = tmp_path / "talks.jsonl"
    path.write_text("\n \n", encoding="utf-8")
    with pytest.raises(ValueError, match="no conversation in it"):
        load_examples(path, TEMPLATE, TOKENIZER, [1], 64)


def first_fit(lengths: list[int], row_length: int, block_size: int) -> list[list[int]]:
    """The definition: a document goes into the first of the last 64 open rows that has room."""
    rows, is_open = [], []
    blocks = lambda documents: sum(math.ceil(lengths[i] / block_size) for i in documents)
    for document in range(len(lengths)):
        fits = [row for row in is_open if (blocks(rows[row]) + blocks([document])) * block_size <= row_length]
        if fits:
            rows[fits[0]].append(document)
        else:
            rows.append([document])
            is_open.append(len(rows) - 1)
            is_open = is_open[-64:]
        is_open = [row for row in is_open if blocks(rows[row]) * block_size < row_length]
    return rows


@given(st.lists(st.integers(1, 24), max_size=60), st.sampled_from([0, 63, 80]))
def test_documents_go_into_the_first_open_row_with_room(lengths, rows_before):
    """Behind rows with room for one block each, of which the oldest close."""
    lengths = [20] * rows_before + lengths
    assert pack(lengths, 24, 4) == first_fit(lengths, 24, 4)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 99)), min_size=1, max_size=3))
def test_a_target_is_the_next_token_of_the_same_document(drawn):
    draws = [(count, np.random.default_rng(seed)) for count, seed in drawn]
    examples = [Example(draw.integers(1, 99, n).astype(np.int32), draw.random(n) < 0.5) for n, draw in draws]
    row = packed_row(examples, 96, 8)
    learnt = [(row["tokens"][t], row["targets"][t]) for t in np.flatnonzero(row["weights"])]
    wanted = [(e.tokens[t], e.tokens[t + 1]) for e in examples for t in range(len(e.tokens) - 1) if e.is_written[t + 1]]
    assert learnt == wanted
    starts = np.flatnonzero(row["positions"] == 0)
    assert len(starts) == len(examples) and not (starts % 8).any()
    assert (row["positions"] >= 0).sum() == sum(len(example.tokens) for example in examples)
