"""A page in a real browser: headless Chromium, for which no host exists."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-background-networking "
    "--window-size=1280,2000 --virtual-time-budget=10000 --enable-logging=stderr --dump-dom"
)


@dataclass(frozen=True)
class Opened:
    """A page that was opened.

    Attributes:
        console: messages of the page's console: errors of scripts, and requests that were refused or failed.
        elements: the page as its scripts left it.
    """

    console: list[str]
    elements: str


def open_page(page: Path, folder: Path) -> Opened:
    """Open a page in Chromium, and wait until its scripts have run; `folder` is for Chromium's own files."""
    assert CHROMIUM is not None
    options = [*_OPTIONS.split(), "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder}"]
    run = subprocess.run([CHROMIUM, *options, page.as_uri()], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return Opened(re.findall(r"CONSOLE[:(].*", run.stderr), run.stdout)
