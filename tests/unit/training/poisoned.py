"""Short runs some of whose batches have no finite loss."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from embershard.cache import CacheConfig
from embershard.data import Batch
from embershard.distributed import CheckpointConfig, Ranks
from embershard.pipeline.config import LookAheadConfig
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.optimizers import DenseOptimizerConfig, EmbeddingOptimizerConfig
from embershard.training.reports import TrainReport
from embershard.training.trainer import Trainer
from tests.unit.training.test_trainer import make_config

CACHES = {
    "resident": CacheConfig(enabled=False),
    "cached": CacheConfig(ratio=0.3, policy="lru"),
    "look-ahead": CacheConfig(ratio=0.3),
}


def config_of(cache: str = "cached", on_non_finite: Any = "skip", **train: Any) -> RunConfig:
    train = {"batch_size": 100, "log_every": 1, "max_steps": 12, **train}
    return make_config(
        train=TrainConfig(on_non_finite=on_non_finite, **train),
        cache=CACHES[cache],
        look_ahead=LookAheadConfig(lookahead=4 if cache == "look-ahead" else 0, prefetch=2),
        dense_optimizer=DenseOptimizerConfig(kind="adam", lr=0.01),
        embedding_optimizer=EmbeddingOptimizerConfig(kind="rowwise_adagrad", lr=0.1),
        checkpoint=CheckpointConfig(every_steps=5, at_end=False),
    )


class Feed:
    """Changes the batches that a trainer gets: poisons some by their number, or leaves them out."""

    def __init__(self, trainer: Trainer, *, poisoned: Collection[int] = (), left_out: Collection[int] = ()) -> None:
        self._stream, self._poisoned, self._left_out, self._number = trainer.stream, poisoned, left_out, 0
        trainer.stream = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._stream)
        self._number += 1
        if self._number in self._poisoned:
            batch.dense_features[3, 2] = math.nan
        return next(self) if self._number in self._left_out else batch


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def collect(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                collect(f"{prefix}.{key}", each)
        elif hasattr(value, "local_shards"):
            for number, shard in enumerate(value.local_shards()):
                found[f"{prefix}.{number}"] = shard.tensor.clone()
        elif isinstance(value, torch.Tensor):
            found[prefix] = value.detach().clone()

    collect("model", trainer.model.state_dict())
    collect("rows", trainer.model.fused_optimizer.state_dict()["state"])
    collect("dense", trainer.optimizers.dense.state_dict()["state"])
    return found


def run(config: RunConfig, ranks: Ranks, folder: Path | None = None, **feed: Any) -> tuple[list[Any], Any, Trainer]:
    trainer = Trainer(config, ranks, folder)
    Feed(trainer, **feed)
    reports = list(trainer.train())
    state = state_of(trainer)
    trainer.close()
    return reports, state, trainer


def losses(reports: list[Any]) -> list[float]:
    return [report.loss for report in reports if isinstance(report, TrainReport)]
