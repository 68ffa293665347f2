"""The exchange of distinct rows trains what TorchRec's exchange of pooled embeddings trains, and sends fewer bytes."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import keep, matrix
from tests.ranks import rows_exchange
from tests.ranks.modes_matrix import SHARDINGS, case_of, combinations, faults_of, with_look_ahead
from tests.ranks.rounding import MANY
from tests.ranks.rows_exchange import Case, Outcome
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

#: Every pair of sharding type and optimizer, sharding type and pooling, optimizer and pooling is among these.
SAMPLE = [
    ("SUM", "table_wise", "sgd"),
    ("MEAN", "table_wise", "rowwise_adagrad"),
    ("weighted", "table_wise", "adagrad"),
    ("shared table", "table_wise", "rowwise_adagrad"),
    ("SUM", "row_wise", "rowwise_adagrad"),
    ("MEAN", "row_wise", "adagrad"),
    ("weighted", "row_wise", "sgd"),
    ("shared table", "row_wise", "adagrad"),
    ("SUM", "column_wise", "adagrad"),
    ("MEAN", "column_wise", "sgd"),
    ("weighted", "column_wise", "rowwise_adagrad"),
    ("shared table", "column_wise", "sgd"),
]
VARIANTS = {
    "mixed types": Case(sharding=("table_wise", "row_wise", "column_wise", "row_wise"), ratio=0.3),
    "table-column-wise": Case(sharding="table_column_wise"),
    "different dims": Case(dims=(16, 8, 16, 32), ratio=0.3),
    "different dims column-wise": Case(dims=(16, 8, 16, 32), ratio=0.3, sharding="column_wise"),
    "beside stock tables": Case(sharding=("table_wise", "row_wise") * 2, cached=(0, 3), ratio=0.35),
    "a rank without ids": Case(empty_every=3),
    "a rank without ids row-wise": Case(empty_every=3, sharding="row_wise"),
    "evaluation in between": Case(evaluate_every=3, sharding="row_wise"),
    "look-ahead without ids": Case(lookahead=4, policy="lookahead", ratio=0.3, sharding="column_wise", empty_every=4),
}


def _check(outcomes: list[Outcome]) -> None:
    assert [outcome.different for outcome in outcomes] == [[] for _ in outcomes]
    assert sum(outcome.num_compared for outcome in outcomes) >= 4
    assert sum(outcome.evictions for outcome in outcomes) > 50


def _check_all(pool: RankPool, names: tuple[str, str, str], world_size: int) -> None:
    """Without look-ahead and with it."""
    case = case_of(*names, world_size)
    by_rank = pool.run(rows_exchange.compare_variants, case, [(case, None), (with_look_ahead(case), None)])
    for outcomes in zip(*by_rank, strict=True):
        _check(list(outcomes))


@pytest.mark.parametrize("names", keep([SAMPLE[3], SAMPLE[10]], SAMPLE), ids=", ".join)
def test_weights_and_states_are_those_of_pooled_embeddings(two_ranks: RankPool, names: tuple[str, str, str]) -> None:
    """`python -m tests.ranks.modes_matrix` runs every combination, on 1, 2 and 4 ranks."""
    _check_all(two_ranks, names, 2)


def test_the_sample_has_every_pair() -> None:
    whole = list(combinations())
    for first, second in itertools.combinations(range(3), 2):
        assert {(names[first], names[second]) for names in SAMPLE} == {(names[first], names[second]) for names in whole}


#: What others have, too.
COMBINED = {"mixed types", "different dims", "a rank without ids", "table-column-wise", "evaluation in between"}


@pytest.mark.parametrize("name", keep(VARIANTS.keys() - COMBINED, VARIANTS))
def test_variants(two_ranks: RankPool, name: str) -> None:
    _check(two_ranks.run(rows_exchange.compare_dyadic, VARIANTS[name]))


def test_one_rank_exchanges_nothing(one_rank: RankPool) -> None:
    _check(one_rank.run(rows_exchange.compare_dyadic, Case(sharding="row_wise")))
    ((sent, _),) = one_rank.run(rows_exchange.sent_in_a_step, Case())
    assert sent.in_training == 0


@pytest.mark.matrix
@pytest.mark.parametrize("pooling", keep(["MEAN"], ["SUM", "MEAN"]))
def test_faults_are_noticed(two_ranks: RankPool, pooling: str) -> None:
    case, faults = case_of(pooling, "row_wise", "rowwise_adagrad", 2), faults_of(pooling, 2)
    by_rank = two_ranks.run(rows_exchange.compare_variants, case, [(case, fault) for fault in faults])
    unnoticed = [fault for number, fault in enumerate(faults) if not any(found[number].different for found in by_rank)]
    assert len(faults) >= 4
    assert unnoticed == []


@pytest.mark.parametrize(
    ("sharding", "mean"), [matrix("table_wise", False), ("row_wise", True), matrix("column_wise", True)]
)
def test_real_gradients_differ_by_rounding(two_ranks: RankPool, sharding: str, mean: bool) -> None:
    """30 steps of row-wise Adagrad with learning rate 0.1, on weights of up to 1/sqrt(333); the rounding is stock's."""
    for outcome in two_ranks.run(rows_exchange.compare_real, Case(sharding=sharding, mean=mean, steps=30)):
        assert outcome.different == []
        assert 0 < outcome.loss_error < MANY
        assert 0 < outcome.weight_error < MANY


@pytest.mark.parametrize("sharding", keep(["column_wise"], SHARDINGS))
def test_checkpoints_move_between_both_exchanges(two_ranks: RankPool, sharding: str) -> None:
    assert two_ranks.run(rows_exchange.move_between_exchanges, Case(sharding=sharding)) == [[], []]


@pytest.mark.parametrize("weighted", [False, True])
def test_bytes_of_row_wise_tables(two_ranks: RankPool, weighted: bool) -> None:
    """A distinct id goes to its owner, its row comes back, and its gradient goes there."""
    case = Case(rows=(600, 600, 600, 600), sharding="row_wise", weighted=weighted)
    found = two_ranks.run(rows_exchange.sent_in_a_step, case)
    away = [sum(row // 300 != rank for row in _distinct(ids)) for rank, (_, ids) in enumerate(found)]
    for rank, (sent, _) in enumerate(found):
        assert sent.ids == away[rank] * 8 + 4 * 8 + 3 * 8  # ids, a length per table, sizes
        assert sent.embeddings == away[1 - rank] * 16 * 4
        assert sent.gradients == away[rank] * 16 * 4


def test_rows_travel_in_half_precision(two_ranks: RankPool) -> None:
    half = two_ranks.run(rows_exchange.sent_in_a_step, Case(comm=("fp16", "fp16")))
    for (sent, _), (whole, _) in zip(half, two_ranks.run(rows_exchange.sent_in_a_step, Case()), strict=True):
        assert (sent.embeddings, sent.gradients) == (whole.embeddings / 2, whole.gradients / 2)
        assert sent.ids == whole.ids


def test_bytes_of_a_shared_table(two_ranks: RankPool) -> None:
    """An id that two features of a table look up travels once."""
    case = Case(rows=(50, 600, 600, 600), shared=True, sharding="row_wise")
    for rank, (sent, ids) in enumerate(two_ranks.run(rows_exchange.sent_in_a_step, case)):
        by_table = [ids[0] + ids[4], ids[1], ids[2], ids[3]]
        blocks = [25, 300, 300, 300]
        away = sum(row // block != rank for t, block in zip(by_table, blocks, strict=True) for row in set(t))
        assert sent.gradients == away * 16 * 4


def _distinct(ids: list[list[int]]) -> list[int]:
    return [row for values in ids for row in set(values)]


def test_weighted_means_are_refused(two_ranks: RankPool) -> None:
    """The input all-to-all is made at the first batch."""
    for error in two_ranks.run(rows_exchange.error_of_a_step, Case(mean=True, weighted=True)):
        assert "on which FBGEMM and TorchRec disagree" in error
