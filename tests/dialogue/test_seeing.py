"""Images and videos from a user's hands to the model: generate, chat, the command line, and what each refuses."""

import base64
import io
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from support import tiny
from support.embedded import TOKENIZER
from support.media import clip, image_file, picture, sound_file, video_file
from tiny.pictures import with_tower

import m3jax
from m3jax import cli
from m3jax.assets import embedded_path
from m3jax.completion import read_media, with_placeholders
from m3jax.decoding import Engine, Media
from m3jax.media import PlaceholderIds, batch, media_source, names_file, process_image, process_video
from m3jax.text import ChatTemplate
from m3jax.vision import VisionConfig

IDS = PlaceholderIds.of_tokenizer(TOKENIZER)
GREEDY = dict(max_new_tokens=4, temperature=0)
pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def model():
    config = tiny.config("M", vocab_size=2048, index_block_size=16, index_topk_blocks=4, bos_token_id=0)
    tower = VisionConfig.tiny(num_hidden_layers=1, image_token_id=IDS.image, video_token_id=IDS.video)
    return with_tower(tiny.model(config), tower, seed=0)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    """Save the model as a checkpoint, with the embedded tokenizer and template."""
    path = tmp_path_factory.mktemp("seeing")
    m3jax.save(model, path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(embedded_path() / name, path / name)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Two pictures, a clip, and files that are none."""
    path = tmp_path_factory.mktemp("media")
    written = {
        "a.png": image_file(picture(60, 90, seed=1)), "b.png": image_file(picture(56, 56, seed=2)),
        "c.png": image_file(picture(60, 90, seed=3)),
        "clip.mp4": video_file(clip(5), rate=1), "cut.png": image_file(picture(60, 90))[:900], "text.png": b"no image",
        "empty.png": b"", "thin.png": image_file(picture(2, 500)), "sound.mp4": sound_file(),
        "cut.mp4": video_file(clip(5))[:-600],
    }  # fmt: skip
    for name, data in written.items():
        (path / name).write_bytes(data)
    return path


@jax.jit
def _best(model, row, embeddings):
    """The best next token after each token of a row."""
    return jnp.argmax(model.unembed(model.hidden(row, embeddings=embeddings)[0][0]), axis=-1)


def continued(model, tokens: list[int], media: Media, count: int = 4) -> list[int]:
    """Greedily, by the whole model on everything at each step: no engine, no cache."""
    packed = batch(media.images, media.videos, model.config)
    features, prompt = model.features(packed), list(tokens)
    for _ in range(count):
        row = np.full((1, 160), TOKENIZER.eos_id, np.int32)
        row[0, : len(tokens)] = tokens
        embeddings = model.embed(jnp.asarray(row), features, model.places(jnp.asarray([prompt]), packed))
        tokens = [*tokens, int(_best(model, jnp.asarray(row), embeddings)[len(tokens) - 1])]
    return tokens[len(prompt) :]


# Sources


def test_a_picture_is_the_same_from_wherever_it_comes(files):
    data = (files / "a.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    sources = [files / "a.png", str(files / "a.png"), data, url, Image.open(io.BytesIO(data)), process_image(data)]
    patches = [image.patches for image in read_media(sources, progress=False).images]
    assert all(np.array_equal(patches[0], other) for other in patches[1:])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("https://example.com/a.png", "nothing is fetched"), ("data:image/png,abc", "not base64"),
        ("data:image/png;base64,a", "not valid base64"), ("", "no name of a file"),
    ],
)  # fmt: skip
def test_a_text_that_names_nothing(source, message):
    with pytest.raises(ValueError, match=message):
        media_source(source)
    with pytest.raises(ValueError, match="at most 3 bytes"):
        media_source("data:image/png;base64,YWJjZGVm", most_bytes=3)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (Path("a.png"), True), ("a.png", True), ("data", True), ("DATA:image/png;base64,YQ==", False),
        ("file:///a.png", False), (b"\x89PNG", False), (np.zeros((2, 2, 3), np.uint8), False),
    ],
)  # fmt: skip
def test_what_names_a_file(source, expected):
    """Its name is said where it cannot be read, and shown in a dialogue; of a data URL all that would be characters."""
    assert names_file(source) is expected


def test_placeholders_stand_where_they_are_written_or_in_front(files):
    media = read_media([files / "b.png"], [files / "clip.mp4"], progress=False)
    text = TOKENIZER.encode("What is it?")
    image = [IDS.start, *[IDS.image] * 4, IDS.end]
    written = with_placeholders([*text, IDS.image, *text], Media(media.images), TOKENIZER)
    assert written == [*text, *image, *text]
    both = with_placeholders([TOKENIZER.bos_id, *text], media, TOKENIZER)
    assert both[: len(image) + 1] == [TOKENIZER.bos_id, *image] and both[-len(text) :] == text
    assert both.count(IDS.video) == media.videos[0].tokens
    assert with_placeholders(text, Media(videos=media.videos), TOKENIZER).count(IDS.video) == media.videos[0].tokens
    assert TOKENIZER.decode(both).count(" seconds") == media.videos[0].temporal_patches
    with pytest.raises(ValueError, match="2 image placeholders for 1 image"):
        with_placeholders([IDS.image, IDS.image], Media(media.images), TOKENIZER)
    with pytest.raises(ValueError, match="give tokenizer"):
        with_placeholders(text, media, None)


# Whole answers


@pytest.mark.further  # of an engine: tests/decoding/test_engine_vision.py
def test_generate_is_the_whole_model_on_the_same_picture(model, files):
    """And what it says depends on the picture: two pictures behind the same words are two answers."""
    text = TOKENIZER.encode("What is it?")
    for shown in ([files / "a.png"], [files / "c.png"]):
        # One prompt a call and one size, as the command line below has it: the programs are the same.
        (tokens,) = m3jax.generate(model, [text], images=[shown], tokenizer=TOKENIZER, progress=False, **GREEDY)
        media = read_media(shown, progress=False)
        assert tokens == continued(model, with_placeholders(text, media, TOKENIZER), media)
    with pytest.raises(ValueError, match="images has 1 lists for 2 prompts"):
        m3jax.generate(model, [text, text], images=[[]], tokenizer=TOKENIZER, **GREEDY)


@pytest.mark.further  # pictures of an engine that goes on: tests/decoding/test_engine_media.py
def test_a_dialogue_sees_what_its_messages_show(model, files):
    """An image and a clip in one history, a second turn that asks again; `m3jax.chat` says the same of that history."""
    template = ChatTemplate.from_folder(embedded_path())
    engine = Engine(model, pages=24, max_batch=1, prefill_chunk=128, max_length=384, max_stop_ids=4, media_patches=256)
    knobs = dict(template=template, thinking_mode="disabled", stream=False, engine=engine, progress=False, **GREEDY)
    parts = [
        {"type": "text", "text": "One: "}, {"type": "image_url", "image_url": {"url": str(files / "a.png")}},
        {"type": "text", "text": " two: "}, {"type": "video", "video": clip(4), "detail": "low"},
    ]  # fmt: skip
    messages = [{"role": "user", "content": parts}]
    first = m3jax.chat(model, TOKENIZER, messages, **knobs)
    media = Media([process_image(files / "a.png")], [process_video(clip(4), max_long_side=504)])
    prompt = with_placeholders(template.encode(TOKENIZER, messages, thinking_mode="disabled"), media, TOKENIZER)
    assert first.prompt_tokens == len(prompt)
    ids = continued(model, prompt, media)
    assert first.content == TOKENIZER.decode(ids, skip_special_tokens=False)
    history = [*messages, first.message, {"role": "user", "content": "Again?"}]
    second = m3jax.chat(model, TOKENIZER, history, **knobs)
    assert second.cached_tokens >= len(prompt) - 16, "the picture is not read again"
    other = [{"role": "user", "content": [parts[0], {"type": "image", "image": files / "b.png"}, *parts[2:]]}]
    assert m3jax.chat(model, TOKENIZER, other, **knobs).cached_tokens < 32, "another picture shares no page with it"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image"}, "message 1 .user., part 1: image has 0 sources"),
        ({"type": "image", "image": "nowhere.png"}, "message 1 .user., part 1: nowhere.png cannot be read"),
        ({"type": "image_url", "image_url": {"url": "http://x/y.png"}}, "nothing is fetched"),
        ({"type": "image", "image": b"x", "detail": "best"}, "detail = 'best'"),
        ({"type": "image", "image": b"x", "detail": ["high"]}, "detail = .'high'.: must be auto, low"),
        (
            {"type": "image", "image": b"x", "max_long_side_pixel": "504"},
            "max_long_side_pixel = '504': must be a number",
        ),
        ({"type": "video", "video": b"x", "fps": True}, "fps = True: must be a number"),
        ({"type": "video", "video": b"x", "fps": 0.19}, "fps = 0.19: must be from 0.2 to 5"),
        ({"type": "video", "video": b"x", "fps": float("nan")}, "fps = nan: must be from 0.2 to 5"),
        ({"type": "image", "image": 5}, "part 1: an image as int: give bytes"),
        ({"type": "image", "image": b"x", "crop": True}, "'crop' is not supported"),
    ],
)
def test_a_part_that_cannot_be_seen(model, part, message):
    with pytest.raises(ValueError, match=message):
        m3jax.chat(
            model, TOKENIZER, [{"role": "user", "content": [part]}], template=embedded_path() / "chat_template.jinja"
        )


def test_images_of_messages_keep_their_order(files):
    """That in which the template writes them: messages, then parts; results of tools stand as their calls do."""
    from m3jax.dialogue.media import dialogue_tokens

    a, b = ({"type": "image", "image": files / name} for name in ("a.png", "b.png"))
    messages = [{"role": "user", "content": [a, b, "?"]}]
    template = ChatTemplate.from_folder(embedded_path())
    _, media = dialogue_tokens(template, TOKENIZER, messages, None, "disabled", can_see=True, progress=False)
    assert [image.tokens for image in media.images] == [process_image(files / n).tokens for n in ("a.png", "b.png")]
    call = lambda name: {"id": name, "type": "function", "function": {"name": "show", "arguments": {}}}
    result = lambda call_id, part: {"role": "tool", "tool_call_id": call_id, "content": [part]}
    history = [
        {"role": "user", "content": "Show."},
        {"role": "assistant", "content": "", "tool_calls": [call("1"), call("2")]},
        result("2", b), result("1", a),
    ]  # fmt: skip
    _, media = dialogue_tokens(template, TOKENIZER, history, None, "disabled", can_see=True, progress=False)
    assert [image.tokens for image in media.images] == [process_image(files / n).tokens for n in ("a.png", "b.png")]


def test_a_dialogue_reads_each_source_once(model, files, monkeypatch):
    from m3jax.dialogue import media as reading

    read, known = [], {}
    whole = reading.read_medium
    monkeypatch.setattr(
        reading, "read_medium", lambda *given, **options: read.append(given) or whole(*given, **options)
    )
    messages = [{"role": "user", "content": [{"type": "image", "image": str(files / "a.png")}, "?"]}]
    template = ChatTemplate.from_folder(embedded_path())
    for _ in range(2):
        reading.dialogue_tokens(template, TOKENIZER, messages, None, "disabled", True, known, progress=False)
    assert len(read) == 1
    with pytest.raises(ValueError, match="no vision tower"):
        reading.dialogue_tokens(template, TOKENIZER, messages, None, "disabled", False)


# The command line


@pytest.fixture
def run(folder, capsys):
    def call(*argv, model=folder):
        status = cli.main(["--model", str(model), "--dtype", "float32", "--max-new-tokens", "4", *map(str, argv)])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_the_command_line_shows_files(run, model, files):
    image = ["--image", files / "a.png"]
    status, out, err = run("--prompt", "What is it?", *image, "--temperature", 0, "--json")
    assert (status, err) == (0, "")
    text, shown = TOKENIZER.encode("What is it?"), [files / "a.png"]
    (expected,) = m3jax.generate(model, [text], images=[shown], tokenizer=TOKENIZER, progress=False, **GREEDY)
    assert json.loads(out)["token_ids"] == expected
    assert (
        run("--prompt", "<image>What is it?", *image, "--temperature", 0, "--json")[1].split('"prefill')[0]
        == (out.split('"prefill')[0])
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--image", "cut.png"], "image 1 of 1, .*cut.png: the image cannot be decoded"),
        (["--image", "a.png", "--image", "text.png"], "image 2 of 2, .*text.png: these 8 bytes are no image"),
        (["--image", "empty.png"], "these 0 bytes are no image"),
        (["--image", "thin.png"], "more than 200 times"),
        (["--image", "nowhere.png"], "cannot be read: No such file"),
        (["--image", "clip.mp4"], "are no image"),
        (["--video", "sound.mp4"], "only sound"),
        (["--video", "cut.mp4"], "cut short"),
        (["--video", "a.png"], "video 1 of 1, .*a.png: the video cannot be read"),
        (["--image", "a.png", "--prompt", "<image> and <image>"], "2 image placeholders for 1 image"),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_status_2(run, files, argv, message, monkeypatch):
    import re

    monkeypatch.setattr("m3jax.cli.generation.load", lambda *_, **__: pytest.fail("the weights were read"))
    argv = [str(files / word) if word.endswith(("png", "mp4")) else word for word in argv]
    status, out, err = run(*argv, *([] if "--prompt" in argv else ["--prompt", "x"]))
    assert (status, out, err.count("\n")) == (2, "", 1) and re.search(message, err)


def test_a_bomb_is_refused(run, files, monkeypatch):
    """Pillow's limit is kept."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    status, _, err = run("--image", files / "a.png", "--prompt", "x")
    assert status == 2 and err.count("\n") == 1 and "PIL.Image.MAX_IMAGE_PIXELS" in err


def test_a_model_without_a_tower_says_so(run, tmp_path, files):
    m3jax.save(tiny.model(tiny.config("dM", vocab_size=2048)), tmp_path / "text")
    shutil.copy(embedded_path() / "tokenizer.json", tmp_path / "text")
    status, _, err = run("--image", files / "a.png", "--prompt", "x", model=tmp_path / "text")
    assert status == 2 and "no vision tower" in err
