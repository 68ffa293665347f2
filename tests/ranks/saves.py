"""Checkpoints that are written while training goes on, on several ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest import mock

import torch

from embershard.cache import CacheConfig
from embershard.distributed import CheckpointConfig, complete_checkpoints
from embershard.distributed.checkpoint import digests
from embershard.errors import FailedSaveError
from embershard.pipeline.config import LookAheadConfig
from embershard.training.config import RunConfig
from embershard.training.optimizers import EmbeddingOptimizerConfig
from embershard.training.reports import FailedSaveReport
from embershard.training.trainer import Trainer
from tests.ranks.planned import here, make_config
from tests.unit.distributed.test_blocks import stock_loaded
from tests.unit.training.gated_saves import train

EVERY = 6


def _config(lookahead: int, asynchronous: bool | None) -> RunConfig:
    config = make_config(
        None,
        cache=CacheConfig(ratio=0.3, policy="lru"),
        look_ahead=LookAheadConfig(lookahead),
        embedding_optimizer=EmbeddingOptimizerConfig(kind="adagrad", lr=0.1),
        checkpoint=CheckpointConfig(every_steps=EVERY, at_end=False, keep_last=9, asynchronous=asynchronous),
    )
    return dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=50))


def compare(folder: Path, lookahead: int) -> tuple[list[str], int, int | None]:
    """Save at once, and late beside training: the tensors that differ, bytes put aside, and the step of the report."""
    ranks = here()
    trainer = Trainer(_config(lookahead, False), ranks, folder / "at_once")
    for _ in trainer.train():
        pass
    trainer.close()
    _, aside_bytes, reported = train(_config(lookahead, None), ranks, folder / "beside")
    ranks.barrier()
    different = []
    for saved in complete_checkpoints(folder / "at_once"):
        first, second = stock_loaded(saved), stock_loaded(folder / "beside" / saved.name)
        different += [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]
    return different, sum(aside_bytes), reported


def fail(folder: Path, failing: int, on_failed_save: str) -> tuple[list[tuple[int, int]], str, list[str]]:
    """Train while a rank's disk is full: the steps of failed saves with those of their reports, the error that ended
    the run, and the checkpoints."""
    ranks = here()
    config = _config(0, None)
    checkpoint = dataclasses.replace(config.checkpoint, on_failed_save=on_failed_save)  # type: ignore[arg-type]
    trainer = Trainer(dataclasses.replace(config, checkpoint=checkpoint), ranks, folder)
    full = mock.patch.object(digests._DigestedFile, "write", side_effect=OSError(28, "No space left on device"))
    failed, said = [], ""
    with full if ranks.rank == failing else mock.patch.object(digests, "_unused", create=True):
        try:
            for report in trainer.train():
                if isinstance(report, FailedSaveReport):
                    failed.append((report.step, trainer.steps))
        except FailedSaveError as error:
            said = f"{trainer.steps}: {error}"
        trainer.close()
    return failed, said, [path.name for path in complete_checkpoints(folder)]
