"""A small trained run on Parquet files with bags, missing values and raw ids."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.cache import CacheConfig
from embershard.cache.config import Policy
from embershard.commands import score
from embershard.commands.train.run import train_run
from embershard.data import DataConfig, ParquetConfig
from embershard.distributed import Supervision, process_group
from embershard.launch import launcher, rank
from embershard.models import ModelConfig
from embershard.training.config import RunConfig, TrainConfig

NUM_ROWS, NUM_HELD_OUT = 1000, 200


class Trained(NamedTuple):
    """The run's folder, its data, and other data with the same columns but the label."""

    run_dir: Path
    data: Path
    unlabelled: Path


def clicks(num_rows: int = NUM_ROWS, seed: int = 0) -> pa.Table:
    """Raw ids of all sizes, bags of 0 to 4 ids, and in each column missing values."""
    random = np.random.default_rng(seed)
    users = random.integers(-(2**40), 2**40, 60)[random.integers(0, 60, num_rows)]
    bags = [random.integers(0, 500, random.integers(0, 5)).tolist() for _ in range(num_rows)]
    ages = random.gamma(2.0, 15.0, num_rows).astype(np.float32)
    missing = random.random((3, num_rows)) < 0.05
    return pa.table(
        {
            "user": pa.array(users, pa.int64(), mask=missing[0]),
            "items": pa.array([None if gone else bag for gone, bag in zip(missing[1], bags, strict=True)]),
            "age": pa.array(ages, mask=missing[2]),
            "click": pa.array((random.random(num_rows) < 1 / (1 + ages / 30)).astype(np.int8)),
        }
    )


def config_of_clicks(path: Path, max_steps: int, policy: Policy | None = None) -> RunConfig:
    """A small run on the file of `clicks`."""
    columns = ParquetConfig(
        dense=("age",), sparse=("user", "items"), num_rows=(40, 70), label="click",
        id_mapping="hash", dense_transform="log1p",
    )  # fmt: skip
    return RunConfig(
        data=DataConfig("parquet", str(path), eval_fraction=NUM_HELD_OUT / NUM_ROWS, num_workers=0, parquet=columns),
        model=ModelConfig(embedding_dim=8, dense_arch_layer_sizes=(16, 8), over_arch_layer_sizes=(16, 1)),
        cache=CacheConfig(ratio=0.9, policy=policy),
        train=TrainConfig(batch_size=64, max_steps=max_steps),
    )


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return _trained(tmp_path_factory.getbasetemp() / "trained")


@cache  # tests of commands and of serving have it in common
def _trained(folder: Path) -> Trained:
    folder.mkdir()
    data, unlabelled = folder / "clicks.parquet", folder / "new.parquet"
    pq.write_table(clicks(), data, row_group_size=128, write_page_checksum=True)
    pq.write_table(clicks(300, seed=1).drop_columns("click"), unlabelled, write_page_checksum=True)
    train_here(config_of_clicks(data, 12, "frequency"), folder / "run")
    return Trained(folder / "run", data, unlabelled)


def train_here(config: RunConfig, run_dir: Path, **changes: Any) -> None:
    """Train a whole run on one rank in this process; `changes` are arguments of `train_run`."""
    given = {"resume": None, "unverified": False, "changes": (), "same_run": "", "go_on": ""}
    with process_group("cpu") as ranks:
        train_run(config, ranks, run_dir, **{"supervision": Supervision(), **given, **changes})


def score_here(*words: str) -> int:
    """Run `embershard predict`, or `embershard eval` without `-o`, as one rank in this process, which raises errors."""
    return rank.do(lambda: score.rank_job("predict" if "-o" in words else "eval", words))


def start_here(num_ranks: int, module: str, *, job: rank.Job, **options: object) -> int:
    """In place of `start_ranks`: do the job as one rank in this process; errors are raised."""
    return rank.do(lambda: job, stops_in_order=job.stops_in_order)


@pytest.fixture
def one_rank_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that start ranks run the program of one in this process; tests/ranks starts real ones."""
    monkeypatch.setattr(launcher, "start_ranks", start_here)
