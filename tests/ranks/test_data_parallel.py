"""Data-parallel tables train what TorchRec's sharded tables train; the ranks of a machine share one host copy."""

from __future__ import annotations

import pytest

from tests.covering import keep, matrix
from tests.ranks import data_parallel, parity
from tests.ranks.data_parallel import Case
from tests.ranks.rounding import MANY
from tests.ranks.workers import RankPool

pytestmark = [pytest.mark.extra, pytest.mark.ranks]

CASES = {
    "sgd": Case(optimizer="sgd"),
    "adagrad, look-ahead": Case(optimizer="adagrad", lookahead=4, policy="lookahead"),
    "row-wise adagrad": Case(),
    "means": Case(mean=True),
    "weighted": Case(weighted=True),
    "shared table": Case(shared=True),
    "different dims": Case(dims=(16, 8, 16, 32)),
    "a rank without ids": Case(empty_every=3, lookahead=2, policy="lookahead", ratio=0.25),
    "fewer rows than ranks": Case(rows=(1, 3, 2000, 333), ratio=0.25),
    "evaluation in between": Case(evaluate_every=3),
    "weights from a counter": Case(init_seed=5, ratio=0.35),
}


#: What others have, too.
COMBINED = {"sgd", "weighted", "row-wise adagrad", "adagrad", "evaluation in between"}


@pytest.mark.smoke
@pytest.mark.parametrize("name", keep(["adagrad, look-ahead"], CASES))
def test_weights_and_states_are_those_of_sharded_tables(two_ranks: RankPool, name: str) -> None:
    for (outcome,) in two_ranks.run(data_parallel.compare_all, [CASES[name]]):
        assert outcome.different == []
        assert outcome.num_compared >= 4
        assert outcome.evictions > 50


@pytest.mark.parametrize(
    "case",
    [matrix(Case(ratio=0.6, optimizer="adagrad", lookahead=3, policy="lookahead")), matrix(Case(ratio=0.6))],
    ids=["look-ahead", "not"],
)
def test_four_ranks(four_ranks: RankPool, case: Case) -> None:
    for (outcome,) in four_ranks.run(data_parallel.compare_all, [case]):
        assert outcome.different == []
        assert outcome.evictions > 20


def test_one_rank_has_an_ordinary_cache(one_rank: RankPool) -> None:
    case = parity.Case(mode="data_parallel", sharding="row_wise", mean=True, steps=15)
    (found,) = one_rank.run(parity.compare, case)
    assert found["lfu"].different == []


@pytest.mark.parametrize("fault", ["rank left out", "division missing", "rows of other ids"])
def test_faults_are_noticed(two_ranks: RankPool, fault: str) -> None:
    for (outcome,) in two_ranks.run(data_parallel.compare_variants, Case(), [(Case(), fault)]):
        assert outcome.different


@pytest.mark.parametrize("mean", [matrix(False), True])
def test_real_gradients_differ_by_rounding(two_ranks: RankPool, mean: bool) -> None:
    """30 steps of row-wise Adagrad with learning rate 0.1, on weights of up to 1/sqrt(333); the rounding is stock's."""
    for outcome in two_ranks.run(data_parallel.compare_real, Case(mean=mean, steps=30)):
        assert outcome.different == []
        assert 0 < outcome.loss_error < MANY
        assert 0 < outcome.weight_error < MANY


@pytest.mark.parametrize("seed", [0, matrix(1), matrix(2)])
def test_ranks_plan_alike_whenever_they_plan(two_ranks: RankPool, seed: int) -> None:
    case = Case(lookahead=4, policy="lookahead", ratio=0.3, steps=25, batch_size=8)
    for different, unequal, waits in two_ranks.run(data_parallel.train_with_delays, case, seed):
        assert (different, unequal) == ([], [])
        assert waits > 20


def test_loading_reaches_the_copies_of_all_ranks(two_ranks: RankPool) -> None:
    for case in (Case(), Case(lookahead=3, policy="lookahead", optimizer="adagrad")):
        assert two_ranks.run(data_parallel.load_while_cached, case) == [[], []]


def test_checkpoints_move_to_stock_and_back(two_ranks: RankPool) -> None:
    assert two_ranks.run(data_parallel.rows_exchange.move_between_exchanges, Case()) == [[], []]


def test_after_a_flush_the_host_copy_is_complete(two_ranks: RankPool) -> None:
    assert two_ranks.run(data_parallel.flush_alone, Case(steps=10)) == [[], []]


def test_a_broken_cache_says_so_at_once(two_ranks: RankPool) -> None:
    """Its rank does not wait for ranks that may have left; those that come to the flush do not wait for it."""
    assert two_ranks.run(data_parallel.flush_a_broken_cache, Case(steps=3)) == ["CacheError: planted", ""]


def test_there_is_one_copy_of_the_tables(two_ranks: RankPool) -> None:
    """Rss counts a page on every rank that maps it, Pss shares it out among them."""
    found = two_ranks.run(data_parallel.memory_of_tables, Case(rows=(100_000, 50_000, 200_000, 33_300)))
    needed = found[0][0]
    assert needed > 20e6
    assert sum(pss for _, _, pss in found) == pytest.approx(needed, rel=0.02)
    assert sum(rss for _, rss, _ in found) == pytest.approx(2 * needed, rel=0.02)


def test_several_machines_are_refused(two_ranks: RankPool) -> None:
    for error in two_ranks.run(data_parallel.error_of, Case(), "two machines"):
        assert "all ranks must be on one machine (and in one container); got rank 0 on host0, rank 1 on host1" in error


def test_other_shardings_are_refused(two_ranks: RankPool) -> None:
    for error in two_ranks.run(data_parallel.error_of, Case(cached=(0, 2, 3))):
        assert "table 't1': mode \"data_parallel\" with sharding 'row_wise' and compute kernel 'fused'" in error
