"""Runs on input that is damaged or changes, as one rank of a pool of processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from embershard.cache import CacheConfig
from embershard.data import CriteoConfig, DataConfig, open_source
from embershard.data.sources.table import source
from embershard.distributed import CheckpointConfig, complete_checkpoints
from embershard.errors import DataError
from embershard.pipeline.config import LookAheadConfig
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.reports import BadRowsReport, EvalReport, TrainReport
from embershard.training.trainer import Trainer
from tests.ranks.planned import here, make_config

GLOBAL_BATCH = 20
LINES = 400


def write_clicks(path: Path, bad: tuple[int, ...] = ()) -> None:
    """Lines with ids that differ, of which those number `bad` have a wrong last cell."""
    lines = []
    for row in range(LINES):
        ids = [f"{(row * 7919 + table * 31) % 997:x}" for table in range(25)]
        lines.append("\t".join([str(row % 2), *["3"] * 13, *ids, "zebra" if row in bad else f"{row:x}"]))
    path.write_text("\n".join(lines) + "\n")


def config(path: Path, lookahead: int, **data: Any) -> RunConfig:
    """A run over the clicks, in the files' order, with global batches of 20."""
    rows = CriteoConfig(num_rows=(1, *[40] * 25), dense_transform="none")
    given = {"shuffle": False, "chunk_rows": 10, "num_workers": 0, "criteo": rows, **data}
    return make_config(
        None,
        data=DataConfig("criteo", str(path), **given),
        cache=CacheConfig(ratio=0.5, policy="lru"),
        look_ahead=LookAheadConfig(lookahead=lookahead, prefetch=min(lookahead, 2)) if lookahead else NO_LOOK_AHEAD,
        train=TrainConfig(global_batch_size=GLOBAL_BATCH, batch_size=None, log_every=1, max_steps=18, device="cpu"),
        checkpoint=CheckpointConfig(at_end=False),
    )


def what_is_held_out(data: DataConfig) -> tuple[int, list[bool], str]:
    """How often this rank passed over the columns that decide, what is held out then, and the error if it failed."""
    with mock.patch.object(source, "hold_out_by_column", wraps=source.hold_out_by_column) as made:
        try:
            bits = open_source(data, share=here().from_first).held_out.samples
        except DataError as error:
            return made.call_count, [], str(error)
    assert bits is not None
    return made.call_count, bits.between(0, bits.num_samples).tolist(), ""


NO_LOOK_AHEAD = LookAheadConfig(lookahead=0)


def train(run: RunConfig, folder: Path, resume: bool = False, truncate_at: int | None = None) -> dict[str, Any]:
    """Train; at step `truncate_at` the first rank cuts the data in half. What the rank saw, until an error ended it."""
    ranks = here()
    trainer = Trainer(run, ranks, folder)
    if resume:
        trainer.resume(complete_checkpoints(folder)[-1])
    found: dict[str, Any] = {"losses": [], "bad": 0, "rows": set(), "held_out": None, "error": ""}
    try:
        for report in trainer.train():
            if isinstance(report, TrainReport):
                found["losses"].append(report.loss)
                if report.step == truncate_at and ranks.is_first:
                    os.truncate(run.data.path, os.stat(run.data.path).st_size // 2)
                dist.barrier()
            elif isinstance(report, BadRowsReport):
                found["bad"] = report.num_bad
                found["rows"] |= {row.row for row in report.rows}
            elif isinstance(report, EvalReport):
                found["held_out"] = report.quality["samples"]
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["steps"] = trainer.steps
    found["saved"] = [path.name for path in complete_checkpoints(folder)]
    trainer.close()
    return found
