"""Parts of a dialogue with no model: room for an answer, open calls, how a history ends, media, text that stops."""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3jax.completion import StoppableText, drafts, generate_text, stream_text
from m3jax.completion import media as reading
from m3jax.decoding import Params, Sampling
from m3jax.decoding.engine.request import Generation
from m3jax.dialogue import dialogue, media
from m3jax.dialogue.answer import stop_ids
from m3jax.dialogue.chat import as_stop, check_answer, new_tokens_within
from m3jax.dialogue.dialogue import Dialogue, open_calls
from m3jax.dialogue.media import forget_changed, media_parts, read_part, what_is_read

chat = sys.modules["m3jax.dialogue.chat"]  # the package has a function of this name
generating = sys.modules["m3jax.completion.generate"]  # likewise
pytestmark = pytest.mark.usefixtures("unchecked")  # the models, engines and tokenizers here are none


@given(st.integers(1, 9000), st.integers(1, 9000))
def test_an_answer_has_what_the_prompt_leaves_and_4096_at_most(prompt_tokens, room):
    assert new_tokens_within(prompt_tokens, room, None) == min(
        4096, room - prompt_tokens if room > prompt_tokens else 1
    )
    assert new_tokens_within(prompt_tokens, room, 5000) == 5000


def test_a_dialogue_and_its_answer_have_to_fit():
    config = SimpleNamespace(vocab_size=9, max_position_embeddings=99)
    check_answer([1, 2, 3], Params(max_new_tokens=7, sampling=Sampling()), config, 10)
    with pytest.raises(ValueError, match="has 3 tokens, which with an answer of 8 are more than the 10 that there is"):
        check_answer([1, 2, 3], Params(max_new_tokens=8, sampling=Sampling()), config, 10)


def test_texts_that_end_an_answer():
    assert (as_stop("ab"), as_stop(["a", "b"]), as_stop(())) == (("ab",), ("a", "b"), ())
    for wrong in ("", ["a", ""], [3]):
        with pytest.raises(ValueError, match=r"stop = .*: must be a text of at least one character"):
            as_stop(wrong)


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


def said(content: str) -> dict:
    return {"role": "assistant", "content": content}


def reply(reason: str, content: str = "", reasoning: str = "", calls=None) -> SimpleNamespace:
    message = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
    return SimpleNamespace(
        kind="reply", message=message, finish_reason=reason, content=content, reasoning=reasoning
    )  # fmt: skip


@pytest.mark.parametrize(
    ("last", "kept"),
    [
        (reply("stop", "yes"), said("yes")), (reply("stop"), said("")), (reply("tool_calls", calls=CALLS), ASKED),
        (reply("interrupted", "ye", calls=CALLS), said("ye")), (reply("interrupted", reasoning="so"), said("")),
        (reply("interrupted"), None), (None, None),
    ],
)  # fmt: skip
def test_a_history_ends_with_the_question_and_its_answer_or_as_it_was(last, kept):
    """No call of an answer that was stopped is to be run; where nothing came, nothing was said."""
    held = Dialogue.__new__(Dialogue)
    before, question = [{"role": "user", "content": "a"}], {"role": "user", "content": "b"}
    held.messages = before
    piece = SimpleNamespace(kind="content", text="y")
    events = iter([piece, *([] if last is None else [last])])
    seen = []
    for event in held._kept(events, [*before, question]):
        seen.append(event)
        assert held.messages[:2] == [*before, question], "while it is written, the question is there"
    assert seen == [piece, *([] if last is None else [last])]
    assert held.messages == ([*before, question, kept] if kept else before)
    with (
        pytest.raises(RuntimeError, match="lost"),
        contextlib.closing(held._kept(iter([piece]), [question])) as running,
    ):
        next(running)
        running.throw(RuntimeError("lost"))
    assert held.messages == ([*before, question, kept] if kept else before)


def test_undo_takes_back_what_followed_the_last_question():
    held = Dialogue.__new__(Dialogue)
    first, second = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    held.messages = [{"role": "system", "content": "s"}, first, ASKED, second, ASKED, OF("a")]
    assert held.undo() == [second, ASKED, OF("a")] and held.undo() == [first, ASKED]
    assert held.messages == [{"role": "system", "content": "s"}]
    with pytest.raises(ValueError, match="nothing to undo: no message of yours is left"):
        held.undo()


# Media


def test_a_part_is_known_by_its_source_and_options():
    found = lambda **part: what_is_read(part)
    assert found(type="image", image="a") == (("image", "a"), "a", {}) == found(type="image", url="a", detail="auto")
    options = {"max_long_side": 504}
    nested = found(type="image", image_url={"url": "a", "detail": "low"})
    assert nested == (("image", "a", ("max_long_side", 504)), "a", options)
    assert found(type="video", path="a", fps=2, max_long_side_pixel=99, detail=None)[2] == dict(fps=2, max_long_side=99)
    array = np.zeros(3)
    assert found(type="image", image=array) == (("image", id(array)), array, {})
    for part, reason in (
        (dict(type="image"), "image has 0 sources"), (dict(type="video", url="a", path="b"), "video has 2 sources"),
        (dict(type="image", url="a", fps=1), "'?fps'? is not supported: only detail, max_long_side_pixel"),
        (dict(type="image", url="a", detail="huge"), "detail = .*huge.*: must be auto, low, default, high"),
        (dict(type="video", url="a", fps=True), "fps = .*: must be a number"),
        (dict(type="image", url="a", max_long_side_pixel=1.5), "max_long_side_pixel = .*: must be a number"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            what_is_read(part)
    least, most = media.LIMITS.fewest_fps, media.LIMITS.most_fps
    for fps, is_taken in ((least, True), (most, True), (least * 0.99, False), (most * 1.01, False)):
        with contextlib.nullcontext() if is_taken else pytest.raises(ValueError, match="must be from"):
            assert found(type="video", url="a", fps=fps)[2] == {"fps": fps}


def test_media_stand_in_messages_by_number():
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": ["x", {"type": "image", "image": "a"}, {"type": "text", "text": "y"},
                                     {"type": "video", "video": "b"}]},
    ]  # fmt: skip
    found = [(part["type"], place) for part, place in media_parts(messages)]
    assert found == [("image", "message 2 (user), part 2"), ("video", "message 2 (user), part 4")]


def test_a_file_is_read_once_until_it_changes(monkeypatch, tmp_path):
    read, known = [], {}

    def read_medium(kind, source, progress, **options):
        read.append((kind, source, progress, options))
        return len(read)

    monkeypatch.setattr(media, "read_medium", read_medium)
    (tmp_path / "a").write_text("1")
    part = {"type": "image", "image": str(tmp_path / "a")}
    of = lambda part, **more: read_part(part, known, can_see=True, **more)
    assert (of(part), of(part), of(part | {"detail": "high"})) == (1, 1, 2)
    assert [each[2:] for each in read] == [(True, {}), (True, {"max_long_side": 2016})]
    forget_changed(part, known, [])
    assert of(part, progress=False) == 1
    (tmp_path / "a").write_text("22")
    shown = [{"role": "user", "content": [part]}]
    with pytest.raises(ValueError, match="a has changed, and this dialogue shows it as it was"):
        forget_changed(part, known, shown)
    assert of(part) == 1
    forget_changed(part, known, [{"role": "user", "content": [{"type": "image", "image": "b"}]}])
    assert of(part, progress=False) == 3 and read[-1][2] is False
    forget_changed({"type": "image", "image": "never read"}, known, shown)
    with pytest.raises(ValueError, match="the model has no vision tower"):
        read_part(part, known, can_see=False)


def test_a_dialogues_media_keep_their_order(monkeypatch):
    """Images and videos each in theirs; a fault says where it stands."""

    def read(part, known, can_see, progress):
        if part.get("image") == "wrong":
            raise ValueError("no image")
        known[part[part["type"]]] = (can_see, progress)
        return part[part["type"]]

    monkeypatch.setattr(media, "read_part", read)
    monkeypatch.setattr(media, "activity", lambda progress: contextlib.nullcontext())
    monkeypatch.setattr(media, "Media", lambda images=(), videos=(): (images, videos))
    monkeypatch.setattr(media, "with_placeholders", lambda prompt, shown, tokenizer: [*prompt, tokenizer])
    template = SimpleNamespace(encode=lambda tokenizer, messages, tools, thinking_mode: [1, tools, thinking_mode])
    part = lambda kind, name: {"type": kind, kind: name}
    messages = [{"role": "user", "content": [part("image", "a"), part("video", "b"), part("image", "c")]}]
    known = {}
    found = media.dialogue_tokens(template, 9, messages, "tools", "mode", True, known, False)
    assert found == ([1, "tools", "mode", 9], (["a", "c"], ["b"])) and known == dict.fromkeys("abc", (True, False))
    text = [{"role": "user", "content": "x"}]
    assert media.dialogue_tokens(template, 9, text, None, None, False) == ([1, None, None], ((), ()))
    messages[0]["content"].insert(1, part("image", "wrong"))
    with pytest.raises(ValueError, match=r"message 1 \(user\), part 2: no image"):
        media.dialogue_tokens(template, 9, messages, None, None, True)


def test_what_is_read_is_named_while_it_is_waited_for_and_in_errors(monkeypatch):
    """By its number and its path; of a video each share of the frames; a fault that names the file does so once."""
    said, asked = [], []
    line = SimpleNamespace(say=said.append)
    monkeypatch.setattr(reading, "activity", lambda progress: asked.append(progress) or contextlib.nullcontext(line))
    monkeypatch.setattr(reading, "media_source", lambda source, *most: (source, *most))
    monkeypatch.setattr(reading, "process_image", lambda source, **options: ("image", source, options))

    def process_video(source, watch, **options):
        watch(50, 2000)
        return "video", source, options

    monkeypatch.setattr(reading, "process_video", process_video)
    found = reading.read_medium("image", "a.png", called="image 1 of 2", progress=False, max_long_side=9)
    assert found == ("image", ("a.png", reading.LIMITS.image_bytes), dict(max_long_side=9)) and asked == [False]
    assert reading.read_medium("video", b"data") == ("video", (b"data",), {}) and asked == [False, True]
    assert said == ["reading image 1 of 2, a.png", "reading video", "reading video: 2% of 2,000 frames"]
    read = lambda kind, item, called, progress: (kind, item, called, progress)
    for error, source, called, message in (
        ("it is broken", "a.png", "image 1 of 2", "image 1 of 2, a.png: it is broken"),
        ("a.png: no image", "a.png", "image 1 of 2", "image 1 of 2: a.png: no image"),
        ("it is broken", b"data", "", "it is broken"), ("a.png: no image", "a.png", "", "a.png: no image"),
    ):  # fmt: skip

        def fail(source, error=error, **_):
            raise ValueError(error)

        monkeypatch.setattr(reading, "process_image", fail)
        with pytest.raises(ValueError) as refused:
            reading.read_medium("image", source, called=called)
        assert str(refused.value) == message
    monkeypatch.setattr(reading, "read_medium", read)
    monkeypatch.setattr(reading, "Media", lambda images, videos: (images, videos))
    assert reading.read_media(["a", "b"], ["c"], progress=False) == (
        [("image", "a", "image 1 of 2", False), ("image", "b", "image 2 of 2", False)],
        [("video", "c", "video 1 of 1", False)],
    )
    assert reading.read_media(["a"])[0][0][-1] is True and reading.read_media() == ([], [])
    for wrong in ("a", b"a", Path("a"), 3):
        with pytest.raises(ValueError, match="images is one image: give a list of them"):
            reading.read_media(wrong)
        with pytest.raises(ValueError, match="videos is one video: give a list of them"):
            reading.read_media([], wrong)


def test_placeholders_stand_in_front_where_a_prompt_marks_no_place(monkeypatch):
    """Of each kind by itself, images before videos, behind a BOS; a text's marks are those of what it shows."""
    ids = SimpleNamespace(image=70, video=80)
    monkeypatch.setattr(reading, "PlaceholderIds", SimpleNamespace(of_tokenizer=lambda tokenizer: ids))
    expand = lambda prompt, images, videos, encode, ids: (prompt, images, videos, encode)
    monkeypatch.setattr(reading, "expand_tokens", expand)
    tokenizer = SimpleNamespace(bos_id=1, encode="encode")
    of = lambda prompt, images=("a", "b"), videos=("c",): reading.with_placeholders(
        prompt, SimpleNamespace(images=images, videos=videos), tokenizer
    )
    for prompt, expected in (
        ([5, 6], [70, 70, 80, 5, 6]), ([1, 5], [1, 70, 70, 80, 5]), ([], [70, 70, 80]), ([1], [1, 70, 70, 80]),
        ([1, 70, 5, 70], [1, 80, 70, 5, 70]), ([5, 80], [70, 70, 5, 80]), ([5, 1, 80, 70], [5, 1, 80, 70]),
    ):  # fmt: skip
        given = tuple(prompt)
        assert of(given) == (expected, ("a", "b"), ("c",), "encode"), prompt
    assert reading.with_placeholders((1, 2), (), None) == [1, 2]
    with pytest.raises(ValueError, match="give tokenizer"):
        reading.with_placeholders([1], SimpleNamespace(images=("a",), videos=()), None)
    shows = lambda images, videos: SimpleNamespace(images=images, videos=videos)
    text = "a <image> b <video> <image>"
    image, video = reading.IMAGE, reading.VIDEO
    assert reading.marked(text, shows((), ())) == text
    assert reading.marked(text, shows((1,), ())) == f"a {image} b <video> {image}"
    assert reading.marked(text, shows((), (1,))) == f"a <image> b {video} <image>"


def test_a_draft_is_named_before_there_is_a_model(monkeypatch):
    loaded = []
    monkeypatch.setattr(drafts, "load_draft", lambda *given: loaded.append(given) or "draft")
    monkeypatch.setattr(drafts, "Eagle3Drafter", lambda draft: ("eagle3", draft))
    monkeypatch.setattr(drafts, "PromptLookup", lambda: "lookup")
    assert drafts.named_drafter("ngram", "config", "float32", "mesh") == "lookup" and loaded == []
    assert drafts.named_drafter("builtin", "config", "float32", "mesh") == ("eagle3", "draft")
    drafts.named_drafter(Path("folder"), "config", "bfloat16", None)
    assert loaded == [(None, "config", "float32", "mesh"), (Path("folder"), "config", "bfloat16", None)]


def test_each_prompt_has_its_own_images_and_videos(monkeypatch):
    """A list of lists of each kind, or none; a model without a tower reads nothing."""
    monkeypatch.setattr(generating, "sees", lambda model: model == "sees")
    monkeypatch.setattr(generating, "read_media", lambda images, videos, progress: (images, videos, progress))
    of = lambda images, videos, model="sees": generating._media_of([[1], [2]], images, videos, model, False)
    assert of([["a"], []], [[], ["b"]]) == [(["a"], [], False), ([], ["b"], False)]
    assert of(None, [["b"], []]) == [([], ["b"], False), ([], [], False)]
    assert of(None, None, "blind") == of([[], []], None, "blind") == [([], [], False)] * 2
    for images, videos, name, count in (([["a"]], None, "images", 1), (None, [[]] * 3, "videos", 3)):
        with pytest.raises(ValueError, match=f"{name} has {count} lists for 2 prompts"):
            of(images, videos)
    for shown in (([["a"], []], None), (None, [[], ["b"]])):
        with pytest.raises(ValueError, match="the model has no vision tower"):
            of(*shown, "blind")


# Text as it comes


class Letters:
    """A stream of text in which a token is a letter, given out at once."""

    def push(self, token):
        return chr(token)

    def push_all(self, tokens):
        return "".join(map(chr, tokens))

    def flush(self):
        return "!"


class Scripted:
    """An engine whose rounds are written down: (handle, text, reason) each; what it is told to stop has ended."""

    def __init__(self, *rounds):
        self.rounds, self.stopped = [*rounds], {}

    def step(self):
        events = []
        for handle, text, reason in self.rounds.pop(0):
            is_last = reason != "unfinished" or handle in self.stopped
            events.append(
                SimpleNamespace(
                    handle=handle, tokens=tuple(map(ord, text)), stop_reason=reason, generation=is_last or None
                )
            )
        return events

    def stop(self, handle, tokens):
        self.stopped[handle] = tokens

    def result(self, handle):
        return Generation([handle], [0.0], "length", 1)


def test_text_comes_in_pieces_and_ends_before_a_stop_string():
    """Requests side by side; a stop id is no part of the text, and what follows a stop string is not either."""
    engine = Scripted(
        [(1, "ab", "unfinished"), (2, "x", "unfinished"), (9, "other", "length")],
        [(2, "y~", "stop_id")],
        [(1, "cENDde", "unfinished"), (2, "zz", "length")],
        [(1, "", "unfinished")],
    )
    texts = {handle: StoppableText(Letters(), ["END"]) for handle in (1, 2)}
    found = [(handle, piece, result and result.text) for handle, piece, result in stream_text(engine, texts)]
    assert found == [(1, "ab", None), (2, "x", None), (2, "y!", "xy!"), (1, "c", None), (1, "", "abc")]
    assert engine.stopped == {1: 6} and engine.rounds == []  # at the token that completed it


def test_texts_are_returned_in_the_order_that_was_asked_for():
    engine, heard = Scripted([(4, "a", "length"), (3, "b", "unfinished")], [(3, "", "length")]), []
    tokenizer = SimpleNamespace(stream=Letters)
    found = generate_text(engine, [3, 4], tokenizer, on_text=lambda *piece: heard.append(piece))
    assert [(each.tokens, each.text) for each in found] == [([3], "b!"), ([4], "a!")]
    assert heard == [(4, "a!"), (3, "b"), (3, "!")]


def test_ids_that_end_a_turn_come_once_each():
    tokenizer = SimpleNamespace(eos_id=7, backend=SimpleNamespace(token_to_id=lambda text: {"[e~[": 5}.get(text)))
    assert stop_ids(tokenizer, (3, 7, 3)) == (3, 7, 5)
    nothing = SimpleNamespace(eos_id=None, backend=SimpleNamespace(token_to_id=lambda text: None))
    assert stop_ids(nothing, (3,)) == (3,)


# What a call hands on


def test_a_call_hands_its_arguments_on(monkeypatch):
    """An answer's room, limits and stops; with an engine its room and its prefix cache, and no other draft."""
    calls = {}

    def noted(name, answer=None):
        return lambda *given, **named: calls.update({name: (given, named)}) or answer

    config = SimpleNamespace(max_position_embeddings=50, eos_token_id=(3,))
    model = SimpleNamespace(config=config)
    for module in (chat, dialogue):
        monkeypatch.setattr(module, "check_model", lambda model: None)
        monkeypatch.setattr(module, "sees", lambda model: True)
        monkeypatch.setattr(module, "as_template", lambda template, tokenizer: template)
        monkeypatch.setattr(module, "stop_ids", lambda tokenizer, eos: (tokenizer, *eos))
        monkeypatch.setattr(module, "dialogue_tokens", noted("read", ([1] * 9, "media")))
        monkeypatch.setattr(module, "check_answer", lambda *given: calls.update(checked=given))
        monkeypatch.setattr(module, "OutputParser", lambda tools, thinking_mode: (tools, thinking_mode))
        monkeypatch.setattr(module, "answer", noted("answer", "ab"))
    monkeypatch.setattr(chat, "engine_for", noted("made", "made"))
    ask = [{"role": "user", "content": "x"}]
    stream = chat.chat(model, 8, ask, template="t", tools=[], thinking_mode="m", stop="E", temperature=0.5, draft="d",
                       draft_tokens=2)  # fmt: skip
    assert [*stream] == ["a", "b"]
    params = Params(max_new_tokens=41, sampling=Sampling(temperature=0.5), stop_ids=(8, 3))
    assert calls["checked"] == ([1] * 9, params, config, 50)
    assert calls["read"] == (("t", 8, ask, [], "m"), dict(can_see=True, progress=True))
    assert calls["made"] == ((model, [[1] * 9], [params]), dict(media=["media"], steps_per_call=chat._STREAM_STEPS,
                                                                draft="d", draft_tokens=2, progress=True))  # fmt: skip
    assert calls["answer"] == (("made", 8, ([], "m"), [1] * 9, params, "media"), dict(stop=("E",), progress=True))
    engine = SimpleNamespace(max_length=20)
    assert chat.chat(model, 8, ask, template="t", stream=False, engine=engine, stop_at=(4, 5)) == "b"
    assert calls["checked"][1:] == (Params(max_new_tokens=11, sampling=Sampling(), stop_ids=(8, 4, 5)), config, 20)
    assert calls["answer"][0][0] is engine and calls["answer"][1]["stop"] == ()
    assert chat.chat(model, 8, ask, template="t", stream=False, progress=False) == "b"
    assert calls["made"][1]["steps_per_call"] is None and calls["made"][1]["progress"] is False
    with pytest.raises(ValueError, match="draft with an engine"):
        chat.chat(model, 8, ask, template="t", engine=engine, draft="d")
    made = []
    monkeypatch.setattr(dialogue, "_engine", lambda *given: made.append(given) or SimpleNamespace(max_length=given[1]))
    held = Dialogue(model, 8, template="t", messages=ask, stop=["E"], draft="d", draft_tokens=5, context=40)
    assert made == [(model, 40, 2, "d", 5, True)] and (held.context, held.can_see) == (40, True)
    Dialogue(model, 8, template="t", progress=False)
    assert made[1] == (model, 50, 2, None, chat.DRAFT_TOKENS, False)
    config.max_position_embeddings = 10**6
    Dialogue(model, 8, template="t")
    assert made[2][1] == 32_768
