"""Rows that somebody writes to in host memory, around torch's counters, are read in all modes once it is announced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.ranks import host_writes
from tests.ranks.rows_exchange import Case
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

HOT = Case(optimizer="adagrad", init_seed=3, exchange="pooled", hot=40, hot_every=3, steps=6, batch_size=8, ratio=0.3)
POOLED = replace(HOT, hot=None)
DATA_PARALLEL = replace(POOLED, mode="data_parallel", sharding="row_wise")
MODES = [
    HOT,
    replace(HOT, sharding="column_wise"),
    replace(HOT, sharding="row_wise", exchange="rows"),
    POOLED,
    replace(POOLED, sharding="column_wise", exchange="rows"),
    replace(POOLED, replicated=(0, 2)),
    DATA_PARALLEL,
]


def test_announced_writes_are_trained_on_in_all_modes(two_ranks: RankPool) -> None:
    assert two_ranks.run(host_writes.write_between_steps, MODES, False) == [[[] for _ in MODES]] * 2


def test_so_are_those_to_some_rows(two_ranks: RankPool) -> None:
    """The copies of other hot rows, and of rows on other ranks, stay as they are."""
    assert two_ranks.run(host_writes.write_between_steps, [*MODES[:2], DATA_PARALLEL], True) == [[[]] * 3] * 2


def test_one_rank(one_rank: RankPool) -> None:
    assert one_rank.run(host_writes.write_between_steps, [HOT, DATA_PARALLEL], True) == [[[], []]]


def test_hot_rows_that_were_not_flushed_are_an_error_on_all_ranks(two_ranks: RankPool) -> None:
    """Also where all batches are hot, so that no cache has trained a row. The host's rows count from then on."""
    for case in (HOT, replace(HOT, hot_every=1)):
        for error, is_written in two_ranks.run(host_writes.write_without_a_flush, replace(case, steps=3)):
            assert "hot rows of tables t0, t1, t2, t3 were trained after the last flush" in error
            assert is_written


def test_data_parallel_ranks_wait_for_each_other_s_writes(two_ranks: RankPool) -> None:
    assert two_ranks.run(host_writes.write_late, DATA_PARALLEL) == [[True], [True]]


def test_data_parallel_rows_are_loaded_when_no_rank_reads_any_more(two_ranks: RankPool) -> None:
    for before, (first, last) in two_ranks.run(host_writes.versions_when_ranks_meet, DATA_PARALLEL):
        assert (first, last > before) == (before, True)
