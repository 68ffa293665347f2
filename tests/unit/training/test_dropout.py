"""Training with dropout: the same masks with a cache and without, after a resume, and behind a skipped batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from embershard.training.config import RunConfig
from embershard.training.trainer import Trainer
from tests.unit.training.poisoned import Feed, config_of, losses, run, state_of

pytestmark = pytest.mark.slow  # whole training runs


def dropping(cache: str, dropout: float = 0.25) -> RunConfig:
    config = config_of(cache)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=dropout))


def are_equal(state: dict[str, Any], other: dict[str, Any]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(values, other[name]) for name, values in state.items())


def test_a_cache_and_a_skipped_batch_change_no_mask(ranks):
    """With look-ahead, which draws nothing; the batch that is skipped drew masks in its forward."""
    reports, state, trainer = run(dropping("look-ahead"), ranks, poisoned={3, 7})
    without, expected, _ = run(dropping("resident"), ranks, left_out={3, 7})
    assert losses(reports) == losses(without)
    assert are_equal(state, expected)
    assert trainer.evaluate().quality == trainer.evaluate().quality, "nothing is dropped"
    plain, _, _ = run(dropping("resident", 0.0), ranks, left_out={3, 7})
    assert losses(plain)[1:] != losses(without)[1:]  # the control


@pytest.mark.matrix
def test_a_run_resumes_with_its_masks(ranks, tmp_path):
    whole, expected, _ = run(dropping("look-ahead"), ranks, tmp_path, poisoned={2, 9})
    resumed = Trainer(dropping("look-ahead"), ranks, tmp_path / "again")
    resumed.resume(tmp_path / "step_5")
    torch.manual_seed(4711)  # whatever was drawn meanwhile
    Feed(resumed, poisoned={9 - 6})
    assert losses(list(resumed.train())) == losses(whole)[5:]
    assert are_equal(state_of(resumed), expected)
    resumed.close()
