"""A sample of `python -m tests.faults.file_kills`: kills of runs whose rows are in a file."""

from __future__ import annotations

import pytest

from embershard.cache.file.file_rows import PageIo
from tests.faults.file_kills import FileKills

pytestmark = pytest.mark.slow  # processes that are killed


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> FileKills:
    return FileKills(tmp_path_factory.mktemp("kills"))


def test_runs_that_are_killed_go_on(kills: FileKills) -> None:
    assert kills.rows_read > 200
    assert kills.rows_written > 200
    points = [kills.num_operations * share // 8 for share in (3, 1)]
    assert kills.try_all(points) == ""
    assert kills.num_kills == 2


def test_pages_that_are_lost_are_noticed(kills: FileKills, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: a disk that forgets what is written."""
    monkeypatch.setattr(PageIo, "write", lambda *arguments: None)
    assert "differ" in kills.try_all([])
