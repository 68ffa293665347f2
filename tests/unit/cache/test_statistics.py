"""Counters per table, their sums, and what they cost. Every scenario of harness.py checks them too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.cache import CachePlan, TableStats
from embershard.cache.statistics import CacheCounters, Counter, apportion
from tests.unit.cache.harness import Pool, random_operations, run

CPU = torch.device("cpu")


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**9), min_size=1, max_size=30))
def test_parts_add_up_and_are_in_proportion(total, weights):
    parts = apportion(total, weights)
    assert sum(parts) == total
    assert len(parts) == len(weights)
    assert all(part >= 0 for part in parts)
    if sum(weights):
        assert all(abs(part - total * w / sum(weights)) < 1.001 for part, w in zip(parts, weights, strict=True))


def test_a_batch_is_split_by_feature_and_rows_by_table():
    """Three tables of 10, 0 and 5 rows; features: table 2, table 0, table 0."""
    counters = CacheCounters([0, 10, 10], [2, 0, 0], CPU)
    keys = torch.tensor([10, 14, 14, 0, 9, 9, 9])
    hits = torch.tensor([True, False, False, True, True, False, False])
    none = torch.empty(0, dtype=torch.int64)
    plan = CachePlan(
        1,
        keys + 1,
        torch.tensor([14]),
        none,
        torch.tensor([3, 11]),
        none,
        torch.tensor([3]),
        none,
        hits,
        torch.tensor([1, 2]),  # positions of the misses
    )
    counters.add_plan(plan, torch.tensor([3, 2, 2]), critical_path=True)
    found = {counter.name: counters.values[:, counter].tolist() for counter in Counter}
    assert found == {
        "LOOKUPS": [4, 0, 3],
        "MISSED_LOOKUPS": [0, 0, 2],
        "HITS_UNIQUE": [2, 0, 1],
        "FILLS": [0, 0, 1],
        "CRITICAL_PATH_FILLS": [0, 0, 1],
        "WRITE_BACKS": [1, 0, 0],
        "EVICTIONS": [1, 0, 1],
        "PRELOADS": [0, 0, 0],
        "OVERFLOW_GROWTHS": [0, 0, 0],
    }


def test_prefetched_fills_are_not_on_the_critical_path():
    pool = Pool()
    pool.prepare([1, 2, 17], critical_path=False)
    pool.prepare([3], critical_path=True)
    assert [s.critical_path_fills for s in pool.cache.stats()] == [1, 0, 0]
    assert [s.fills for s in pool.cache.stats()] == [3, 1, 0]


def test_an_overflow_counts_for_the_table_with_most_misses():
    pool = Pool(num_slots=3, overflow="grow")
    pool.step([1, 20, 21, 22])
    assert [s.overflow_growths for s in pool.cache.stats()] == [0, 0, 1]


def test_hit_rates():
    pool = Pool()
    assert {(s.hit_rate_unique, s.hit_rate_lookups) for s in pool.cache.stats()} == {(None, None)}
    pool.step([1, 1, 2])
    pool.step([1, 1, 1, 3])
    first = pool.cache.stats()[0]
    assert first.hit_rate_unique == pytest.approx(1 / 4)
    assert first.hit_rate_lookups == pytest.approx(3 / 7)


def test_bytes_are_what_is_allocated_and_what_was_moved():
    pool = Pool((17, 1, 12), num_slots=10, policy="lfu")
    run(pool, random_operations(seed=4, steps=50))
    stats = pool.cache.stats()
    row_bytes = 4 * (4 + 1 + 4)
    payload = 11 * row_bytes
    assert sum(s.device_bytes for s in stats) == pool.cache.device_bytes == payload + 30 * 4 + 11 * (4 + 8) + 11 * 4
    assert sum(s.host_bytes for s in stats) == 30 * row_bytes + 30 * 4
    assert [s.bytes_to_device for s in stats] == [s.fills * row_bytes for s in stats]


@pytest.mark.parametrize("num_slots", [1, 7, 30])
def test_slots_are_shared_out_before_anything_is_cached(num_slots):
    stats = Pool((17, 1, 12), num_slots).cache.stats()
    assert sum(s.slots for s in stats) == num_slots
    assert [s.rows for s in stats] == [17, 1, 12]


def test_seconds_grow_and_are_shared_out_by_lookups():
    pool = Pool()
    pool.step([1, 2, 3, 20])
    seconds = [s.seconds for s in pool.cache.stats()]
    assert seconds[0] > seconds[2] > seconds[1] == 0.0
    assert sum(seconds) == pytest.approx(pool.cache.counters.seconds)
    pool.step([1])
    assert sum(s.seconds for s in pool.cache.stats()) > sum(seconds)


def test_steps_stall_for_what_is_on_their_path_only():
    pool = Pool()
    pool.prepare([1, 2, 17], critical_path=False)
    assert sum(s.stall_seconds for s in pool.cache.stats()) == pool.cache.counters.stall_seconds == 0.0
    pool.prepare([3], critical_path=True)
    stats = pool.cache.stats()
    assert sum(s.stall_seconds for s in stats) == pytest.approx(pool.cache.counters.stall_seconds)
    assert 0.0 < pool.cache.counters.stall_seconds < sum(s.seconds for s in stats)


def test_counting_keeps_nothing_per_batch():
    pool = Pool()
    shape, storage = pool.cache.counters.values.shape, pool.cache.counters.values.data_ptr()
    for step in range(100):
        pool.step([step % 30])
    assert pool.cache.counters.values.shape == shape
    assert pool.cache.counters.values.data_ptr() == storage
    assert not any(isinstance(value, list) and len(value) > 30 for value in vars(pool.cache.counters).values())


def test_stats_are_values():
    stats = Pool().cache.stats()[0]
    assert isinstance(stats, TableStats)
    assert stats == stats
    assert hash(stats) == hash(stats)
    with pytest.raises(AttributeError):
        stats.fills = 3  # type: ignore[misc]
