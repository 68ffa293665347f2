"""A launch hands a compiled kernel what Triton would, and the right one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.matrix
def test_what_is_kept_is_launched_as_triton_would(tmp_path: Path, project_dir: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.unit.cache.gpu.launched"]
    done = subprocess.run(command, cwd=project_dir, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name, (kept, by_triton) in found["launched"].items():
        assert kept == by_triton, name
    kinds = {name: json.dumps([kept[2], kept[3], kept[4][4:]]) for name, (kept, _) in found["launched"].items()}
    first = kinds["as at first"]
    assert {name for name, kind in kinds.items() if kind == first} == {
        "as at first", "another number", "values that begin elsewhere", "an option of the compiler",
    }  # fmt: skip
    assert found["compiled"] == 6
