"""Two ranks with dropout: bit for bit as without a cache, and each with masks of its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from embershard.cache import CacheConfig
from embershard.sharding.torchrec import cache_stats
from embershard.training.reports import TrainReport
from embershard.training.trainer import Trainer
from tests.ranks.planned import here, make_config
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


def train(dropout: float, is_cached: bool) -> tuple[list[float], int, int]:
    """Return the losses, the seed of the last masks, and the evictions."""
    config = make_config(None, cache=CacheConfig(ratio=0.3, policy="lru") if is_cached else CacheConfig(enabled=False))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=dropout))
    trainer = Trainer(config, here())
    losses = [report.loss for report in trainer.train() if isinstance(report, TrainReport)]
    trainer.close()
    return losses, torch.initial_seed(), sum(table.evictions for table in cache_stats(trainer.model))


def test_a_cache_changes_no_mask_and_ranks_have_their_own(two_ranks: RankPool):
    cached, stock, plain = (
        two_ranks.run(train, probability, is_cached)
        for probability, is_cached in ((0.25, True), (0.25, False), (0.0, False))
    )
    assert [losses for losses, _, _ in cached] == [losses for losses, _, _ in stock]
    assert [losses for losses, _, _ in cached] != [losses for losses, _, _ in plain]
    assert [seed for _, seed, _ in cached] == [seed for _, seed, _ in stock]
    assert cached[0][1] != cached[1][1]
    assert sum(evictions for _, _, evictions in cached) > 0
