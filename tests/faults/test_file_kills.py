"""A sample of `python -m tests.faults.file_kills`: kills of runs whose rows are in a file."""

from __future__ import annotations

import pytest

from embershard.cache.file.file_rows import FileRows, PageIo
from tests.covering import matrix
from tests.faults.file_kills import FileKills

pytestmark = pytest.mark.slow  # processes that are killed


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> FileKills:
    return FileKills(tmp_path_factory.mktemp("kills"))


def test_runs_that_are_killed_go_on(kills: FileKills) -> None:
    assert kills.rows_read > 200
    assert kills.rows_written > 200
    assert kills.try_all([kills.num_operations * 3 // 8]) == ""
    assert kills.num_kills == 1


@pytest.mark.matrix
@pytest.mark.parametrize("with_checksums", [True, matrix(False)])
def test_pages_that_are_lost_are_noticed(
    kills: FileKills, monkeypatch: pytest.MonkeyPatch, with_checksums: bool
) -> None:
    """A disk that forgets what is written ends the run; the negative control is one without checksums."""
    monkeypatch.setattr(PageIo, "write", lambda *arguments: None)
    if not with_checksums:
        monkeypatch.setattr(FileRows, "_sums_of", lambda *arguments: 0)
    assert ("ended with status" if with_checksums else "differ") in kills.try_all([])
