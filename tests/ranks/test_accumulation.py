"""Micro-batches that train together give bit for bit what stock TorchRec gives with one batch of their samples."""

from __future__ import annotations

import pytest

from tests.covering import covering, keep
from tests.ranks import accumulation
from tests.ranks.accumulation import Case, Outcome
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad")
SHARDINGS = ("table_wise", "row_wise", "column_wise")
POOLED = {"exchange": "pooled", "sharding": "table_wise"}
#: Every mode, pooling and depth of look-ahead.
VARIANTS = {
    "weighted": Case(**POOLED, weighted=True),
    "two features of a table": Case(**POOLED, shared=True),
    "mean": Case(**POOLED, mean=True, pieces=2),
    "sequences": Case(**POOLED, sequence=True, pieces=2),
    "rows": Case(sharding="table_wise"),
    "rows, row-wise": Case(sharding="row_wise", lookahead=4, policy="lookahead"),
    "data-parallel": Case(exchange="pooled", sharding="row_wise", mode="data_parallel", ratio=0.42),
    "hot and cold rows": Case(**POOLED, hot=40),
    "hot batches": Case(**POOLED, hot=40, hot_every=2, lookahead=4, policy="lookahead"),
    "replicated": Case(**POOLED, replicated=(1,)),
    "look-ahead 8": Case(exchange="pooled", sharding="row_wise", lookahead=8, policy="lookahead", optimizer="adagrad"),
    "look-ahead 64": Case(**POOLED, lookahead=64, policy="lookahead", steps=80),
    "8 micro-batches": Case(**POOLED, pieces=8, ratio=0.5),
    "a cache that grows": Case(**POOLED, pieces=8, ratio=0.1, overflow="grow", steps=16),
    "one micro-batch": Case(**POOLED, pieces=1),
    "a last update of fewer": Case(**POOLED, pieces=5),
    "TorchRec's own tables": Case(**POOLED, is_cached=False),
    "a rank without ids": Case(**POOLED, empty_every=3),
}


def _check(outcomes: list[Outcome], case: Case, evictions: int = 100) -> None:
    assert [outcome.different for outcome in outcomes] == [[] for _ in outcomes]
    assert sum(outcome.num_compared for outcome in outcomes) >= 8
    assert all(stock == ours for stock, ours in (outcome.counts for outcome in outcomes)), "iterations"
    if case.is_cached:
        assert max(outcome.most_held for outcome in outcomes) == case.pieces - bool(case.hot_every)
        assert sum(outcome.evictions for outcome in outcomes) >= evictions


@pytest.mark.parametrize(("sharding", "optimizer"), covering(SHARDINGS, OPTIMIZERS))
def test_every_sharding_type_and_optimizer(two_ranks: RankPool, sharding: str, optimizer: str) -> None:
    case = Case(exchange="pooled", sharding=sharding, optimizer=optimizer)
    _check(two_ranks.run(accumulation.compare, case), case, evictions=500)


@pytest.mark.parametrize("name", keep([*VARIANTS][::3], [*VARIANTS]))
def test_every_mode_on_two_ranks(two_ranks: RankPool, name: str) -> None:
    case = VARIANTS[name]
    grows = case.overflow == "grow" or case.hot_every or case.mode == "data_parallel"
    _check(two_ranks.run(accumulation.compare, case), case, evictions=0 if grows else 100)


def test_on_one_rank_and_on_four(one_rank: RankPool, four_ranks: RankPool) -> None:
    case = Case(exchange="pooled", sharding="row_wise", lookahead=4, policy="lookahead", steps=60, ratio=0.4)
    for pool in (one_rank, four_ranks):
        _check(pool.run(accumulation.compare, case), case, evictions=500)


@pytest.mark.parametrize("fault", ["k updates", "a piece dropped", "slots not held"])
def test_faults_show(one_rank: RankPool, fault: str) -> None:
    case = Case(**POOLED, optimizer="adagrad", ratio=0.07 if fault == "slots not held" else 0.4)
    assert one_rank.run(accumulation.compare, case, fault)[0].different


def test_one_iteration_counts(one_rank: RankPool) -> None:
    (outcome,) = one_rank.run(accumulation.compare, Case(**POOLED), "each counts")
    assert outcome.counts[0] != outcome.counts[1]


def test_dense_gradients_are_averaged_once(two_ranks: RankPool) -> None:
    case = Case(**POOLED)
    assert two_ranks.run(accumulation.dense_gradients, case) == [[], []]
    assert any(two_ranks.run(accumulation.dense_gradients, case, "never averaged"))


@pytest.mark.parametrize("at", [f"after {kind} {n}" for kind in ("forward", "backward") for n in range(3)])
def test_an_interrupted_update_trains_nothing(one_rank: RankPool, at: str) -> None:
    assert one_rank.run(accumulation.interrupted, Case(**POOLED), at) == [([], False, [])]


def test_an_interrupt_of_the_update_itself_leaves_the_rows_refused(one_rank: RankPool) -> None:
    ((_, is_pinned, (message,)),) = one_rank.run(
        accumulation.interrupted, Case(exchange="pooled", dims=(16, 16, 8, 8)), "end"
    )
    assert not is_pinned
    assert "training several batches at once did not end" in message
