"""A headless Chromium that a test steers by the DevTools protocol, over two pipes: it waits for what it is told to."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Chromium reads from descriptor 3 and writes to 4. Both are copied first, for they may be one of these themselves.
_LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One tab. Its clock is the machine's, so what the page waits for may take as long as it takes.

    Args:
      to_browser, from_browser: ends of the pipes.
    """

    def __init__(self, to_browser: BinaryIO, from_browser: BinaryIO):
        self._out, self._in = to_browser, from_browser
        self._number, self._session = 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=1000, height=900, deviceScaleFactor=1, mobile=False)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result; events that come meanwhile are dropped."""
        self._number += 1
        session = {} if self._session is None else {"sessionId": self._session}
        message = {"id": self._number, "method": method, "params": params, **session}
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            answer = json.loads(self._message())
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _message(self) -> bytes:
        data = bytearray()
        while (byte := self._in.read(1)) != b"\0":
            assert byte, "the browser has ended"
            data += byte
        return bytes(data)

    def run(self, script: str) -> Any:
        """Return what an expression is in the page; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, url: str) -> None:
        """Open an address, and wait until the page is there."""
        self.call("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url.split('#')[0])})")

    def wait(self, condition: str, seconds: float = 30.0) -> None:
        """Wait until an expression is true in the page.

        Raises:
          AssertionError: it did not become true in time; with what the page shows.
        """
        waits = f"new Promise((done) => {{ const end = Date.now() + {seconds * 1000}; const look = () => "
        waits += f"({condition}) ? done(true) : Date.now() > end ? done(false) : setTimeout(look, 20); look(); }})"
        assert self.run(waits), f"{condition} did not come: {self.run('document.body.innerText')}"

    def drop(self, path: Path, x: int, y: int) -> None:
        """Drop a file on a place of the page, as a hand would."""
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def screenshot(self) -> bytes:
        """Return what the window shows as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium.

    Args:
      profile: an empty folder.
    """
    from_test, to_browser = os.pipe()
    from_browser, to_test = os.pipe()
    command = [
        *(sys.executable, "-c", _LAUNCH, str(from_test), str(to_test), CHROMIUM),
        *("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"),
        "about:blank",
    ]
    with subprocess.Popen(command, pass_fds=(from_test, to_test), stderr=subprocess.DEVNULL) as process:
        os.close(from_test)
        os.close(to_test)
        with os.fdopen(to_browser, "wb") as out, os.fdopen(from_browser, "rb") as into:
            try:
                yield Browser(out, into)
            finally:
                process.kill()
