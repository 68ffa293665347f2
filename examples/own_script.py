"""A training script of one's own around embershard's `Trainer`: settings in code, and what to do with its reports.

torchrun --standalone --nproc_per_node 2 examples/own_script.py

Without torchrun it trains on one rank. The model is that of own_model.py; leave `model` out for a DLRM.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from embershard import CacheConfig, RunConfig, Trainer, process_group
from embershard.data import DataConfig, SyntheticConfig
from embershard.distributed import CheckpointConfig
from embershard.models import ModelConfig
from embershard.training.config import TrainConfig
from embershard.training.reports import EvalReport, TrainReport


def settings(steps: int) -> RunConfig:
    """Return the settings that a TOML file would have."""
    return RunConfig(
        data=DataConfig(synthetic=SyntheticConfig(num_samples=100_000, scale=0.003, bag_sizes=(3,))),
        model=ModelConfig(build="own_model:build", folder=str(Path(__file__).parent), options={"hidden": 32}),
        cache=CacheConfig(ratio=0.3),
        train=TrainConfig(batch_size=256, max_steps=steps, log_every=20),
        checkpoint=CheckpointConfig(at_end=True),
    )


def main() -> None:
    """Train, show the loss and the AUC, and save at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", type=Path, default=None, help="folder; default: none are saved")
    arguments = parser.parse_args()
    with process_group("auto") as ranks:
        trainer = Trainer(settings(arguments.steps), ranks, arguments.checkpoints)
        for report in trainer.train():
            if ranks.is_first and isinstance(report, TrainReport):
                print(f"step {report.step}: loss {report.loss:.4f}, hit rate {report.hit_rate_lookups or 0:.3f}")
            elif ranks.is_first and isinstance(report, EvalReport):
                print(f"step {report.step}: AUC {report.quality['auc']:.4f}")
        trainer.close()


if __name__ == "__main__":
    main()
