"""`python -m m3jax.chat`: in a pipe, on a terminal, and where something is wrong."""

import importlib
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pexpect
import pytest
from support.scripted_chat import TOOLS, ScriptedModel, wire

import m3jax
from m3jax import dialogue
from m3jax.assets import embedded_path
from m3jax.cli import chat
from m3jax.cli.chat import talk
from m3jax.cli.chat.shown import visible
from m3jax.dialogue import Dialogue
from m3jax.text.chat import template

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "support" / "scripted_chat.py"
QUESTION = "Look up harbor, then tell me what it is; it is a word of the sea and of songs."
ANSWERS = [
    "<mm:think>I look up harbor.</mm:think>One moment."
    + wire(("lookup", {"key": "harbor"}), ("add", {"a": 1, "b": 2})),
    "</mm:think>harbor is lantern,\nand 3.",
    "</mm:think>Bye \x1b[31mred\x07.",
]


class Lines(io.BytesIO):
    """A standard input that is no terminal."""

    def __init__(self, *lines: str | bytes):
        super().__init__(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
        self.buffer = self


@pytest.fixture
def tools(tmp_path) -> str:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS), encoding="utf-8")
    return str(tmp_path / "tools.json")


@pytest.fixture
def say(monkeypatch, capsys):
    """Runs the command in this process with lines on its input: exit status, stdout, stderr."""

    def run(arguments: list[str], *lines: str | bytes, answers=ANSWERS) -> tuple[int, str, str]:
        monkeypatch.setattr(talk, "load", lambda *_, **__: ScriptedModel.of(answers))
        monkeypatch.setattr(sys, "stdin", Lines(*lines))
        status = chat.main([*arguments, "--context", "1024"])
        return status, *capsys.readouterr()

    return run


# In a pipe


def test_a_line_is_a_message_and_the_next_lines_are_the_results(say, tools, monkeypatch):
    """The text alone, then a line for each call; what was thought stays out; an empty line is no message."""
    sent, send = [], Dialogue.send
    note = lambda dialogue, *new: (sent.append((dialogue, new)), send(dialogue, *new))[1]
    monkeypatch.setattr(Dialogue, "send", note)
    status, out, err = say(["--tools", tools], QUESTION, "", "lantern", "3", "Thanks.")
    assert (status, err) == (0, "")
    ids = [call["id"] for call in sent[0][0].messages[1]["tool_calls"]]
    results = [(new["tool_call_id"], new["content"]) for new in sent[1][1]]
    assert results == [(ids[0], "lantern"), (ids[1], "3")]
    assert [len(new) for _, new in sent] == [1, 2, 1]
    calls = 'lookup {"key": "harbor"}\nadd {"a": 1, "b": 2}\n'
    assert out == f"One moment.\n{calls}harbor is lantern,\nand 3.\nBye \x1b[31mred\x07.\n"


def test_json_lines_have_all_of_an_answer(say, tools):
    """Messages in, alone or as a list; out come message, finish reason and counts. Results go by their ids."""
    status, out, err = say(["--tools", tools, "--json"], json.dumps([{"role": "user", "content": QUESTION}]))
    assert (status, err) == (0, "")
    (answer,) = map(json.loads, out.splitlines())
    message = answer["message"]
    assert (message["content"], message["reasoning_content"]) == ("One moment.", "I look up harbor.")
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{"key": "harbor"}, {"a": 1, "b": 2}]
    assert answer["finish_reason"] == "tool_calls" and answer["usage"]["cached_tokens"] == 0
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}, message]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": name}
        for call, name in reversed(list(zip(message["tool_calls"], ("lantern", "3"), strict=True)))
    ]
    lines = [json.dumps(history), *map(json.dumps, results), json.dumps({"role": "user", "content": "Thanks."})]
    status, out, err = say(["--tools", tools, "--json"], *lines)
    assert (status, err) == (0, ""), err
    second, third = map(json.loads, out.splitlines())
    assert (second["message"]["content"], second["finish_reason"]) == ("harbor is lantern,\nand 3.", "stop")
    seen = second["usage"]["prompt_tokens"] + second["usage"]["new_tokens"]
    assert seen - 32 < third["usage"]["cached_tokens"] <= seen, "the second turn was read again"


@pytest.mark.parametrize(
    ("arguments", "lines", "message"),
    [
        ([], ["Hello", b"\xff\xfe"], "line 2 is not UTF-8 text: byte 0"),
        ([], ["", "harbor " * 2000], "line 2: the dialogue has"),
        (["--json"], ["Hello"], "line 1: not valid JSON"),
        (["--json"], ["[" * 100_000], "line 1: "),
        (["--json"], ['"Hello"'], "line 1: give a message"),
        (["--json"], ['{"role": "wizard", "content": "a"}', '{"role": "user", "content": "a"}'], "role = 'wizard'"),
        (["--json"], ['{"role": "system", "content": "a"}'], "line 1 with nothing to answer"),
    ],
)
def test_a_line_that_cannot_be_sent_is_named(say, arguments, lines, message):
    """The error names the line and its fault, and answers to earlier lines stay printed."""
    status, out, err = say(arguments, *lines)
    *notes, error = err.splitlines()
    assert status == 2 and message in error and error.startswith("m3jax.chat: error: "), err
    # Without tools the first answer's calls are of none.
    assert all(note.startswith("m3jax.chat: note: ") and "no tool is called" in note for note in notes), err
    assert ("One moment." in out) == bool(notes) == (lines[0] == "Hello" and not arguments)


def test_an_answer_that_is_cut_says_so(say):
    status, out, err = say(["--max-new-tokens", "7"], QUESTION)
    assert (status, out) == (0, "\n")  # all of it was reasoning
    assert err == "m3jax.chat: note: cut after 7 tokens; --max-new-tokens allows more\n"


# On a terminal


def terminal(tmp_path: Path, answers: list[str], *arguments: str, **variables: str) -> pexpect.spawn:
    (tmp_path / "script.json").write_text(json.dumps(answers), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TERM": "xterm", "INPUTRC": "/dev/null"}
    return pexpect.spawn(
        sys.executable, [str(PROGRAM), str(tmp_path / "script.json"), "--context", "1024", *arguments],
        env=environment | variables, cwd=str(tmp_path), encoding="utf-8", timeout=60, dimensions=(40, 120),
    )  # fmt: skip


ON_A_TERMINAL = pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals here")
# pexpect forks, and then executes another program at once: nothing of jax runs in between.
WITH_FORK = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
DIM, PLAIN = r"\x1b\[2m", r"\x1b\[0m"


@ON_A_TERMINAL
@WITH_FORK
def test_a_session_on_a_terminal(tmp_path, tools):
    """Thinking is dim, calls are boxed and their results asked for, the cache shows; commands; errors end nothing."""
    child = terminal(tmp_path, ANSWERS, "--tools", tools)
    child.expect(r"the embedded model: room for 1,024 tokens, thinking adaptive, 2 tools; /help lists the commands")
    child.expect("> ")
    child.sendline(QUESTION)
    child.expect(rf"{DIM}I look ?(?:{PLAIN}{DIM})? ?up harbor\.{PLAIN}")
    child.expect(rf"\r\n{DIM}─+{PLAIN}\r\nOne moment")  # an answer begins on a line of its own, below a rule
    child.expect(r"─ lookup ─+")
    child.expect(r'│ \{"key":"harbor"\}')
    child.expect(r"─ add ─+")
    child.expect(r"tokens in \d+\.\d s; 0 of the \d+ before them from the prefix cache")
    child.expect(r"result of lookup \(1 of 2\)> ")
    child.sendline("lantern")
    child.expect(r"result of add \(2 of 2\)> ")
    child.sendline("3")
    child.expect(r"harbor is lantern,\s+and 3\.")
    child.expect(r"; ([1-9]\d*) of the (\d+) before them from the prefix cache")
    assert int(child.match[1]) > int(child.match[2]) / 2, child.match[0]
    child.expect("> ")
    child.sendline("/what")
    child.expect("error: no command /what")
    child.sendline('"""two')
    child.expect("  ")
    child.sendline('lines"""')
    child.expect(re.escape(r"Bye \x1b[31mred\x07."))  # what the model writes moves no cursor and changes no colour
    child.expect("> ")
    child.sendline("/undo")
    child.expect("taken back: two lines")
    child.sendline("/history")
    child.expect(rf"I look up harbor\.{PLAIN}\r\n{DIM}─+{PLAIN}\r\nOne moment\.")
    child.expect(r"\[tool\].*lantern.*\[tool\].*3.*\[assistant\].*harbor is lantern")
    child.expect("> ")
    child.sendline("/save")
    child.expect("error: /save needs the name of a file")
    child.sendline("/save a.json")
    child.expect("5 messages in a.json")
    child.sendline("/save a.json")
    child.expect("error: a.json: File exists")
    child.sendline("/help")
    child.expect("/history     the dialogue so far")
    child.expect("> ")
    child.send("\x1b[A\x1b[A\r")  # upwards through what was typed: /save a.json once more
    child.expect("error: a.json: File exists")
    child.expect("> ")
    child.sendline("/quit")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    messages = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert messages[1]["reasoning_content"] == "I look up harbor." and messages[0]["content"] == QUESTION


@ON_A_TERMINAL
@WITH_FORK
def test_ctrl_c_stops_an_answer_and_keeps_the_session(tmp_path, tools):
    """In an answer, at a result, and at the prompt, where it only says how to end; Ctrl-D ends."""
    counting = "</mm:think>" + " ".join(map(str, range(100, 220)))
    answers = [counting, "</mm:think>Fine." + wire(("lookup", {"key": "harbor"})), "</mm:think>Bye."]
    child = terminal(tmp_path, answers, "--tools", tools, SECONDS_A_STEP="0.1")
    child.expect("> ")
    child.sendintr()
    child.expect("Ctrl-D or /quit ends the chat")
    child.expect("> ")
    child.sendline("Count.")
    child.expect("100 101")
    child.sendintr()
    child.expect(r"(\d+) tokens in .* from the prefix cache; stopped")
    assert int(child.match[1]) < 200
    child.expect("> ")
    child.sendline("And now?")
    child.expect("Fine.")
    child.expect(r"result of lookup \(1 of 1\)> ")
    child.sendintr()
    child.expect("taken back: And now\\?")
    child.expect("> ")
    child.sendline("/history")
    child.expect(r"\[user\].*Count\..*\[assistant\].*100 101")
    child.expect("> ")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_text_of_a_model_cannot_drive_the_terminal():
    """Escapes, bells and marks of direction are shown, not obeyed; letters of all scripts and emoji are text."""
    assert visible("a\tb\nc é 中 \u3000 👩\u200d🚀") == "a\tb\nc é 中 \u3000 👩\u200d🚀"
    assert visible("\x1b]0;t\x07\r\x9b2J\u202e\u2028\ud800") == "\\x1b]0;t\\x07\\r\\x9b2J\\u202e\\u2028\\ud800"


# What is wrong


def folder_without(tmp_path: Path, *names: str) -> str:
    folder = tmp_path / "model"
    shutil.copytree(embedded_path(), folder, ignore=shutil.ignore_patterns("__*", *names))
    return str(folder)


def written(tmp_path: Path, name: str, text: str) -> str:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return str(tmp_path / name)


WRONG = {
    "no tools' file": (lambda p: ["--tools", f"{p}/none.json"], "none.json: No such file or directory"),
    "tools that are no list": (lambda p: ["--tools", written(p, "t", "{}")], "a file of tools is a JSON list"),
    "tools that are no JSON": (lambda p: ["--tools", written(p, "t", "[")], "is not valid JSON"),
    "tools that are none": (lambda p: ["--tools", written(p, "t", '[{"name": "bare"}]')], "tool 1"),
    "a template that is none": (lambda p: ["--template", written(p, "t", "{% if %}")], "/t"),
    "a template that fails": (lambda p: ["--template", written(p, "t", "{{ raise_exception('no way') }}")], "no way"),
    "no template": (lambda p: ["--template", f"{p}/none"], "none"),
    "a folder without a template": (
        lambda p: ["--model", folder_without(p, "*.jinja")],
        "has no chat_template.jinja",
    ),
    "a folder without a tokenizer": (lambda p: ["--model", folder_without(p, "tokenizer.json")], "no tokenizer.json"),
    "no room": (lambda p: ["--context", "0"], "--context 0"),
    "more than the model's context": (lambda p: ["--context", "9000"], "--context 9000: give 1 to 8192"),
    "no answer": (lambda p: ["--max-new-tokens", "0"], "max_new_tokens = 0"),
    "a knob": (lambda p: ["--temperature", "-1"], "temperature = -1"),
    "a mode": (lambda p: ["--thinking-mode", "deep"], "argument --thinking-mode"),
    "a mode by its old name": (lambda p: ["--thinking", "deep"], "argument --thinking"),
    "an empty stop": (lambda p: ["--stop", ""], "--stop '': answers would end before they began"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_a_line_before_the_weights_are_read(tmp_path, monkeypatch, capsys, case):
    def load(*_, **__):
        raise AssertionError("the weights were read")

    monkeypatch.setattr(talk, "load", load)
    arguments, message = WRONG[case]
    assert chat.main(arguments(tmp_path)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err, err


def test_a_missing_jinja2_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    template._compiled.cache_clear()  # where there is no jinja2 nothing was made before
    assert chat.main([]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "pip install 'm3jax[chat]'" in err, err


def test_the_function_stays_where_the_command_is():
    """`import m3jax.chat` is the command's module, and the attribute `chat` the function, whichever came first."""
    assert importlib.import_module("m3jax.chat") is m3jax.chat is dialogue.chat
