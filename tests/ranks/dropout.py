"""Dropout on several ranks."""

from __future__ import annotations

import dataclasses

import torch

from embershard.cache import CacheConfig
from embershard.sharding.torchrec import cache_stats
from embershard.training.reports import TrainReport
from embershard.training.trainer import Trainer
from tests.ranks.planned import here, make_config


def train(dropout: float, is_cached: bool) -> tuple[list[float], int, int]:
    """Return the losses, the seed of the last masks, and the evictions."""
    config = make_config(None, cache=CacheConfig(ratio=0.3, policy="lru") if is_cached else CacheConfig(enabled=False))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=dropout))
    trainer = Trainer(config, here())
    losses = [report.loss for report in trainer.train() if isinstance(report, TrainReport)]
    trainer.close()
    return losses, torch.initial_seed(), sum(table.evictions for table in cache_stats(trainer.model))
