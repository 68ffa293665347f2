"""Runs with hot and cold batches, as one rank of a pool of processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from embershard.cache import CacheConfig
from embershard.data import DataConfig
from embershard.data.config import SyntheticConfig
from embershard.distributed import CheckpointConfig
from embershard.models import ModelConfig
from embershard.pipeline.config import LookAheadConfig
from embershard.sharding.config import ShardingConfig
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.reports import TrainReport
from embershard.training.trainer import Trainer
from tests.ranks.planned import here

GLOBAL_BATCH, SAVED_AT = 20, 13


@dataclass
class Trained:
    """What a rank trained on, step by step.

    Attributes:
        samples: the first dense features of its samples.
        is_hot: of its batches.
        losses: of all ranks.
        embedding_bytes: between ranks, per rank.
        batches: by kind, over all steps.
    """

    samples: list[list[float]] = field(default_factory=list)
    is_hot: list[bool] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    embedding_bytes: list[float] = field(default_factory=list)
    batches: dict[str, int] = field(default_factory=dict)


def make_config(lookahead: int) -> RunConfig:
    return RunConfig(
        data=DataConfig(synthetic=SyntheticConfig(num_samples=1000, scale=0.0001), num_workers=0),
        model=ModelConfig(embedding_dim=4, dense_arch_layer_sizes=(8, 4), over_arch_layer_sizes=(8, 1)),
        cache=CacheConfig(ratio=0.5),
        look_ahead=LookAheadConfig(lookahead, 1),
        sharding=ShardingConfig(mode="hot_cold", hot_bytes=20_000),
        train=TrainConfig(global_batch_size=GLOBAL_BATCH, log_every=1, epochs=1, device="cpu"),
        checkpoint=CheckpointConfig(every_steps=SAVED_AT, at_end=False, keep_last=9),
    )


def run(folder: Path | None, lookahead: int, resume: Path | None = None) -> Trained:
    """Train, from a checkpoint on if there is one."""
    trainer = Trainer(make_config(lookahead), here(), folder)
    if resume is not None:
        trainer.resume(resume)
    found, step = Trained(), trainer.step

    def noting(batch):  # type: ignore[no-untyped-def]
        found.samples.append(batch.dense_features[:, 0].tolist())
        found.is_hot.append(batch.is_hot)
        return step(batch)

    trainer.step = noting  # type: ignore[method-assign]
    for report in trainer.train():
        if isinstance(report, TrainReport):
            found.losses.append(report.loss)
            found.embedding_bytes.append(report.sent_bytes.embeddings)
            found.batches = report.batches or {}
    trainer.close()
    return found
