"""How many batches are held ahead follows how long steps waited: a controller without clocks, on made-up machines."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.pipeline.prefetch_depth import PrefetchDepth

ROUND = 16


def run(ranks: list[PrefetchDepth], stall_at: Callable[[int, int], float], steps: int) -> list[int]:
    """Steps of one second on several ranks, which agree behind each; the depth after every step. ``stall_at``: how long
    a rank waits at a depth."""
    depths = []
    for _ in range(steps):
        for number, rank in enumerate(ranks):
            rank.add(1.0, stall_at(number, rank.depth))
        wish = max(rank.wish for rank in ranks)
        for rank in ranks:
            rank.agree(wish)
        assert len({rank.depth for rank in ranks}) == 1
        depths.append(ranks[0].depth)
    return depths


def test_one_batch_is_held_while_nothing_waits() -> None:
    assert set(run([PrefetchDepth(4, True)], lambda rank, depth: 0.0, 500)) == {1}


def test_more_are_held_until_nothing_waits() -> None:
    depths = run([PrefetchDepth(4, True)], lambda rank, depth: {1: 0.3, 2: 0.1}.get(depth, 0.0), 8 * ROUND)
    assert depths[-1] == max(depths) == 3
    assert sorted(set(depths)) == [1, 2, 3]


def test_never_more_than_the_most() -> None:
    assert max(run([PrefetchDepth(2, True)], lambda rank, depth: 1.0 / depth**4, 1000)) == 2


def test_what_does_not_help_is_taken_back_and_tried_ever_more_rarely() -> None:
    depths = run([PrefetchDepth(3, True)], lambda rank, depth: 0.5, 200 * ROUND)
    tries = [step for step in range(1, len(depths)) if depths[step - 1 : step + 1] == [1, 2]]
    assert max(depths) == 2
    assert depths.count(2) < 0.1 * len(depths)
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 4 * gaps[0]


def test_less_is_held_when_waiting_has_long_ended() -> None:
    depth = PrefetchDepth(4, True)
    assert run([depth], lambda rank, depth: 0.3 if depth < 2 else 0.0, 4 * ROUND)[-1] == 2
    assert run([depth], lambda rank, depth: 0.0, 20 * ROUND)[-1] == 1


def test_all_ranks_hold_what_one_of_them_needs() -> None:
    ranks = [PrefetchDepth(4, True) for _ in range(3)]
    depths = run(ranks, lambda rank, depth: 0.3 if rank == 1 and depth < 2 else 0.0, 4 * ROUND)
    assert depths[-1] == 2


def test_without_measurements_the_depth_is_the_most() -> None:
    depth = PrefetchDepth(3, False)
    assert set(run([depth], lambda rank, depth: 1.0, 100)) == {3}


@pytest.mark.slow
@given(st.integers(1, 5), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=400))
def test_the_depth_stays_between_one_and_the_most(most: int, stalls: list[float]) -> None:
    depth, waiting = PrefetchDepth(most, True), iter(stalls)
    assert all(1 <= each <= most for each in run([depth], lambda rank, depth: next(waiting), len(stalls)))
