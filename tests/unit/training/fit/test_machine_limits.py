"""Space for checkpoints is what mapped rows leave, where both are on one disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from embershard.cache import CacheConfig
from embershard.distributed import CheckpointConfig, PublishConfig, Ranks
from embershard.errors import ConfigError
from embershard.extras.publications import part as publications
from embershard.extras.publications.part import Publishing, bytes_of_bases, check_disk_for_bases
from embershard.training.fit import machine_limits
from embershard.training.fit.machine_limits import check_disk_for_run, disk_of
from embershard.training.fit.memory_needs import RanksHere, memory_needs
from embershard.training.fit.model_size import model_size, table_rows
from tests.unit.distributed.publications import OneRank
from tests.unit.training.test_trainer import make_config

RANKS = Ranks(0, 1, 0, 1, torch.device("cpu"))


@pytest.mark.parametrize("case", ["same disk", "other disk", "memory"])
def test_rows_on_the_disk_of_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    mapped: dict[str, str] = {} if case == "memory" else {"host": "mmap", "host_dir": str(tmp_path / "rows")}
    config = make_config(cache=CacheConfig(ratio=0.3, **mapped), checkpoint=CheckpointConfig(every_steps=5))  # type: ignore[arg-type]
    found = []
    monkeypatch.setattr(machine_limits, "check_disk", lambda *_, mapped_bytes, **__: found.append(mapped_bytes))
    if case == "other disk":
        monkeypatch.setattr(machine_limits, "disk_of", lambda path: path.name)
    check_disk_for_run(config, None, tmp_path / "run", 10, RANKS, of_parts=5)
    rows_bytes = memory_needs(config, table_rows(config), RanksHere.of(RANKS), None).disk_bytes
    assert found == [5 + (rows_bytes if case == "same disk" else 0)]
    assert (rows_bytes > 0) is (case != "memory")


def test_bases_need_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are there will go, or stay."""
    publish = PublishConfig(str(tmp_path / "published"), every_steps=5, base_every=2, keep_bases=3)
    config, folder = make_config(publish=publish), tmp_path / "published"
    rows = sum(table_rows(config).values()) * config.model.embedding_dim * 4
    needed = bytes_of_bases(config, folder)
    assert needed == 4 * (rows + model_size(config, table_rows(config)).dense_parameter_bytes)
    monkeypatch.setattr(publications.shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    with pytest.raises(ConfigError, match=r"publish\.folder: .*published needs .* more for bases.*are free"):
        check_disk_for_bases(config, folder, OneRank())
    (folder / "base_0").mkdir(parents=True)
    (folder / "base_0" / "x").write_bytes(b"x")
    check_disk_for_bases(config, folder, OneRank())
    part, disk = Publishing(SimpleNamespace(config=config)), disk_of(tmp_path)  # type: ignore[arg-type]
    assert (part.disk_bytes(disk), part.disk_bytes(disk + 1)) == (needed - 1, 0)
