"""Device memory on the model of a GPU: what is held at peaks, beside what the memory model says."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch

from embershard.cache.config import CachePolicy
from embershard.cache.gpu import victim_queue
from embershard.cache.gpu.next_use import KernelNextUseIndex
from embershard.cache.gpu.readback import Readback
from embershard.cache.gpu.slot_map import KernelSlotMap
from embershard.cache.gpu.victim_queue import KernelVictimQueue
from embershard.cache.parts import changed
from embershard.cache.policies import make_scores
from embershard.cache.rows import copies, transfer
from embershard.cache.slot_state import SlotState
from embershard.distributed.changed_rows import BehindRows
from embershard.extras.publications.sources import PublishedPool
from tests.covering import matrix
from tests.unit.gpu_model.device import CUDA, Gpu
from tests.unit.gpu_model.training import DIM, Setting, modelled, train

MANY = 1_000_000


def _nothing(*_: object, **__: object) -> None:
    """In place of a launch."""


@pytest.mark.parametrize("least", [1000, MANY // 4])
def test_a_ranking_takes_seven_bytes_of_a_slot_for_a_moment(least: int) -> None:
    """Of those that it ranks, an eighth of all or more, 56: a rank and a slot, both sorted, and torch's sort."""
    with Gpu() as gpu, mock.patch.object(victim_queue, "launch", _nothing):
        slot_map = KernelSlotMap(MANY, MANY, CUDA, "array")
        scores = make_scores(CachePolicy("lru"), MANY, MANY, CUDA)
        queue = KernelVictimQueue(SlotState(slot_map, scores, KernelNextUseIndex(slot_map)), Readback())
        slot_map.num_used = MANY
        gpu.bytes.begin()
        before = gpu.bytes.held
        queue._refill(least, 5, 6)
        assert 56 * max(least, MANY // 8) == pytest.approx(gpu.bytes.held - before, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lookahead", matrix("lfu")])
def test_a_publication_comes_in_blocks(policy: str) -> None:
    """Its rows are those that the cache reads at once. A block is on the device twice, and in page-locked memory once,
    beside its keys and what finds them."""
    setting, block, keys = Setting(rows=(3000, 5, 900), steps=6, policy=policy), 1 << 13, 1 << 8
    with modelled(setting) as (gpu, model, may_lock):
        pool = model.pool
        source = PublishedPool(pool)
        train(setting, model, may_lock)
        every = torch.arange(pool.host.num_rows)
        expected = pool.cache.read(every.to(CUDA)).cpu()
        gc.collect()
        source.touch("t0", BehindRows(every[:3000]))
        source.touch("t2", BehindRows(every[:900]))
        gpu.bytes.begin()
        gpu.pinned.begin()
        before, pinned = gpu.bytes.held, gpu.pinned.held
        with mock.patch.object(copies, "BLOCK_BYTES", block), mock.patch.object(changed, "_BLOCK", keys):
            found = source.take()
        assert gpu.bytes.held - before < 2 * block + 100 * block // (4 * DIM)
        assert gpu.pinned.held - pinned == block
        assert [part.keys.tolist() for part in (found[0], found[2])] == [list(range(3000)), list(range(900))]
        assert torch.equal(found[0].rows, expected[:3000])
        assert torch.equal(found[2].rows, expected[3005:])
        assert gpu.problems == []


def test_all_rows_are_written_to_without_a_number_of_each() -> None:
    """Of the pool, or of a table: on the device nothing is taken beside the marks."""
    with modelled(Setting(rows=(30_000, 5, 9000))) as (gpu, model, _):
        pool = model.pool
        marks = pool.track_changes()
        gpu.bytes.begin()
        before = gpu.bytes.held
        pool.cache.parts.changed(None)
        assert gpu.bytes.held == before
        assert marks.take().numel() == 39_005
        gpu.bytes.begin()
        pool.host_rows_changed("t2")
        assert gpu.bytes.held - before < 1000
        assert marks.take().tolist() == list(range(30_005, 39_005))


@pytest.mark.parametrize("waits", [False, True])
def test_page_locked_memory_that_a_kernel_may_still_read_is_not_given_away(waits: bool) -> None:
    with Gpu() as gpu:
        numbers = torch.arange(100).pin_memory()
        gpu.launch("a kernel", [numbers], [torch.empty(100, device=CUDA)])
        if waits:
            torch.cuda.current_stream().synchronize()
        del numbers
        gc.collect()
        assert [("is given away before a kernel" in problem) for problem in gpu.problems] == [True] * (not waits)


def test_page_locked_memory_waits_for_copies_by_itself() -> None:
    with Gpu() as gpu:
        numbers = torch.arange(100).pin_memory()
        numbers.to(CUDA, non_blocking=True)
        del numbers
        gc.collect()
        assert gpu.problems == []
        assert gpu.pinned.held == 1024


@pytest.mark.slow
@pytest.mark.parametrize("finishes", [True, False])
def test_a_pool_that_is_dropped_ends_its_staging_buffers_behind_the_kernels(finishes: bool) -> None:
    """Small rows, which kernels read out of the buffers. With `finish` left out the model tells."""
    setting = Setting(rows=(60, 5, 40), small="int8", transfer="staged", steps=5)
    with modelled(setting) as (gpu, model, may_lock):
        train(setting, model, may_lock)
        if finishes:
            model.pool.cache.transfer.finish()
        assert gpu.problems == []
        model.pool.cache._copies.transfer = None  # type: ignore[assignment]
        gc.collect()
        assert any("page-locked memory" in problem for problem in gpu.problems) == (not finishes)


def test_memory_that_a_stream_freed_is_reused_by_this_stream_only() -> None:
    with Gpu() as gpu:
        kept = torch.empty(100, dtype=torch.int64, device=CUDA)
        for _ in range(3):
            torch.empty(1000, dtype=torch.int64, device=CUDA)
        with torch.cuda.stream(torch.cuda.Stream()):
            kept.sum().view(1)
            torch.empty(500, dtype=torch.int64, device=CUDA)[7:].view(-1)
        assert gpu.bytes.live.total() == 800
        assert gpu.bytes.held == 800 + 8000 + 4000


def test_a_sort_takes_memory_inside() -> None:
    """The result of 16 bytes a number, and 24 inside."""
    with Gpu() as gpu:
        numbers = torch.zeros(10_000, dtype=torch.int64, device=CUDA)
        gpu.bytes.begin()
        numbers.sort()
        assert gpu.bytes.held == 10_000 * (8 + 16 + 24)


@pytest.mark.slow
def test_a_step_finds_its_staging_buffers_made() -> None:
    """Where copies are done when the host asks: page-locking a buffer takes milliseconds."""
    setting = Setting(steps=6, transfer="staged", is_quick=True)
    with modelled(setting) as (gpu, model, may_lock):
        with mock.patch.object(transfer, "Buffer", side_effect=AssertionError("a buffer was made in a step")):
            train(setting, model, may_lock)
        assert gpu.problems == []
