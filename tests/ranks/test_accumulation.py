"""Micro-batches that train together give bit for bit what stock TorchRec gives with one batch of their samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from embershard.cache import CacheConfig
from embershard.training.config import TrainConfig
from tests.covering import keep
from tests.ranks import accumulation, grown_accumulation, own_models
from tests.ranks.accumulation import Case, Interrupted, Outcome
from tests.ranks.workers import RankPool

pytestmark = [pytest.mark.extra, pytest.mark.ranks]

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


#: With what the other tests of the room have, every mode that trains otherwise.
KEPT = ("sequences", "rows, row-wise", "replicated", "a last update of fewer")


def _check(outcomes: list[Outcome], case: Case, evictions: int = 100) -> None:
    assert [outcome.different for outcome in outcomes] == [[] for _ in outcomes]
    assert sum(outcome.num_compared for outcome in outcomes) >= 8
    assert all(stock == ours for stock, ours in (outcome.counts for outcome in outcomes)), "iterations"
    if case.is_cached:
        assert max(outcome.most_held for outcome in outcomes) == case.pieces - bool(case.hot_every)
        assert sum(outcome.evictions for outcome in outcomes) >= evictions


@pytest.mark.smoke
@pytest.mark.parametrize("sharding", keep(["column_wise"], SHARDINGS))
@pytest.mark.parametrize("optimizer", keep(["rowwise_adagrad"], OPTIMIZERS))
def test_every_sharding_type_and_optimizer(two_ranks: RankPool, sharding: str, optimizer: str) -> None:
    case = Case(exchange="pooled", sharding=sharding, optimizer=optimizer)
    _check(two_ranks.run(accumulation.compare, case), case, evictions=500)


@pytest.mark.parametrize("name", keep(KEPT, VARIANTS))
def test_every_mode_on_two_ranks(two_ranks: RankPool, name: str) -> None:
    case = VARIANTS[name]
    grows = case.overflow == "grow" or case.hot_every or case.mode == "data_parallel"
    _check(two_ranks.run(accumulation.compare, case), case, evictions=0 if grows else 100)


@pytest.mark.matrix  # on one rank it is compared below, with interrupts and in caches that grow
def test_on_one_rank_and_on_four(one_rank: RankPool, four_ranks: RankPool) -> None:
    case = Case(exchange="pooled", sharding="row_wise", lookahead=4, policy="lookahead", steps=60, ratio=0.4)
    for pool in (one_rank, four_ranks):
        _check(pool.run(accumulation.compare, case), case, evictions=500)


@pytest.mark.parametrize("fault", keep(["slots not held"], ["k updates", "a piece dropped", "slots not held"]))
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


def test_the_first_update_of_a_process_has_the_bits_of_a_later_one(two_ranks: RankPool) -> None:
    assert two_ranks.run(accumulation.resumed, Case(**POOLED)) == [[], []]


@pytest.mark.matrix
def test_a_resumed_run_has_the_bits_of_the_whole_one(two_ranks: RankPool, tmp_path: Path) -> None:
    train = TrainConfig(batch_size=20, max_steps=own_models.STEPS, log_every=1, device="cpu", accumulate=3)
    config = own_models.own_config(train=train, cache=CacheConfig(ratio=0.02))
    assert two_ranks.run(own_models.resumed_equals_whole, config, tmp_path) == [[], []]


#: Rows in a file, small ones, hot ones, data-parallel ones, and those that are exchanged.
GROWN = (1, 4, 8, 10, 14, 31)


@pytest.mark.parametrize(
    "number", keep(GROWN[:3], [each for each in range(36) if grown_accumulation.ranks_of(each) < 4])
)
def test_caches_that_grow_between_micro_batches(number: int, request: pytest.FixtureRequest) -> None:
    """`python -m tests.ranks.grown_accumulation` tries hundreds."""
    pool: RankPool = request.getfixturevalue("one_rank" if grown_accumulation.ranks_of(number) == 1 else "two_ranks")
    case = grown_accumulation.random_case(1, number)
    outcomes = pool.run(grown_accumulation.compared, case)
    assert grown_accumulation.differs(case, outcomes) == []
    assert number not in GROWN or any(outcome.held_growths for outcome in outcomes)


@pytest.mark.parametrize("fault", keep(["growth unpins"], ["growth unpins", "growth unpins, checked"]))
def test_growth_that_unpins_shows(one_rank: RankPool, fault: str) -> None:
    """In the rows, or by an assertion before one is moved."""
    (outcome,) = one_rank.run(grown_accumulation.compared, grown_accumulation.random_case(1, GROWN[1]), fault)
    assert outcome.different
    assert ("checked" in fault) == ("was to be evicted" in outcome.different[0])


INTERRUPTS = [f"{when} {kind} {n}" for when in ("in", "after") for kind in ("forward", "backward") for n in range(3)]


@pytest.mark.parametrize("is_first", keep([False], [False, True]))
@pytest.mark.parametrize("at", keep(["in backward 1", "after backward 2"], INTERRUPTS))
def test_an_interrupted_update_trains_nothing_and_the_next_one_does(
    one_rank: RankPool, at: str, is_first: bool
) -> None:
    """The first exception may come before the dense layers' wrapper has seen a forward or a backward."""
    assert one_rank.run(accumulation.interrupted, Case(**POOLED), at, is_first) == [Interrupted([], False, [], [])]


@pytest.mark.parametrize("at", keep(["in backward 0"], INTERRUPTS))
def test_interrupts_on_two_ranks(two_ranks: RankPool, at: str) -> None:
    expected = [Interrupted([], False, [], [])] * 2
    assert two_ranks.run(accumulation.interrupted, Case(exchange="pooled", sharding="row_wise"), at, True) == expected


def test_an_interrupt_of_the_update_itself_leaves_the_rows_refused(one_rank: RankPool) -> None:
    (found,) = one_rank.run(accumulation.interrupted, Case(exchange="pooled", dims=(16, 16, 8, 8)), "end")
    assert not found.is_pinned
    assert "training several batches at once did not end" in found.wrong[0]
