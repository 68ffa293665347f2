"""Deciding, for one batch, the slot of every id, the rows to fill and the rows to put out.

The cost follows the batch, not the table and not the cache: one gather finds the slots of all ids; only the
misses are sorted; victims come from a queue that is refilled in bulk when it runs dry. Planning is
deterministic: equal states and equal keys give equal plans.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embershard.cache.scores import SlotScores
from embershard.cache.slot_map import NULL_SLOT, SlotMap

_QUEUE_SHARE = 8  # a refill ranks the lowest eighth of the slots
_SAMPLE = 4096
_NEVER = torch.iinfo(torch.int64).max


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


class VictimQueue:
    """Slots in the order in which they should leave, as of the last refill.

    An entry is skipped when its slot is pinned, or was used or refilled since: ranking the survivors again is
    the next refill's work. The ranking is by score, then longest unused.
    """

    def __init__(self, slot_map: SlotMap, scores: SlotScores, num_home_slots: int = 0) -> None:
        self._map = slot_map
        self._scores = scores
        self._num_home_slots = num_home_slots
        self.clear()

    def clear(self) -> None:
        """Forget the ranking."""
        self._slots = torch.empty(0, dtype=torch.int64, device=self._map.device)
        self._stamps = self._slots
        self._cursor = 0

    def pop(self, count: int, oldest_pinned: int) -> Tensor:
        """Up to ``count`` slots whose last batch is before ``oldest_pinned``: int64 [<= count], in leaving
        order."""
        victims = self._take(count, oldest_pinned)
        if victims.numel() < count:
            # Slots handed out above still hold their rows, and would be ranked again: start over.
            self._refill(count, oldest_pinned)
            victims = self._take(count, oldest_pinned)
        return victims

    def _take(self, count: int, oldest_pinned: int) -> Tensor:
        remaining = self._slots.numel() - self._cursor
        for width in (2 * count, remaining):  # most entries are usable: a short look ahead nearly always does
            window = slice(self._cursor, self._cursor + min(width, remaining))
            slots, stamps = self._slots[window], self._stamps[window]
            current = self._map.use_stamp.index_select(0, slots)
            usable = ((current == stamps) & (current >> 32 < oldest_pinned)).nonzero().flatten()[:count]
            if usable.numel() == count or width >= remaining:
                break
        if 0 < usable.numel() == count:
            self._cursor += int(usable[-1]) + 1
        return slots.index_select(0, usable)

    def _refill(self, least: int, oldest_pinned: int) -> None:
        num_used = self._map.num_used
        stamps = self._map.use_stamp[1 : num_used + 1]
        batches = stamps >> 32
        scores = self._scores.of_slots()
        if scores is None:
            rank = batches.clone()
        else:  # the bits of a non-negative float32 order like the number itself
            rank = (scores[1 : num_used + 1].view(torch.int32).long() << 32).bitwise_or_(batches)
        rank.masked_fill_(batches >= oldest_pinned, _NEVER)
        rank[: self._num_home_slots] = _NEVER
        order = _lowest(rank, least, max(least, num_used // _QUEUE_SHARE))
        self._slots, self._stamps, self._cursor = order + 1, stamps.index_select(0, order), 0


def _lowest(rank: Tensor, least: int, about: int) -> Tensor:
    """Positions of the ``about`` lowest values of ``rank``, ascending by value, without any ``_NEVER``; a few less,
    but never fewer than ``least`` where there are so many.

    A regular sample of a long vector gives the bound, and only what lies below it is sorted.
    """
    found = None
    if rank.numel() > _SAMPLE and 2 * about < rank.numel():
        sample = rank[:: rank.numel() // _SAMPLE].sort().values
        margin = sample.numel() // 64
        bound = min(int(sample[sample.numel() * about // rank.numel() + margin]), _NEVER - 1)
        found = (rank <= bound).nonzero().flatten()
    if found is None or found.numel() < least:  # a short vector, or an unlucky sample
        found = (rank < _NEVER).nonzero().flatten()
    return found.index_select(0, rank.index_select(0, found).sort(stable=True).indices[:about])


class CachePlanner:
    """Plans batches against one slot map. The map is updated at once; the rows follow when the plan is executed.

    The first ``num_home_slots`` slots are never given away.
    """

    def __init__(self, slot_map: SlotMap, scores: SlotScores, num_home_slots: int = 0) -> None:
        self.map = slot_map
        self.scores = scores
        self.queue = VictimQueue(slot_map, scores, num_home_slots)
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
        self.scores.retire(evicted_keys, victims)
        self.map.unbind(evicted_keys)
        fill_slots = torch.cat([self.map.take_free(misses.keys.numel() - victims.numel()), victims])
        self.map.bind(misses.keys, fill_slots, batch)
        self.scores.admit(misses.keys, fill_slots)
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
        self.map.unbind(plan.fill_keys)
        kept = plan.evicted_slots.numel() if victims_are_intact else 0
        self.map.leave_empty(plan.fill_slots[: plan.fill_slots.numel() - kept])
        if kept:
            self.map.bind(plan.evicted_keys, plan.evicted_slots, plan.batch)
            self.scores.admit(plan.evicted_keys, plan.evicted_slots)
        self.queue.clear()

    def hits_only(self, looked: tuple[Tensor, Tensor, Tensor], batch: int) -> CachePlan:
        """The plan of a batch all of whose rows are cached."""
        slots, first_hits, positions = looked
        self.scores.used(slots)
        none = positions
        return CachePlan(batch, slots, none, none, none, none, none, none, first_hits, none)

    def occupy(self, keys: Tensor) -> Tensor:
        """Bind ``keys`` (int64 [M], distinct, not cached) to free slots without a batch that uses them."""
        slots = self.map.take_free(keys.numel())
        self.map.bind(keys, slots, batch=0)
        self.scores.admit(keys, slots)
        return slots

    def dirty_slots(self) -> Tensor:
        """Slots whose row was trained since it was filled or written back: int64."""
        slots = self.map.used_slots()
        return slots[self.map.last_batch(slots) > self.clean_through]

    def clear(self) -> None:
        """Forget every row; counts go back to their rows."""
        slots = self.map.used_slots()
        self.scores.retire(self.map.keys(slots), slots)
        self.map.clear()
        self.queue.clear()


@dataclass(frozen=True, eq=False)
class Misses:
    """The distinct missing rows of a batch, ascending: keys [M]; ``inverse`` leads from each miss to its key;
    ``victims`` are the slots that make room."""

    keys: Tensor
    inverse: Tensor
    victims: Tensor
