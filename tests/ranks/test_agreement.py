"""Ranks whose data end, fail or find no room at different times decide together. A hang would end in the pool's
timeout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import cache_stats
from embershard.distributed import empty_like, longest, shortest
from embershard.distributed.agreement import Agreement, Supply
from tests.covering import keep
from tests.ranks.parity import Case, batches, build, train
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

Batch = tuple[KeyedJaggedTensor, Tensor]


def agree(states: list[tuple[int, int]]) -> list[tuple[int, str]]:
    """Per pair of what the ranks say: what they agree on, and which rank failed. Another collective between."""
    agreement, rank = Agreement("cpu"), dist.get_rank()
    found = []
    for pair in states:
        agreement.start(pair[rank])
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
        result = agreement.result()
        assert isinstance(result, Supply)
        found.append((int(result), str(agreement.failure()) if result is Supply.FAILED else ""))
    return found


def start_before_the_other(first: int) -> int:
    """The second rank starts only once it has heard from the first that `start` came back."""
    agreement, message = Agreement("cpu"), torch.zeros(1)
    if dist.get_rank() == first:
        agreement.start(Supply.READY)
        dist.send(message, 1 - first)
    else:
        dist.recv(message, first)
        agreement.start(Supply.FULL)
    return int(agreement.result())


def several_at_once(rounds: int) -> list[tuple[int, int]]:
    """Two agreements in flight at a time keep their answers apart. One is that of a GPU, whose ranks agree in host
    memory where their group can."""
    one, two, rank = Agreement("cpu"), Agreement("cuda"), dist.get_rank()
    found = []
    for i in range(rounds):
        one.start(Supply.READY if rank != i % 2 else Supply.FULL)
        two.start(Supply.READY if rank != i % 2 else Supply.ENDED)
        found.append((int(one.result()), int(two.result())))
    return found


def in_a_group_of_one() -> tuple[int, list[int]]:
    """Groups of one rank each: a rank does not see the other one."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    agreement = Agreement("cpu", groups[rank])
    agreement.start(Supply.READY if rank else Supply.ENDED)
    return int(agreement.result()), list(shortest(range(rank), "cpu", groups[rank]))


class _Numbers:
    """100 r, 100 r + 1, ... on rank r, then the end or an error; not to be asked again after either."""

    def __init__(self, length: int, fails: bool) -> None:
        self._rank, self._length, self._fails, self._asked = dist.get_rank(), length, fails, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self._asked += 1
        if self._asked <= self._length:
            return 100 * self._rank + self._asked - 1
        assert self._asked == self._length + 1, "asked again after the end"
        if self._fails:
            raise OSError(f"the disk of rank {self._rank} is gone")
        raise StopIteration


def _collect(source: Iterator[Any]) -> tuple[list[Any], str]:
    """What was yielded, each with a collective, as in a step; the error's text."""
    found: list[Any] = []
    try:
        for item in source:
            dist.all_reduce(torch.ones(1))
            found.append(item)
    except Exception as error:
        return found, f"{type(error).__name__}: {error}"
    return found, ""


Lengths = list[tuple[tuple[int, bool], tuple[int, bool]]]


def run_shortest(cases: Lengths) -> list[tuple[list[int], str]]:
    """Per case, a pair of lengths and whether the iterator then fails: what this rank got."""
    return [_collect(shortest(_Numbers(*case[dist.get_rank()]), "cpu")) for case in cases]


def run_longest(cases: Lengths) -> list[tuple[list[tuple[int, bool]], str]]:
    """The same; a stand-in is the negative of the last number, or -1."""

    def empty(last: int | None) -> int:
        return -1 if last is None else -last

    return [_collect(longest(_Numbers(*case[dist.get_rank()]), empty, "cpu")) for case in cases]


def run_longest_without_a_stand_in(lengths: list[tuple[int, int]]) -> list[tuple[list[tuple[int, bool]], str]]:
    """The stand-in cannot be made."""

    def empty(_: int | None) -> int:
        raise KeyError("no stand-in")

    return [_collect(longest(_Numbers(pair[dist.get_rank()], False), empty, "cpu")) for pair in lengths]


def evaluate_unevenly(case: Case, lengths: tuple[int, int]) -> dict[str, Any]:
    """Evaluate a trained model on another number of batches per rank; against one where both have all of them."""
    model = build(case, cached=True)
    train(model, case, steps=3)
    rank = dist.get_rank()
    unseen = list(batches(case, rank, max(lengths), seed=4))
    counted = [stats.lookups for stats in cache_stats(model)]
    results, placeholder = [], next(batches(case, rank, 1, seed=9))
    with torch.no_grad():
        expected = [model(*batch).item() for batch in unseen]
        mine: Iterator[Batch] = itertools.islice(unseen, lengths[rank])
        for batch, is_real in longest(mine, lambda last: empty_like(last or placeholder), "cpu"):
            loss = model(*batch)
            results.append(loss.item() if is_real else None)
    return {
        "losses": results,
        "expected": expected[: lengths[rank]] + [None] * (max(lengths) - lengths[rank]),
        "weighted": placeholder[0].weights_or_none() is not None,
        "untouched": counted == [stats.lookups for stats in cache_stats(model)],
    }


LENGTHS = (0, 1, 5)


def test_ranks_agree_on_the_least(two_ranks: RankPool) -> None:
    states = [(int(a), int(b)) for a, b in itertools.product(Supply, Supply)]
    first, second = two_ranks.run(agree, states)
    assert first == second
    for pair, (result, failure) in zip(states, first, strict=True):
        assert result == min(pair)
        failed = pair.index(Supply.FAILED) if Supply.FAILED in pair else None
        assert failure.startswith(f"the input of rank {failed} failed") if failed is not None else not failure


@pytest.mark.parametrize("first", [0, 1])
def test_start_does_not_wait_for_the_others(two_ranks: RankPool, first: int) -> None:
    assert two_ranks.run(start_before_the_other, first) == [Supply.FULL, Supply.FULL]


def test_agreements_do_not_mix(two_ranks: RankPool) -> None:
    expected = [(Supply.FULL, Supply.ENDED)] * 6
    assert two_ranks.run(several_at_once, 6) == [expected, expected]


def test_an_agreement_of_a_group_is_the_groups(two_ranks: RankPool) -> None:
    assert two_ranks.run(in_a_group_of_one) == [(Supply.ENDED, []), (Supply.READY, [0])]


def test_training_ends_with_the_first_rank(two_ranks: RankPool) -> None:
    pairs = list(itertools.product(LENGTHS, LENGTHS))
    results = two_ranks.run(run_shortest, [((a, False), (b, False)) for a, b in pairs])
    for rank, result in enumerate(results):
        assert result == [(list(range(100 * rank, 100 * rank + min(pair))), "") for pair in pairs]


def test_evaluation_ends_with_the_last_rank(two_ranks: RankPool) -> None:
    pairs = list(itertools.product(LENGTHS, LENGTHS))
    results = two_ranks.run(run_longest, [((a, False), (b, False)) for a, b in pairs])
    for rank, result in enumerate(results):
        for pair, (found, error) in zip(pairs, result, strict=True):
            real = list(range(100 * rank, 100 * rank + pair[rank]))
            stand_in = -real[-1] if real else -1
            assert error == ""
            assert found == [(i, True) for i in real] + [(stand_in, False)] * (max(pair) - len(real))


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("run", [run_shortest, run_longest])
def test_an_error_on_one_rank_stops_all(two_ranks: RankPool, run: object, failing: int) -> None:
    """In training a rank that ended before hides the error: no rank asks for that batch."""
    pairs = list(itertools.product(LENGTHS, LENGTHS))  # lengths of the failing and of the other rank
    cases = [((a, True), (b, False)) if failing == 0 else ((b, False), (a, True)) for a, b in pairs]
    results = two_ranks.run(run, cases)  # type: ignore[arg-type]
    for (before, other), of_failing, of_other in zip(pairs, results[failing], results[1 - failing], strict=True):
        if run is run_shortest and other < before:
            assert (of_failing[1], of_other[1], len(of_failing[0])) == ("", "", other)
        else:
            assert of_failing[1] == f"OSError: the disk of rank {failing} is gone"
            assert of_other[1].startswith(f"DataError: the input of rank {failing} failed")
            assert len(of_failing[0]) == before
        assert len(of_failing[0]) == len(of_other[0])


def test_both_ranks_failing_raise_their_own(two_ranks: RankPool) -> None:
    for run in (run_shortest, run_longest):
        results = two_ranks.run(run, [((2, True), (2, True))])
        assert [result[0][1] for result in results] == [f"OSError: the disk of rank {r} is gone" for r in (0, 1)]
        assert [len(result[0][0]) for result in results] == [2, 2]


def test_a_stand_in_that_cannot_be_made_stops_all_before_the_step(two_ranks: RankPool) -> None:
    pairs = [(0, 3), (3, 0), (1, 5), (2, 2), (0, 0)]
    results = two_ranks.run(run_longest_without_a_stand_in, pairs)
    for pair, both in zip(pairs, zip(*results, strict=True), strict=True):
        assert [len(found) for found, _ in both] == [min(pair)] * 2
        errors = [error for _, error in both]
        if pair[0] == pair[1]:
            assert errors == ["", ""]  # nobody needed one
        else:
            short = pair.index(min(pair))
            assert errors[short] == "KeyError: 'no stand-in'"
            assert errors[1 - short].startswith(f"DataError: the input of rank {short} failed")


@pytest.mark.parametrize("lengths", keep([(3, 0)], [(3, 0), (1, 3)]))
@pytest.mark.parametrize(
    "case",
    [
        Case(sharding=("row_wise", "table_wise", "column_wise", "table_wise"), ratio=0.35, weighted=True),
        Case(sharding=("row_wise", "table_wise", "column_wise", "table_wise"), ratio=0.35, sequence=True),
    ],
    ids=["pooled and weighted", "sequence"],
)
def test_a_sharded_model_evaluates_on_stand_ins(two_ranks: RankPool, case: Case, lengths: tuple[int, int]) -> None:
    for result in two_ranks.run(evaluate_unevenly, case, lengths):
        assert result["losses"] == result["expected"]
        assert result["weighted"] == case.weighted
        assert result["untouched"]
