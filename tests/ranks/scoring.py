"""Training, and scoring what was trained, as one rank of a pool of processes."""

from __future__ import annotations

from pathlib import Path

from embershard.distributed import Supervision
from embershard.launch.score import ScoreJob
from embershard.training.config import RunConfig
from embershard.training.trainer import Trainer
from tests.ranks.planned import here


def train(config: RunConfig, checkpoints: Path) -> None:
    """Train, and save at the end."""
    trainer = Trainer(config, here(), checkpoints)
    for _ in trainer.train():
        pass
    trainer.close()


def score(config: RunConfig, checkpoints: Path, output: Path) -> None:
    """Write the scores of the held-out samples."""
    ScoreJob(config, None, False, checkpoints, None, output).run(here(), Supervision())
