"""A sample of `python -m tests.faults.following`: trainings that follow a folder, killed while files arrive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.covering import matrix

pytestmark = pytest.mark.slow  # processes that are killed


def _following(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which forks: this one has threads."""
    words = [sys.executable, "-m", "tests.faults.following", *more]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


def test_every_sample_trains_once_over_kills(project_dir: Path) -> None:
    done = _following(project_dir, "--runs", "1", "--kills", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run 0: every sample once, 3 kills" in done.stdout


@pytest.mark.parametrize("without", [matrix("journal")])
def test_a_journal_behind_the_offer_is_noticed(project_dir: Path, without: str) -> None:
    done = _following(project_dir, "--runs", "1", "--kills", "1", "--without", without)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the journal of this run has" in done.stdout
