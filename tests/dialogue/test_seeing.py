"""Images and videos from a user's hands to the model: generate, chat, the command line, and what each refuses."""

import base64
import io
import json
import shutil
from pathlib import Path

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
from m3jax.completion import read_media
from m3jax.media import PlaceholderIds, process_image
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


# Sources


def test_a_picture_is_the_same_from_wherever_it_comes(files):
    data = (files / "a.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    sources = [files / "a.png", str(files / "a.png"), data, url, Image.open(io.BytesIO(data)), process_image(data)]
    patches = [image.patches for image in read_media(sources, progress=False).images]
    assert all(np.array_equal(patches[0], other) for other in patches[1:])


def test_each_prompt_has_a_list_of_images(model):
    with pytest.raises(ValueError, match="images has 1 lists for 2 prompts"):
        m3jax.generate(model, [[5], [5]], images=[[]], tokenizer=TOKENIZER, **GREEDY)


# Whole answers


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


def test_a_model_without_a_tower_says_so(run, tmp_path, files):
    m3jax.save(tiny.model(tiny.config("dM", vocab_size=2048)), tmp_path / "text")
    shutil.copy(embedded_path() / "tokenizer.json", tmp_path / "text")
    status, _, err = run("--image", files / "a.png", "--prompt", "x", model=tmp_path / "text")
    assert status == 2 and "no vision tower" in err
