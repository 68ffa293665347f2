"""Choice of the slots to evict, with sizes that stay on the device until the plan's one read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import SupportsInt

import torch
from torch import Tensor

from embershard.cache.eviction import ranking_size, sample_stride
from embershard.cache.gpu import victim_kernels as kernels
from embershard.cache.gpu.launch import Count, Readback, launch
from embershard.cache.gpu.slot_map import FILLS, NUM_OF_BATCH
from embershard.cache.slot_state import SlotState

_LEAST_WIDTH = 1024
_NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True, eq=False)
class _PartBeside:
    """Slots beside the ranking: int64 [3, ?] slots (0 for none), stamps and ranks.

    Attributes:
        batch: all of these slots were last used by this batch; 0 for slots of several batches.
        count: how many they are; they come first if there is a batch.
    """

    batch: int
    slots: Tensor
    count: SupportsInt

    def columns(self) -> Tensor:
        """Return the slots, without the room behind them if their number is known."""
        is_known = self.batch and not (isinstance(self.count, Count) and self.count.value is None)
        return self.slots[:, : int(self.count)] if is_known else self.slots


@dataclass(frozen=True, eq=False)
class _Taken:
    """Victims int64 [4, ?] and what waits, int64 [3, ?], as the kernels write them, of `width` entries; if not
    `is_whole`, of at most twice as many entries as victims."""

    width: int
    is_whole: bool
    victims: Tensor
    waiting: Tensor

    def limit(self, needed: int) -> int:
        """Return how many entries of the ranking could be taken."""
        return self.width if self.is_whole else min(self.width, 2 * needed)


class KernelVictimQueue:
    """The order of eviction that `VictimQueue` has, kept and used by kernels.

    The ranking ends at a rank that stays on the device. Beside it are slots that were passed, or pinned at the last
    refill, and those that later batches offered.
    """

    def __init__(self, state: SlotState, readback: Readback) -> None:
        self._state, self._map, self._readback = state, state.map, readback
        self._num_expected = 0  # victims of a plan, by the last one
        self.clear()

    def clear(self) -> None:
        """Forget the ranking."""
        device = self._map.device
        self._is_ranked, self._cursor = False, 0
        self._end: SupportsInt = 0
        self._none = torch.empty((3, 0), dtype=torch.int64, device=device)
        self._slots, self._stamps, self._ranks = self._none
        self._uses = torch.empty(0, dtype=torch.int32, device=device)
        self._worst = torch.empty(1, dtype=torch.int64, device=device)
        self._parts: list[_PartBeside] = []
        self._may_be_crowded = False

    def pop(
        self, numbers: Tensor, read: Callable[[], list[int]], batch: int, oldest_pinned: int
    ) -> tuple[Tensor, list[int]]:
        """Choose the slots that `batch` lacks, whose last batch is before `oldest_pinned`.

        Args:
            numbers: int64 [NUM_NUMBERS], of the batch; the kernels add theirs.
            read: returns `numbers`; the host waits.

        Returns:
            int64 [4, ?]: slots and keys of the victims, and of those to write back; and the numbers. There are fewer
            victims than needed if the others are pinned.
        """
        taken = self._take(numbers, max(_LEAST_WIDTH, 4 * self._num_expected), False, oldest_pinned)
        found = read()
        needed = found[FILLS.value] - self._map.num_free
        if needed <= 0:
            return taken.victims, found
        if self._may_be_crowded and sum(int(part.count) for part in self._parts) > self._map.num_used // 2:
            self.clear()  # nearly everything passes the bound, so it is out of date
            found[kernels.VICTIMS.value] = 0
        else:
            taken, found = self._take_more(taken, found, numbers, read, needed, oldest_pinned)
        in_flight = None
        if found[kernels.VICTIMS.value] < needed:
            in_flight = self._refill(needed, oldest_pinned, batch)
            taken = self._take(numbers, 2 * needed, False, oldest_pinned)
            taken, found = self._take_more(taken, read(), numbers, read, needed, oldest_pinned)
        self._pass(taken, found, needed, oldest_pinned)
        if in_flight is not None:
            self._offer_pinned(*in_flight, batch)
        if found[kernels.VICTIMS.value] < needed:
            self.clear()  # nobody will evict these
        return taken.victims, found

    def offer(self, slots: Tensor, next_uses: Tensor, batch: int) -> None:
        """Consider `slots` (int64 [N]) that `batch` used, with their rows' next uses (int32 [N], 0: none); those with
        negative ones are repeats."""
        self._parts = [part for part in self._parts if part.batch != batch]  # offered by a refill for this batch
        if not self._is_ranked or not slots.numel():
            return
        self._may_be_crowded = True
        flags = torch.empty_like(next_uses)
        scores, has_scores = self._score_bits()
        state = (self._map.use_stamp, scores, self._worst)
        launch(kernels.mark_offers, slots.numel(), slots, next_uses, *state, flags, SCORES=has_scores)
        running = flags.cumsum(0, dtype=torch.int32)
        found = slots.new_zeros((3, slots.numel()))
        where = (slots, flags, running, self._map.use_stamp, found, 0, slots.numel())
        launch(kernels.gather, slots.numel(), *where, LISTED=True)
        self._parts.append(_PartBeside(batch, found, self._readback.count(running[-1])))

    def _score_bits(self) -> tuple[Tensor, bool]:
        """Return the bits of every slot's score, and True; without scores any tensor, and False."""
        scores = self._state.scores.of_slots()
        return (self._map.use_stamp, False) if scores is None else (scores.view(torch.int32), True)

    def _next_uses(self) -> tuple[Tensor, bool]:
        """Return every slot's next use, and True; without look-ahead any tensor, and False."""
        index = self._state.next_use_index
        return (self._map.use_stamp, False) if index is None else (index.next_use, True)

    def _num_left(self) -> int:
        """Entries of the ranking from the cursor on, at most."""
        end = self._end.value if isinstance(self._end, Count) else int(self._end)
        return max(self._slots.numel() if end is None else end, self._cursor) - self._cursor

    def _take(self, numbers: Tensor, width: int, is_whole: bool, oldest_pinned: int) -> _Taken:
        """Take the lowest ranks of the ranking and of the slots beside it, together. Changes no state of the host."""
        numbers[NUM_OF_BATCH:].zero_()
        width = min(width, self._num_left())
        ready = [part.columns() for part in self._parts if part.batch < oldest_pinned]
        offered = torch.cat(ready, 1) if len(ready) > 1 else [*ready, self._none][0]
        window = slice(self._cursor, self._cursor + width)
        slots, stamps = self._slots[window], self._stamps[window]
        (uses, has_uses), (scores, has_scores) = self._next_uses(), self._score_bits()
        beside, total = offered.shape[1], width + offered.shape[1]
        ranks = slots.new_empty(width + total if has_uses else width)
        count, limits = ranks.numel(), (self._map.num_free, width, int(is_whole))
        victims, waiting = slots.new_empty((4, count)), slots.new_empty((3, total))
        if not count:
            return _Taken(width, is_whole, victims, waiting)
        queue = (slots, stamps, self._ranks[window], self._uses[window])
        state = (self._map.use_stamp, uses, scores, self._worst)
        which = (offered.stride(0) if beside else 0, oldest_pinned)
        constants = {"USES": has_uses, "SCORES": has_scores}
        launch(kernels.rank_candidates, total, *queue, offered, *state, numbers, ranks, *which, *limits, **constants)
        flags = slots.new_empty((4, count), dtype=torch.int32)
        ascending, clean = ranks.sort().values, self._state.clean_through
        of_slots = (self._map.use_stamp, numbers, flags, clean, self._map.num_free, width)
        launch(kernels.mark_victims, count, slots, offered, ranks, ascending, *of_slots)
        running = flags.cumsum(1, dtype=torch.int32)
        found = (flags, running, self._map.key_of_slot, numbers, ranks, victims)
        launch(kernels.choose_victims, count, slots, offered, *found, *limits)
        if has_uses:
            flags = slots.new_empty((2, total), dtype=torch.int32)
            launch(kernels.mark_waiting, total, offered, ranks, numbers, flags, *which, *limits)
            rest = (ranks, flags, flags.cumsum(1, dtype=torch.int32), numbers, waiting)
            launch(kernels.keep_waiting, total, slots, stamps, offered, *rest, which[0], width)
        return _Taken(width, is_whole, victims, waiting)

    def _take_more(
        self,
        taken: _Taken,
        found: list[int],
        numbers: Tensor,
        read: Callable[[], list[int]],
        needed: int,
        oldest_pinned: int,
    ) -> tuple[_Taken, list[int]]:
        """Take again from more entries where there were too few: rarely, as most entries are usable."""
        if taken.width < min(2 * needed, self._num_left()):
            taken, found = self._take(numbers, 2 * needed, False, oldest_pinned), read()
        if found[kernels.USABLE.value] < needed and taken.limit(needed) < self._num_left():
            taken, found = self._take(numbers, self._num_left(), True, oldest_pinned), read()
        return taken, found

    def _pass(self, taken: _Taken, found: list[int], needed: int, oldest_pinned: int) -> None:
        self._num_expected = needed
        self._cursor += taken.limit(needed) - found[kernels.LEFT.value]
        num_waiting, num_pinned = found[kernels.WAITING.value], found[kernels.PINNED.value]
        later = [part for part in self._parts if part.batch >= oldest_pinned]
        count = num_waiting + num_pinned
        kept = _PartBeside(0, taken.waiting[:, :count], count)
        if num_waiting > 4 * needed:
            kept = self._trim(kept, num_waiting, 2 * needed)
        self._parts = [kept, *later] if count else later

    def _trim(self, part: _PartBeside, num_waiting: int, enough: int) -> _PartBeside:
        """Keep the best `enough` of many slots that wait, and end the ranking at the worst of these."""
        ranks = part.slots[2, :num_waiting]
        self._worst = ranks.kthvalue(enough).values.view(1)
        dropped = ranks > self._worst
        part.slots[0, :num_waiting].masked_fill_(dropped, 0)
        self._end = self._readback.count(torch.searchsorted(self._ranks, self._worst, right=True))
        return _PartBeside(0, part.slots, self._readback.count(int(part.count) - dropped.sum()))

    def _refill(self, least: int, oldest_pinned: int, batch: int) -> tuple[Tensor, Tensor, Count, Count] | None:
        """Rank the lowest slots again, at least `least`, as far as these may be evicted. The host does not
        wait.

        Returns:
            Of slots 1, 2, ..., for `_offer_pinned`: int32 marks of those that are pinned and rank among them; their
            running sum; how many they are; and how many of them `batch` used.
        """
        self.clear()
        size, num_used = ranking_size(least, self._map.num_used), self._map.num_used
        if not num_used:
            return None
        (uses, has_uses), (scores, has_scores) = self._next_uses(), self._score_bits()
        ranks, pinned_ranks = torch.empty((2, num_used), dtype=torch.int64, device=self._map.device)
        state = (self._map.use_stamp, uses, scores, ranks, pinned_ranks, self._state.num_pinned, oldest_pinned)
        launch(kernels.rank_slots, num_used, *state, USES=has_uses, SCORES=has_scores)
        self._ranks, order = _lowest(ranks, least, size)
        self._slots = order + 1
        self._stamps = self._map.use_stamp.index_select(0, self._slots)
        self._uses = self._slots.int() if not has_uses else uses.index_select(0, self._slots)
        self._is_ranked, is_entry = has_uses, self._ranks != _NEVER
        self._end = self._readback.count(is_entry.sum())
        if not has_uses:
            self._worst = torch.full_like(self._worst, _NEVER - 1)
            return None
        self._worst = self._ranks.masked_fill(~is_entry, -1).amax().view(1)
        flags = pinned_ranks <= self._worst
        of_batch = (self._map.use_stamp[1 : num_used + 1] >> 32 == batch) & flags
        running = flags.cumsum(0, dtype=torch.int32)
        counts = self._readback.count(running[-1]), self._readback.count(of_batch.sum())
        return flags.int(), running, *counts

    def _offer_pinned(self, flags: Tensor, running: Tensor, count: Count, of_batch: Count, batch: int) -> None:
        """Offer slots of batches in flight, which may be evicted once these are released."""
        width, num_old = int(count), int(count) - int(of_batch)
        if not width:
            return
        found = self._none.new_empty((3, width))
        where = (found, flags, running, self._map.use_stamp, found, 1, width)
        launch(kernels.gather, flags.numel(), *where, LISTED=False)
        found = found.index_select(1, (found[1] >> 32).sort(stable=True).indices)
        old, new = _PartBeside(0, found[:, :num_old], num_old), _PartBeside(batch, found[:, num_old:], int(of_batch))
        self._parts += [part for part in (old, new) if int(part.count)]


def _lowest(ranks: Tensor, least: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` lowest of `ranks` (int64 [M]), ascending, and their positions: int64 [<= size] each.

    May mark higher ones with `_NEVER`, but leaves at least `least` of the others: a regular sample of a long
    vector gives a bound, so that plans by kernels and by the loops on a CPU are the same.
    """
    stride = sample_stride(size, ranks.numel())
    if stride:
        sample = ranks[::stride].sort().values
        bound = sample[sample.numel() * size // ranks.numel() + sample.numel() // 64].clamp_max(_NEVER - 1)
        is_lucky = (ranks <= bound).sum() >= least
        ranks = ranks.masked_fill((ranks > bound) & is_lucky, _NEVER)
    ascending, order = ranks.sort(stable=True)
    return ascending[:size].clone(), order[:size]  # a view would hold the memory of all
