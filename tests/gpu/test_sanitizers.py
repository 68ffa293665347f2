"""No access outside of an allocation, none to what another kernel writes at the same time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOUND = 99
RUN = [sys.executable, "-m", "tests.gpu.short_run"]


def _run(command: list[str], project_dir: Path, **variables: str) -> None:
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=project_dir, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{' '.join(command)}: exit {done.returncode}\n{(done.stdout + done.stderr)[-6000:]}"


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer(tool: str, project_dir: Path) -> None:
    """Of the whole short run, or (racecheck, which only looks at shared memory) of the package's own kernel."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer, which comes with the CUDA toolkit")
    kernels = [] if tool == "memcheck" else ["--kernel-name", "kernel_substring=_copy_rows"]
    _run([sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *kernels, *RUN], project_dir)


def test_torch_finds_no_race_between_streams(project_dir: Path) -> None:
    _run(RUN, project_dir, TORCH_CUDA_SANITIZER="1")
