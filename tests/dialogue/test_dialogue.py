"""A chat from Python: events, what the prefix cache had, how an answer ends, and what becomes of the history."""

from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_model import FakeConfig, FakeModel
from support.scripted_chat import TOOLS, ScriptedModel, wire

import m3jax
from m3jax.assets import embedded_path
from m3jax.completion import Defaults
from m3jax.decoding import Engine, Params, Sampling
from m3jax.dialogue import Dialogue, Reply, open_calls
from m3jax.dialogue.chat import check_answer, check_question, new_tokens_within
from m3jax.progress import Activity
from m3jax.text import ChatTemplate, Tokenizer

USER = {"role": "user", "content": "Look up harbor, then tell me what it is; it is a word of the sea and of songs."}
ROUND_TRIP = (
    "<mm:think>I look up harbor.</mm:think>One moment." + wire(("lookup", {"key": "harbor"})),
    "</mm:think>harbor is lantern.",
    "</mm:think>Bye.",
)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(embedded_path())


def dialogue(*answers, **settings) -> Dialogue:
    settings = dict(tools=TOOLS, context=1024, progress=False) | settings
    model = ScriptedModel.of(answers, settings.get("thinking_mode", "adaptive"))
    return Dialogue(model, tokenizer(), **settings)


def answered(talk: Dialogue, *messages, **options) -> Reply:
    *_, reply = talk.send(*messages, **options)
    return reply


def text_of(events, kind: str) -> str:
    return "".join(event.text for event in events if event.kind == kind)


# One answer


ANSWERED = [USER, {"role": "assistant", "content": "It is lantern."}]
NOTHING_ASKED = {
    "no messages": ([], "^messages is empty: give at least one"),
    "an answer comes last": (ANSWERED, r"^message 2 \(assistant\): .* nothing to answer: add a message of the user"),
    "calls without results": (
        [USER, {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "lookup", "arguments": {"key": "harbor"}}}]}],
        r"^message 2 \(assistant\): .* nothing to answer: add the results of its calls"),
    "an empty text": ([*ANSWERED, {"role": "user", "content": ""}], r"^message 3 \(user\): its content is empty"),
    "white space": ([{"role": "user", "content": " \n"}], r"^message 1 \(user\): its content is empty"),
    "no parts": ([{"role": "user", "content": []}], r"^message 1 \(user\): its content is empty"),
    "an empty part": (
        [{"role": "user", "content": [{"type": "text", "text": ""}]}], r"^message 1 \(user\): its content is empty"),
}  # fmt: skip


@pytest.mark.parametrize(("messages", "message"), NOTHING_ASKED.values(), ids=NOTHING_ASKED)
def test_what_asks_nothing_is_refused(messages, message):
    """`m3jax.chat` and a dialogue refuse it before anything runs, and the dialogue is as it was."""
    with pytest.raises(ValueError, match=message):
        m3jax.chat(random_model(), tokenizer(), messages, tools=TOOLS)
    talk = dialogue()
    with pytest.raises(ValueError, match=message):
        talk.send(*messages)
    assert talk.messages == []


def test_what_asks_something_without_a_text_of_the_user_is_answered():
    """A picture asks, so does a tool's empty result, and a system's message alone."""
    call = {"id": "1", "type": "function", "function": {"name": "lookup", "arguments": {"key": "harbor"}}}
    result = {"role": "tool", "tool_call_id": "1", "content": ""}
    check_question([{"role": "user", "content": [{"type": "image", "image": "harbor.png"}]}])
    check_question([USER, {"role": "assistant", "tool_calls": [call]}, result])
    check_question([{"role": "system", "content": "Greet the user."}])


def test_an_answer_comes_as_events_and_the_last_is_all_of_it():
    """`m3jax.chat` with and without a stream: reasoning, text and a call, each in its kind; the reply has all of it."""
    model = ScriptedModel.of(ROUND_TRIP)
    chat = lambda **options: m3jax.chat(model, tokenizer(), [USER], tools=TOOLS, progress=False, **options)
    *events, reply = chat()
    assert [kind for kind in dict.fromkeys(event.kind for event in events)] == [
        *("reasoning", "content", "tool_call", "arguments", "tool_call_end")
    ]
    assert text_of(events, "reasoning") == reply.reasoning == "I look up harbor."
    assert text_of(events, "content") == reply.content == "One moment."
    assert text_of(events, "arguments") == '{"key":"harbor"}'
    (call,) = reply.tool_calls
    assert (call.name, call.arguments) == ("lookup", {"key": "harbor"})
    assert [(event.id, event.name) for event in events if event.kind == "tool_call"] == [(call.id, "lookup")]
    prompt = ChatTemplate.from_folder(embedded_path()).encode(tokenizer(), [USER], tools=TOOLS)
    written = len(tokenizer().encode(ROUND_TRIP[0])) + 1
    assert (reply.kind, reply.finish_reason, reply.cached_tokens) == ("reply", "tool_calls", 0)
    assert (reply.prompt_tokens, reply.new_tokens) == (len(prompt), written)
    whole = chat(stream=False)
    assert (whole.reasoning, whole.content, whole.finish_reason) == (reply.reasoning, reply.content, "tool_calls")
    assert whole.message["tool_calls"][0]["function"] == {"name": "lookup", "arguments": {"key": "harbor"}}


@pytest.mark.parametrize("mode", ["enabled", "disabled", "adaptive"])
def test_the_mode_says_where_an_answer_begins(mode):
    """With thinking enabled the prompt opens it: unless the parser knows, the reasoning is taken for the answer."""
    answer = {"enabled": "I think.</mm:think>Yes.", "disabled": "Yes.", "adaptive": "<mm:think>I think.</mm:think>Yes."}
    model = ScriptedModel.of([answer[mode]], mode)
    reply = m3jax.chat(model, tokenizer(), [USER], thinking_mode=mode, stream=False, progress=False)
    assert (reply.reasoning, reply.content) == ("" if mode == "disabled" else "I think.", "Yes.")


def test_an_answer_cut_at_its_limit_ends_before_an_unfinished_character():
    """Each byte of the bird is a token of its own: 1 to 3 of the 4 show nothing, and never U+FFFD."""
    bird = tokenizer().encode("🦜")
    assert len(bird) == 4
    before = tokenizer().encode("</mm:think>ab")
    for shown in (0, 3, 4):
        model = ScriptedModel.of([[*before, *bird, *bird]])
        limit = len(before) + shown
        *events, reply = m3jax.chat(model, tokenizer(), [USER], max_new_tokens=limit, progress=False)
        assert (reply.content, reply.finish_reason) == ("ab🦜" if shown == 4 else "ab", "length"), shown
        assert text_of(events, "content") == reply.content


def test_a_special_token_is_text():
    """A marker that is a special token in this tokenizer stays in the answer's text."""
    model = ScriptedModel.of(["</mm:think>a ]<]image[>[ b"])
    reply = m3jax.chat(model, tokenizer(), [USER], stream=False, progress=False)
    assert reply.content == "a ]<]image[>[ b"


def test_a_stop_text_ends_an_answer():
    model = ScriptedModel.of(["</mm:think>one two three four"])
    chat = lambda stop: m3jax.chat(model, tokenizer(), [USER], stop=stop, stream=False, progress=False)
    assert (chat(" three").content, chat(["@@", "wo"]).content) == ("one two", "one t")
    assert chat(" three").finish_reason == "stop"


def test_a_call_that_is_cut_is_no_call():
    model = ScriptedModel.of([ROUND_TRIP[0]])
    limit = len(tokenizer().encode(ROUND_TRIP[0])) - 12
    *events, reply = m3jax.chat(model, tokenizer(), [USER], tools=TOOLS, max_new_tokens=limit, progress=False)
    assert (reply.finish_reason, reply.tool_calls) == ("length", ())
    assert "tool_call" in {event.kind for event in events} and "tool_calls" not in reply.message


# Turns


def test_the_second_turn_reads_only_what_is_new():
    """All whole pages of the turn before are in the cache, the answer's own among them (issue: a fast second turn)."""
    talk = dialogue(*ROUND_TRIP)
    first = answered(talk, USER)
    (call,) = open_calls(talk.messages)
    second = answered(talk, {"role": "tool", "tool_call_id": call["id"], "content": "lantern"})
    seen = first.prompt_tokens + first.new_tokens
    assert first.cached_tokens == 0 and second.prompt_tokens > seen
    assert seen - 2 * 16 < second.cached_tokens <= seen, (second.cached_tokens, seen)
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "tool", "assistant"]
    assert (second.content, second.finish_reason, open_calls(talk.messages)) == ("harbor is lantern.", "stop", [])
    third = answered(talk, {"role": "user", "content": "Thanks."})
    assert third.content == "Bye." and third.cached_tokens > second.prompt_tokens - 16


def test_an_engine_of_the_callers_own_keeps_what_it_has_read():
    model = ScriptedModel.of(ROUND_TRIP)
    engine = Engine(model, pages=64, max_batch=1)
    first, second = (m3jax.chat(model, tokenizer(), [USER], tools=TOOLS, engine=engine, stream=False) for _ in range(2))
    assert first.cached_tokens == 0 and second.cached_tokens == (second.prompt_tokens - 1) // 16 * 16
    engine.check()
    assert engine.pages["used"] == 0 and not engine.busy
    for handle in range(2):  # of requests that have ended nothing is left but pages that a later one may find
        with pytest.raises(ValueError, match=f"{handle}"):
            engine.result(handle)
    with pytest.raises(ValueError, match="draft with an engine"):
        m3jax.chat(model, tokenizer(), [USER], engine=engine, draft="ngram")


def test_undo_takes_the_last_question_back_with_all_that_followed():
    talk = dialogue(*ROUND_TRIP)
    answered(talk, USER)
    (call,) = open_calls(talk.messages)
    answered(talk, {"role": "tool", "tool_call_id": call["id"], "content": "lantern"})
    assert talk.undo()[0] == USER and talk.messages == []
    with pytest.raises(ValueError, match="nothing to undo"):
        talk.undo()
    again = answered(talk, USER)
    assert again.cached_tokens > again.prompt_tokens - 17 and again.content == "One moment."


@pytest.mark.parametrize("when", ["while it is read", "while it is written"])
def test_an_interrupted_answer_stays_as_far_as_it_came(when):
    """Nothing came: the question goes too. Something came: it stays, and the next turn goes on behind it."""
    talk = dialogue("</mm:think>" + "one two three four five six seven eight nine ten " * 4, "</mm:think>Right.")
    asked = 0

    def is_interrupted() -> bool:
        nonlocal asked
        asked += 1
        return asked >= (1 if when == "while it is read" else 5)

    *events, reply = talk.send(USER, is_interrupted=is_interrupted)
    assert reply.finish_reason == "interrupted" and text_of(events, "content") == reply.content
    if when == "while it is read":
        assert (reply.content, talk.messages) == ("", [])
        return
    assert 0 < reply.new_tokens < 30 and reply.content.startswith("one two")
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]
    assert answered(talk, {"role": "user", "content": "Go on."}).content == "Right."


def test_an_interrupted_answer_keeps_no_call():
    """A call without its result could not be followed by what the user says next."""
    talk = dialogue("</mm:think>Hm." + wire(("lookup", {"key": "a"})) + " and so on" * 40, "</mm:think>Right.")
    events = []
    for event in talk.send(USER, is_interrupted=lambda: "tool_call_end" in {event.kind for event in events}):
        events.append(event)
    assert events[-1].finish_reason == "interrupted" and len(events[-1].tool_calls) == 1
    assert open_calls(talk.messages) == [] and talk.messages[-1]["content"].startswith("Hm.")
    assert answered(talk, {"role": "user", "content": "Go on."}).content == "Right."


def test_who_stops_asking_leaves_the_history_as_it_was(monkeypatch):
    """The request ends with its reader: its place is free again, and the next answer does not wait for it."""
    steps, step = [], Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: steps.append(1) or step(engine))
    talk = dialogue("</mm:think>" + "one two three " * 50, "</mm:think>Right.")
    events = talk.send(USER)
    assert next(events).kind == "content" and talk.messages == [USER]
    events.close()
    assert talk.messages == []
    counts = []
    for _ in range(2):
        steps.clear()
        assert answered(talk, USER).content == "one two three " * 50
        counts.append(len(steps))
        talk.undo()
    assert counts[0] <= counts[1] + 3 and counts[1] > 20


# What there is room for, and what is open


@given(st.integers(1, 9000), st.integers(1, 9000))
def test_an_answer_has_what_the_prompt_leaves_and_4096_at_most(prompt_tokens, room):
    assert new_tokens_within(prompt_tokens, room, None) == min(
        4096, room - prompt_tokens if room > prompt_tokens else 1
    )
    assert new_tokens_within(prompt_tokens, room, 5000) == 5000


@pytest.mark.usefixtures("unchecked")
def test_a_dialogue_and_its_answer_have_to_fit():
    config = SimpleNamespace(vocab_size=9, max_position_embeddings=99)
    check_answer([1, 2, 3], Params(max_new_tokens=7, sampling=Sampling()), config, 10)
    with pytest.raises(ValueError, match="has 3 tokens, which with an answer of 8 are more than the 10 that there is"):
        check_answer([1, 2, 3], Params(max_new_tokens=8, sampling=Sampling()), config, 10)


CALLS = [{"id": x, "function": {"name": x}} for x in "abc"]
ASKED = {"role": "assistant", "content": "", "tool_calls": CALLS}
OF = lambda name: {"role": "tool", "tool_call_id": name, "content": "1"}


def test_calls_are_open_until_they_have_a_result():
    """Of the last answer alone, in its order, whatever the order of the results."""
    for results, still_open in (("", "abc"), ("b", "ac"), ("cb", "a"), ("abc", "")):
        history = [ASKED, OF("a"), {"role": "user", "content": "x"}, ASKED, *map(OF, results)]
        assert [call["id"] for call in open_calls(history)] == [*still_open]
    assert open_calls([]) == open_calls([{"role": "user", "content": "x"}]) == open_calls([OF("a")]) == []
    assert open_calls([ASKED, {"role": "assistant", "content": "done", "tool_calls": None}]) == []


# What is refused


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": "x" * 5000}], "the dialogue has"),
        ([{"role": "tool", "tool_call_id": "a", "content": "b"}], "message 1 (tool)"),
        ([{"role": "wizard", "content": "b"}], "role = 'wizard'"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
    ],
)
def test_what_cannot_be_sent_changes_nothing(messages, message):
    talk = dialogue(*ROUND_TRIP)
    with pytest.raises(ValueError) as raised:
        talk.send(*messages)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert talk.messages == [] and answered(talk, USER).finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tools=[{"name": "bare"}]), "tool 1"),
        (dict(thinking_mode="deep"), "thinking_mode = 'deep'"),
        (dict(stop=""), "stop = ''"),
        (dict(stop=["a", ""]), "stop = ''"),
        (dict(temperature=-1.0), "temperature = -1"),
        (dict(max_new_tokens=0), "max_new_tokens = 0"),
        (dict(max_new_tokens=5000), "more than the"),
        (dict(template="nowhere.jinja"), "nowhere.jinja"),
    ],
)
def test_a_bad_argument_is_refused_at_the_call(options, message):
    """Not at the first event: a stream that nobody reads would hide it."""
    model = ScriptedModel.of(ROUND_TRIP)
    with pytest.raises(ValueError) as raised:
        m3jax.chat(model, tokenizer(), [USER], progress=False, **options)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_tokenizer_from_nowhere_needs_a_template():
    model, bare = ScriptedModel.of(ROUND_TRIP), Tokenizer(tokenizer().backend)
    with pytest.raises(ValueError, match="give template=FILE"):
        m3jax.chat(model, bare, [USER])
    template = ChatTemplate.from_folder(embedded_path())
    assert m3jax.chat(model, bare, [USER], stream=False, template=template, progress=False).content == "One moment."


def test_a_longer_call_is_compiled_with_the_first_message_that_needs_it(monkeypatch):
    """A dialogue begins with the smallest call of prefill; another size is named when it is compiled."""
    names = []
    monkeypatch.setattr(Activity, "timed", lambda self, name: names.append(name) or nullcontext())
    talk = dialogue(*["</mm:think>Yes."] * 4, tools=None)
    assert names == ["compiling prefill of 1 x 256 tokens, decode of 4 steps, copies of pages"]
    for length, compiled in ((3, []), (200, ["compiling prefill of 1 x 512 tokens"]), (3, [])):
        names.clear()
        reply = answered(talk, {"role": "user", "content": "word " * length})
        assert (reply.content, names) == ("Yes.", compiled)


def random_model() -> FakeModel:
    return FakeModel.random(config=FakeConfig(vocab_size=2048))


@pytest.mark.usefixtures("unchecked")
def test_the_door_of_a_text_model_takes_the_folders_defaults(tmp_path):
    """generation_config.json of the folder says greedy and 3 tokens; what the caller gives wins."""
    defaults = Defaults.from_dict({"do_sample": False, "max_new_tokens": 3, "eos_token_id": 1})
    source = (embedded_path() / "chat_template.jinja").read_text(encoding="utf-8")
    lm = m3jax.TextModel(random_model(), tokenizer(), defaults, source, tmp_path)
    short = lm.chat([USER], stream=False)
    assert (short.new_tokens, short.finish_reason) == (3, "length")
    greedy = m3jax.chat(lm.model, lm.tokenizer, [USER], temperature=0, max_new_tokens=8, stream=False, progress=False)
    assert lm.chat([USER], stream=False, max_new_tokens=8).content == greedy.content
    one, other = (lm.chat([USER], stream=False, max_new_tokens=8, temperature=1.0, seed=seed) for seed in range(2))
    assert one.content != other.content
    bare = m3jax.TextModel(lm.model, Tokenizer(lm.tokenizer.backend), defaults, None, tmp_path)
    with pytest.raises(ValueError, match="template"):
        bare.chat([USER])
