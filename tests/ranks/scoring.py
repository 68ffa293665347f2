"""Training, and scoring what was trained, as one rank of a pool of processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from embershard.commands.score import ScoreJob
from embershard.data import Target, open_source
from embershard.distributed import Supervision
from embershard.metrics.config import MetricsConfig
from embershard.metrics.evaluation import Evaluator
from embershard.metrics.predictions import Predicted, PredictionBuffer
from embershard.training.config import RunConfig
from embershard.training.trained_run import Scorer, open_trained
from embershard.training.trainer import Trainer
from tests.ranks.planned import here
from tests.unit.metrics.columns import Columns


def train(config: RunConfig, checkpoints: Path) -> None:
    """Train, and save at the end."""
    trainer = Trainer(config, here(), checkpoints)
    for _ in trainer.train():
        pass
    trainer.close()


def judge_scores() -> dict[str, Any]:
    """Return what made-up scores say, of which this rank has those of its batches of 16."""
    ranks, generator = here(), torch.Generator().manual_seed(0)
    outputs = torch.randn(357, 2, generator=generator).round(decimals=1)
    labels, weights = (torch.rand(357, 2, generator=generator) < 0.3).float(), torch.rand(357, generator=generator)
    target = Target(("click", "buy"), weight="weight")
    buffer = PredictionBuffer(target)
    for start in range(0, 357, 16 * ranks.world_size):
        own = slice(start + 16 * ranks.rank, start + 16 * (ranks.rank + 1))
        buffer.add(Predicted(outputs[own], labels[own], weights[own]))
    source: Any = Columns(user=[f"u{n % 23}" for n in range(357)], country=[f"c{n % 5}" for n in range(357)])
    metrics = MetricsConfig(("auc", "ne", "gauc", "ndcg@3"), "user", ("country",))
    return dataclasses.asdict(Evaluator(target, metrics, source, ranks).judge(buffer, source))


def evaluate(config: RunConfig, checkpoints: Path) -> dict[str, Any]:
    """Return the evaluation of the newest checkpoint."""
    ranks = here()
    trained = open_trained(config, checkpoints, ranks, "last")
    found = Scorer(trained, open_source(config.data), ranks, Supervision()).evaluate()
    return dataclasses.asdict(found)


def score(config: RunConfig, checkpoints: Path, output: Path) -> None:
    """Write the scores of the held-out samples."""
    ScoreJob(config, None, False, checkpoints, None, output).run(here(), Supervision())
