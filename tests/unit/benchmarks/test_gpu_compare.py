"""The GPU benchmark, as far as it runs without one: its variants, its batches, and all of it at toy size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_compare import TERABYTE, Batches, variants


def test_every_kind_of_cache_is_there_at_every_ratio():
    found = variants([0.015, 0.2])
    assert len({variant.name for variant in found}) == len(found) == 2 * (3 + 3) + 1
    assert [v.name for v in found if not v.needs_cuda][:3] == [
        "embershard frequency 1.5%", "embershard lookahead 1.5%", "embershard lookahead in a thread 1.5%",
    ]  # fmt: skip


def test_batches_are_skewed_the_same_for_all_and_in_range():
    rows = [1000, 3]
    first, again = Batches(rows, 4096, 2).all[1], Batches(rows, 4096, 2).all[1]
    values = first.sparse_features.values()
    assert torch.equal(values, again.sparse_features.values())
    of_first = values[:4096]
    assert 0 <= int(of_first.min()) <= int(of_first.max()) < 1000
    assert set(values[4096:].tolist()) == {0, 1, 2}
    counts = of_first.bincount(minlength=1000).sort(descending=True).values
    assert int(counts[:10].sum()) > 0.3 * 4096, "ten rows have log(11) / log(1001) of the lookups"


def test_the_capped_tables_have_what_is_claimed():
    assert sum(TERABYTE) == 204_184_588
    assert 60e9 < sum(min(rows, 23_000_000) for rows in TERABYTE) * 128 * 4 < 62e9


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there the variants of TorchRec run, too")
def test_all_of_it_at_toy_size(tmp_path: Path, project_dir: Path):
    sizes = ["--scale", "0.0002", "--batch-size", "64", "--ratios", "0.2", "--lookahead", "4", "--dim", "16"]
    steps = ["--profile-batches", "2", "--warmup-steps", "2", "--blocks", "2", "--block-steps", "2", "--link-dims", "8"]
    command = [sys.executable, "-m", "benchmarks.gpu_compare", *sizes, *steps, "--output", str(tmp_path / "found.json")]
    subprocess.run(
        command, cwd=project_dir, check=True, capture_output=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert [case["variant"] for case in found["cases"]] == [
        f"embershard {how} 20.0%" for how in ("frequency", "lookahead", "lookahead in a thread")
    ]
    assert len(found["left_out"]) == 4
    assert all(case["per_step"]["fills"] > 0 and case["lookahead_min"] > 0 for case in found["cases"])
    assert found["link_gb_per_second"]["staged, dim 8"]["fill"] > 0
