"""Choice of the slots to evict, with sizes that stay on the device until the plan's one read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, SupportsInt

import torch
from torch import Tensor

from embershard.cache.eviction import ranking_size, sample_stride
from embershard.cache.gpu import victim_kernels as kernels
from embershard.cache.gpu.launch import COUNTED, block_counts, launch
from embershard.cache.gpu.readback import Count, Readback, Reads
from embershard.cache.gpu.slot_map import FILLS, NUM_OF_BATCH
from embershard.cache.slot_state import SlotState

_LEAST_WIDTH = 1024


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


@dataclass(frozen=True, eq=False)
class _InFlight:
    """Slots 1, 2, ... that batches in flight pin and that rank among those of a refill: `marks` int8, and `counts` of
    them by program; how many they are; and how many of these the planned batch used."""

    marks: Tensor
    counts: Tensor
    count: Count
    of_batch: Count


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
        self, numbers: Tensor, read: Callable[[], Reads[list[int]]], batch: int, oldest_pinned: int
    ) -> Reads[tuple[Tensor, list[int]]]:
        """Choose the slots that `batch` lacks, whose last batch is before `oldest_pinned`.

        Args:
            numbers: int64 [NUM_NUMBERS], of the batch, 0 from `NUM_OF_BATCH` on; the kernels add theirs.
            read: returns `numbers`.

        Returns:
            int64 [4, ?]: slots and keys of the victims, and of those to write back; and the numbers. There are fewer
            victims than needed if the others are pinned.
        """
        taken = self._take(numbers, max(_LEAST_WIDTH, 4 * self._num_expected), False, oldest_pinned)
        found = yield from read()
        needed = found[FILLS.value] - self._map.num_free
        if needed <= 0:
            return taken.victims, found
        if self._may_be_crowded and sum(int(part.count) for part in self._parts) > self._map.num_used // 2:
            self.clear()  # nearly everything passes the bound, so it is out of date
            found[kernels.VICTIMS.value] = 0
        else:
            taken, found = yield from self._take_more(taken, found, numbers, read, needed, oldest_pinned)
        in_flight = None
        if found[kernels.VICTIMS.value] < needed:
            in_flight = self._refill(needed, oldest_pinned, batch)
            taken = self._take_again(numbers, 2 * needed, False, oldest_pinned)
            found = yield from read()
            taken, found = yield from self._take_more(taken, found, numbers, read, needed, oldest_pinned)
        self._num_expected = needed
        self._cursor += taken.limit(needed) - found[kernels.LEFT.value]
        num_waiting = found[kernels.WAITING.value]
        count = num_waiting + found[kernels.PINNED.value]
        kept = _PartBeside(0, taken.waiting[:, :count], count)
        if num_waiting > 4 * needed:
            kept = self._trim(kept, num_waiting, 2 * needed)
        later = [part for part in self._parts if part.batch >= oldest_pinned]
        self._parts = [kept, *later] if count else later
        if in_flight is not None:
            self._offer_pinned(in_flight, batch)
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
        count, marks, counts = slots.numel(), torch.empty_like(next_uses, dtype=torch.int8), block_counts(slots)
        scores, has_scores = self._score_bits()
        state = (self._map.use_stamp, scores, self._worst, marks, counts)
        launch(kernels.mark_offers, count, slots, next_uses, *state, block=COUNTED, SCORES=has_scores)
        gathered, total = slots.new_empty((3, count)), slots.new_empty(1)
        self._gather(slots, marks, counts, gathered, total, is_listed=True)
        self._parts.append(_PartBeside(batch, gathered, self._readback.count(total)))

    def _gather(
        self, slots: Tensor, marks: Tensor, counts: Tensor, gathered: Tensor, total: Tensor, is_listed: bool
    ) -> None:
        where = (slots, marks, counts.cumsum_(1), self._map.use_stamp, gathered, total, gathered.shape[1])
        launch(kernels.gather, marks.numel(), *where, block=COUNTED, LISTED=is_listed)

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
        marks, counts = slots.new_empty(count, dtype=torch.int8), block_counts(ranks, 4)
        ascending, clean = ranks.sort().values, self._state.clean_through
        of_slots = (self._map.use_stamp, numbers, marks, counts, clean, self._map.num_free, width)
        launch(kernels.mark_victims, count, slots, offered, ranks, ascending, *of_slots, block=COUNTED)
        found = (marks, counts.cumsum_(1), self._map.key_of_slot, numbers, ranks, victims)
        launch(kernels.choose_victims, count, slots, offered, *found, *limits, block=COUNTED)
        if has_uses:
            marks, counts = slots.new_empty(total, dtype=torch.int8), block_counts(waiting, 2)
            marked = (offered, ranks, numbers, marks, counts)
            launch(kernels.mark_waiting, total, *marked, *which, *limits, block=COUNTED)
            rest = (ranks, marks, counts.cumsum_(1), numbers, waiting, which[0], width)
            launch(kernels.keep_waiting, total, slots, stamps, offered, *rest, block=COUNTED)
        return _Taken(width, is_whole, victims, waiting)

    def _take_again(self, numbers: Tensor, width: int, is_whole: bool, oldest_pinned: int) -> _Taken:
        numbers[NUM_OF_BATCH:].zero_()
        return self._take(numbers, width, is_whole, oldest_pinned)

    def _take_more(
        self,
        taken: _Taken,
        found: list[int],
        numbers: Tensor,
        read: Callable[[], Reads[list[int]]],
        needed: int,
        oldest_pinned: int,
    ) -> Reads[tuple[_Taken, list[int]]]:
        """Take again from more entries where there were too few: rarely, as most entries are usable."""
        if taken.width < min(2 * needed, self._num_left()):
            taken = self._take_again(numbers, 2 * needed, False, oldest_pinned)
            found = yield from read()
        if found[kernels.USABLE.value] < needed and taken.limit(needed) < self._num_left():
            taken = self._take_again(numbers, self._num_left(), True, oldest_pinned)
            found = yield from read()
        return taken, found

    def _trim(self, part: _PartBeside, num_waiting: int, enough: int) -> _PartBeside:
        """Keep the best `enough` of many slots that wait, and end the ranking at the worst of these."""
        # Not by kthvalue, which torch refuses on a GPU where algorithms must be deterministic (its index may not be).
        self._worst = part.slots[2, :num_waiting].sort().values[enough - 1].view(1)
        kept = part.slots.new_zeros(2)
        rest = (self._worst, self._ranks, kept, self._ranks.numel(), int(part.count) - num_waiting)
        launch(kernels.drop_waiting, num_waiting, part.slots, part.slots.stride(0), *rest)
        self._end = self._readback.count(kept[0])
        return _PartBeside(0, part.slots, self._readback.count(kept[1]))

    def _refill(self, least: int, oldest_pinned: int, batch: int) -> _InFlight | None:
        """Rank the lowest slots again, at least `least`, as far as these may be evicted; return those that are pinned
        and rank among them, for `_offer_pinned`. The host does not wait."""
        self.clear()
        num_used = self._map.num_used
        if not num_used:
            return None
        size = min(ranking_size(least, num_used), num_used)
        (uses, has_uses), (scores, has_scores) = self._next_uses(), self._score_bits()
        stamps, found = self._map.use_stamp, self._none.new_zeros(kernels.NUM_FOUND)
        state = (stamps, uses, scores, self._state.num_pinned, oldest_pinned)
        constants = {"USES": has_uses, "SCORES": has_scores}
        lowest, slots = self._lowest(size, least, found, state, constants)
        self._ranks, order = lowest.sort(stable=True)
        del lowest
        self._slots, self._stamps = self._none.new_empty((2, size))
        self._uses = self._none.new_empty(size, dtype=torch.int32)
        queue = (self._slots, self._stamps, self._uses, found)
        launch(kernels.keep_ranking, size, self._ranks, order, slots, stamps, uses, *queue, USES=has_uses)
        self._is_ranked, self._worst = has_uses, found[kernels.WORST.value].view(1)
        self._end = self._readback.count(found[kernels.END.value])
        if not has_uses:
            return None
        del order, slots
        marks = self._none.new_empty(num_used, dtype=torch.int8)
        counts = block_counts(marks)
        launch(kernels.mark_in_flight, num_used, *state, found, marks, counts, batch, block=COUNTED, **constants)
        count, of_batch = (self._readback.count(found[at.value]) for at in (kernels.IN_FLIGHT, kernels.OF_BATCH))
        return _InFlight(marks, counts, count, of_batch)

    def _lowest(
        self, size: int, least: int, found: Tensor, state: tuple[Any, ...], constants: dict[str, bool]
    ) -> tuple[Tensor, Tensor]:
        """Return ranks and slots of the `size` lowest slots that may be evicted, by slot where ranks are equal: int64
        [size] each, behind them `NEVER` and slot 0 where there are fewer.

        Leaves out those above a bound, the rank at about that place in a regular sample of many slots, but at least
        `least` are left: so that plans by kernels and by the loops on a CPU are the same.
        """
        num_used, sample, at = self._map.num_used, found, -1
        if stride := sample_stride(size, num_used):
            sample = self._none.new_empty(-(-num_used // stride))
            launch(kernels.rank_sample, sample.numel(), *state, sample, stride, **constants)
            sample = sample.sort().values
            at = sample.numel() * size // num_used + sample.numel() // 64
            launch(kernels.count_lucky, num_used, *state, sample, found, at, **constants)
        digits = self._none.new_zeros((kernels.NUM_DIGITS, kernels.DIGITS), dtype=torch.int32)
        picks = self._none.new_empty((kernels.NUM_DIGITS, 2))
        select = (*state, sample, found, at, least, digits, picks, size)
        kinds = {**constants, "DIGITS": kernels.DIGITS, "block": COUNTED}
        for number in range(kernels.NUM_DIGITS):
            shift = kernels.DIGIT_BITS.value * (kernels.NUM_DIGITS - 1 - number)
            launch(kernels.count_digits, num_used, *select, number, shift, **kinds)
        counts = self._none.new_empty((2, -(-num_used // COUNTED)), dtype=torch.int32)
        launch(kernels.count_lowest, num_used, *select, kernels.NUM_DIGITS, counts, **kinds)
        ranks, slots = self._none.new_empty((2, size))
        ends = counts.cumsum_(1)
        launch(kernels.keep_lowest, num_used, *select, kernels.NUM_DIGITS, ends, ranks, slots, **kinds)
        return ranks, slots

    def _offer_pinned(self, pinned: _InFlight, batch: int) -> None:
        """Offer slots of batches in flight, which may be evicted once these are released."""
        width, num_old = int(pinned.count), int(pinned.count) - int(pinned.of_batch)
        if not width:
            return
        gathered, total = self._none.new_empty((3, width)), self._none.new_empty(1)
        self._gather(gathered, pinned.marks, pinned.counts, gathered, total, is_listed=False)
        gathered = gathered.index_select(1, gathered[2].sort(stable=True).indices)
        old = _PartBeside(0, gathered[:, :num_old], num_old)
        new = _PartBeside(batch, gathered[:, num_old:], int(pinned.of_batch))
        self._parts += [part for part in (old, new) if int(part.count)]
