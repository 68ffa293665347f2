"""What the cache promises, after any sequence of operations: every row right, no pin broken, every counter true."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.cache import CacheGrowthWarning
from embershard.errors import CacheError, CacheOverflowError
from tests.unit.cache.faults import FAULTS
from tests.unit.cache.harness import DIM, Pool, random_operations, run

POLICIES = ("frequency", "lfu", "lru")
NUM_ROWS = 30

rows = st.lists(st.integers(0, NUM_ROWS - 1), max_size=8).map(tuple)
which = st.tuples(st.integers(0, 3))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("prepare"), rows),
        st.tuples(st.just("prepare"), rows),
        st.tuples(st.just("train"), which),
        st.tuples(st.just("train"), which),
        st.tuples(st.sampled_from(["abandon", "flush", "drop"]), which),
        st.tuples(st.sampled_from(["read", "load"]), rows),
    ),
    max_size=40,
)


@given(
    operations,
    st.sampled_from(POLICIES),
    st.integers(1, 12),
    st.sampled_from(["grow", "raise"]),
    st.sampled_from([None, 0.9, 1e-3]),
    st.booleans(),
)
@settings(max_examples=150)
def test_every_row_is_right_after_any_operations(operations, policy, num_slots, overflow, decay, warmup):
    profile = [(7 * k) % 23 for k in range(NUM_ROWS)] if warmup else None
    decay = decay if policy == "lfu" else None
    run(Pool(num_slots=num_slots, policy=policy, overflow=overflow, decay=decay, profile=profile, warmup=warmup), operations)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("overflow", ["raise", "grow"])
def test_many_evictions_with_batches_in_flight(policy, overflow):
    pool = Pool(num_slots=16 if overflow == "raise" else 4, policy=policy, overflow=overflow)
    run(pool, random_operations(seed=1, steps=150))
    totals = {name: int(values.sum()) for name, values in pool.expected.items()}
    assert totals["evictions"] > 100
    assert totals["write_backs"] > 100
    assert 100 < totals["hits_unique"] < totals["unique_ids"]
    assert (totals["overflow_growths"] > 0) == (overflow == "grow")


def check_scenarios() -> None:
    """What the negative controls run: it passes when nothing is broken."""
    run(Pool(num_slots=12), random_operations(seed=0, steps=100))
    run(Pool(num_slots=3, overflow="grow"), random_operations(seed=1, steps=40))


def test_the_negative_controls_pass_without_a_fault():
    check_scenarios()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault):
    with FAULTS[fault](), pytest.raises(AssertionError):
        check_scenarios()
