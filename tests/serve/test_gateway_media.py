"""Images and videos in requests: what is read, what is refused, and the messages that go to a worker."""

import asyncio
import base64
import json
from pathlib import Path

import numpy as np
import pytest
from smg_grpc_proto.generated import common_pb2
from support.embedded import TOKENIZER
from support.media import clip, image_file, picture, video_file
from support.serving import NAME, ScriptedWorker, clients, running

from m3jax.media import PlaceholderIds, process_image, process_video
from m3jax.serve.gateway.sources import Sources, is_public

IDS = PlaceholderIds.of_tokenizer(TOKENIZER)
PNG = image_file(picture(60, 90, seed=1))
SMALL = image_file(picture(56, 56, seed=2))


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def shown(*parts) -> list[dict]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


def image(source: str, **options) -> dict:
    return {"type": "image_url", "image_url": {"url": source, **options}}


def tensor(data) -> np.ndarray:
    return np.frombuffer(data.inline, f"<{data.dtype[0]}{8 if '64' in data.dtype else 4}").reshape(data.shape)


def test_what_a_worker_gets(scripted):
    """Two images and a video: patches are those of the processor, in order, and each span is where the features go."""
    server, worker = scripted
    movie = video_file(clip(20), rate=1)  # ten pairs of frames: three chunks, which go as one grid
    video = {"type": "video_url", "video_url": {"url": url(movie, "video/mp4")}}
    server.openai.chat.completions.create(model=NAME, messages=shown(image(url(PNG)), video, image(url(SMALL))))
    request = worker.requests[0]
    ids = np.array(request.tokenized.input_ids)
    images, (videos,) = request.mm_inputs, request.extra_mm_inputs
    expected = [process_image(PNG), process_image(SMALL)]
    np.testing.assert_array_equal(tensor(images.pixel_values), np.concatenate([each.patches for each in expected]))
    assert tensor(images.model_specific_tensors["image_grid_thw"]).tolist() == [list(each.grid) for each in expected]
    assert tensor(images.model_specific_tensors["patches_per_image"]).tolist() == [len(e.patches) for e in expected]
    assert (images.modality, videos.modality) == (common_pb2.IMAGE, common_pb2.VIDEO)
    for place, each in zip(images.mm_placeholders, expected, strict=True):
        span = ids[place.offset : place.offset + place.length]
        assert (span[0], span[-1], len(span)) == (IDS.start, IDS.end, each.tokens + 2)
        assert set(span[1:-1]) == {IDS.image}
    moving = process_video(movie)
    assert len(moving.grid) > 1
    np.testing.assert_array_equal(tensor(videos.pixel_values), moving.patches)
    (row,) = tensor(videos.model_specific_tensors["video_grid_thw"]).tolist()
    assert row == [sum(t for t, _, _ in moving.grid), *moving.grid[0][1:]]
    (place,) = videos.mm_placeholders
    assert (ids == IDS.video).sum() == (ids[place.offset : place.offset + place.length] == IDS.video).sum()
    assert (ids == IDS.video).sum() == moving.tokens
    assert len(set(images.mm_hashes)) == 2
    # Sizes: a picture is larger in a higher tier, and so is its prompt.
    counts = []
    for tier in (252, 504, 1008):
        parts = [image(url(image_file(picture(1100, 1100))), max_long_side_pixel=tier)]
        found = server.openai.chat.completions.create(model=NAME, messages=shown(*parts))
        counts.append(found.usage.prompt_tokens)
    assert counts == sorted(set(counts))


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([image("data:image/png;base64,@@@@")], "base64"),
        ([image(url(b"no image"))], "message 1 \\(user\\), part 1"),
        ([image(url(PNG[:200]))], "part 1"),
        ([image("https://example.org/a.png")], "does not fetch"),
        ([image("http://169.254.169.254/latest/meta-data")], "does not fetch"),
        ([image("file:///etc/passwd")], "does not read"),
        ([image("/etc/passwd")], "data URL"),
        ([image(url(PNG), detail="huge")], "detail"),
        ([image(url(PNG), max_long_side_pixel=100)], "max_long_side"),
        ([image(url(PNG))] * 201, "at most 200"),
        ([{"type": "video_url", "video_url": {"url": url(b"no video", "video/mp4")}}] * 21, "at most 20"),
        ([{"type": "video_url", "video_url": {"url": url(b"no video", "video/mp4"), "fps": 5.1}}], "fps = 5.1"),
        ([{"type": "audio_url", "audio_url": {"url": "x"}}], "would not reach the model"),
    ],
)
def test_refused(scripted, parts, says):
    server, worker = scripted
    with pytest.raises(clients.openai.BadRequestError, match=says) as raised:
        server.openai.chat.completions.create(model=NAME, messages=shown(*parts))
    assert raised.value.param == "messages" and not worker.requests
    assert "root:" not in raised.value.message  # nothing of a file comes back


@pytest.mark.parametrize(
    ("address", "is_good"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1:248:1893:25c8:1946", True), ("127.0.0.1", False),
        ("10.1.2.3", False), ("192.168.0.1", False), ("169.254.169.254", False), ("0.0.0.0", False), ("::1", False),
        ("fe80::1%eth0", False), ("fd00::1", False), ("::ffff:127.0.0.1", False), ("100.64.0.1", False),
        ("224.0.0.1", False), ("2002:7f00:1::", False),
    ],
)  # fmt: skip
def test_public_addresses(address, is_good):
    assert is_public(address) == is_good


def read(sources: Sources, address: str) -> bytes:
    return asyncio.run(sources.read("image", address))


def test_files(tmp_path: Path):
    """Only what lies in an allowed folder is read, where a link really leads."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (inside / "a.png").write_bytes(PNG)
    (outside / "b.png").write_bytes(PNG)
    (inside / "link.png").symlink_to(outside / "b.png")
    sources = Sources.of([str(inside)])
    assert read(sources, f"file://{inside}/a.png") == PNG
    for path in (inside / "link.png", outside / "b.png", inside / ".." / "outside" / "b.png"):
        with pytest.raises(ValueError, match="does not read"):
            read(sources, f"file://{path}")
    with pytest.raises(ValueError, match="No such file"):
        read(sources, f"file://{inside}/none.png")
    for wrong in (str(tmp_path / "none"), "https://example.org", "host:80"):
        with pytest.raises(ValueError, match="--allow-media"):
            Sources.of([wrong])


def test_allowed_folder_over_http(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(PNG)
    with running(ScriptedWorker(), sources=Sources.of([str(tmp_path)])) as server:
        body = {"messages": shown(image(f"file://{tmp_path}/a.png"))}
        status, _, text = server.ask("/v1/chat/completions", body)
        assert status == 200 and json.loads(text)["usage"]["prompt_tokens"] > process_image(PNG).tokens
