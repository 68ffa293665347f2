"""The example of a TorchRec program that deals its samples: the losses of slices, and ranks that cost alike."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.commands import run_script
from tests.ranks.rounding import loss_rounding

pytestmark = [pytest.mark.extra, pytest.mark.ranks, pytest.mark.slow]

STEPS, RANKS, SIZE = 12, 2, 16
EXAMPLE = [
    "examples/torchrec_deal.py", "--steps", str(STEPS), "--batch-size", str(SIZE), "--log-every", "4",
]  # fmt: skip


def losses_and_ratios(printed: str) -> tuple[list[float], tuple[float, float]]:
    found = re.findall(r"^step \d+  loss (\S+)$", printed, re.MULTILINE)
    ratios = re.search(r"the slowest rank's cost over the mean's: (\S+); in slices (\S+)$", printed, re.MULTILINE)
    assert ratios is not None
    return [float(loss) for loss in found], (float(ratios[1]), float(ratios[2]))


@pytest.mark.smoke
def test_it_trains_what_slices_train_and_ranks_cost_alike(project_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "slices").mkdir()
    dealt, (trained, in_slices) = losses_and_ratios(run_script(EXAMPLE, tmp_path))
    slices, (as_slices, _) = losses_and_ratios(run_script([*EXAMPLE, "--slices"], tmp_path / "slices"))
    assert dealt == pytest.approx(slices, rel=loss_rounding(STEPS, RANKS * SIZE))
    assert len(dealt) == 3
    assert as_slices == in_slices
    assert trained < 1.1 < in_slices


@pytest.mark.matrix
def test_torchrun_starts_it(project_dir: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(project_dir), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*torchrun, *EXAMPLE], cwd=project_dir, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert len(losses_and_ratios(done.stdout)[0]) == 3
