"""What clients expect of a server, and what other servers were found to do wrong, each with the tests that hold it.

The list is expectations.toml beside this file; tests that fit nowhere else are here.
"""

import asyncio
import base64
import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from support.media import image_file, picture
from support.serving import NAME

from m3jax.serve.gateway import http as http_module
from m3jax.serve.gateway.gateway import Gateway, Settings
from m3jax.serve.gateway.sources import Sources

ROOT = Path(__file__).resolve().parents[2]
HI = [{"role": "user", "content": "Hi"}]
PNG = image_file(picture(56, 56))


def test_every_expectation_has_tests_that_exist():
    expectations = tomllib.loads(Path(__file__).with_name("expectations.toml").read_text(encoding="utf-8"))
    texts: dict[str, str] = {}
    for source, listed in expectations.items():
        assert listed, source
        for says, tests in listed.items():
            for name in [tests] if isinstance(tests, str) else tests:
                file, _, function = name.partition("::")
                text = texts.setdefault(file, (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8"))
                assert re.search(rf"^def {function}\(", text, re.M), (source, says, name)


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def ask(server, **fields):
    return server.openai.chat.completions.create(**{"model": NAME, "messages": HI} | fields)


@pytest.mark.parametrize("tokens_per_chunk", [1, 4, 1000])
def test_packets_of_content_are_neither_tiny_nor_large(scripted, tokens_per_chunk):
    """However many tokens come at once: at most a twentieth has fewer than 5 characters, and none above 200."""
    server, worker = scripted
    worker.tokens_per_chunk = tokens_per_chunk
    worker.script = lambda request, index: f"<mm:think>{'I think of it. ' * 30}</mm:think>{'All of it is well. ' * 40}"
    deltas = [chunk.choices[0].delta for chunk in ask(server, stream=True)]
    for name in ("content", "reasoning_content"):
        sizes = np.array([len(text) for delta in deltas if (text := getattr(delta, name, None))])
        assert (sizes < 5).mean() <= 0.05 and (sizes > 200).mean() == 0


def test_cached_tokens_are_counted_everywhere(scripted):
    """The second time each protocol says it, whole and as a stream, and it is no more than the prompt has."""
    server, _ = scripted
    bodies = {
        "/v1/chat/completions": {"messages": HI, "stream_options": {"include_usage": True}},
        "/v1/completions": {"prompt": "Hi there", "stream_options": {"include_usage": True}},
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": {"messages": HI, "max_tokens": 20},
    }
    pattern = re.compile(r'"(?:cached_tokens|cache_read_input_tokens)":(\d+)')
    for path, body in bodies.items():
        whole = {name: value for name, value in body.items() if name != "stream_options"}
        first = pattern.findall(server.ask(path, whole)[2])
        second = pattern.findall(server.ask(path, whole)[2])
        streamed = pattern.findall(server.ask(path, {**body, "stream": True})[2])
        assert len(first) == 1 and len(second) == 1 and int(second[0]) > 0
        assert streamed and set(streamed) == set(second)


@pytest.mark.parametrize(("kind", "said"), [("JPEG", "png"), ("GIF", "gif"), ("WEBP", "webp"), ("PNG", "jpeg")])
def test_kinds_of_images(scripted, kind, said):
    """Each is read whatever its URL says of it, also in the system prompt."""
    server, worker = scripted
    part = {"type": "image_url", "image_url": {"url": data_url(image_file(picture(56, 56), kind), f"image/{said}")}}
    ask(server, messages=[{"role": "system", "content": [part]}, *HI])
    assert worker.requests[0].HasField("mm_inputs")


@pytest.mark.parametrize(
    ("kind", "most"), [pytest.param("image", 30 << 20, marks=pytest.mark.further), ("video", 50 << 20)]
)
def test_a_medium_that_is_too_large(kind, most):
    """So many bytes are read from a data URL, a byte more is not."""
    assert len(asyncio.run(Sources().read(kind, data_url(bytes(most))))) == most
    with pytest.raises(ValueError, match=str(most)):
        asyncio.run(Sources().read(kind, data_url(bytes(most + 1))))


def anthropic_image(data: str) -> dict:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


GOOD = base64.b64encode(PNG).decode()
OPENAI_IMAGE = lambda data: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
RESPONSES_IMAGE = lambda data: {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
# Of each protocol: its path, a good request, the name of its limit, of the field with messages, and its images.
PROTOCOLS = {
    "chat": ("/v1/chat/completions", {"messages": HI}, "max_tokens", "messages", OPENAI_IMAGE),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": 5}, "max_tokens", "messages", anthropic_image),
    "responses": ("/v1/responses", {"input": HI}, "max_output_tokens", "input", RESPONSES_IMAGE),
    "completions": ("/v1/completions", {"prompt": "Hi"}, "max_tokens", "prompt", None),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_bad_input_in_each_protocol(scripted, protocol):
    """Every answer is an error object of that protocol, below 500, and it names the field."""
    server, worker = scripted
    path, good, limit, messages, image = PROTOCOLS[protocol]
    parts = [] if image is None else [
        ({messages: [{"role": "user", "content": [image("@@@@")]}]}, messages, 400),
        ({messages: [{"role": "user", "content": [image(GOOD)] * 201}]}, messages, 400),
        ({messages: [{"role": "user", "content": [image(GOOD[:200])]}]}, messages, 400),
    ]  # fmt: skip
    bad = [
        ({"temperature": 5}, "temperature", 400),
        ({"top_p": -1}, "top_p", 400),
        ({limit: -1}, limit, 400),
        ({messages: [] if messages != "prompt" else [[]]}, messages, 400),
        ({"model": "other"}, "model", 404),
        ({"temprature": 1}, "temprature", 400),
        ({"stream_options": {"usage": True}}, "stream_options", 400),
        *parts,
    ]
    for fields, name, expected in bad:
        for stream in (False, True):
            status, _, text = server.ask(path, {**good, **fields, "stream": stream})
            answer = json.loads(text)
            assert status == expected and name in answer["error"]["message"], (fields, text)
            kind = "not_found_error" if expected == 404 else "invalid_request_error"
            assert answer["error"]["type"] == kind
            if protocol == "messages":
                assert answer["type"] == "error" and set(answer["error"]) == {"type", "message"}
            else:
                assert answer["error"]["param"] == name
    assert not worker.requests


def test_keys_are_compared_in_constant_time(monkeypatch):
    """By the function that looks at every byte wherever two differ, and by nothing else."""
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return True  # whatever the keys are: a second comparison would tell them apart

    monkeypatch.setattr(http_module.hmac, "compare_digest", compare)
    gateway = Gateway(settings=Settings(api_key="right"))
    http_module.check_key(gateway, {"authorization": "Bearer wrong"})
    http_module.check_key(gateway, {"x-api-key": "r"})
    http_module.check_key(gateway, {})
    assert compared == [(b"wrong", b"right"), (b"r", b"right"), (b"", b"right")]
