"""`PinWatch`: whether pins mattered, for checks of a cache."""

from __future__ import annotations

import torch

from embershard.cache.eviction import VictimQueue
from embershard.cache.planner import CachePlan, Shortage
from embershard.cache.slot_state import SlotState

_ABOVE_ALL = torch.iinfo(torch.int64).max


class PinWatch:
    """Counts pinned slots that plans passed over: they rank below a victim, so that only their pins saved them.

    A cache that ignored pins equals one that keeps them where this never happens. Every plan that evicts ranks all
    slots: this is for checks, not for training.

    Attributes:
        in_flight: slots pinned by earlier batches in flight, counted once per plan.
        own: slots that the planned batch itself uses, likewise, where no batch was in flight.

    >>> from embershard.cache.planner import CachePlanner
    >>> from embershard.cache.policies import RecencyScores
    >>> from embershard.cache.slot_map import SlotMap
    >>> state = SlotState(SlotMap(num_keys=9, num_slots=1), RecencyScores())
    >>> planner, watch = CachePlanner(state), PinWatch(state)
    >>> planner.admit(planner.plan(torch.tensor([7]), batch=1, oldest_pinned=1))
    >>> watch.add(planner.plan(torch.tensor([5]), batch=2, oldest_pinned=1), batch=2, oldest_pinned=1)
    >>> watch.in_flight, watch.own
    (1, 0)
    """

    def __init__(self, state: SlotState) -> None:
        self._state = state
        self._order = VictimQueue(state)
        self.in_flight = self.own = 0

    def add(self, found: CachePlan | Shortage, batch: int, oldest_pinned: int) -> None:
        """Count for what `Planner.plan` found for these arguments. Called before the plan is executed."""
        state, bound = self._state, _ABOVE_ALL
        if isinstance(found, CachePlan):
            if not found.evicted_slots.numel():
                return
            bound = int(self._order.ranks(found.evicted_slots).max())
        slots = torch.arange(state.num_pinned + 1, state.map.num_used + 1, device=state.map.device)
        last_batches = state.map.last_batch(slots)
        is_low = self._order.ranks(slots) < bound
        if oldest_pinned < batch:
            self.in_flight += int((is_low & (last_batches >= oldest_pinned) & (last_batches < batch)).sum())
        else:
            self.own += int((is_low & (last_batches == batch)).sum())
