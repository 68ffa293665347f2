"""Deciding, for one batch, the slot of every id, the rows to fill and the rows to put out.

The cost follows the batch, not the table and not the cache: one gather finds the slots of all ids; only the
misses are sorted; victims come from a queue that is refilled in bulk when it runs dry. Planning is
deterministic: equal states and equal keys give equal plans.

A plan changes nothing by itself. It is carried out in two halves, so that the map never promises a row that is not
there: :meth:`CachePlanner.put_out` when the rows that leave are in the host tier, :meth:`CachePlanner.put_in` when the
rows that come are in their slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embershard.cache.eviction import VictimQueue
from embershard.cache.next_use import KnownBatch, NextUseIndex
from embershard.cache.policies import SlotScores
from embershard.cache.slot_map import NULL_SLOT, SlotMap


@dataclass(frozen=True, eq=False)
class CachePlan:
    """What one batch needs: a value; executing it is the transfer's job.

    N ids, M fills, E evictions, W <= E write-backs; all int64 on the planning device.

    Attributes:
        batch: number of the batch, counted from 1.
        slots: [N] slot of every id.
        fill_keys, fill_slots: [M] rows to bring in, ascending by key, and where to.
        evicted_keys, evicted_slots: [E] rows that leave; their slots are among ``fill_slots``.
        write_back_keys, write_back_slots: [W] those of them that were trained since they came in.
        first_hits: bool [N], True at one position of every distinct row that was found in the cache.
        missed: [?] positions of all ids that were not, ascending.
    """

    batch: int
    slots: Tensor
    fill_keys: Tensor
    fill_slots: Tensor
    evicted_keys: Tensor
    evicted_slots: Tensor
    write_back_keys: Tensor
    write_back_slots: Tensor
    first_hits: Tensor
    missed: Tensor


@dataclass(frozen=True, eq=False)
class Shortage:
    """Why a batch has no plan: with the slots that batches in flight pin, ``num_slots`` are missing for its
    ``miss_keys`` (int64 [M], ascending)."""

    num_slots: int
    miss_keys: Tensor


class CachePlanner:
    """Plans batches against one slot map.

    The first ``num_pinned_slots`` slots are never given away. With an index of next uses, the victims are those whose
    next use is furthest.
    """

    def __init__(
        self,
        slot_map: SlotMap,
        scores: SlotScores,
        num_pinned_slots: int = 0,
        next_use_index: NextUseIndex | None = None,
    ) -> None:
        self.map = slot_map
        self.scores = scores
        self.next_use_index = next_use_index
        self.queue = VictimQueue(slot_map, scores, num_pinned_slots, next_use_index)
        self.clean_through = 0  # rows last used by this batch or before have been written back
        self._is_open = False  # a plan was begun and not carried out

    def plan(self, keys: Tensor, batch: int, oldest_pinned: int) -> CachePlan | Shortage:
        """What ``keys`` (int64 [N]) need. Only the stamps of what was found change, so that it is no victim.

        Args:
            batch: its number, which no other plan has.
            oldest_pinned: slots that this batch or a later one used stay.
        """
        if self._is_open:
            self.queue.clear()  # the victims of that plan are still there, and missing in the queue
        self._is_open = True
        slots = self.map.lookup(keys)
        first_hits = self.map.touch(slots, batch)
        missed = (slots == NULL_SLOT).nonzero().flatten()
        if not missed.numel():
            return CachePlan(batch, slots, missed, missed, missed, missed, missed, missed, first_hits, missed)
        first_hits.scatter_(0, missed, False)
        fill_keys, inverse = keys.index_select(0, missed).unique(return_inverse=True)
        victims = self._choose_victims(fill_keys.numel(), oldest_pinned)
        num_missing = fill_keys.numel() - self.map.num_free - victims.numel()
        if num_missing > 0:
            return Shortage(num_missing, fill_keys)
        evicted_keys = self.map.keys(victims)
        dirty = self.map.last_batch(victims) > self.clean_through
        write_back_slots, write_back_keys = victims, evicted_keys
        if not bool(dirty.all()):
            write_back_slots, write_back_keys = victims[dirty], evicted_keys[dirty]
        fill_slots = torch.cat([self.map.next_free(fill_keys.numel() - victims.numel()), victims])
        slots.scatter_(0, missed, fill_slots.index_select(0, inverse))
        return CachePlan(
            batch=batch,
            slots=slots,
            fill_keys=fill_keys,
            fill_slots=fill_slots,
            evicted_keys=evicted_keys,
            evicted_slots=victims,
            write_back_keys=write_back_keys,
            write_back_slots=write_back_slots,
            first_hits=first_hits,
            missed=missed,
        )

    def put_out(self, plan: CachePlan) -> None:
        """The rows that leave are in the host tier: they are not cached any more."""
        if not plan.evicted_slots.numel():
            return
        self.scores.retire(plan.evicted_keys, plan.evicted_slots)
        traces = None if self.next_use_index is None else self.next_use_index.traces(plan.evicted_slots)
        self.map.unbind(plan.evicted_keys, traces)

    def leave_empty(self, plan: CachePlan) -> None:
        """After :meth:`put_out`, in place of :meth:`put_in`: the rows that should have come could not be copied."""
        self.map.leave_empty(plan.evicted_slots)

    def put_in(self, plan: CachePlan, known: KnownBatch | None = None) -> None:
        """The rows that come are in their slots. ``known``: what was known of the batch."""
        self.map.claim(plan.fill_slots.numel() - plan.evicted_slots.numel())
        self._bind(plan.fill_keys, plan.fill_slots, plan.batch)
        self.scores.used(plan.slots)
        if known is not None:
            assert self.next_use_index is not None, "only an index of next uses knows batches"
            arrived = self.next_use_index.arrive(known, plan.slots)
            if arrived is not None:
                self.queue.offer(*arrived, plan.batch)
        self._is_open = False

    def occupy(self, keys: Tensor, slots: Tensor) -> None:
        """Rows ``keys`` are in the next free slots (both int64 [M], distinct), without a batch that uses them."""
        self.map.claim(slots.numel())
        self._bind(keys, slots, batch=0)

    def dirty_slots(self) -> Tensor:
        """Slots whose row was trained since it was filled or written back: int64."""
        return self.dirty_among(self.map.used_slots())

    def dirty_among(self, slots: Tensor) -> Tensor:
        """Those of ``slots`` (int64 [M]) whose row was trained since it was filled or written back."""
        return slots[self.map.last_batch(slots) > self.clean_through]

    def grow(self, num_slots: int) -> None:
        """The pool now has ``num_slots`` slots."""
        self.map.grow(num_slots)
        self.scores.grow(num_slots)
        if self.next_use_index is not None:
            self.next_use_index.grow(num_slots)

    def _choose_victims(self, count: int, oldest_pinned: int) -> Tensor:
        """Slots to put out so that ``count`` rows fit: int64; fewer than needed when the rest is pinned."""
        needed = count - self.map.num_free
        if needed <= 0:
            return torch.empty(0, dtype=torch.int64, device=self.map.device)
        return self.queue.pop(needed, oldest_pinned)

    def _bind(self, keys: Tensor, slots: Tensor, batch: int) -> None:
        if not keys.numel():
            return
        if self.next_use_index is not None:
            self.next_use_index.admit(keys, slots)
        self.map.bind(keys, slots, batch)
        self.scores.admit(keys, slots)
