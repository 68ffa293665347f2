"""Training by a plan that the commands make, beside stock TorchRec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from embershard.commands import cli
from embershard.settings.decoding import to_toml
from embershard.sharding.config import ShardingConfig
from embershard.training.config import RunConfig
from tests.ranks import own_models
from tests.ranks.workers import RankPool


def expect_planned_equals_stock(two_ranks: RankPool, config: RunConfig, folder: Path) -> None:
    """Profile and plan in `folder`, and train; caches must have evicted rows."""
    run, profile, plan = (str(folder / name) for name in ("run.toml", "p.npz", "plan.json"))
    Path(run).write_text(to_toml(config))
    assert cli.main(["profile", "--config", run, "-o", profile]) == 0
    assert cli.main(["plan", "--config", run, "--profile", profile, "--ranks", "2", "-o", plan]) == 0
    verdicts = two_ranks.run(own_models.verdict, replace(config, sharding=ShardingConfig(plan=plan)))
    assert all(verdict.is_equal and verdict.caches[0].evictions > 20 for verdict in verdicts), verdicts
