"""Plans of single batches by kernels: the host reads the sizes of the copies, once, and waits for nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from embershard.cache.gpu import victim_kernels as kernels
from embershard.cache.gpu.launch import launch
from embershard.cache.gpu.next_use import KernelNextUseIndex
from embershard.cache.gpu.readback import Readback, Reads, read_at_once
from embershard.cache.gpu.slot_map import FILLS, MISSED, OUT_OF_RANGE, KernelSlotMap, give_slots
from embershard.cache.gpu.victim_queue import KernelVictimQueue
from embershard.cache.planner import CachePlan, Planner, Shortage
from embershard.cache.slot_state import SlotState


class KernelPlanner(Planner):
    """Plans batches as `CachePlanner` does, to the slot. The state's map and index are those of this room."""

    def __init__(self, state: SlotState) -> None:
        index = state.next_use_index
        self._readback = index.readback if isinstance(index, KernelNextUseIndex) else Readback()
        self._victims = KernelVictimQueue(state, self._readback)
        super().__init__(state, self._victims)
        assert isinstance(state.map, KernelSlotMap), "a map of another kind"
        self._places, self._key_map = state.map, state.map.key_map

    def plan(self, keys: Tensor, batch: int, oldest_pinned: int) -> CachePlan | Shortage:
        return read_at_once(self.plan_with_reads(keys, batch, oldest_pinned))

    def plan_with_reads(self, keys: Tensor, batch: int, oldest_pinned: int) -> Reads[CachePlan | Shortage]:
        self._begin()
        numbers = keys.new_zeros(kernels.NUM_NUMBERS)
        slots, first_hits, fill_keys, fill_of_id, order = self._places.find_missed(keys, batch, numbers)

        def read() -> Reads[list[int]]:
            return self._read(numbers)

        if self._map.num_free < keys.numel():
            victims, found = yield from self._victims.pop(numbers, read, batch, oldest_pinned)
        else:
            victims, found = keys.new_empty((4, 0)), (yield from read())
        if found[OUT_OF_RANGE.value]:
            raise IndexError(f"{found[OUT_OF_RANGE.value]} keys are out of range, needed 0 to {self._map.num_keys - 1}")
        num_fills, num_victims = found[FILLS.value], found[kernels.VICTIMS.value]
        num_victims = 0 if num_fills <= self._map.num_free else num_victims
        num_missing = num_fills - self._map.num_free - num_victims
        fill_keys = fill_keys[:num_fills]
        if num_missing > 0:
            return Shortage(num_missing, fill_keys)
        if not num_fills:
            none = order[:0]
            return CachePlan(batch, slots, none, none, none, none, none, none, first_hits, none)
        evicted_slots, evicted_keys = victims[:2, :num_victims]
        dirty_slots, dirty_keys = evicted_slots, evicted_keys  # the same tensors are counted once
        if found[kernels.DIRTY.value] < num_victims:
            dirty_slots, dirty_keys = victims[2:, : found[kernels.DIRTY.value]]
        fill_slots = evicted_slots
        if num_victims < num_fills:
            free = self._map.next_free(num_fills - num_victims)
            fill_slots = torch.cat([free, evicted_slots]) if num_victims else free
        launch(give_slots, slots.numel(), slots, fill_of_id, fill_slots)
        rows = (fill_keys, fill_slots, evicted_keys, evicted_slots, dirty_keys, dirty_slots)
        return CachePlan(batch, slots, *rows, first_hits, order[: found[MISSED.value]])

    def _read(self, numbers: Tensor) -> Reads[list[int]]:
        tallies = self._key_map.tallies
        found, *others = yield from self._readback.read(*([numbers] if tallies is None else [numbers, tallies]))
        for each in others:
            self._key_map.note_tallies(each)
        return found
