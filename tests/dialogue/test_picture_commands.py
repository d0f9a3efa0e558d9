"""/image and /video in `python -m m3jax.chat`: what is shown, kept, taken back and refused."""

import io
import json
import logging
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from support.comparisons import assert_equal
from support.embedded import TOKENIZER
from support.fake_seer import seeing_config
from support.media import clip, image_file, picture, video_file
from support.screen import Screen
from support.scripted_chat import ScriptedModel, ScriptedSeer
from tiny.pictures.draw import COLOURS, Shape, draw_shapes

from m3jax.assets import sample_picture_path
from m3jax.cli import chat
from m3jax.cli.chat import talk
from m3jax.dialogue import Dialogue
from m3jax.dialogue.media import read_part
from m3jax.media import PlaceholderIds, decode_image, process_image

IDS = PlaceholderIds.of_tokenizer(TOKENIZER)
CONFIG = seeing_config(
    IDS.image, IDS.video, vocab_size=2048, index_block_size=16, max_position_embeddings=4096, eos_token_id=(1,)
)
ANSWERS = ["</mm:think>A harbor.", "</mm:think>Two boats.", "</mm:think>Bye."]


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """Two pictures that one size of call holds, a clip, a file that is cut; the process is in their folder."""
    written = {
        "a.png": image_file(picture(60, 90, seed=1)), "b c.png": image_file(picture(56, 56, seed=2)),
        "clip.mp4": video_file(clip(5), rate=1), "cut.png": image_file(picture(60, 90))[:900],
    }  # fmt: skip
    for name, data in written.items():
        (tmp_path / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def seer() -> ScriptedSeer:
    return ScriptedSeer.of(ANSWERS, config=CONFIG)


def shown(files: Path, *names: str) -> list[dict[str, str]]:
    """Parts of a content for files, as commands make them: by their whole paths."""
    kind = lambda name: "video" if name.endswith("mp4") else "image"
    return [{"type": kind(name), kind(name): str(files / name)} for name in names]


# On a terminal


@pytest.mark.further
def test_the_sample_is_a_picture_as_the_embedded_model_has_seen_them(monkeypatch):
    """/sample shows it by its short name; it is drawn by what drew the training pictures, without noise."""
    shapes = (
        Shape("circle", "green", 30.0, 34.0, 19.0), Shape("star", "blue", 84.0, 30.0, 20.0),
        Shape("square", "red", 78.0, 82.0, 17.0),
    )  # fmt: skip
    colours = [np.array(COLOURS[shape.colour], float) for shape in shapes]
    drawn = draw_shapes(np.full((112, 112, 3), 228.0), shapes, colours)
    assert_equal(decode_image(sample_picture_path()), np.rint(drawn).astype(np.uint8), "pixels", "row column colour")
    screen = Screen(monkeypatch, seer())
    assert "image sample.png: 112 x 112 pixels (H x W), 16 tokens; your next" in screen.after("/sample")
    assert "A harbor." in screen.after("What is it?")
    assert screen.talk.messages[0]["content"][0] == {"type": "image", "image": str(sample_picture_path())}


def test_a_terminal_shows_files_with_the_next_message(files, monkeypatch, caplog):
    """Read at once; taken back one by one; kept where a message cannot be sent; in the history and a saved file."""
    caplog.set_level(logging.INFO, "m3jax")
    screen = Screen(monkeypatch, seer())
    assert "tower" not in caplog.text, "the tower was compiled before there was a picture"
    tokens = process_image(files / "a.png").tokens
    assert f"image a.png: 56 x 84 pixels (H x W), {tokens} tokens; your next message shows it" in screen.after(
        "/image a.png"
    )
    assert "error: " + str(files / "cut.png") + ": the image cannot be decoded" in screen.after("/image cut.png")
    assert "error: /video needs the name of a video file" in screen.after("/video ")
    assert "5 frames of 56 x 84 pixels (H x W), 18 tokens" in screen.after("/video clip.mp4")
    assert "image b c.png: 56 x 56 pixels (H x W), 4 tokens" in screen.after("/image 'b c.png'")
    assert "taken back: image b c.png" in screen.after("/undo")
    history = screen.after("/history")
    assert history.endswith("\n[with your next message] image a.png\n[with your next message] video clip.mp4\n")
    assert history.count("[with your next message]") == 2, "what was taken back is not shown"
    assert screen.talk.messages == []
    assert "error: the dialogue has" in screen.after("harbor " * 1200), "it does not fit"

    parts = shown(files, "a.png", "clip.mp4")
    said = screen.after("What is it?")
    assert "A harbor." in said
    assert screen.talk.messages[0]["content"] == [*parts, {"type": "text", "text": "What is it?"}]
    (prompt_tokens,) = re.findall(r"0 of the (\d+) before them", said)
    assert int(prompt_tokens) > tokens + 18
    assert caplog.text.count("compiling vision tower for 256 patches\n") == 1
    said = screen.after("/image b c.png", "And this?")
    assert "Two boats." in said and screen.talk.messages[2]["content"][:-1] == shown(files, "b c.png")
    cached = re.findall(r"; (\d+) of the", said)
    assert int(cached[0]) > tokens + 18, "pictures of the first turn were read again"
    assert caplog.text.count("patches\n") == 1, "a second picture of that size compiles nothing"
    screen.after("And now?")
    assert screen.talk.messages[4] == {"role": "user", "content": "And now?"}, "shown once, not with every message"
    assert "taken back: And now?" in screen.after("/undo")

    assert "[user]\n[image a.png] [video clip.mp4] What is it?\n" in screen.after("/history")
    screen.after("/save saved.json")
    assert json.loads((files / "saved.json").read_text(encoding="utf-8")) == screen.talk.messages
    again = Dialogue(seer(), TOKENIZER, context=1024, messages=screen.talk.messages[:2], progress=False)
    *_, reply = again.send(screen.talk.messages[2])
    assert reply.content == "Two boats."
    (files / "b c.png").write_bytes((files / "a.png").read_bytes())
    assert "b c.png has changed, and this dialogue shows it as it was: give the new" in screen.after("/image b c.png")
    assert "taken back: [image b c.png] And this?" in screen.after("/undo")
    assert "image b c.png: 56 x 84 pixels (H x W), 6 tokens" in screen.after("/image b c.png"), (
        "an old picture under its name"
    )
    assert "~nobody-here/a.png cannot be read" in screen.after("/image ~nobody-here/a.png")


# In a pipe


@pytest.fixture
def say(monkeypatch, capsys):
    """Runs the command in this process with lines on its input: exit status, stdout, stderr."""

    def run(arguments: list[str], *lines: str, model: ScriptedModel | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(talk, "load", lambda *_, **__: seer() if model is None else model)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("".join(f"{x}\n" for x in lines).encode())))
        status = chat.main([*arguments, "--context", "1024", "--max-new-tokens", "32"])
        return status, *capsys.readouterr()

    return run


def test_a_pipe_shows_files_with_the_next_line(files, say, monkeypatch):
    """A note on stderr says what each fills; the answers alone are on stdout; JSON has the files in its parts."""
    sent, send = [], Dialogue.send
    monkeypatch.setattr(Dialogue, "send", lambda talk, *new: (sent.extend(new), send(talk, *new))[1])
    status, out, err = say([], "/image a.png", "/image b c.png", "What is it?", "", " /image a.png", "/imagine")
    assert (status, out) == (0, "A harbor.\nTwo boats.\nBye.\n")
    assert err == (
        "m3jax.chat: note: image a.png: 56 x 84 pixels (H x W), 6 tokens; your next message shows it\n"
        "m3jax.chat: note: image b c.png: 56 x 56 pixels (H x W), 4 tokens; your next message shows it\n"
    )
    content = [*shown(files, "a.png", "b c.png"), {"type": "text", "text": "What is it?"}]
    assert [message["content"] for message in sent] == [content, " /image a.png", "/imagine"]
    as_json = json.dumps({"role": "user", "content": [*shown(files, "a.png"), "What is it?"]})
    status, out, err = say(["--json"], as_json)
    assert (status, err, json.loads(out)["message"]["content"]) == (0, "", "A harbor.")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["/image"], "line 1: /image needs the name of an image file"),
        (["/image cut.png", "x"], "line 1: .*cut.png: the image cannot be decoded: .*; it is broken or cut short"),
        (["/image nowhere.png"], r"line 1: \S*nowhere.png cannot be read: No such file or directory"),
        (["/video a.png"], "line 1: .*a.png: the video cannot be read: it has another format; must be a video: MP4"),
        (["/image https://x/y.png"], "line 1: 'https://x/y.png' is an address, and nothing is fetched"),
        (["", "/image a.png", ""], "the input ends at line 2 with image a.png and no message that shows it"),
    ],
)
def test_a_file_that_cannot_be_shown_is_one_line_and_status_2(files, say, lines, message):
    status, out, err = say([], *lines)
    errors = [line for line in err.splitlines() if ": note: " not in line]
    assert (status, out, len(errors)) == (2, "", 1) and re.search(f"^m3jax.chat: error: {message}", errors[0]), err


def test_a_model_without_a_tower_says_so(files, say):
    status, out, err = say([], "/image a.png", model=ScriptedModel.of(ANSWERS))
    assert (status, out) == (2, "") and "line 1: the model has no vision tower: it takes text alone" in err


# Long files


def test_a_long_video_says_how_far_it_is(files, caplog):
    """In percent of the frames that are decoded, whoever reads it and whatever its part asks for."""
    caplog.set_level(logging.DEBUG, "m3jax")
    for more in ({}, {"detail": "low"}):
        caplog.clear()
        found = read_part({"type": "video", "video": "clip.mp4"} | more, {}, can_see=True)
        assert found.frame_indices == (0, 1, 2, 3, 4)
        assert [r.getMessage() for r in caplog.records if "clip" in r.getMessage()] == [
            "reading clip.mp4", *(f"reading clip.mp4: {20 * done}% of 5 frames" for done in range(1, 6))
        ]  # fmt: skip
