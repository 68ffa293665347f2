"""Two ranks save while they train: the state of the step; a failure of one is that of all, in the same step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
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
from tests.covering import matrix
from tests.ranks.planned import here, make_config
from tests.ranks.workers import RankPool
from tests.unit.distributed.test_blocks import stock_loaded
from tests.unit.training.gated_saves import train

pytestmark = pytest.mark.ranks

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


@pytest.mark.parametrize("lookahead", [matrix(0), 16])
def test_the_state_of_its_step(two_ranks: RankPool, tmp_path: Path, lookahead: int):
    found = two_ranks.run(compare, tmp_path, lookahead)
    assert [different for different, _, _ in found] == [[], []]
    assert sum(aside for _, aside, _ in found) > 0
    reported = {step for _, _, step in found}
    assert len(reported) == 1
    assert min(step or 0 for step in reported) > EVERY


@pytest.mark.matrix
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_reported_in_the_same_step(two_ranks: RankPool, tmp_path: Path, failing: int):
    first, second = two_ranks.run(fail, tmp_path, failing, "continue")
    assert first == second
    failed, said, left = first
    assert [step for step, _ in failed] == [6]
    assert (said.partition(" could")[0], left) == ("12: step 12", [])  # at the end it is an error
    first, second = two_ranks.run(fail, tmp_path, failing, "stop")
    assert first == second
    assert f"(rank {failing}: No space left on device)" in first[1]
