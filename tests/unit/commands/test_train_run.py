"""A whole run on one rank, in this process: its files, and how it ends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from embershard.distributed import CheckpointConfig
from embershard.errors import CheckpointError, FailedSaveError
from embershard.training.config import RunConfig, TrainConfig
from tests.unit.commands.conftest import train_here
from tests.unit.training.test_trainer import make_config


def _without_space(*_: Any, **__: Any) -> None:
    raise FailedSaveError("no space")


@pytest.mark.slow
@pytest.mark.parametrize("at_end", [True, False])
def test_the_result_is_not_lost_with_the_last_checkpoint(tmp_path, monkeypatch, at_end, capsys):
    monkeypatch.setattr("embershard.training.checkpoint.run_state.save_checkpoint", _without_space)
    saving = CheckpointConfig(every_steps=3, at_end=at_end, on_failed_save="continue")
    config = make_config(train=TrainConfig(batch_size=100, max_steps=6), checkpoint=saving)
    with pytest.raises(FailedSaveError, match="no space"):
        train_here(config, tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == 6
    assert result["auc"] is not None
    assert capsys.readouterr().out.count("no space") == 1, "that of step 3; the error tells of the last"


def test_a_resume_from_a_step_that_is_not_there_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"new/checkpoints: no checkpoint of step 7; there is no complete checkpoint"
    ):
        train_here(RunConfig(), tmp_path / "new", resume=7)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_log_of_json_has_the_reports_and_the_result(tmp_path, capsys):
    config = make_config(train=TrainConfig(batch_size=100, max_steps=4, log_every=2))
    train_here(config, tmp_path / "run", log_format="json")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    recorded = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines if line["kind"] != "message"] == [
        *(line["kind"] for line in recorded),
        "result",
    ]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in [*lines, *recorded])
    assert lines[0]["text"].startswith("dlrm: ")
    assert lines[-1]["steps"] == 4
