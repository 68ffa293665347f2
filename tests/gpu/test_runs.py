"""Runs on a GPU: labels of several kinds, means, models of histories, `verify`, publications, `predict`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.gpu import cases
from tests.ranks.workers import RankPool


@pytest.mark.parametrize("name", cases.RUNS)
def test_cached_equals_stock(gpu_rank: RankPool, name: str, tmp_path: Path) -> None:
    cases.check_run(gpu_rank, name, tmp_path, "cuda")


def test_publications_and_scores(tmp_path: Path, project_dir: Path) -> None:
    def embershard(words: Sequence[str]) -> None:
        command = [sys.executable, "-m", "embershard.commands.cli", *words]
        done = subprocess.run(command, cwd=project_dir, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"

    cases.check_publication(embershard, tmp_path, "cuda")
