"""Runs in time order, as one rank of a pool of processes; and the same by hand, judged in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache import CacheConfig
from embershard.data import Batch, DataConfig
from embershard.data.config import TableConfig, TableFeature
from embershard.data.time_config import TimeConfig
from embershard.distributed import CheckpointConfig
from embershard.pipeline.config import LookAheadConfig
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.optimizers import DenseOptimizerConfig, EmbeddingOptimizerConfig
from embershard.training.reports import WindowReport
from embershard.training.trainer import Trainer
from tests.ranks.planned import here
from tests.small_runs import small_model

GLOBAL_BATCH, HOUR = 20, 3600
#: Steps of checkpoints: at the second, windows are due; after the third, some samples of a window have trained.
EVERY, BORDER, INSIDE = 7, 14, 21
NUM_USERS, NUM_ITEMS = 40, 60
Metrics = dict[str, float]


@dataclass
class Trained:
    """What a rank trained on, step by step, and the windows that it evaluated: step, number, figures."""

    samples: list[list[float]] = field(default_factory=list)
    windows: list[tuple[int, int, Metrics]] = field(default_factory=list)
    late: int = 0


def write_clicks(folder: Path, num_rows: int = 600) -> Path:
    """Three files of clicks in the course of nine hours; a few rows of each belong to the hours of the one before, and
    one hour has a handful of rows, so that its global batch has the first ones of the next hour, too."""
    chance = np.random.default_rng(3)
    hours = np.sort(chance.uniform(0, 9, num_rows))
    hours[(hours > 4.1) & (hours < 5)] += 1
    hours = np.where(chance.random(num_rows) < 0.15, np.maximum(hours - 1.2, 0), hours)
    hours = np.where((hours // 1 == 4) & (np.arange(num_rows) % 2 > 0), 3.5, hours)
    users, items = chance.integers(0, NUM_USERS, num_rows), chance.integers(0, NUM_ITEMS, num_rows)
    clicks = chance.random(num_rows) < 1 / (1 + np.exp(-2 * chance.normal(size=NUM_ITEMS)[items]))
    columns = {"label": clicks.astype(int), "number": np.arange(num_rows), "user": users, "item": items}
    columns["at"] = (1_700_000_400 // HOUR * HOUR + hours * HOUR).astype(int)
    folder.mkdir()
    for file, rows in enumerate(np.array_split(np.arange(num_rows), 3)):
        table = pa.table({name: values[rows] for name, values in columns.items()})
        pq.write_table(table, folder / f"part_{file}.parquet", row_group_size=64)
    return folder


def make_config(path: Path, lookahead: int, files: str = "in_turn") -> RunConfig:
    features = {
        "number": TableFeature("dense", scale="log1p"),
        "user": TableFeature("sparse", mapping="none", num_rows=NUM_USERS),
        "item": TableFeature("sparse", mapping="none", num_rows=NUM_ITEMS),
    }
    table = TableConfig(features, files=("*.parquet",))
    time = TimeConfig("at", HOUR, files)  # type: ignore[arg-type]
    return RunConfig(
        data=DataConfig("table", str(path), table=table, time=time, num_workers=0, seed=4),
        model=small_model(),
        cache=CacheConfig(ratio=0.4),
        look_ahead=LookAheadConfig(lookahead, 1),
        embedding_optimizer=EmbeddingOptimizerConfig(lr=0.3),
        dense_optimizer=DenseOptimizerConfig(lr=0.05),
        train=TrainConfig(global_batch_size=GLOBAL_BATCH, log_every=100, device="cpu", precision="fp64"),
        checkpoint=CheckpointConfig(every_steps=EVERY, at_end=False, keep_last=9),
    )


def run(path: Path, folder: Path | None, lookahead: int, resume: Path | None = None) -> Trained:
    """Train, from a checkpoint on if there is one."""
    trainer = Trainer(make_config(path, lookahead), here(), folder)
    if resume is not None:
        trainer.resume(resume)
    found, step = Trained(), trainer.step

    def noting(batch):  # type: ignore[no-untyped-def]
        found.samples.append(np.rint(np.expm1(batch.dense_features[:, 0].double().numpy())).tolist())
        return step(batch)

    trainer.step = noting  # type: ignore[method-assign]
    for report in trainer.train():
        if isinstance(report, WindowReport):
            values = {name: report.quality[name] for name in ("samples", "auc", "ne", "logloss", "calibration")}
            found.windows.append((report.step, report.window, values))
            found.late += report.late
    trainer.close()
    return found


def by_hand(path: Path, *, after_training: bool = False) -> list[tuple[int, int, Metrics]]:
    """Train on one rank, step by step; judge the rows of each window, read from the files, just before the global batch
    that has its first sample; or, which is wrong, just after it."""
    trainer = Trainer(make_config(path, 0), here(), None)
    rows = [_rows(file) for file in sorted(path.iterdir())]
    newest = np.maximum.accumulate([0, *(of_file["hour"].max() for of_file in rows)])
    hour = np.concatenate([np.maximum(each["hour"], least) for each, least in zip(rows, newest, strict=False)])
    columns = {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}
    distinct = np.unique(hour).tolist()
    firsts = {window: int((hour < number).sum()) for window, number in enumerate(distinct)}
    found, steps = [], len(hour) // GLOBAL_BATCH
    for step in range(steps + 1):
        start = step * GLOBAL_BATCH
        due = [window for window, first in firsts.items() if window and start <= first < start + GLOBAL_BATCH]
        if step < steps and after_training:
            with trainer.upcoming.next() as batch:
                trainer.step(batch)
        for window in due:
            members = hour == distinct[window]
            found.append((step, window, _judged(trainer, {name: cells[members] for name, cells in columns.items()})))
        if step < steps and not after_training:
            with trainer.upcoming.next() as batch:
                trainer.step(batch)
    trainer.close()
    return found


def _rows(file: Path) -> dict[str, np.ndarray]:
    columns = {name: column.to_numpy() for name, column in zip(*_columns(file), strict=True)}
    return {**columns, "hour": columns["at"] // HOUR}


def _columns(file: Path) -> tuple[list[str], list[pa.ChunkedArray]]:
    table = pq.read_table(file)
    return table.column_names, table.columns


def _judged(trainer: Trainer, rows: dict[str, np.ndarray]) -> Metrics:
    count, labels = len(rows["label"]), rows["label"].astype(np.float64)
    ids = torch.from_numpy(np.concatenate([rows["user"], rows["item"]]))
    lengths = torch.ones(2 * count, dtype=torch.int32)
    dense = torch.from_numpy(np.log1p(rows["number"].astype(np.float32)))[:, None]
    batch = Batch(dense, KeyedJaggedTensor(["user", "item"], ids, lengths=lengths), torch.from_numpy(labels).float())
    trainer.model.eval()
    with torch.no_grad():
        _, (_, logits, _) = trainer.model(batch)
    trainer.model.train()
    chances = 1 / (1 + np.exp(-logits.float().double().numpy()))
    clicked, others = chances[labels == 1].astype(np.float32)[:, None], chances[labels == 0].astype(np.float32)
    loss = -np.mean(np.where(labels == 1, np.log(chances), np.log1p(-chances)))
    rate = labels.mean()
    return {
        "samples": count,
        "auc": float(np.mean((clicked > others) + (clicked == others) / 2)),
        "ne": float(loss / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))),
        "logloss": float(loss),
        "calibration": float(chances.sum() / labels.sum()),
    }
