"""Hot rows with copies on every rank are trained as stock TorchRec trains them in their shards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.covering import keep
from tests.ranks import hot_cold
from tests.ranks.hot_cold import FAULTS
from tests.ranks.rounding import MANY
from tests.ranks.rows_exchange import Case
from tests.ranks.workers import RankPool

pytestmark = [pytest.mark.extra, pytest.mark.ranks]

ONE = Case(hot=40, hot_every=3, ratio=0.2)
CASES = {
    f"{sharding}, {optimizer}": Case(hot=40, hot_every=3, ratio=0.2, sharding=sharding, optimizer=optimizer)
    for sharding in ("table_wise", "row_wise", "column_wise")
    for optimizer in ("sgd", "rowwise_adagrad", "adagrad")
}
#: Every sharding type and every optimizer.
DIAGONAL = ["table_wise, sgd", "row_wise, rowwise_adagrad", "column_wise, adagrad"]
VARIANTS = {
    "mean": Case(hot=40, hot_every=3, ratio=0.2, mean=True),
    "weighted": Case(hot=40, hot_every=3, ratio=0.2, weighted=True, sharding="row_wise"),
    "shared": Case(hot=40, hot_every=3, ratio=0.2, shared=True),
    "dims": Case(hot=40, hot_every=3, ratio=0.25, dims=(16, 8, 16, 32), sharding="column_wise"),
    "mixed": Case(hot=40, hot_every=3, ratio=0.25, sharding=("table_wise", "row_wise", "column_wise", "row_wise")),
    "table-column-wise": Case(hot=40, hot_every=3, ratio=0.25, sharding="table_column_wise"),
    "rows": Case(hot=40, hot_every=3, ratio=0.2, exchange="rows", sharding="row_wise"),
    "whole tables": Case(hot=400, hot_every=3, ratio=0.15),
    "no hot row": Case(hot=0, ratio=0.2),
    "a rank without ids": Case(hot=40, hot_every=3, ratio=0.2, empty_every=4),
    "evaluation": Case(hot=40, hot_every=3, ratio=0.2, evaluate_every=2),
    "fp16": Case(hot=40, hot_every=3, ratio=0.25, fp16=(1,), optimizer="sgd"),
    "profile": Case(hot=40, hot_every=3, ratio=0.2, policy="frequency"),
    "look-ahead": Case(hot=40, hot_every=3, ratio=0.3, lookahead=4, policy="lookahead"),
    "look-ahead, row-wise": Case(hot=40, hot_every=3, ratio=0.3, lookahead=4, policy="lookahead", sharding="row_wise"),
}
#: What others have, too.
COMBINED = {"dims", "mixed", "table-column-wise", "look-ahead", "whole tables", "profile"}


@pytest.mark.smoke
@pytest.mark.parametrize("name", [*keep(["row_wise, rowwise_adagrad"], CASES), *keep(["mean"], VARIANTS)])
def test_weights_and_states_are_those_of_stock(two_ranks: RankPool, name: str) -> None:
    """And the copies are equal on both ranks."""
    outcomes = two_ranks.run(hot_cold.compare, {**CASES, **VARIANTS}[name])
    assert [outcome.different for outcome in outcomes] == [[], []]
    assert sum(outcome.evictions for outcome in outcomes) > 20 or name == "whole tables"


def test_one_rank(one_rank: RankPool) -> None:
    shared_columns = Case(hot=40, hot_every=3, ratio=0.2, shared=True, sharding="column_wise")
    for case in (ONE, CASES["column_wise, adagrad"], shared_columns):
        (outcome,) = one_rank.run(hot_cold.compare, case)
        assert outcome.different == []


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(two_ranks: RankPool, fault: str) -> None:
    assert any(outcome.different for outcome in two_ranks.run(hot_cold.compare, ONE, fault))


def test_real_gradients_differ_by_rounding(two_ranks: RankPool) -> None:
    """30 steps of row-wise Adagrad with learning rate 0.1, on weights of up to 1/sqrt(333); the rounding is stock's."""
    for outcome in two_ranks.run(hot_cold.compare_real, Case(hot=40, steps=30)):
        assert outcome.different == []
        assert 0 < outcome.loss_error < MANY
        assert 0 < outcome.weight_error < MANY


def test_hot_batches_move_no_row_and_need_no_all_to_all(two_ranks: RankPool) -> None:
    for outcome in two_ranks.run(hot_cold.hot_steps, ONE):
        assert outcome.rows_moved == 0
        assert (outcome.sent.ids, outcome.sent.embeddings) == (0, 0)
        assert outcome.sent.gradients > 0


@pytest.mark.parametrize("sharding", keep(["column_wise"], ["row_wise", "column_wise"]))
def test_checkpoints_move_to_stock_and_back(two_ranks: RankPool, tmp_path: Path, sharding: str) -> None:
    case = Case(hot=40, hot_every=3, ratio=0.2, sharding=sharding)
    assert two_ranks.run(hot_cold.move, case, tmp_path) == [[], []]


def test_cold_ids_in_a_hot_batch_are_an_error(two_ranks: RankPool) -> None:
    for message in two_ranks.run(hot_cold.error_of_a_wrong_batch, ONE):
        assert "was said to have hot rows only" in message
