"""Deciding, for one batch, the slot of every id, the rows to fill and the rows to put out.

The cost follows the batch, not the table and not the cache: one gather finds the slots of all ids; only the
misses are sorted; victims come from a queue that is refilled in bulk when it runs dry. Planning is
deterministic: equal states and equal keys give equal plans.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embershard.cache.forecast import Forecast, KnownBatch
from embershard.cache.scores import SlotScores
from embershard.cache.slot_map import NULL_SLOT, SlotMap
from embershard.cache.victims import VictimQueue


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


class CachePlanner:
    """Plans batches against one slot map. The map is updated at once; the rows follow when the plan is executed.

    The first ``num_home_slots`` slots are never given away. With a forecast, the victims are those whose next use is
    furthest.
    """

    def __init__(
        self, slot_map: SlotMap, scores: SlotScores, num_home_slots: int = 0, forecast: Forecast | None = None
    ) -> None:
        self.map = slot_map
        self.scores = scores
        self.forecast = forecast
        self.queue = VictimQueue(slot_map, scores, num_home_slots, forecast)
        self.clean_through = 0  # rows last used by this batch or before have been written back

    def look(self, keys: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Find ``keys`` (int64 [N]) and mark what was found as used, so that it cannot be a victim of this
        batch.

        Returns:
            slots [N], first_hits bool [N], and the positions of the misses.
        """
        slots = self.map.lookup(keys)
        first_hits = self.map.touch(slots, batch)
        positions = (slots == NULL_SLOT).nonzero().flatten()
        if positions.numel():
            first_hits.scatter_(0, positions, False)
        return slots, first_hits, positions

    def choose_victims(self, count: int, oldest_pinned: int) -> Tensor:
        """Slots to put out so that ``count`` rows fit: int64; fewer than needed when the rest is pinned."""
        needed = count - self.map.num_free
        if needed <= 0:
            return torch.empty(0, dtype=torch.int64, device=self.map.device)
        return self.queue.pop(needed, oldest_pinned)

    def admit(self, looked: tuple[Tensor, Tensor, Tensor], misses: Misses, batch: int) -> CachePlan:
        """Give every missing row a slot, free ones first, then those of ``misses.victims``, and update the
        map."""
        slots, first_hits, positions = looked
        victims = misses.victims
        evicted_keys = self.map.keys(victims)
        dirty = self.map.last_batch(victims) > self.clean_through
        write_back_slots, write_back_keys = victims, evicted_keys
        if not bool(dirty.all()):
            write_back_slots, write_back_keys = victims[dirty], evicted_keys[dirty]
        self._put_out(evicted_keys, victims)
        fill_slots = torch.cat([self.map.take_free(misses.keys.numel() - victims.numel()), victims])
        self._put_in(misses.keys, fill_slots, batch)
        slots.scatter_(0, positions, fill_slots.index_select(0, misses.inverse))
        self.scores.used(slots)
        return CachePlan(
            batch=batch,
            slots=slots,
            fill_keys=misses.keys,
            fill_slots=fill_slots,
            evicted_keys=evicted_keys,
            evicted_slots=victims,
            write_back_keys=write_back_keys,
            write_back_slots=write_back_slots,
            first_hits=first_hits,
            missed=positions,
        )

    def undo(self, plan: CachePlan, victims_are_intact: bool) -> None:
        """Take back an admitted plan whose rows could not be copied: its missing rows are not cached after all.

        Before the first fill the victims still are in their slots and stay there; later their home is the host.
        """
        self.map.unbind(plan.fill_keys, None if self.forecast is None else self.forecast.traces(plan.fill_slots))
        kept = plan.evicted_slots.numel() if victims_are_intact else 0
        self.map.leave_empty(plan.fill_slots[: plan.fill_slots.numel() - kept])
        if kept:
            self._put_in(plan.evicted_keys, plan.evicted_slots, plan.batch)
        self.queue.clear()

    def arrive(self, known: KnownBatch, plan: CachePlan) -> None:
        """``plan`` is that of a batch that was known."""
        assert self.forecast is not None, "only a forecast knows batches"
        arrived = self.forecast.arrive(known, plan.slots)
        if arrived is not None:
            self.queue.offer(*arrived, plan.batch)

    def hits_only(self, looked: tuple[Tensor, Tensor, Tensor], batch: int) -> CachePlan:
        """The plan of a batch all of whose rows are cached."""
        slots, first_hits, positions = looked
        self.scores.used(slots)
        none = positions
        return CachePlan(batch, slots, none, none, none, none, none, none, first_hits, none)

    def occupy(self, keys: Tensor) -> Tensor:
        """Bind ``keys`` (int64 [M], distinct, not cached) to free slots without a batch that uses them."""
        slots = self.map.take_free(keys.numel())
        self._put_in(keys, slots, batch=0)
        return slots

    def dirty_slots(self) -> Tensor:
        """Slots whose row was trained since it was filled or written back: int64."""
        slots = self.map.used_slots()
        return slots[self.map.last_batch(slots) > self.clean_through]

    def clear(self) -> None:
        """Forget every row; counts go back to their rows."""
        slots = self.map.used_slots()
        self._put_out(self.map.keys(slots), slots)
        self.map.clear()
        self.queue.clear()

    def grow(self, num_slots: int) -> None:
        """The pool now has ``num_slots`` slots."""
        self.map.grow(num_slots)
        self.scores.grow(num_slots)
        if self.forecast is not None:
            self.forecast.grow(num_slots)

    def _put_in(self, keys: Tensor, slots: Tensor, batch: int) -> None:
        if self.forecast is not None:
            self.forecast.admit(keys, slots)
        self.map.bind(keys, slots, batch)
        self.scores.admit(keys, slots)

    def _put_out(self, keys: Tensor, slots: Tensor) -> None:
        self.scores.retire(keys, slots)
        self.map.unbind(keys, None if self.forecast is None else self.forecast.traces(slots))


@dataclass(frozen=True, eq=False)
class Misses:
    """The distinct missing rows of a batch, ascending: keys [M]; ``inverse`` leads from each miss to its key;
    ``victims`` are the slots that make room."""

    keys: Tensor
    inverse: Tensor
    victims: Tensor
