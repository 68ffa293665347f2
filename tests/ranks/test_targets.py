"""Regression, weights of samples, several labels, shared tables, means of bags: cached equals stock TorchRec, bit for
bit, and a step has one loss on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from embershard.training.config import RunConfig
from tests.ranks import own_models
from tests.ranks.parity import differences
from tests.ranks.planned_by_commands import expect_planned_equals_stock
from tests.ranks.rounding import loss_rounding
from tests.ranks.workers import RankPool
from tests.unit.data.targets import target_config, write_targets

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_targets(tmp_path_factory.mktemp("targets") / "samples.parquet")


def test_cached_equals_stock(samples: Path, one_rank: RankPool, two_ranks: RankPool):
    """On two ranks also with several labels, by the plan of the next test."""
    for target, pool in (("several", one_rank), ("weighted regression", two_ranks)):
        verdicts = pool.run(own_models.verdict, target_config(samples, target))
        assert all(verdict.is_equal and verdict.caches[0].evictions > 20 for verdict in verdicts), verdicts


def test_a_plan_of_shared_tables_is_obeyed(samples: Path, two_ranks: RankPool, tmp_path: Path):
    """Profiled and planned by the commands."""
    expect_planned_equals_stock(two_ranks, target_config(samples, "several"), tmp_path)


@pytest.mark.matrix
def test_weights_of_one_change_no_bit(samples: Path, two_ranks: RankPool):
    """Batches of 24: no power of two, so that dividing by it rounds."""
    found = []
    for target in ("plain", "ones", "weighted"):
        config = target_config(samples, target)
        config = replace(config, train=replace(config.train, batch_size=24))
        found.append(two_ranks.run(own_models.trained, config))
    plain, ones, weighted = found
    for rank in range(2):
        assert plain[rank][0] == ones[rank][0]
        assert differences(plain[rank][1], ones[rank][1]) == []
        assert differences(plain[rank][1], weighted[rank][1]), "the control"


def test_a_step_has_one_loss_on_any_number_of_ranks(samples: Path, one_rank: RankPool, two_ranks: RankPool):
    """Ranks have samples of different weights; the loss is that of the whole batch, and so are the gradients."""
    config = target_config(samples, "several")
    whole = replace(config, train=replace(config.train, batch_size=32))
    ((alone, _),) = one_rank.run(own_models.trained, whole)
    together, _ = two_ranks.run(own_models.trained, config)[0]
    assert together == pytest.approx(alone, rel=loss_rounding(len(alone), 32))
    ((unweighted, _),) = one_rank.run(own_models.trained, without_weights(whole))
    assert unweighted != pytest.approx(alone, rel=1e-2), "the control"


def without_weights(config: RunConfig) -> RunConfig:
    return replace(config, data=replace(config.data, table=replace(config.data.table, weight=None)))
