"""Images and videos of messages and prompts: how each is known, read once, named while it is read, and placed."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from m3jax.completion import media as reading
from m3jax.dialogue import media
from m3jax.dialogue.media import forget_changed, media_parts, read_part, what_is_read

pytestmark = pytest.mark.usefixtures("unchecked")  # the media, templates and tokenizers here are none


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


def test_media_of_a_prompt_are_lists():
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
