"""Space for checkpoints is what mapped rows leave, where both are on one disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embershard.cache import CacheConfig
from embershard.distributed import CheckpointConfig, Ranks
from embershard.training.fit import machine_limits
from embershard.training.fit.machine_limits import check_disk_for_run
from embershard.training.fit.memory_needs import RanksHere, memory_needs
from embershard.training.fit.model_size import table_rows
from tests.unit.training.test_trainer import make_config

RANKS = Ranks(0, 1, 0, 1, torch.device("cpu"))


@pytest.mark.parametrize("case", ["same disk", "other disk", "memory"])
def test_rows_on_the_disk_of_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    mapped: dict[str, str] = {} if case == "memory" else {"host": "mmap", "host_dir": str(tmp_path / "rows")}
    config = make_config(cache=CacheConfig(ratio=0.3, **mapped), checkpoint=CheckpointConfig(every_steps=5))  # type: ignore[arg-type]
    found = []
    monkeypatch.setattr(machine_limits, "check_disk", lambda *values: found.append(values[-1]))
    if case == "other disk":
        monkeypatch.setattr(machine_limits, "disk_of", lambda path: path.name)
    check_disk_for_run(config, None, tmp_path / "run", 10, RANKS)
    rows_bytes = memory_needs(config, table_rows(config), RanksHere.of(RANKS), None).disk_bytes
    assert found == [rows_bytes if case == "same disk" else 0]
    assert (rows_bytes > 0) is (case != "memory")
