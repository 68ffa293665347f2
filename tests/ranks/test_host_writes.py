"""Rows that somebody writes to in host memory, around torch's counters, are read in all modes once it is announced."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from embershard import flush, host_rows_changed
from embershard.extras.hot_cold.mode import announce_hot_batches
from embershard.sharding.torchrec import cached_embeddings
from tests.covering import matrix
from tests.ranks import parity
from tests.ranks.absent import whole_tables
from tests.ranks.look_ahead import message_of
from tests.ranks.parity import LinearModel, differences
from tests.ranks.rows_exchange import Case, batches
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


def write_between_steps(cases: list[Case], rows: bool) -> list[list[str]]:
    """Tables are halved between two steps, and that is announced; weights and states that are then not those of stock
    TorchRec, for each case. ``rows``: only the even rows of table 2."""
    stock = replace(cases[0], exchange="pooled", sharding="table_wise", mode="sharded", replicated=())
    found = []
    for case, cached in ((replace(stock, hot=None), False), *((case, True) for case in cases)):
        model = parity.build(case, cached, LinearModel)
        announce_hot_batches(model)
        for step, (features, coefficients) in enumerate(batches(replace(case, hot=cases[0].hot))):
            if step in (2, 4):
                flush(model)
                dist.barrier()  # nobody reads rows now
                halve(model, rows)
                if cached:
                    host_rows_changed(model, *(("t2", torch.arange(0, 2000, 2)) if rows else ()))
            model(features, coefficients).backward()
        found.append(whole_tables(model))
    return [differences(found[0], tables) for tables in found[1:]]


def halve(model: Any, even_rows_of_t2: bool = False) -> None:
    """Halve this rank's rows, or the even ones of table 2."""
    for name, value in model.state_dict().items():
        if "embedding" not in name or (even_rows_of_t2 and ".t2." not in name):
            continue
        shards = (
            [(shard.tensor, shard.metadata.shard_offsets[0]) for shard in value.local_shards()]
            if isinstance(value, ShardedTensor)
            else [(value, 0)]
        )
        for tensor, first in shards:
            part = slice(first % 2, None, 2) if even_rows_of_t2 else slice(None)
            tensor.detach().numpy()[part] *= 0.5


def write_without_a_flush(case: Case) -> tuple[str, bool]:
    """The error of an announcement without a flush; whether the next read finds what was written."""
    model = parity.build(case, True, LinearModel)
    announce_hot_batches(model)
    steps = list(batches(case))
    flush(model)
    for features, coefficients in steps:
        model(features, coefficients).backward()
    written: list[Tensor] = []
    for pool in cached_embeddings(model):
        pool.host.weights.data.fill_(0.25)
        written.append(pool.host.weights)
    error = message_of(lambda: host_rows_changed(model))
    flush(model)
    return error, all(bool((rows == 0.25).all()) for rows in written)


def write_late(case: Case) -> list[bool]:
    """The first rank is late with its write, the others announce theirs at once: whether this rank then reads what all
    have written, by pool."""
    model = parity.build(case, True, LinearModel)
    for features, coefficients in batches(case):
        model(features, coefficients).backward()
    flush(model)
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.5)
    halve(model)
    host_rows_changed(model)
    found = []
    for pool in cached_embeddings(model):
        keys = pool.cache.contents().rows
        slots = pool.cache.read(keys)
        dist.barrier()
        found.append(torch.equal(slots, pool.host.weights[keys]))
    return found


def versions_when_ranks_meet(case: Case) -> tuple[int, list[int]]:
    """The version of a pool's rows before `load_state_dict`, and at each barrier of the ranks during it."""
    model = parity.build(case, True, LinearModel)
    (pool, *_) = cached_embeddings(model)
    tensors, found = model.state_dict(), []
    before, wait = pool.host.version, pool.host.wait_for_ranks

    def noting(*arguments: Any) -> None:
        found.append(pool.host.version)
        wait(*arguments)

    pool.host.wait_for_ranks = noting  # type: ignore[method-assign]
    model.load_state_dict(tensors)
    return before, found


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


#: Those of the core.
CORE = [case for case in MODES if case.mode == "sharded" and not case.hot]


@pytest.mark.parametrize("modes", [CORE, matrix(MODES)], ids=len)
def test_announced_writes_are_trained_on_in_all_modes(two_ranks: RankPool, modes: list[Case]) -> None:
    assert two_ranks.run(write_between_steps, modes, False) == [[[] for _ in modes]] * 2


@pytest.mark.extra
def test_so_are_those_to_some_rows(two_ranks: RankPool) -> None:
    """The copies of other hot rows, and of rows on other ranks, stay as they are."""
    assert two_ranks.run(write_between_steps, [*MODES[:2], DATA_PARALLEL], True) == [[[]] * 3] * 2


@pytest.mark.extra
def test_one_rank(one_rank: RankPool) -> None:
    assert one_rank.run(write_between_steps, [HOT, DATA_PARALLEL], True) == [[[], []]]


@pytest.mark.extra
def test_hot_rows_that_were_not_flushed_are_an_error_on_all_ranks(two_ranks: RankPool) -> None:
    """Also where all batches are hot, so that no cache has trained a row. The host's rows count from then on."""
    for case in (HOT, replace(HOT, hot_every=1)):
        for error, is_written in two_ranks.run(write_without_a_flush, replace(case, steps=3)):
            assert "hot rows of tables t0, t1, t2, t3 were trained after the last flush" in error
            assert is_written


@pytest.mark.extra
def test_data_parallel_ranks_wait_for_each_other_s_writes(two_ranks: RankPool) -> None:
    assert two_ranks.run(write_late, DATA_PARALLEL) == [[True], [True]]


@pytest.mark.extra
def test_data_parallel_rows_are_loaded_when_no_rank_reads_any_more(two_ranks: RankPool) -> None:
    for before, (first, last) in two_ranks.run(versions_when_ranks_meet, DATA_PARALLEL):
        assert (first, last > before) == (before, True)
