"""The policies against slow references: true recency, true counts, and the most frequent rows stay."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.cache import MemoryRows, RowCache, make_scores
from embershard.cache import policies as scores_module
from embershard.cache.config import CachePolicy, Policy, Scoring
from embershard.cache.homes.shape import PoolShape
from embershard.frequency.counts import RowCounts
from tests.covering import examples, keep
from tests.unit.cache.harness import Pool

CPU = torch.device("cpu")


# -- lru ---------------------------------------------------------


class OrderedDictLru:
    """The textbook: one row at a time, the first of the dictionary leaves."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.held: OrderedDict[int, None] = OrderedDict()

    def use(self, key: int) -> None:
        self.held[key] = None
        self.held.move_to_end(key)
        if len(self.held) > self._num_slots:
            self.held.popitem(last=False)


def follows_lru(policy: Scoring, keys: list[int], num_slots: int) -> bool:
    """True if a pool holds the reference's rows after every one of `keys`."""
    pool, reference = Pool(num_slots=num_slots, policy=policy), OrderedDictLru(num_slots)
    for key in keys:
        pool.step([key])
        reference.use(key)
        if pool.resident() != set(reference.held):
            return False
    assert pool.expected["evictions"].sum() > 20
    return True


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [1, 2, 5, 15])
@pytest.mark.parametrize("policy", get_args(Scoring))
def test_lru_is_true_lru(policy, num_slots):
    """Also when the queue was ranked long ago: rows that it lists are skipped once they have been used. No other policy
    passes for it, but in one slot."""
    keys = (np.random.default_rng(num_slots).random(300) ** 2 * 30).astype(int).tolist()
    assert follows_lru(policy, keys, num_slots) == (policy == "lru" or num_slots == 1)


@pytest.mark.slow
@given(st.lists(st.integers(0, 29), min_size=40, max_size=150), st.integers(1, 9))
@examples(40)
def test_lru_is_true_lru_on_any_stream(keys, num_slots):
    pool, reference = Pool(num_slots=num_slots, policy="lru"), OrderedDictLru(num_slots)
    for key in keys:
        pool.step([key])
        reference.use(key)
        assert pool.resident() == set(reference.held)


@pytest.mark.matrix
def test_lru_over_many_slots_and_refills():
    pool, reference = Pool((2000,), num_slots=500, policy="lru"), OrderedDictLru(500)
    rng = np.random.default_rng(0)
    for key in (rng.random(1800) ** 1.5 * 2000).astype(int):
        pool.step([int(key)])
        reference.use(int(key))
    assert pool.expected["evictions"].sum() > 500
    assert pool.resident() == set(reference.held)


# -- lfu ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("decay", keep([None, 0.9], [None, 0.5, 0.9, 0.999]))
def test_lfu_counts_the_batches_that_held_a_row_whether_it_stayed_or_not(decay):
    """The pool's checker compares every count with a float64 reference after each step."""
    pool = Pool(num_slots=8, policy="lfu", decay=decay)
    rng = np.random.default_rng(1)
    for _ in range(250):
        pool.step((rng.random(6) ** 2 * 30).astype(int).tolist())
        pool.check()
    assert pool.expected["evictions"].sum() > 200


@pytest.mark.slow
def test_counts_are_scaled_back_long_before_they_overflow(monkeypatch):
    """0.5 ** 250 is far below what float32 holds, so the run above rescaled; here every few batches."""
    monkeypatch.setattr(scores_module, "_RESCALE_AT", 10.0)
    pool = Pool(num_slots=8, policy="lfu", decay=0.7)
    rng = np.random.default_rng(1)
    weights = set()
    for _ in range(100):
        pool.step((rng.random(6) ** 2 * 30).astype(int).tolist())
        pool.check()
        weights.add(pool.cache.state.scores._weight)
    assert max(weights) <= 10.0
    assert 1.0 in weights


def test_scores_stay_finite_with_the_strongest_decay():
    pool = Pool(num_slots=8, policy="lfu", decay=1e-300)
    for step in range(50):
        pool.step([step % 30, (step * 7) % 30])
        assert torch.isfinite(pool.cache.state.scores.of_slots()).all()


def test_repeats_in_a_batch_count_once_and_empty_batches_for_nothing():
    pool = Pool(num_slots=4, policy="lfu")
    pool.step([3, 3, 3, 5])
    pool.step([])
    pool.step([3])
    assert pool.cache.state.scores.of_slots()[pool.map.lookup(torch.tensor([3, 5]))].tolist() == [2.0, 1.0]


def test_lfu_starts_from_a_profile():
    profile = [0] * 30
    profile[4], profile[9] = 10, 3
    pool = Pool(num_slots=2, policy="lfu", profile=profile)
    for keys in ([4], [9], [1]):
        pool.step(keys)
    assert pool.resident() == {4, 1}
    pool.check()


def test_history_survives_eviction():
    """A row that was frequent comes back with its count, and then outlives rows that were used once."""
    pool = Pool(num_slots=2, policy="lfu")
    for _ in range(5):
        pool.step([7])
    pool.step([1, 2])
    assert 7 not in pool.resident()
    pool.step([7])
    pool.step([3])
    assert pool.resident() == {7, 3}


# -- frequency ---------------------------------------------------------


@pytest.mark.slow
def test_the_most_frequent_rows_stay():
    """The lowest eighth of the slots takes the traffic of the rare rows; nothing above it ever leaves."""
    num_rows, num_slots = 1000, 160
    profile = (np.arange(num_rows) * 7 % num_rows).tolist()
    pool = Pool((num_rows - 13, 1, 12), num_slots, "frequency", profile=profile, warmup=True)
    best = np.argsort(profile)[::-1]
    hot = set(best[: num_slots * 7 // 8 - 4].tolist())
    rng = np.random.default_rng(0)
    for _ in range(300):
        pool.step(rng.integers(num_rows, size=4).tolist())
        assert hot <= pool.resident()
    assert pool.expected["evictions"].sum() > 800


@pytest.mark.parametrize("policy", ["frequency", "lfu"])
def test_the_most_frequent_rows_stay_when_many_rows_miss(policy):
    """A quarter of the slots is replaced per batch, by rare rows: the other three must be safe."""
    num_rows, num_slots, misses = 4000, 160, 40
    profile = np.full(num_rows, 1)
    profile[: num_slots - misses] = 1000 + np.arange(num_slots - misses)
    pool = Pool((num_rows,), num_slots, policy, profile=profile.tolist(), warmup=True)
    rng = np.random.default_rng(0)
    for _ in range(20):
        pool.step(rng.integers(num_slots, num_rows, size=misses).tolist())
    assert pool.resident() >= set(range(num_slots - misses))


def test_frequency_scores_do_not_move_with_use():
    profile = list(range(30))
    pool = Pool(num_slots=3, policy="frequency", profile=profile)
    for _ in range(20):
        pool.step([1])
    for keys in ([28], [29], [2]):
        pool.step(keys)
    assert pool.resident() == {28, 29, 2}


def test_equal_frequencies_leave_by_age():
    pool = Pool(num_slots=3, policy="frequency", profile=[1] * 30)
    for key in (4, 9, 1, 4, 8):
        pool.step([key])
    assert pool.resident() == {1, 4, 8}


# -- static ---------------------------------------------------------


@pytest.mark.parametrize("policy", get_args(Policy))
def test_a_static_cache_admits_nothing(policy):
    """Slots for eight rows, two new ones per batch: six of the profile's stay for good, and a row that is used again
    and again misses again and again. Under any other policy one of the two does not hold."""
    profile = [0] * 30
    profile[:8] = [108, 107, 106, 105, 104, 103, 102, 101]
    pool = Pool(num_slots=8, policy=policy, profile=profile, warmup=True)
    misses = 0
    for step in range(40):
        before = int(pool.expected["fills"].sum())
        pool.step([20, 8 + step % 12])
        misses += int(pool.expected["fills"].sum()) - before
        pool.check()
    stays = pool.resident() >= set(range(6))
    assert (stays and misses == 8 + 2 * 40) == (policy == "static"), "8 of the warm-up, and both rows of each batch"


def test_rows_of_a_static_cache_leave_once_no_batch_in_flight_uses_them():
    pool = Pool(num_slots=9, policy="static", profile=[9, 8, 7, 6] + [0] * 26)
    first = pool.prepare([0, 20])
    second = pool.prepare([20, 21])
    assert pool.expected["fills"].sum() == 4 + 2, "row 20 is still there: the first batch is in flight"
    for batch in (first, second):
        pool.train(batch)
        pool.release(batch)
    pool.step([22])
    assert pool.resident() == {0, 1, 2, 3, 22}
    pool.check()


def test_a_static_cache_starts_with_its_profile_whatever_a_checkpoint_holds():
    profile = [9, 8, 7] + [0] * 27
    pool, other = (Pool(num_slots=5, policy=policy, profile=profile) for policy in ("static", "lfu"))
    other.step([20, 21])
    pool.cache.restore(other.cache.contents())
    pool.step([1])
    assert pool.resident() == {0, 1, 2}


# -- all of them ---------------------------------------------------------


@pytest.mark.parametrize("policy", get_args(Scoring))
def test_warm_up_takes_the_most_frequent_rows_and_only_those_that_occur(policy):
    profile = [0] * 30
    profile[3], profile[17], profile[29] = 5, 2, 9
    pool = Pool(num_slots=10, policy=policy, profile=profile, warmup=True)
    pool.prepare([3, 3, 8])
    assert pool.resident() == {3, 17, 29, 8}
    pool.check()
    (first, second, third) = pool.cache.stats()
    assert (first.fills, first.hits_unique, first.hits_lookups, first.unique_ids) == (2, 1, 2, 2)
    assert (second.fills, third.fills) == (1, 1)
    assert sum(s.critical_path_fills for s in (first, second, third)) == 1


@pytest.mark.parametrize(("policy", "per_slot", "per_row"), [("lru", 0, 0), ("lfu", 4, 4), ("frequency", 4, 4)])
def test_the_device_holds_a_score_per_slot_not_per_row(policy, per_slot, per_row):
    initial = RowCounts.of_dense(torch.ones(1000)) if policy == "frequency" else None
    made = make_scores(CachePolicy(policy), 1000, 10, CPU, initial)
    assert (made.device_bytes, made.host_bytes) == (per_slot * 11, per_row * 1000)
    made.grow(20)
    assert (made.device_bytes, made.host_bytes) == (per_slot * 21, per_row * 1000)


@pytest.mark.parametrize("policy", get_args(Scoring))
def test_the_profile_s_counts_are_not_written_to(policy):
    counts = RowCounts.of_dense(torch.ones(30))
    made = make_scores(CachePolicy(policy), 30, 4, CPU, counts)
    slots = torch.tensor([1, 2])
    made.admit(torch.tensor([3, 4]), slots)
    made.used(slots, torch.tensor([True, True]), slots[:0])
    made.evict(torch.tensor([3, 4]), slots)
    assert counts.hits.tolist() == [1] * 30


@pytest.mark.parametrize("policy", ["frequency", "lfu"])
def test_scores_are_kept_when_the_pool_grows(policy):
    made = make_scores(CachePolicy(policy), 30, 2, CPU, RowCounts.of_dense(torch.arange(30)))
    made.admit(torch.tensor([3, 4]), torch.tensor([1, 2]))
    made.grow(5)
    assert made.of_slots()[:3].tolist() == [0.0, 3.0, 4.0]
    assert made.of_slots().numel() == 6


@pytest.mark.slow
@pytest.mark.parametrize("policy", get_args(Scoring))
def test_counts_are_kept_until_the_warm_up_only(policy):
    """They take 16 bytes for every row that occurs."""
    counts = RowCounts.of_dense(torch.arange(30))
    kept = weakref.ref(counts)
    host, slots = MemoryRows(PoolShape([30], 2)), [torch.zeros(5, 2)]
    cache = RowCache(
        ["t"], host, lambda _: slots, 4, [0], CachePolicy(policy, False, warmup=True), CPU, row_counts=counts
    )
    del counts
    gc.collect()
    assert kept() is not None
    cache.prepare(torch.tensor([3]), torch.tensor([1]))
    gc.collect()
    assert kept() is None
    assert cache.state.map.lookup(torch.tensor([27, 28, 29])).gt(0).all(), "warmed up, but for one slot at most"
