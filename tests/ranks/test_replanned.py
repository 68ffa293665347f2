"""A plan that `embershard plan replan` wrote: a run goes on with it, with every row as it was saved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest
from torch.distributed.checkpoint import FileSystemReader, LoadPlan

from embershard.cache import CacheConfig
from embershard.commands import cli
from embershard.commands.ckpt import differences
from embershard.data import DataConfig, ParquetConfig
from embershard.distributed import CheckpointConfig
from embershard.distributed.checkpoint.load import saved_tensors
from embershard.extras.replan.moves import moves
from embershard.extras.replan.resume import storage_bytes
from embershard.pipeline.config import LookAheadConfig
from embershard.planning.cost.topology import load_topology, save_topology
from embershard.settings.decoding import to_toml
from embershard.sharding.config import ShardingConfig
from embershard.sharding.plan import Plan
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.fit.model_size import model_size
from embershard.training.trainer import Trainer
from tests.ranks import commands, resharding
from tests.ranks.planned import here
from tests.ranks.resharding import BATCH, DIM, ROWS, SAVED_AT
from tests.ranks.workers import RankPool
from tests.small_runs import small_model

pytestmark = [pytest.mark.ranks, pytest.mark.extra]

_OF_ROWS = ("model.", "embedding_optimizer.")


@contextmanager
def counting_reads() -> Iterator[dict[str, int]]:
    """Count the bytes of the saved blocks that this process reads, by tensor."""
    found: dict[str, int] = {}
    read_data = FileSystemReader.read_data

    def counted(reader: FileSystemReader, plan: LoadPlan, planner: Any) -> Any:
        tensors = reader.read_metadata().state_dict_metadata
        for item in plan.items:
            name, entry = item.storage_index.fqn, tensors[item.storage_index.fqn]
            (size,) = (chunk.sizes for chunk in entry.chunks if chunk.offsets == item.storage_index.offset)
            found[name] = found.get(name, 0) + size.numel() * entry.properties.dtype.itemsize
        return read_data(reader, plan, planner)

    with mock.patch.object(FileSystemReader, "read_data", counted):
        yield found


def resume_and_save(config: RunConfig, checkpoint: Path, copy: Path) -> int:
    """Resume by the config's plan and save what was loaded to `copy`; the bytes of rows that this rank read."""
    trainer = Trainer(config, here(), copy)
    with counting_reads() as read:
        trainer.resume(checkpoint)
    trainer.save()
    trainer.close()
    return sum(count for name, count in read.items() if is_of_rows(name))


def is_of_rows(name: str) -> bool:
    return name.startswith(_OF_ROWS) and any(f"t_{table}." in name for table in ROWS)


def embershard(*words: object) -> None:
    assert cli.main([str(word) for word in words]) == 0


def settings_of(folder: Path) -> RunConfig:
    """The small run of tests of resharding, without its plan."""
    return RunConfig(
        data=DataConfig(
            kind="parquet",
            path=str(folder / "samples.parquet"),
            num_workers=0,
            parquet=ParquetConfig(dense=("age",), sparse=tuple(ROWS), num_rows=tuple(ROWS.values()), id_mapping="none"),
        ),
        model=small_model(DIM),
        cache=CacheConfig(ratio=0.5),
        look_ahead=LookAheadConfig(2, 1),
        train=TrainConfig(global_batch_size=BATCH, max_steps=SAVED_AT, device="cpu"),
        checkpoint=CheckpointConfig(every_steps=SAVED_AT),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run by a plan by rows, and a plan that was made from it for later samples, of which the best one is another."""
    folder = tmp_path_factory.mktemp("replanned")
    resharding.write_samples(folder / "samples.parquet")
    (folder / "run.toml").write_text(to_toml(settings_of(folder)))
    machine = load_topology("cpu")
    fast = replace(machine.assumptions, step_overhead_seconds=0.0, collective_seconds=0.0)  # rows decide
    save_topology(replace(machine, name="fast", assumptions=fast), folder / "fast.toml")
    table = pq.read_table(folder / "samples.parquet")
    pq.write_table(table.slice(300).sort_by("user"), folder / "later.parquet")
    inputs = ["--config", folder / "run.toml", "--topology", folder / "fast.toml", "--profile"]
    later = ["--set", f"data.path={folder / 'later.parquet'}"]
    embershard("profile", "--config", folder / "run.toml", "-o", folder / "old.npz")
    embershard("profile", "--config", folder / "run.toml", *later, "-o", folder / "new.npz")
    embershard("plan", *inputs, folder / "old.npz", "--ranks", 2, "--types", "row_wise", "-o", folder / "old.json")
    pays = ["--types", "row_wise,table_wise", "--resume-seconds", 0.001, "--steps", 10**9]
    embershard("plan", "replan", folder / "old.json", *inputs, folder / "new.npz", *pays, "-o", folder / "new.json")
    words = ["train", "--config", folder / "run.toml", "--plan", folder / "old.json", "--run-dir", folder / "run"]
    done = commands.run(list(map(str, words)), folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.smoke
def test_rows_are_as_they_were_saved_and_are_read_as_told(two_ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    config, plans = settings_of(folder), [Plan.load(folder / name) for name in ("old.json", "new.json")]
    saved, rows = (
        folder / "run" / "checkpoints" / f"step_{SAVED_AT}",
        {f"t_{name}": count for name, count in ROWS.items()},
    )
    placed = [plan.tables for plan in plans]
    assert moves(model_size(config, rows), *placed, plans[0]).total > 0, "the case proves nothing"
    by_new_plan = replace(config, sharding=ShardingConfig(plan=str(folder / "new.json")))
    read = two_ranks.run(resume_and_save, by_new_plan, saved, tmp_path)
    assert [name for name, *_ in differences(saved, tmp_path / saved.name) if name.startswith(_OF_ROWS)] == []
    told = storage_bytes(model_size(config, rows), *placed, plans[0])
    assert sum(read) == told.read
    tensors = {name: entry for name, entry in saved_tensors(saved).items() if is_of_rows(name)}
    assert sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors.values()) == told.written


def test_the_run_goes_on_by_the_command_that_was_told(folder: Path) -> None:
    words = ["train", "--config", folder / "run.toml", "--plan", folder / "new.json", "--run-dir", folder / "run"]
    more = ["--resume", "--set", f"train.max_steps={2 * SAVED_AT}"]
    done = commands.run([*map(str, words), *more], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((folder / "run" / "result.json").read_text())
    assert (result["steps"], result["plan"]["digest"]) == (2 * SAVED_AT, Plan.load(folder / "new.json").digest)
