"""Models with several collections of tables and with histories: training beside stock TorchRec, as one rank of a pool."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from embershard.cache import CacheConfig
from embershard.data.config import SyntheticConfig
from embershard.decoding import to_toml
from embershard.launch.config import load_config
from embershard.pipeline.config import LookAheadConfig
from embershard.sharding.torchrec import cache_stats
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.equivalence import Verdict, compare_with_stock
from embershard.training.trainer import Trainer
from tests.ranks.parity import differences, snapshot
from tests.ranks.planned import here

PROJECT = Path(__file__).resolve().parents[2]
STEPS = 12


def own_config(**changes: Any) -> RunConfig:
    """The example of a model of one's own, made small: two collections of bags, and one of sequences."""
    config = load_config(RunConfig, PROJECT / "examples" / "own_model.toml")
    parts: dict[str, Any] = {
        "data": replace(
            config.data, synthetic=SyntheticConfig(num_samples=4000, scale=2e-4, bag_sizes=(2,)), num_workers=0
        ),
        "model": replace(config.model, options={"hidden": 8, "dim": 8}),
        "cache": CacheConfig(ratio=0.25),
        "look_ahead": LookAheadConfig(lookahead=4, prefetch=2),
        "train": TrainConfig(batch_size=20, max_steps=STEPS, log_every=1, device="cpu"),
    }
    return replace(config, **{**parts, **changes})


def as_toml(config: RunConfig) -> str:
    """The settings as a file; the example's module is beside the example."""
    return to_toml(config)


def history_config(arch: Any, folder: Path, **changes: Any) -> RunConfig:
    """DIN or TBSM on windows of events that `embershard data events` wrote to `folder`."""
    config = load_config(RunConfig, folder / "run.toml")
    parts: dict[str, Any] = {
        "model": replace(config.model, arch=arch, embedding_dim=8, dense_arch_layer_sizes=(8,)),
        "cache": CacheConfig(ratio=0.3),
        "look_ahead": LookAheadConfig(lookahead=4, prefetch=2),
        "train": TrainConfig(batch_size=16, max_steps=STEPS, log_every=1, device="cpu"),
    }
    return replace(config, **{**parts, **changes})


def verdict(config: RunConfig) -> Verdict:
    """Cached beside stock, bit for bit."""
    return compare_with_stock(config, here(), STEPS)


@dataclass(frozen=True)
class LateRows:
    """What a run with look-ahead did: `late` rows were not resident when their step began."""

    late: int
    evictions: int
    losses: list[float]


def trained(config: RunConfig, checkpoints: Path | None = None) -> LateRows:
    """Train the whole run."""
    trainer = Trainer(config, here(), checkpoints)
    losses = [report.loss for report in trainer.train() if hasattr(report, "batches")]
    stats = cache_stats(trainer.model)
    trainer.close()
    return LateRows(sum(table.critical_path_fills for table in stats), sum(table.evictions for table in stats), losses)


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
