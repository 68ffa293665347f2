"""Models with several collections of tables, and with attention over a history: cached equals stock TorchRec, bit for
bit, and no step waits for a row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from embershard.cache import CacheConfig
from embershard.commands import cli
from embershard.distributed import CheckpointConfig
from embershard.pipeline.config import LookAheadConfig
from embershard.settings.decoding import to_toml
from embershard.sharding.config import ShardingConfig
from tests.covering import matrix
from tests.ranks import own_models
from tests.ranks.workers import RankPool
from tests.unit.data.windows import make_windows

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_windows(tmp_path_factory.mktemp("events"), users=2000, items=3000, history=6)


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        matrix("own", "two_ranks"),
        ("own", "one_rank"),
        matrix("din", "one_rank"),
        matrix("din", "two_ranks"),
        matrix("tbsm", "one_rank"),
        matrix("tbsm", "two_ranks"),
        matrix("hstu", "one_rank"),
        matrix("hstu", "two_ranks"),
    ],
)
def test_cached_equals_stock_and_no_row_is_late(model, ranks, windows, request) -> None:
    config = own_models.own_config() if model == "own" else own_models.history_config(model, windows)
    small = replace(config, cache=CacheConfig(ratio=(config.cache.ratio or 0.0) / 2))  # else pins do not matter
    pool: RankPool = request.getfixturevalue(ranks)
    verdicts = pool.run(own_models.verdict, small)
    assert all(verdict.is_equal and verdict.caches[0].evictions > 50 for verdict in verdicts), verdicts
    assert pool.run(own_models.late_rows, config) == [0] * len(verdicts)


@pytest.mark.parametrize(
    ("arch", "ranks"),
    [("hstu", "two_ranks"), matrix("hstu", "one_rank"), matrix("din", "two_ranks"), matrix("tbsm", "two_ranks")],
)
def test_cached_equals_stock_in_groups_by_length(arch, ranks, windows, request) -> None:
    """Ranks have different groups, and other ones in each step."""
    config = own_models.history_config(arch, windows, cache=CacheConfig(ratio=0.06))
    pool: RankPool = request.getfixturevalue(ranks)
    verdicts = pool.run(own_models.verdict_in_groups, config)
    assert all(verdict.is_equal and verdict.caches[0].evictions > 50 for verdict in verdicts), verdicts


def test_without_look_ahead_rows_are_late(one_rank: RankPool):
    """So the test above can fail."""
    config = own_models.own_config(look_ahead=LookAheadConfig(lookahead=0))
    assert one_rank.run(own_models.late_rows, config)[0] > 100


@pytest.mark.matrix
def test_a_plan_of_several_collections_is_obeyed(two_ranks: RankPool, tmp_path: Path):
    config = own_models.own_config()
    run, profile, plan = (str(tmp_path / name) for name in ("run.toml", "p.npz", "plan.json"))
    Path(run).write_text(to_toml(config))
    assert cli.main(["profile", "--config", run, "-o", profile]) == 0
    assert cli.main(["plan", "--config", run, "--profile", profile, "--ranks", "2", "-o", plan]) == 0
    planned = replace(config, sharding=ShardingConfig(plan=plan))
    verdicts = two_ranks.run(own_models.verdict, planned)
    assert all(verdict.is_equal and verdict.caches[0].evictions > 50 for verdict in verdicts), verdicts


@pytest.mark.matrix
def test_a_resumed_hstu_has_the_bits_of_a_whole_run(two_ranks: RankPool, windows: Path, tmp_path: Path):
    """Its dropout draws the masks that it would have drawn."""
    config = own_models.history_config(
        "hstu", windows, checkpoint=CheckpointConfig(at_end=True, every_steps=own_models.STEPS // 2)
    )
    sizes = replace(config.model.hstu, input_dropout=0.1, linear_dropout=0.2)
    config = replace(config, model=replace(config.model, hstu=sizes))
    assert two_ranks.run(own_models.resumed_equals_whole, config, tmp_path / "checkpoints") == [[], []]


def test_a_checkpoint_has_all_collections(two_ranks: RankPool, tmp_path: Path):
    config = own_models.own_config(
        cache=CacheConfig(ratio=0.1), checkpoint=CheckpointConfig(at_end=True, every_steps=own_models.STEPS // 2)
    )
    assert two_ranks.run(own_models.resumed_equals_whole, config, tmp_path / "checkpoints") == [[], []]
