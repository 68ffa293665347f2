"""A cache over rows that are made when first touched: every row is right after any operations, as if all were made."""

from __future__ import annotations

import functools
from typing import get_args
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.cache.config import Policy
from embershard.cache.homes.memory import MemoryRows
from embershard.cache.rows import copies
from embershard.cache.rows.lazy_rows import LazyRows
from embershard.cache.rows.transfer import StagedTransfer
from embershard.errors import CacheError
from embershard.stages import stages_recorded
from tests.covering import examples
from tests.unit.cache.harness import Pool, made_rows, random_operations, run, windowed_operations
from tests.unit.cache.test_row_cache import NUM_ROWS, operations, window_operations

POLICIES = get_args(Policy)
TRANSFERS = ["plain", StagedTransfer, functools.partial(StagedTransfer, buffer_bytes=1)]


@pytest.mark.slow
@given(operations, st.sampled_from(POLICIES), st.integers(1, 12), st.booleans(), st.sampled_from(TRANSFERS))
@examples(60)
def test_every_row_is_right_after_any_operations(operations, policy, num_slots, warmup, transfer):
    """The writes among them come after a flush, as they must."""
    profile = [(7 * k) % 23 for k in range(NUM_ROWS)] if warmup else None
    run(
        Pool(
            num_slots=num_slots,
            policy=policy,
            overflow="grow",
            profile=profile,
            warmup=warmup,
            transfer=transfer,
            lazy=True,
        ),
        operations,
    )


@pytest.mark.slow
@given(operations, st.integers(6, 12), st.booleans(), st.sampled_from(TRANSFERS))
@examples(60)
def test_every_row_is_right_after_a_warm_up_that_leaves_host_rows_for_later(operations, num_slots, later, transfer):
    """Made by the thread before the first batch, or not before a write-back needs them."""
    make_later = LazyRows.make if later else mock.Mock()
    with mock.patch.object(copies, "_MOST_MADE_AT_ONCE", 0), mock.patch.object(LazyRows, "make_later", make_later):
        profile = [(7 * k) % 23 for k in range(NUM_ROWS)]
        pool = Pool(num_slots=num_slots, overflow="grow", profile=profile, warmup=True, transfer=transfer, lazy=True)
        run(pool, operations)


def test_a_warm_up_makes_no_row_while_a_step_waits_for_it_and_is_a_stage(monkeypatch):
    """A page of host memory for each row took 3 s of the first step (decision 0057)."""
    monkeypatch.setattr(copies, "_MOST_MADE_AT_ONCE", 0)
    later = mock.Mock()
    monkeypatch.setattr(LazyRows, "make_later", later)
    pool = Pool(num_slots=8, lazy=True, profile=list(range(NUM_ROWS)), warmup=True)
    with stages_recorded(), mock.patch("torch.profiler.record_function") as stage:
        pool.prepare([NUM_ROWS - 1])
    assert mock.call("embershard: warm-up") in stage.mock_calls
    assert not made_rows(pool.host).any()
    warm = later.call_args.args[0]
    assert warm.tolist() == list(range(NUM_ROWS - 8, NUM_ROWS)), "the most frequent ones"
    slots = pool.cache.state.map.lookup(warm)
    assert torch.equal(pool.slots[0][slots], pool.rows[0][warm])


@pytest.mark.slow
@given(window_operations, st.integers(1, 14), st.sampled_from([None, 1]))
@examples(60)
def test_every_row_is_right_in_a_window(operations, num_slots, pinned_table):
    run(
        Pool(
            num_slots=num_slots + 1 if pinned_table else num_slots,
            policy="lookahead",
            overflow="grow",
            pinned_table=pinned_table,
            lazy=True,
        ),
        operations,
    )


@pytest.mark.slow
def test_long_histories_in_memory_and_in_files(tmp_path):
    run(Pool(num_slots=12, lazy=True), random_operations(seed=0, steps=100))
    run(Pool(num_slots=12, lazy=True, mmap_dir=tmp_path), random_operations(seed=1, steps=60))
    run(Pool(num_slots=20, policy="lookahead", lazy=True), windowed_operations(seed=3, steps=90))


@pytest.mark.parametrize("path", ["prepare", "warmup", "pinned", "read"])
def test_a_path_that_forgets_to_make_its_rows_is_noticed(path):
    """Negative control: with `MemoryRows.make` gone, each way of reading rows gets zeros, and the harness says so."""
    profile = [(7 * k) % 23 for k in range(NUM_ROWS)] if path == "warmup" else None
    pinned_table = 1 if path == "pinned" else None
    with mock.patch.object(MemoryRows, "make"):
        pool = Pool(num_slots=8, lazy=True, profile=profile, warmup=path == "warmup", pinned_table=pinned_table)
        with pytest.raises(AssertionError):
            run(pool, [("read" if path == "read" else "prepare", (3,))])


def test_only_touched_rows_are_made_until_a_flush():
    pool = Pool(num_slots=4, policy="lru", lazy=True)  # blocks of 2 rows
    assert not made_rows(pool.host).any()
    pool.read([2])
    pool.train(pool.prepare([7, 20]))
    assert made_rows(pool.host).nonzero().flatten().tolist() == [2, 3, 6, 7, 20, 21]
    pool.cache.write_back()
    assert int(made_rows(pool.host).sum()) == 6
    pool.cache.flush()
    assert pool.host.is_made


def test_writes_to_weights_before_all_rows_are_made_are_refused():
    """Rows made later would overwrite them."""
    for write in (
        lambda pool: pool.host.weights[5].fill_(1.0),
        lambda pool: pool.host.views.table_weights()[0][5].fill_(1.0),
        lambda pool: pool.host.views.flat_weights.zero_(),
    ):
        pool = Pool(num_slots=4, policy="lru", lazy=True)
        pool.cache.prepare(*pool.split_by_feature([7]))
        write(pool)
        for _ in range(2):  # for good: nobody can tell which rows were meant
            with pytest.raises(CacheError, match=r"before all rows had their initial weights.*embershard.flush"):
                pool.cache.read(torch.tensor([5]))
            with pytest.raises(CacheError, match="before all rows had their initial weights"):
                pool.cache.flush()
    pool = Pool(num_slots=4, policy="lru", lazy=True)
    with pytest.raises(CacheError, match="before all rows had their initial weights"):
        pool.cache.host_rows_changed(torch.tensor([5]))
    pool.cache.flush()
    pool.host.weights[5] = 3.0
    assert (pool.cache.read(torch.tensor([5])) == 3.0).all()
    pool.host.weights.data[6] = 4.0
    pool.cache.host_rows_changed(torch.tensor([6]))
    assert (pool.cache.read(torch.tensor([6])) == 4.0).all()


def test_optimizer_states_may_be_written_before_all_rows_are_made():
    """They start as zeros, made or not: loading them alone makes no row."""
    pool = Pool(num_slots=4, policy="lru", lazy=True)
    pool.host.states["momentum"][5] = 2.0
    pool.rows[1][5] = 2.0
    ticket, _ = pool.tickets[pool.prepare([5])]
    assert (pool.slots[1][ticket.slots] == 2.0).all()
    assert int(made_rows(pool.host).sum()) == 2
