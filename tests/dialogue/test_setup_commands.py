"""/set, /system, /tools, /regenerate and /load in `python -m m3jax.chat` on a terminal."""

import itertools
import json
import re

import pytest
from support.screen import Screen
from support.scripted_chat import TOOLS, ScriptedModel, wire

from m3jax.cli.chat.terminal import COMMANDS, HELP, _completion

ANSWERS = ["</mm:think>Fine." + wire(("lookup", {"key": "harbor"})), "</mm:think>lantern.", "</mm:think>Bye."]


@pytest.fixture
def screen(tmp_path, monkeypatch) -> Screen:
    """A chat in a folder of its own, with a file of tools and one of a dialogue that lacks its answer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    (tmp_path / "bad.json").write_text(json.dumps([{"name": "bare"}]))
    (tmp_path / "question.json").write_text(json.dumps([{"role": "user", "content": "What is harbor?"}]))
    made = Screen(monkeypatch, ScriptedModel.of(ANSWERS))
    made.talk.max_new_tokens = 64
    return made


def test_settings_hold_from_the_next_answer_on(screen):
    """Each value is checked and shown; what is refused changes nothing."""
    assert "temperature 0.5, top_k off, top_p off, min_p off" in screen.after("/set temperature 0.5")
    screen.after("/set top_k 40", "/set thinking_mode disabled", "/set seed 7")
    assert (screen.talk.sampling.top_k, screen.talk.sampling.seed, screen.talk.thinking_mode) == (40, 7, "disabled")
    assert "top_k off" in screen.after("/set top_k off") and screen.talk.sampling.top_k is None
    before = screen.after("/set")
    for line, error in {
        "/set heat 1": "the names are temperature,",
        "/set temperature": "the names are temperature,",
        "/set temperature warm": "temperature warm: give a number\n",
        "/set temperature -1": "temperature",
        "/set top_p 2": "top_p",
        "/set thinking_mode deep": "thinking_mode deep: give adaptive, enabled, disabled",
        "/set max_new_tokens 0": "give a whole number of at least 1",
        "/tools bad.json": "tool 1",
        "/tools none.json": "none.json: No such file",
    }.items():
        shown = screen.after(line)
        assert "error: " in shown and error in shown, shown
    assert screen.after("/set") == before and screen.talk.tools is None
    assert "3 tokens in" in screen.after("/set max_new_tokens 3", "Hello.")


def test_a_system_message_is_set_shown_and_removed(screen):
    """In front of the dialogue, which goes on."""
    assert "no system message" in screen.after("/set max_new_tokens 3", "/system")
    assert "system message: Be brief." in screen.after("/system Be long.", "/system Be brief.", "Hello.", "/system")
    assert [message["role"] for message in screen.talk.messages] == ["system", "user", "assistant"]
    assert "no system message" in screen.after('/system ""')
    assert [message["role"] for message in screen.talk.messages] == ["user", "assistant"]


def test_what_is_wrong_with_a_call_is_said_before_its_result_is_asked_for(screen):
    """A name that is no tool's, and arguments that break the schema; a call without fault has no such line."""
    said = screen.after("What is harbor?", "a kite")
    assert said.index("lookup: no tool is called 'lookup'") < said.index(" tokens in "), said
    screen.after("/undo", "/tools tools.json")
    assert "lookup: " not in screen.after("What is harbor?", "a kite")
    screen.talk.tools = [json.loads(json.dumps(TOOLS[0]).replace('"string"', '"integer"'))]
    assert "lookup: arguments.key: 'harbor' is not of type 'integer'" in screen.after("/regenerate", "a kite")


def test_an_answer_is_made_anew_and_a_saved_dialogue_goes_on(screen):
    """A new answer has the next seed and asks for results anew; /load takes what /save wrote."""
    assert "error: nothing to undo" in screen.after("/regenerate")
    assert "tools: lookup, add" in screen.after("/tools tools.json")
    screen.after("What is harbor?", "a kite")
    screen.after("/regenerate", "a lantern")
    contents = [message["content"] for message in screen.talk.messages]
    assert contents == ["What is harbor?", "Fine.", "a lantern", "lantern."] and screen.talk.sampling.seed == 1
    screen.after("/save a.json", "/undo")
    assert "4 messages from a.json in place of 0" in screen.after("/load a.json")
    assert [message["content"] for message in screen.talk.messages] == contents
    assert "Bye." in screen.after("Thanks.") and len(screen.talk.messages) == 6
    for line, error in {
        "/load": "/load needs the name of a file",
        "/load question.json": "the dialogue ends before an answer",
        "/load bad.json": "message 1",
        "/load none.json": "none.json: No such file",
    }.items():
        shown = screen.after(line)
        assert "error: " in shown and error in shown, shown
    assert len(screen.talk.messages) == 6


def test_a_new_answer_that_fails_leaves_the_old_one(screen, monkeypatch):
    """As where it does not fit, or is stopped before its first word."""
    screen.after("/set max_new_tokens 3", "Hello.")
    before = screen.talk.messages

    def send(*_, **__):
        raise ValueError("it does not fit")

    monkeypatch.setattr(screen.talk, "send", send)
    assert "error: it does not fit" in screen.after("/regenerate")
    assert screen.talk.messages == before


def test_the_tab_key_completes_commands_settings_and_files(tmp_path, monkeypatch):
    """Nothing in a message, and every command that /help lists."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "har[bor.png").write_bytes(b"")
    (tmp_path / "har[d").mkdir()
    at = lambda line: (_completion(line, number) for number in itertools.count())
    completions = lambda line: list(itertools.takewhile(lambda found: found is not None, at(line)))
    assert completions("/s") == ["/sample ", "/save ", "/set ", "/system "]
    assert completions("/set top") == ["/set top_k ", "/set top_p "]
    assert completions("/image har[") == ["/image har[bor.png", "/image har[d/"]
    assert completions("") == completions("Look at har") == completions("/undo har") == []
    listed = re.findall(r"^  (/\w+)", HELP, re.MULTILINE)
    assert sorted(listed) == sorted(set(COMMANDS))
