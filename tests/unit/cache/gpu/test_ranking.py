"""A ranking by digits, in Triton's interpreter, is that of a sort of all slots, to the slot."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from embershard.cache import loops
from embershard.cache.config import CachePolicy
from embershard.cache.eviction import ranking_size, sample_stride
from embershard.cache.gpu import victim_kernels
from embershard.cache.gpu.next_use import KernelNextUseIndex
from embershard.cache.gpu.readback import Readback
from embershard.cache.gpu.slot_map import KernelSlotMap
from embershard.cache.gpu.victim_queue import KernelVictimQueue
from embershard.cache.policies import make_scores
from embershard.cache.slot_state import SlotState
from tests.covering import matrix

pytestmark = pytest.mark.slow

NEVER, OLDEST_PINNED = 2**63 - 1, 50


class Case(NamedTuple):
    """`known`: the share of slots with a known next use; None: there is no look-ahead."""

    num_slots: int
    least: int
    known: float | None
    counted: bool
    batches: int = 60  # that used the slots last: from `OLDEST_PINNED` on they are in flight


CASES = {
    "a sample bounds it": Case(5200, 300, 0.5, True),
    "all have the rank of the last one": Case(2500, 900, 0.0, False, batches=1),
    "fewer than asked for": Case(1300, 1250, 0.9, False),
    "none may be evicted": Case(700, 20, None, True, batches=-1),
    "without look-ahead": Case(4300, 40, None, False),
}


def state_of(case: Case) -> SlotState:
    """Slots with any stamps, scores and next uses; the first three are pinned."""
    draw, count, cpu = np.random.default_rng(len(str(case))), case.num_slots, torch.device("cpu")
    slot_map = KernelSlotMap(count, count, cpu, "array")
    slot_map.num_used = count
    batches = np.full(count, OLDEST_PINNED) if case.batches < 0 else draw.integers(case.batches, size=count)
    slot_map.use_stamp[1:] = torch.from_numpy((batches << 32) + draw.integers(9, size=count))
    scores = make_scores(CachePolicy("lfu" if case.counted else "lru"), count, count, cpu)
    if (of_slots := scores.of_slots()) is not None:
        of_slots[1:] = torch.from_numpy(draw.integers(30, size=count) / 7)
    index = None if case.known is None else KernelNextUseIndex(slot_map)
    if index is not None:
        is_known = draw.random(count) < case.known
        index.next_use[1:] = torch.from_numpy(np.where(is_known, draw.integers(60, 90, size=count), 0))
    return SlotState(slot_map, scores, index, num_pinned=3)


def ranks_of(state: SlotState) -> tuple[Tensor, Tensor]:
    """Ranks of all slots, and which of them may be evicted or are in flight."""
    stamps, scores, index = state.map.use_stamp[1:], state.scores.of_slots(), state.next_use_index
    ranks = stamps >> 32
    if scores is not None:
        ranks = (scores[1:].view(torch.int32).long() << 32) | ranks
    if index is not None:
        known = loops.KNOWN_USE + loops.LAST_BATCH - index.next_use[1:].long()
        ranks = torch.where(index.next_use[1:] > 0, known, ranks)
    return ranks, torch.arange(ranks.numel()) >= state.num_pinned


def check(case: Case) -> None:
    state = state_of(case)
    queue = KernelVictimQueue(state, Readback())
    in_flight = queue._refill(case.least, OLDEST_PINNED, batch=59)
    every, may_go = ranks_of(state)
    is_free = state.map.use_stamp[1:] >> 32 < OLDEST_PINNED
    ranks = torch.where(may_go & is_free, every, NEVER)
    size = ranking_size(case.least, case.num_slots)
    if stride := sample_stride(size, case.num_slots):
        sample = ranks[::stride].sort().values
        bound = min(int(sample[sample.numel() * size // case.num_slots + sample.numel() // 64]), NEVER - 1)
        ranks = ranks if int((ranks <= bound).sum()) < case.least else ranks.masked_fill(ranks > bound, NEVER)
    ascending, order = (each[:size] for each in ranks.sort(stable=True))
    count = int((ascending < NEVER).sum())
    assert queue._ranks.tolist() == ascending.tolist()
    assert queue._slots[:count].tolist() == (order[:count] + 1).tolist()
    assert queue._stamps[:count].tolist() == state.map.use_stamp[order[:count] + 1].tolist()
    worst = -1 if not count else int(ascending[count - 1]) if case.known is not None else NEVER - 1
    assert int(queue._worst) == worst
    assert (in_flight is None) == (case.known is None)
    if in_flight is not None:
        assert in_flight.marks.tolist() == (may_go & ~is_free & (every <= worst)).tolist()


@pytest.mark.parametrize("case", [name if "look" not in name else matrix(name) for name in CASES])
def test_a_ranking_is_that_of_a_sort_of_all_slots(case: str) -> None:
    check(CASES[case])


@pytest.mark.matrix
def test_a_digit_that_is_left_out_is_noticed() -> None:
    with mock.patch.object(victim_kernels, "NUM_DIGITS", 7), pytest.raises(AssertionError):
        check(CASES["a sample bounds it"])
