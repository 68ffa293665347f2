"""What git runs before a commit is what developers and CI run, in their own environment."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path


def test_the_hooks_are_make_targets_and_nothing_is_downloaded(project_dir: Path):
    config = (project_dir / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    entries = re.findall(r"^ +entry: (.+)$", config, re.MULTILINE)
    assert entries == ["make check"]
    assert re.findall(r"repo: (.+)", config) == ["local"]
    assert re.findall(r"language: (.+)", config) == ["system"] * len(entries)
    for entry in entries:
        dry = subprocess.run([*entry.split(), "--dry-run", "PYTHON=python3"], cwd=project_dir, capture_output=True)
        assert dry.returncode == 0, dry.stderr
    assert all(entry in (project_dir / ".ci" / "run").read_text() for entry in entries)


def test_the_fast_tests_are_those_of_one_process_without_the_slow_ones(project_dir: Path):
    dry = ["make", "test-fast", "--dry-run", "PYTHON=python3"]
    command = subprocess.run(dry, cwd=project_dir, capture_output=True, text=True, check=True).stdout
    assert 'tests/unit -m "not slow and not matrix and not extra"' in command
    text = (project_dir / "tests" / "README.md").read_text(encoding="utf-8")
    assert "| `make test-fast` | unit tests without marks `slow`, `matrix` and `extra`" in text
