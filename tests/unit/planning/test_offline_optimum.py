"""The benchmark's yardstick: no choice of victims does with fewer fills."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.extras.profile_picture.hit_rate_curve import look_ahead_rule, offline_optimum

pytestmark = [pytest.mark.extra, pytest.mark.smoke]
STREAMS = st.lists(st.sets(st.integers(0, 6), min_size=1, max_size=3), min_size=1, max_size=9)


def arrays(batches: Sequence[set[int]]) -> list[np.ndarray]:
    return [np.array([*batch, *batch]) for batch in batches]  # repeats count once


def exhaustive(batches: Sequence[set[int]], capacity: int, prefetch: int) -> int | None:
    """Tries every set of rows that could stay at every batch, needlessly small ones too."""
    fewest = {frozenset[int](): 0}
    for last, batch in enumerate(batches):
        held = frozenset[int]().union(*batches[max(0, last - prefetch) : last + 1])
        reached: dict[frozenset[int], int] = {}
        for resident, fills in fewest.items():
            others = sorted(resident - held)
            for count in range(min(len(others), capacity - len(held)) + 1):
                for kept in combinations(others, count):
                    after = held.union(kept)
                    reached[after] = min(fills + len(batch - resident), reached.get(after, fills + len(batch)))
        fewest = reached
    return min(fewest.values(), default=None)


@pytest.mark.slow
@settings(max_examples=300)
@given(STREAMS, st.integers(2, 6), st.integers(0, 2))
def test_no_choice_of_victims_needs_fewer_fills(batches: list[set[int]], capacity: int, prefetch: int) -> None:
    assert offline_optimum(arrays(batches), capacity, prefetch) == exhaustive(batches, capacity, prefetch)


@pytest.mark.slow
@settings(max_examples=100)
@given(STREAMS, st.integers(2, 6), st.integers(0, 2))
def test_the_rule_that_knows_everything_is_the_optimum(batches: list[set[int]], capacity: int, prefetch: int) -> None:
    knows_all = look_ahead_rule(arrays(batches), capacity, len(batches), prefetch)
    assert knows_all == offline_optimum(arrays(batches), capacity, prefetch)


@pytest.mark.parametrize(("lookahead", "fills"), [(0, 5), (1, 5), (2, 4)])
def test_the_rule_knows_no_further_than_it_says(lookahead: int, fills: int) -> None:
    """Row 0 is used again two batches after row 2 needs a slot; until that is known, the longest unused row leaves."""
    assert look_ahead_rule(arrays([{0}, {1}, {2}, {3}, {0}]), 2, lookahead, 0) == fills


def test_among_rows_without_a_known_use_the_least_used_leaves() -> None:
    assert look_ahead_rule(arrays([{0}, {0}, {1}, {2}, {0}]), 2, 0, 0) == 3
    assert look_ahead_rule(arrays([{1}, {0}, {1}, {2}, {0}]), 2, 0, 0) == 4


def test_known_counts_tell_what_comes_often() -> None:
    """Row 0 was used twice when row 2 needs a slot; row 1 once, and three times after that. Rows 1 and 2 take turns
    until row 1 was used as often."""
    batches = arrays([{0}, {0}, {1}, {2}, {1}, {2}, {1}, {2}, {1}])
    assert look_ahead_rule(batches, 2, 0, 0) == 5
    assert look_ahead_rule(batches, 2, 0, 0, counts_known=True) == 3


def test_what_is_held_ahead_cannot_leave() -> None:
    """Rows 0 and 1 are of no more use, but batch 1 waits and batch 0 trains while batch 2 is brought in."""
    batches = arrays([{0, 9}, {1}, {2}, {9}])
    assert [offline_optimum(batches, 3, prefetch) for prefetch in (0, 1, 2)] == [4, 4, None]
    assert offline_optimum(batches, 4, prefetch=2) == 4
    assert offline_optimum(arrays([{0, 1, 2}]), 2) is None
