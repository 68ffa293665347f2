"""`make rooms`: files with their subjects, and what a change added to each room."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.rooms import PROJECT, files_at, sizes


def test_rooms_are_the_folders_and_files_of_the_package() -> None:
    lines, counts = sizes(
        [("embershard/errors.py", 90), ("embershard/cache/a.py", 5), ("embershard/cache/gpu/b.py", 6)]
    )
    assert lines == {"errors.py": 90, "cache/": 11}
    assert counts == {"errors.py": 1, "cache/": 2}


@pytest.mark.skipif(not (PROJECT / ".git").exists(), reason="the project is in no repository of git")
@pytest.mark.slow
def test_a_change_is_shown(project_dir: Path) -> None:
    known = dict(files_at("HEAD"))
    whole = (project_dir / "embershard" / "units.py").read_text(encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "scripts/rooms.py", "HEAD"], cwd=project_dir, capture_output=True, text=True, check=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("units.py ")]
    assert line.split()[1:3] == [f"{len(whole.splitlines())}", "1"]
    assert line.split()[3:] == [f"{len(whole.splitlines()) - known['embershard/units.py']:+}", "+0"]


@pytest.mark.slow
def test_an_unknown_revision_is_named(project_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/rooms.py", "nowhere"], cwd=project_dir, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "nowhere: git knows no such revision. Give SINCE=HEAD~1" in done.stderr
