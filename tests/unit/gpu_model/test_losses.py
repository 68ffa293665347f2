"""Without a GPU: losses of two GPUs travel with the agreement on a next batch, and no host waits for them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from embershard.distributed import Ranks
from embershard.errors import NotFiniteError
from embershard.pipeline.config import LookAheadConfig
from embershard.training.parts import loss_monitor
from embershard.training.parts.loss_monitor import in_float64
from embershard.training.reports import TrainReport
from embershard.training.steps import Steps
from embershard.training.trainer import Trainer
from tests.unit.gpu_model.cases import config_of, write_samples
from tests.unit.gpu_model.test_whole import KEPT, Case, modelled_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("bad", [None, 3])
def test_losses_of_gpus_travel(tmp_path: Path, bad: int | None) -> None:
    """With the agreement of the next step, until the data end; where one is bad, the next step has trained."""
    case = replace(next(each for each in KEPT if each.mode == "pooled"), num_ranks=2, target="several", dtype="fp32")
    samples = write_samples(tmp_path / "samples.parquet")
    found = [train_two(case, samples, tmp_path / str(travel), travel, bad) for travel in (True, False)]
    (losses, gathers, waits, error), (expected, others, more_waits, other_error) = found
    assert losses == expected
    if bad is None:
        assert (gathers, others, error, other_error) == (5, 12, "", "")
        assert waits <= more_waits + 2, "once, where the data end: for the last one that travelled, and its gather"
    else:
        assert error.partition(".")[0] == other_error.partition(".")[0] == "Step 3: the loss of rank 0 is nan"
        assert (gathers, others) == (0, 3)


def train_two(
    case: Case, samples: Path, folder: Path, travel: bool, bad: int | None
) -> tuple[list[float], int, int, str]:
    """The losses of a run, gathers of losses, how often the host waited in steps, and the error that ended it."""
    gathers, losses, errors = list[torch.Size](), list[float](), list[str]()
    folder.mkdir()

    class Counting(Ranks):
        def all_gather(self, value: Tensor) -> Tensor:
            gathers.append(value.shape)
            return super().all_gather(value)

    def poisoned(*args: Any) -> Tensor:
        loss = in_float64(*args)
        return loss * math.nan if trainer.steps + 1 == bad else loss

    with contextlib.ExitStack() as stack:
        gpu, ranks = stack.enter_context(modelled_ranks(2))
        config = config_of(case, samples, folder, "cuda")
        train = replace(config.train, max_steps=12, log_every=12, on_non_finite="stop", accumulate=1)
        config = replace(config, train=train, look_ahead=LookAheadConfig(lookahead=2, prefetch=1))
        stack.enter_context(mock.patch.object(loss_monitor, "in_float64", poisoned))
        if not travel:
            stack.enter_context(mock.patch.object(Steps, "carrier", None))
        trainer = Trainer(config, ranks)
        trainer.losses.monitor._ranks = Counting(*dataclasses.astuple(ranks))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for report in trainer.train():
                    if isinstance(report, TrainReport):
                        losses += [report.loss, *map(float, report.label_losses.values())]
            except NotFiniteError as error:
                errors.append(str(error))
            trainer.close()
        assert gpu.problems == []
        return losses, len(gathers), sum(gpu.waits_at.values()), "".join(errors)
