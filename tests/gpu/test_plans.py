"""Plans by kernels on a GPU are those of the loops on the CPU, to the slot."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from embershard.cache import CachePlan, CachePlanner, NextUseIndex, SlotMap, SlotState, make_scores
from embershard.cache.config import CachePolicy
from embershard.cache.gpu.next_use import KernelNextUseIndex
from embershard.cache.gpu.planner import KernelPlanner
from embershard.cache.gpu.slot_map import KernelSlotMap

NUM_ROWS, NUM_SLOTS, NUM_IDS, LOOKAHEAD = 200_000, 20_000, 6000, 8


def planner_on(device: str, kind: Any, policy: str) -> CachePlanner | KernelPlanner:
    by_kernels = device == "cuda"
    map_class, index_class = (KernelSlotMap, KernelNextUseIndex) if by_kernels else (SlotMap, NextUseIndex)
    slot_map = map_class(NUM_ROWS, NUM_SLOTS, torch.device(device), kind if by_kernels else "array")
    scores = make_scores(
        CachePolicy("lfu" if policy == "lookahead" else "lru"), NUM_ROWS, NUM_SLOTS, torch.device(device)
    )
    index = index_class(slot_map) if policy == "lookahead" else None  # type: ignore[arg-type]
    return (KernelPlanner if by_kernels else CachePlanner)(SlotState(slot_map, scores, index))


@pytest.mark.parametrize("kind", ["array", "hashed"])
@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_plans_are_those_of_the_loops(kind: str, policy: str) -> None:
    planners = [planner_on(device, kind, policy) for device in ("cpu", "cuda")]
    generator, known = torch.Generator().manual_seed(4), deque[tuple[Tensor, list[Any]]]()
    num_evicted = 0
    for batch in range(1, 61):
        while len(known) < LOOKAHEAD:
            keys = (torch.rand(NUM_IDS, generator=generator) ** 4 * NUM_ROWS).long()
            indexes = [planner.state.next_use_index for planner in planners]
            known.append((keys, [index and index.know(keys.to(index.next_use.device)) for index in indexes]))
        keys, tokens = known.popleft()
        plans = []
        for planner, token in zip(planners, tokens, strict=True):
            plan = planner.plan(keys.to(planner.state.map.device), batch, max(1, batch - 2))
            assert isinstance(plan, CachePlan)
            planner.evict(plan)
            planner.note_filled(plan, token)
            plans.append(plan)
        for name, expected in vars(plans[0]).items():
            if isinstance(expected, Tensor):
                assert torch.equal(getattr(plans[1], name).cpu(), expected), f"{name} of batch {batch}"
        num_evicted += plans[0].evicted_keys.numel()
    assert num_evicted > 10_000
