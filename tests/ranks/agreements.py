"""What ranks do in test_agreement.py: functions that run in the worker processes and return plain values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import cache_stats
from embershard.distributed import empty_like, longest, shortest
from embershard.distributed.agreement import Agreement, Supply
from tests.ranks.parity import Case, batches, build, train

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
