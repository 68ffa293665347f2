"""Runs whose checkpoints are written late: no block is read before training has gone on for some steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from embershard.distributed import Ranks, TensorBlocks
from embershard.sharding.torchrec import FrozenRows
from embershard.training.config import RunConfig
from embershard.training.reports import Report, SaveReport, TrainReport
from embershard.training.trainer import Trainer

STEPS_LATE = 5


class Late:
    """Keeps the threads of saves from reading what was copied or frozen, until `go`. Attributes: most bytes of rows
    put aside by each pool."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.aside_bytes: list[int] = []

    @contextmanager
    def applied(self) -> Iterator[Late]:
        resolve, close = TensorBlocks.resolve_data, FrozenRows.close

        def late(blocks: TensorBlocks, item: Any) -> torch.Tensor:
            if threading.current_thread().name == "embershard-save" and blocks._parts[item.index].order[0] > 0:
                blocks.before_block()
                assert self.go.wait(600), "training did not go on"
            return resolve(blocks, item)

        def closed(rows: FrozenRows) -> None:
            self.aside_bytes.append(rows.aside_bytes)
            close(rows)

        with mock.patch.object(TensorBlocks, "resolve_data", late), mock.patch.object(FrozenRows, "close", closed):
            yield self


def train(
    config: RunConfig, ranks: Ranks, folder: Path, late: Late | None = None
) -> tuple[list[Report], list[int], int | None]:
    """Train, with late saves: the reports, the bytes put aside, and the step in which the save was reported."""
    trainer, late, reported = Trainer(config, ranks, folder), late or Late(), None
    reports = []
    with late.applied():
        for report in trainer.train():
            reports.append(report)
            if isinstance(report, TrainReport) and report.step == (config.checkpoint.every_steps or 0) + STEPS_LATE:
                late.go.set()
            if isinstance(report, SaveReport):
                reported = reported or trainer.steps
        trainer.close()
    return reports, late.aside_bytes, reported
