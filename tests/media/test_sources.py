"""What a text names: a file, a data URL, or an address, which nothing fetches."""

import base64
from pathlib import Path

import pytest
from support.media import picture

from m3jax.media.images import MediaError
from m3jax.media.sources import media_source, names_file

data_url = lambda content, header="data:image/png;base64": f"{header},{base64.b64encode(content).decode()}"


def test_a_data_url_is_its_bytes():
    """Whatever type it says, in letters of any case; up to as many bytes as may be given so, and not a byte more."""
    for size in range(7):
        content = bytes(range(size))
        for header in ("data:;base64", "DATA:video/mp4;name=x;BASE64"):
            assert media_source(data_url(content, header), size) == content
        with pytest.raises(MediaError, match=f"characters: at most {size} bytes can be given so"):
            media_source(data_url(content + b"x"), size)
    for characters, reason in ((8, "not valid base64"), (9, "has 9 characters: at most 4 bytes can be given so")):
        with pytest.raises(MediaError, match=reason):  # what is too long is not decoded
            media_source("data:;base64," + "!" * characters, 4)
    assert media_source(data_url(bytes(1000))) == bytes(1000)


def test_a_text_is_a_path_and_all_else_is_itself():
    pixels = picture(2, 2)
    assert media_source("a/b.png") == Path("a/b.png") and media_source(Path("c")) == Path("c")
    assert media_source(pixels) is pixels and media_source(b"bytes") == b"bytes"
    sources = {"a.png": True, Path("a.png"): True, "data:,": False, "https://a/b.png": False, b"a.png": False}
    assert {source: names_file(source) for source in sources} == sources


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is no name of a file"),
        ("a\0b", "is no name of a file"),
        ("https://a/b.png", "'https://a/b.png' is an address, and nothing is fetched"),
        ("data:image/png,abcd", "this one is not base64"),
        ("data:image/png;base64", "this one is not base64"),
        ("data:image/png;base64,ab!d", "the data URL is not valid base64"),
        ("data:image/png;base64,ab!cd", "the data URL is not valid base64"),  # the rest alone would be
        ("data:image/png;base64,abc", "the data URL is not valid base64"),
    ],
)
def test_texts_that_name_nothing(text, reason):
    with pytest.raises(MediaError, match=reason) as caught:
        media_source(text)
    assert "\n" not in str(caught.value)
