"""On the model of a GPU a cache holds at its peak what the memory model says: slots, maps, rankings, plans, known
batches, warm-up, write-backs, what a checkpoint asks for, and publications."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from embershard.cache import eviction, slot_map
from embershard.cache.config import CacheConfig
from embershard.cache.gpu import victim_queue
from embershard.cache.gpu.victim_queue import KernelVictimQueue
from embershard.cache.parts import changed
from embershard.cache.rows import copies, moves
from embershard.cache.slot_map import SlotMap
from embershard.distributed.changed_rows import BehindRows
from embershard.extras.publications.sources import PublishedPool
from embershard.sharding.memory_model import (
    known_batch_bytes,
    known_batches,
    pool_memory,
)
from embershard.sharding.run_shape import ReplaySettings, RunShape
from embershard.sharding.sizes import PlacedShard, TableSize
from tests.covering import keep
from tests.unit.gpu_model import training
from tests.unit.gpu_model.device import Gpu
from tests.unit.gpu_model.training import Setting, batches, modelled, train

pytestmark = pytest.mark.slow

ROWS = (24_000, 5, 3000)
_BLOCK_BYTES = 4000
#: Of an id in a plan, where a quarter of the ids miss: keys, slots, numbers of rows to fill, a sort, candidates and
#: what waits for its batch. On a GPU it comes out of the memory that plans leave free.
_PLAN_ID_BYTES = 300


@dataclass(frozen=True)
class Case:
    """A run: its settings, the columns of its rows, and the samples of a batch."""

    setting: Setting
    dim: int = 16
    batch: int = 8


def _case(dim: int = 16, batch: int = 8, **settings: Any) -> Case:
    chosen = {"rows": ROWS, "num_slots": 12_000, "steps": 14, "lookahead": 4, **settings}
    return Case(Setting(kernels=True, **chosen), dim, batch)


CASES = {
    "look-ahead, array": _case(),
    "look-ahead, hashed": _case(slot_map="hashed"),
    "lfu, hashed": _case(policy="lfu", slot_map="hashed", dim=4),
    "lru, wide rows": _case(policy="lru", dim=64),
    "int8": _case(small="int8"),
    "fp16, staged": _case(small="fp16", transfer="staged", buffer_bytes=2000),
    "a file": _case(filed=27_005),
}


def predicted(case: Case) -> float:
    """Bytes of the pool, of its known batches and plans, and of a publication's blocks."""
    setting, dim = case.setting, case.dim
    sizes = [TableSize(f"t{n}", rows, dim, "fp32", 4, host_dtype=setting.small) for n, rows in enumerate(setting.rows)]
    shards = [PlacedShard(size, 0, 0, size.rows, dim, "row_wise", "cached") for size in sizes]
    policy = CacheConfig(ratio=0.1, policy=setting.policy).policy_for(False)  # type: ignore[arg-type]
    cache = ReplaySettings(policy, setting.lookahead if policy.by_next_use else 0, setting.prefetch)
    shape = RunShape(1, 1, case.batch, "cuda", cache, slot_map=setting.slot_map)  # type: ignore[arg-type]
    with Gpu():
        ids = max(each.values().numel() for each in batches(setting)) / len(shards)
    of_batch = sum(known_batch_bytes(shard, shape, ids) + 8 * ids + 4 * case.batch for shard in shards)
    of_plans = _PLAN_ID_BYTES * ids * len(shards)
    of_pool = pool_memory(shards, shape).device_bytes(setting.num_slots)
    return of_pool + known_batches(shape)[0] * of_batch + of_plans + 3 * _BLOCK_BYTES  # of a publication


@contextlib.contextmanager
def small_blocks(case: Case) -> Iterator[None]:
    """What does not grow with slots or batches is small."""
    with (
        mock.patch.multiple(training, DIM=case.dim, BATCH=case.batch, ROW=4 * case.dim + 4),
        mock.patch.object(eviction, "_SAMPLE", 64),
        mock.patch.object(victim_queue, "_LEAST_WIDTH", 4),
        mock.patch.object(slot_map, "BLOCK", 500),
        mock.patch.object(moves, "BLOCK", 500),
        mock.patch.object(copies, "BLOCK_BYTES", _BLOCK_BYTES),
        mock.patch.object(changed, "_BLOCK", 500),
    ):
        yield


def counted(case: Case) -> int:
    """Bytes that a run holds: it begins with full slots, trains, is saved, and publishes."""
    with small_blocks(case), modelled(case.setting) as (gpu, model, may_lock):
        cache = model.pool.cache
        cache._warmup = torch.arange  # all slots, with the first rows
        refill = KernelVictimQueue._refill
        with mock.patch.object(KernelVictimQueue, "_refill", autospec=True, side_effect=refill) as refills:
            train(case.setting, model, may_lock)
        assert refills.call_count
        cache.write_back()
        cache.contents()
        source = PublishedPool(model.pool)  # with a mark for each row from now on
        source.touch("t0", BehindRows(torch.arange(0, case.setting.rows[0], 7)))
        source.take()
        return gpu.bytes.held - cache.host.num_rows


@pytest.mark.parametrize("name", keep({"look-ahead, array"}, CASES))
def test_a_cache_holds_what_the_memory_model_says(name: str) -> None:
    case = CASES[name]
    with small_blocks(case):
        assert counted(case) == pytest.approx(predicted(case), rel=0.02)


@pytest.mark.matrix
def test_plans_of_large_batches_are_counted() -> None:
    """An eighth of the slots. How much of a plan is alive together depends on the misses."""
    case = _case(dim=4, batch=100, rows=(9000, 5, 2000), num_slots=4000, steps=40)
    with small_blocks(case):
        assert counted(case) == pytest.approx(predicted(case), rel=0.1)


def _unblocked(self: SlotMap) -> Iterator[Tensor]:
    yield self.used_slots()


@pytest.mark.matrix
def test_memory_that_nobody_counts_is_noticed() -> None:
    """A tensor of 8 bytes a slot, for a moment of a ranking."""
    case = CASES["lfu, hashed"]

    def lowest(self: KernelVictimQueue, *arguments: Any) -> Any:
        ranks = self._none.new_empty(self._map.num_used)
        found = original(self, *arguments)
        del ranks
        return found

    original = KernelVictimQueue._lowest
    with small_blocks(case), mock.patch.object(KernelVictimQueue, "_lowest", lowest):
        assert counted(case) > 1.02 * predicted(case)


@pytest.mark.matrix
def test_slots_that_are_not_looked_at_in_blocks_are_noticed() -> None:
    case = CASES["look-ahead, array"]
    with small_blocks(case), mock.patch.object(SlotMap, "used_in_blocks", _unblocked):
        assert counted(case) > 1.02 * predicted(case)
