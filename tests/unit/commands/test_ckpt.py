"""`embershard ckpt`: every action, its exit code, and what it must not do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embershard.commands import ckpt, cli
from embershard.distributed import Ranks, save_checkpoint
from embershard.distributed.checkpoint.best import BestEvaluation
from embershard.errors import CheckpointError, InvalidCheckpointError
from tests.unit.distributed.checkpoints import flip_bit


@pytest.fixture
def run_dir(tmp_path: Path, ranks: Ranks) -> Path:
    """Three checkpoints, of which the third differs in one value; an unfinished one, and one set aside."""
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        weights = torch.zeros(10, 2)
        weights[4, 1] = 0.5 * (step == 3)
        scalars = {"stream": {"global_sample": 100 * step}, "lr": 0.1}
        tensors = {"model": {"w": weights, "same": torch.ones(3)}}
        save_checkpoint(folder, step, tensors, scalars, ranks, keep_last=9, run_id="8c1fbeef00")
    (folder / "step_4.tmp").mkdir()
    (folder / "step_3.aside").mkdir()
    return tmp_path


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_ls(run_dir, capsys):
    (run_dir / "checkpoints" / "step_2" / "scalars.json").unlink()
    assert cli.main(["ckpt", "ls", str(run_dir)]) == 0
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines() if "│step_" in line]
    assert [(line[0], line[1]) for line in lines[:3]] == [(f"step_{step}", "8c1fbeef") for step in (1, 2, 3)]
    assert [" ".join(line[2:5]) for line in lines[1:2]] == ["scalars.json: is missing"]
    assert [line[:3] for line in lines[3:]] == [["step_3.aside", "set", "aside"], ["step_4.tmp", "unfinished", "0"]]


def test_verify(run_dir, capsys):
    assert ckpt.main(["verify", str(run_dir)]) == 0
    assert capsys.readouterr().out.count("valid    ") == 3
    flip_bit(run_dir / "checkpoints" / "step_2" / "__0_0.distcp", run_dir)
    assert ckpt.main(["verify", str(run_dir)]) == 1
    assert "INVALID" in (out := capsys.readouterr().out)
    assert "step_2: __0_0.distcp: its bytes 0 to" in out
    assert ckpt.main(["verify", str(run_dir / "checkpoints"), "3"]) == 0
    assert ckpt.main(["verify", str(run_dir), "2"]) == 1
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; there is step_1, step_2, step_3"):
        ckpt.main(["verify", str(run_dir), "7"])


def test_prune_keeps_the_newest_valid_ones(run_dir, capsys):
    flip_bit(run_dir / "checkpoints" / "step_3" / "__0_0.distcp", run_dir)
    before = names(run_dir)
    assert ckpt.main(["prune", str(run_dir), "--keep", "1", "--dry-run"]) == 0
    assert names(run_dir) == before
    assert capsys.readouterr().out.count("would remove") == 4
    assert ckpt.main(["prune", str(run_dir), "--keep", "1"]) == 0
    assert names(run_dir) == ["step_2"]
    assert "kept: step_2" in capsys.readouterr().out


def test_the_best_one_is_marked_and_stays(run_dir, capsys):
    BestEvaluation(1, "auc", 0.75).write(run_dir / "checkpoints")
    assert cli.main(["ckpt", "ls", str(run_dir)]) == 0
    assert capsys.readouterr().out.count("complete, the best") == 1
    assert ckpt.main(["prune", str(run_dir), "--keep", "1"]) == 0
    assert names(run_dir) == ["best.json", "step_1", "step_3"]


def test_prune_removes_nothing_where_nothing_is_valid(run_dir):
    for step in (1, 2, 3):
        (run_dir / "checkpoints" / f"step_{step}" / "manifest.json").unlink()
    before = names(run_dir)
    with pytest.raises(InvalidCheckpointError, match="no valid checkpoint, so none is removed"):
        ckpt.main(["prune", str(run_dir), "--keep", "2"])
    assert names(run_dir) == before


def test_diff(run_dir, capsys):
    first, second, third = (str(run_dir / "checkpoints" / f"step_{step}") for step in (1, 2, 3))
    assert ckpt.main(["diff", first, first]) == 0
    assert "The checkpoints are equal." in capsys.readouterr().out
    assert ckpt.main(["diff", first, second]) == 1
    out = capsys.readouterr().out
    assert "stream.global_sample" in out
    assert "model" not in out  # equal tensors
    assert "lr" not in out.replace("global", "")
    assert ckpt.main(["diff", second, third]) == 1
    assert "1 of 20 values differ, by 0.5 at most" in (out := capsys.readouterr().out)
    assert "model.same" not in out


def test_wrong_usage(tmp_path, capsys):
    assert cli.main(["ckpt", "ls", str(tmp_path)]) == 2
    assert "no checkpoints there" in capsys.readouterr().err
    with pytest.raises(SystemExit) as leaves:
        ckpt.main(["prune", str(tmp_path)])
    assert leaves.value.code == 2
    with pytest.raises(InvalidCheckpointError, match="is missing"):
        ckpt.main(["diff", str(tmp_path), str(tmp_path)])
