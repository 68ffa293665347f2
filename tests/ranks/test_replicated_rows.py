"""Rows with equal copies on every rank are trained as one table that gets the samples of all ranks."""

from __future__ import annotations

import pytest

from tests.covering import keep
from tests.ranks import data_parallel, replicated_rows, rows_exchange
from tests.ranks.replicated_rows import FAULTS, Case
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

CASES = {
    "sgd": Case(optimizer="sgd"),
    "adagrad": Case(optimizer="adagrad"),
    "row-wise adagrad": Case(),
    "mean": Case(mean=True),
    "weighted": Case(weighted=True, optimizer="adagrad"),
}
DECAYING = Case(weight_decay=0.25)
INTERRUPTED = {
    "hot rows": rows_exchange.Case(exchange="pooled", hot=40, hot_every=3, steps=3, ratio=0.3),
    "data-parallel caches": data_parallel.Case(steps=3),
    "replicated tables": rows_exchange.Case(init_seed=3, replicated=(0, 1, 2, 3), steps=3),
}


@pytest.mark.parametrize("name", keep(["weighted"], CASES))
def test_weights_and_states_are_those_of_one_table(two_ranks: RankPool, name: str) -> None:
    for outcome in two_ranks.run(replicated_rows.compare, CASES[name]):
        assert (outcome.different, outcome.ranks_differ, outcome.untouched_changed) == ([], [], 0)


def test_a_touched_row_with_a_gradient_of_zero_is_updated(two_ranks: RankPool) -> None:
    """Weight decay acts on it; a row that no rank looks up stays as it is."""
    for outcome in two_ranks.run(replicated_rows.compare, DECAYING):
        assert (outcome.different, outcome.ranks_differ, outcome.untouched_changed) == ([], [], 0)
        assert outcome.decayed > 0


def test_one_rank(one_rank: RankPool) -> None:
    for case in (Case(weighted=True), Case(mean=True), DECAYING):
        (outcome,) = one_rank.run(replicated_rows.compare, case)
        assert outcome.different == []


@pytest.mark.parametrize("fault", keep(["own gradients only"], FAULTS))
def test_faults_are_noticed(two_ranks: RankPool, fault: str) -> None:
    outcomes = two_ranks.run(replicated_rows.compare, DECAYING, fault)
    assert all(outcome.different for outcome in outcomes)
    assert all(bool(outcome.ranks_differ) == (fault == "own gradients only") for outcome in outcomes)


@pytest.mark.parametrize("copies", keep(["replicated tables"], INTERRUPTED))
def test_after_interrupts_at_different_points_copies_that_may_differ_are_refused(two_ranks, copies) -> None:
    """Rank 1 has trained the batch, and rank 0 has not."""
    (state_dict, *others), of_rank_1 = two_ranks.run(rows_exchange.interrupt_all, INTERRUPTED[copies])
    needed = "did not end (KeyboardInterrupt: ), so these rows may differ from their copies on the other ranks"
    for message in (state_dict, *(others if copies != "replicated tables" else ())):
        assert needed in message
        assert "tables t" in message
    assert of_rank_1 == [""] * 3
