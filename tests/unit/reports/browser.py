"""A page in a real browser: headless Chromium, for which no host exists, told what to do through a pipe.

`make browser` installs one. The protocol is Chrome's own (DevTools), a JSON object and a zero byte for each message.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_CHROMIUM = "there is no Chromium; make browser installs it"
_OPTIONS = (
    "--headless --hide-scrollbars --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --remote-debugging-pipe"
)
#: Chromium reads from the third file of its process, and writes to the fourth.
_WITH_PIPES = 'read=$1 write=$2; shift 2; eval "exec \\"\\$@\\" 3<&$read 4>&$write"'


@dataclass
class OpenPage:
    """A page that is open in a window.

    Attributes:
        console: messages of the page's console: errors of scripts, and requests that were refused or failed.
    """

    browser: Browser
    session: str
    console: list[str] = field(default_factory=list)

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression; that of a promise when it is kept."""
        options = {"expression": script, "returnByValue": True, "awaitPromise": True}
        found = self.browser.call("Runtime.evaluate", self, **options)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def picture(self, file: Path) -> None:
        """Write the whole page as PNG."""
        size = self.evaluate(
            "(page => ({width: page.clientWidth, height: page.scrollHeight}))(document.documentElement)"
        )
        clip = {"x": 0, "y": 0, "scale": 1, **size}
        found = self.browser.call("Page.captureScreenshot", self, captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(found["data"]))


@dataclass
class Browser:
    """Chromium, at the other end of two pipes."""

    commands: IO[bytes]
    answers: IO[bytes]
    _calls: int = 0
    _events: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def page(self, file: Path, *, width: int = 1280, is_dark: bool = False) -> Iterator[OpenPage]:
        """Open a file in a window of a width, with the colours of the day or of the night, and wait until it has drawn
        itself."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        page = OpenPage(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable", page)
        window = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", page, **window)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", page, features=[scheme])
        self.call("Page.navigate", page, url=file.as_uri())
        self._wait_for("Page.loadEventFired", page)
        page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 200)))")
        yield page
        self.call("Target.closeTarget", targetId=target)

    def call(self, method: str, page: OpenPage | None = None, **params: Any) -> dict[str, Any]:
        """Return what a command of the protocol gives."""
        self._calls += 1
        own = {} if page is None else {"sessionId": page.session}
        self.commands.write(json.dumps({"id": self._calls, "method": method, "params": params, **own}).encode() + b"\0")
        self.commands.flush()
        while (message := self._next(page)).get("id") != self._calls:
            self._events.append(message)
        assert "error" not in message, (method, message["error"])
        found: dict[str, Any] = message["result"]
        return found

    def _wait_for(self, event: str, page: OpenPage) -> None:
        while not any(each.get("method") == event for each in self._events):
            self._events.append(self._next(page))
        self._events.clear()

    def _next(self, page: OpenPage | None) -> dict[str, Any]:
        """Return the next message; what it says of the page's console is kept."""
        text = bytearray()
        while (byte := self.answers.read(1)) != b"\0":
            assert byte, "Chromium has ended"
            text += byte
        message: dict[str, Any] = json.loads(text)
        params = message.get("params", {})
        if page is not None and message.get("method") == "Log.entryAdded":
            page.console.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif page is not None and message.get("method") == "Runtime.consoleAPICalled":
            page.console.append(" ".join(str(each.get("value", each)) for each in params["args"]))
        elif page is not None and message.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            page.console.append(f"{details['text']} {details.get('exception', {}).get('description', '')}")
        return message


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Start Chromium; `folder` is for its own files."""
    assert CHROMIUM is not None
    (its_read, commands), (answers, its_write) = os.pipe(), os.pipe()
    options = [*_OPTIONS.split(), "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder}"]
    process = subprocess.Popen(
        ["bash", "-c", _WITH_PIPES, "bash", str(its_read), str(its_write), CHROMIUM, *options],
        pass_fds=(its_read, its_write),
        stderr=subprocess.DEVNULL,
    )
    os.close(its_read)
    os.close(its_write)
    with process, os.fdopen(commands, "wb") as to, os.fdopen(answers, "rb") as of:
        browser = Browser(to, of)
        yield browser
        browser.call("Browser.close")
