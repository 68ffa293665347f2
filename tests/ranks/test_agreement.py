"""Ranks whose data end, fail or find no room at different times decide together. A hang would end in the pool's
timeout."""

from __future__ import annotations

import itertools

import pytest

from embershard.distributed.agreement import Supply
from tests.ranks import agreements
from tests.ranks.parity import Case
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

LENGTHS = (0, 1, 5)


def test_ranks_agree_on_the_least(two_ranks: RankPool) -> None:
    states = [(int(a), int(b)) for a, b in itertools.product(Supply, Supply)]
    first, second = two_ranks.run(agreements.agree, states)
    assert first == second
    for pair, (result, failure) in zip(states, first, strict=True):
        assert result == min(pair)
        failed = pair.index(Supply.FAILED) if Supply.FAILED in pair else None
        assert failure.startswith(f"the input of rank {failed} failed") if failed is not None else not failure


@pytest.mark.parametrize("first", [0, 1])
def test_start_does_not_wait_for_the_others(two_ranks: RankPool, first: int) -> None:
    assert two_ranks.run(agreements.start_before_the_other, first) == [Supply.FULL, Supply.FULL]


def test_agreements_do_not_mix(two_ranks: RankPool) -> None:
    expected = [(Supply.FULL, Supply.ENDED)] * 6
    assert two_ranks.run(agreements.several_at_once, 6) == [expected, expected]


def test_an_agreement_of_a_group_is_the_groups(two_ranks: RankPool) -> None:
    assert two_ranks.run(agreements.in_a_group_of_one) == [(Supply.ENDED, []), (Supply.READY, [0])]


def test_training_ends_with_the_first_rank(two_ranks: RankPool) -> None:
    pairs = list(itertools.product(LENGTHS, LENGTHS))
    results = two_ranks.run(agreements.run_shortest, [((a, False), (b, False)) for a, b in pairs])
    for rank, result in enumerate(results):
        assert result == [(list(range(100 * rank, 100 * rank + min(pair))), "") for pair in pairs]


def test_evaluation_ends_with_the_last_rank(two_ranks: RankPool) -> None:
    pairs = list(itertools.product(LENGTHS, LENGTHS))
    results = two_ranks.run(agreements.run_longest, [((a, False), (b, False)) for a, b in pairs])
    for rank, result in enumerate(results):
        for pair, (found, error) in zip(pairs, result, strict=True):
            real = list(range(100 * rank, 100 * rank + pair[rank]))
            stand_in = -real[-1] if real else -1
            assert error == ""
            assert found == [(i, True) for i in real] + [(stand_in, False)] * (max(pair) - len(real))


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("run", [agreements.run_shortest, agreements.run_longest])
def test_an_error_on_one_rank_stops_all(two_ranks: RankPool, run: object, failing: int) -> None:
    """In training a rank that ended before hides the error: no rank asks for that batch."""
    pairs = list(itertools.product(LENGTHS, LENGTHS))  # lengths of the failing and of the other rank
    cases = [((a, True), (b, False)) if failing == 0 else ((b, False), (a, True)) for a, b in pairs]
    results = two_ranks.run(run, cases)  # type: ignore[arg-type]
    for (before, other), of_failing, of_other in zip(pairs, results[failing], results[1 - failing], strict=True):
        if run is agreements.run_shortest and other < before:
            assert (of_failing[1], of_other[1], len(of_failing[0])) == ("", "", other)
        else:
            assert of_failing[1] == f"OSError: the disk of rank {failing} is gone"
            assert of_other[1].startswith(f"DataError: the input of rank {failing} failed")
            assert len(of_failing[0]) == before
        assert len(of_failing[0]) == len(of_other[0])


def test_both_ranks_failing_raise_their_own(two_ranks: RankPool) -> None:
    for run in (agreements.run_shortest, agreements.run_longest):
        results = two_ranks.run(run, [((2, True), (2, True))])
        assert [result[0][1] for result in results] == [f"OSError: the disk of rank {r} is gone" for r in (0, 1)]
        assert [len(result[0][0]) for result in results] == [2, 2]


def test_a_stand_in_that_cannot_be_made_stops_all_before_the_step(two_ranks: RankPool) -> None:
    pairs = [(0, 3), (3, 0), (1, 5), (2, 2), (0, 0)]
    results = two_ranks.run(agreements.run_longest_without_a_stand_in, pairs)
    for pair, both in zip(pairs, zip(*results, strict=True), strict=True):
        assert [len(found) for found, _ in both] == [min(pair)] * 2
        errors = [error for _, error in both]
        if pair[0] == pair[1]:
            assert errors == ["", ""]  # nobody needed one
        else:
            short = pair.index(min(pair))
            assert errors[short] == "KeyError: 'no stand-in'"
            assert errors[1 - short].startswith(f"DataError: the input of rank {short} failed")


@pytest.mark.parametrize("lengths", [(3, 0), (1, 3)])
@pytest.mark.parametrize(
    "case",
    [
        Case(sharding=("row_wise", "table_wise", "column_wise", "table_wise"), ratio=0.35, weighted=True),
        Case(sharding=("row_wise", "table_wise", "column_wise", "table_wise"), ratio=0.35, sequence=True),
    ],
    ids=["pooled and weighted", "sequence"],
)
def test_a_sharded_model_evaluates_on_stand_ins(two_ranks: RankPool, case: Case, lengths: tuple[int, int]) -> None:
    for result in two_ranks.run(agreements.evaluate_unevenly, case, lengths):
        assert result["losses"] == result["expected"]
        assert result["weighted"] == case.weighted
        assert result["untouched"]
