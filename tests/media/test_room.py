"""The room by itself: it runs without jax, and says what to install where its libraries are missing."""

import subprocess
import sys

import pytest

from m3jax.media import process_image, process_video

ALONE = """
import sys
import numpy as np
import m3jax.media
m3jax.media.batch([m3jax.media.process_image(np.zeros((60, 60, 3), np.uint8))])
heavy = sorted({"jax", "torch", "PIL", "av", "scipy"} & set(sys.modules))
sys.exit(f"loaded {heavy}" if heavy else 0)
"""


def test_arrays_need_numpy_alone():
    """No jax, no torch; Pillow and PyAV where a file is read, and not before."""
    result = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("library", "call"), [("PIL", process_image), ("av", process_video)])
def test_a_missing_library_is_named(monkeypatch, library, call):
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=r"need Pillow and PyAV: pip install 'm3jax\[media\]'"):
        call(b"\x89PNG")
