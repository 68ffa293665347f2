"""`embershard train` as a user starts it on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = ("data.synthetic.num_samples=300_000", "train.log_every=10", "train.eval_every=100")


@pytest.mark.parametrize("transfer", ["triton_uva", "staged"])
def test_a_small_model_learns_through_a_small_cache(project_dir: Path, tmp_path: Path, transfer: str) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "embershard.commands.cli", "train", "--config", "examples/quickstart.toml"]
    command += ["--nproc", "1", "--run-dir", str(run_dir)]
    command += [word for text in (*SETTINGS, f"cache.transfer={transfer}") for word in ("--set", text)]
    done = subprocess.run(command, cwd=project_dir, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    found = json.loads((run_dir / "result.json").read_text())
    assert found["device"].startswith("cuda")
    assert found["auc"] > 0.55
    assert found["cache"]["evictions"] > 1000
    assert 0.5 < found["cache"]["hit_rate_lookups"] < 1.0
    # After the first step, rows come in before their step.
    assert found["cache"]["critical_path_fills"] < found["cache"]["fills"] / 10
