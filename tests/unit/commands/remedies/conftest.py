"""The folder of the tables' files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.commands.remedies.table import FILES


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has the files, and is the current one."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(tmp_path)
    return tmp_path
