"""A sample of `python -m tests.faults.publications`: lives that are killed at file operations of publications."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.covering import matrix
from tests.faults import published_trainings

pytestmark = pytest.mark.slow  # processes that are killed


@pytest.mark.matrix
def test_whole_trainings_that_are_killed(tmp_path: Path):
    """`python -m tests.faults.published_trainings` has more of them."""
    assert published_trainings.try_run(0, tmp_path) == ""


def _schedules(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which forks: this one has threads."""
    words = [sys.executable, "-m", "tests.faults.publications", *more]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


def test_replicas_differ_in_nothing_after_kills(project_dir: Path):
    done = _schedules(project_dir, "--schedules", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": 0 wrong" in done.stdout


@pytest.mark.parametrize("without", ["correction", matrix("touches")])
def test_what_is_left_out_is_noticed(project_dir: Path, without: str):
    done = _schedules(project_dir, "--schedules", "8", "--without", without)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "differs from the trainer" in done.stdout
