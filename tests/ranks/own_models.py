"""Models with several collections of tables, and with histories, trained as one rank of a pool of processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from embershard.cache import CacheConfig
from embershard.data import StreamState
from embershard.data.config import SyntheticConfig
from embershard.extras.length_groups.sizes import MOST_PADDING
from embershard.extras.verify.comparison import Equivalence
from embershard.extras.verify.equivalence import compare_with_stock
from embershard.pipeline.config import LookAheadConfig
from embershard.settings.files import load_config
from embershard.sharding.torchrec import cache_stats
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.reports import TrainReport
from embershard.training.steps import open_stream
from embershard.training.trainer import Trainer
from tests.ranks.parity import differences, snapshot
from tests.ranks.planned import here
from tests.unit.data.windows import hstu_overrides

PROJECT = Path(__file__).resolve().parents[2]
STEPS = 16


def own_config(**changes: Any) -> RunConfig:
    """The example of a model of one's own, made small: two collections of bags, and one of sequences."""
    config = load_config(RunConfig, PROJECT / "examples" / "own_model.toml")
    parts: dict[str, Any] = {
        "data": replace(
            config.data, synthetic=SyntheticConfig(num_samples=4000, scale=1e-3, bag_sizes=(2,)), num_workers=0
        ),
        "model": replace(config.model, options={"hidden": 8, "dim": 8}),
        "cache": CacheConfig(ratio=0.05),
        "look_ahead": LookAheadConfig(lookahead=4, prefetch=2),
        "train": TrainConfig(batch_size=20, max_steps=STEPS, log_every=1, device="cpu"),
    }
    return replace(config, **{**parts, **changes})


def history_config(arch: Any, folder: Path, **changes: Any) -> RunConfig:
    """DIN, TBSM or HSTU on windows of events that `embershard data events` wrote to `folder`."""
    config = load_config(RunConfig, folder / "run.toml", hstu_overrides(folder) if arch == "hstu" else [])
    parts: dict[str, Any] = {
        "model": replace(config.model, arch=arch, embedding_dim=8, dense_arch_layer_sizes=(8,)),
        "cache": CacheConfig(ratio=0.12),
        "look_ahead": LookAheadConfig(lookahead=4, prefetch=1),
        "train": TrainConfig(batch_size=8, max_steps=STEPS, log_every=1, device="cpu"),
    }
    return replace(config, **{**parts, **changes})


def verdict(config: RunConfig) -> Equivalence:
    """Cached beside stock, bit for bit."""
    return compare_with_stock(config, here(), STEPS)


def verdict_in_groups(config: RunConfig) -> Equivalence:
    """The same, with a group for each length of history."""
    with mock.patch.dict(MOST_PADDING, cpu=0):
        return verdict(config)


def late_rows(config: RunConfig) -> int:
    """Train the whole run; return the rows that a step waited for, but for the first one, before which nothing is
    known."""
    trainer, late = Trainer(config, here()), []
    for _ in trainer.train():
        late.append(sum(table.critical_path_fills for table in cache_stats(trainer.model)))
    trainer.close()
    return late[-1] - late[0]


def resumed_equals_whole(config: RunConfig, checkpoints: Path) -> list[str]:
    """Names of tensors that differ between a whole run and one that went on from its half."""
    ranks = here()
    whole = Trainer(config, ranks)
    for _ in whole.train():
        pass
    half = replace(config, train=replace(config.train, max_steps=STEPS // 2))
    first = Trainer(half, ranks, checkpoints)
    for _ in first.train():
        pass
    second = Trainer(config, ranks, checkpoints)
    second.resume(checkpoints / f"step_{STEPS // 2}")
    for _ in second.train():
        pass
    return differences(snapshot(whole.model), snapshot(second.model))


def label_losses(config: RunConfig) -> tuple[list[int], list[dict[str, float | None]]]:
    """How many samples of this rank's first batch have each label, and each label's loss of each step."""
    trainer = Trainer(config, here())
    with open_stream(config, trainer.source, here(), StreamState(seed=config.data.seed)) as stream:
        counts = (~next(stream).labels.isnan()).sum(dim=0).tolist()
    losses = [report.label_losses for report in trainer.train() if isinstance(report, TrainReport)]
    trainer.close()
    return counts, losses


def trained(config: RunConfig) -> tuple[list[float], dict[str, Any]]:
    """Train the whole run; return the loss of each step, and the weights and states that it ends with."""
    trainer = Trainer(config, here())
    losses = [report.loss for report in trainer.train() if isinstance(report, TrainReport)]
    trainer.close()
    return losses, snapshot(trainer.model)
