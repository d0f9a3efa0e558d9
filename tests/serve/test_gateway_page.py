"""The page at /, in a headless browser: a question, a thought, cards of calls, the blocks read, a dropped picture."""

import io
import json
import re
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image
from support.browser import CHROMIUM, Browser, browser
from support.media import image_file, picture
from support.serving import CALL, NAME

from m3jax.media import process_image

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
PAPER = (255, 255, 255)
MARK = (217, 72, 15)  # of a block that all selections have, in the strip


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def text_of(tab: Browser, selector: str) -> list[str]:
    return tab.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(node => node.textContent)")


def shown(tab: Browser) -> np.ndarray:
    """Return the screenshot as pixels [H W 3]."""
    return np.array(Image.open(io.BytesIO(tab.screenshot())).convert("RGB"))


def test_a_question(scripted, tab):
    """The thought folded, the text, cards of calls, and the blocks that each token read; nothing becomes markup."""
    server, worker = scripted
    worker.script = lambda request, index: f"A thought.</mm:think>I will look: <b>now</b>. {CALL}"
    worker.tokens_per_chunk, worker.reading_seconds = 8, 0.6
    _, headers, page = server.ask("/")
    assert "default-src 'none'" in headers["content-security-policy"]
    assert not re.search(r"(src|href)=", page)  # it loads nothing
    tools = '[{"type": "function", "function": {"name": "get_time"}}]'
    tab.open(f"{server.url}/#thinking=enabled&ask={quote('What time is it?')}&tools={quote(tools)}")
    tab.wait("/^1 of \\d+ tokens read$/.test(document.querySelector('.meta')?.textContent)")
    tab.wait("document.body.dataset.answers === '1'")
    assert text_of(tab, "#model") == [f"{NAME}, context 4096"]
    assert text_of(tab, "details .text") == ["A thought."] and not tab.run(
        "document.querySelector('main details').open"
    )
    assert text_of(tab, ".content") == ["I will look: <b>now</b>. "]  # what a model says is text, never markup
    assert text_of(tab, ".card h4") == ["get_weather", "get_time"]
    assert text_of(tab, ".read h5")[0].startswith("which blocks of 16 tokens each new token read")
    new_tokens = int(re.search(r"(\d+) new", text_of(tab, ".meta")[0])[1])
    assert len(text_of(tab, ".tokens span")) == new_tokens > 50
    assert not text_of(tab, ".error")
    # The strip is drawn: orange for what was read, and the answer stands on paper.
    tab.run("document.querySelector('canvas').scrollIntoView()")
    pixels = shown(tab).astype(int)
    assert (abs(pixels - MARK).max(-1) < 12).sum() > 100 and (pixels == PAPER).all(-1).mean() > 0.5


def test_a_picture_is_dropped(scripted, tab, tmp_path: Path):
    """It is shown beside the question, is seen on the screen, and its patches reach the worker."""
    server, worker = scripted
    colors = np.zeros((84, 84, 3), np.uint8)
    colors[:] = (20, 120, 220)
    file = tmp_path / "blue.png"
    file.write_bytes(image_file(colors))
    tab.open(f"{server.url}/")
    tab.drop(file, 400, 300)
    tab.wait("document.querySelectorAll('#waiting img').length === 1")
    assert not tab.run("document.body.classList.contains('over')")
    tab.run("document.getElementById('ask').value = 'What color?'")
    tab.run("document.getElementById('send').click()")
    tab.wait("document.body.dataset.answers === '1'")
    assert text_of(tab, ".user") == ["What color?"] and text_of(tab, ".content") == ["All is well."]
    assert tab.run("document.querySelector('.user img').naturalWidth") == 84
    assert tab.run("document.querySelectorAll('#waiting img').length") == 0
    assert ((shown(tab).astype(int) - (20, 120, 220)) == 0).all(-1).sum() > 60 * 60  # 84 pixels high on the page
    (batch,) = [request.mm_inputs for request in worker.requests]
    sent = np.frombuffer(batch.pixel_values.inline, "<f4").reshape(batch.pixel_values.shape)
    np.testing.assert_array_equal(sent, process_image(file.read_bytes()).patches)


def test_what_is_no_picture_is_not_taken(scripted, tab, tmp_path: Path):
    """A dropped file of another kind changes nothing, and the browser does not leave the page for it."""
    server, _ = scripted
    (tmp_path / "notes.txt").write_text("words")
    (tmp_path / "small.png").write_bytes(image_file(picture(56, 56)))
    tab.open(f"{server.url}/")
    tab.drop(tmp_path / "notes.txt", 400, 300)
    tab.drop(tmp_path / "small.png", 400, 300)
    tab.wait("document.querySelectorAll('#waiting img').length > 0")
    assert tab.run("document.querySelectorAll('#waiting img').length") == 1
    assert tab.run("location.pathname") == "/"
