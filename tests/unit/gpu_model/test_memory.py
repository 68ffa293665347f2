"""Device memory on the model of a GPU: what is held at peaks, beside what the memory model says."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from embershard.cache.config import CachePolicy
from embershard.cache.gpu import victim_queue
from embershard.cache.gpu.next_use import KernelNextUseIndex
from embershard.cache.gpu.readback import Readback
from embershard.cache.gpu.slot_map import KernelSlotMap
from embershard.cache.gpu.victim_queue import KernelVictimQueue
from embershard.cache.policies import make_scores
from embershard.cache.slot_state import SlotState
from tests.unit.gpu_model.device import CUDA, Gpu

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
