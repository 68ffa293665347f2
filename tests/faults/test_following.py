"""A sample of `python -m tests.faults.following`: trainings that follow a folder, killed while files arrive."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.covering import matrix
from tests.ranks import commands

pytestmark = [pytest.mark.extra, pytest.mark.slow]


def _following(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return commands.run_program(["tests.faults.following", *more], folder)


@pytest.mark.matrix  # the next one has kills, and bad files beside them
def test_every_sample_trains_once_over_kills(tmp_path: Path) -> None:
    done = _following(tmp_path, "--runs", "1", "--kills", "3")
    assert done.returncode == 0, done.stdout
    assert "run 0: every sample once, 3 kills" in done.stdout


def test_bad_files_are_named_and_need_no_hand(tmp_path: Path) -> None:
    done = _following(tmp_path, "--runs", "1", "--kills", "2", "--files", "8", "--bad", "3")
    assert done.returncode == 0, done.stdout
    assert "run 0: every sample once, 2 kills, 3 bad files named" in done.stdout


@pytest.mark.parametrize(
    ("without", "problem"), [matrix("journal", "the journal of this run has"), matrix("begun", "samples trained")]
)
def test_what_is_left_out_is_noticed(tmp_path: Path, without: str, problem: str) -> None:
    """A journal behind the offer; a file that is dropped though a part of it has trained."""
    done = _following(tmp_path, "--runs", "1", "--kills", "1", "--without", without)
    assert done.returncode == 1, done.stdout
    assert problem in done.stdout
