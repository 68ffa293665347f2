"""What a process does between fork and exec to end with its parent."""

from __future__ import annotations

import ctypes
import subprocess
from typing import Any

import pytest

from embershard.distributed.supervision import end_with_parent


def test_no_library_is_loaded_behind_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may have held the loader's lock at the fork: the new process would wait for it for ever."""

    def refuse(*_: Any) -> None:
        raise AssertionError("loads a library")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    subprocess.run(["true"], preexec_fn=end_with_parent, check=True)
