"""Choice of the slots to evict on a CPU: a ranking of slots, made in bulk and used up over many batches.

The loops are in `loops/victims.py`; on a GPU `gpu/victim_queue.py` keeps the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embershard.cache import loops
from embershard.cache.slot_state import SlotState

_QUEUE_SHARE = 8  # a refill ranks the lowest eighth of the slots
_SAMPLE = 4096
_NEVER = torch.iinfo(torch.int64).max
# The rank of a row without a known use: the bits of its score above the number of its last batch. Rows with a known use
# rank behind every finite score, the furthest use first.
_NONE_KNOWN_USE = torch.iinfo(torch.int32).max


def ranking_size(least: int, num_used: int) -> int:
    """Return how many of `num_used` slots a refill ranks, if it must rank at least `least`."""
    return max(least, num_used // _QUEUE_SHARE)


def sample_stride(size: int, num_used: int) -> int:
    """Return the stride of the sample of `num_used` ranks that bounds the `size` lowest; 0 if all are sorted."""
    return num_used // _SAMPLE if num_used > _SAMPLE and 2 * size < num_used else 0


@dataclass(frozen=True, eq=False)
class _Ranked:
    """M slots with their state at the time of ranking: slots, use stamps and ranks int64, next uses int32 (or None)."""

    slots: Tensor
    stamps: Tensor
    ranks: Tensor
    next_uses: Tensor | None

    def window(self, start: int, stop: int) -> _Ranked:
        return self._each(lambda column: column[start:stop])

    def select(self, which: Tensor) -> _Ranked:
        return self._each(lambda column: column.index_select(0, which))

    def arrays(self, start: int) -> tuple[loops.Int64s, loops.Int64s, loops.Int64s, loops.Int32s]:
        """Return the columns of slots with next uses from `start` on, for compiled loops."""
        assert self.next_uses is not None, "ranked without next uses"
        columns = (self.slots, self.stamps, self.ranks, self.next_uses)
        slots, stamps, ranks, next_uses = (column.numpy()[start:] for column in columns)
        return slots, stamps, ranks, next_uses

    def _each(self, change: Callable[[Tensor], Tensor]) -> _Ranked:
        next_uses = None if self.next_uses is None else change(self.next_uses)
        return _Ranked(change(self.slots), change(self.stamps), change(self.ranks), next_uses)


class VictimQueue:
    """Slots in the order of eviction: first those without a known use, by score, then longest unused; then those with a
    known use, the furthest first.

    The order is as of the last refill. An entry is skipped if its slot is pinned, or was used or refilled since. With
    an index of next uses, an entry is ranked again once a use of its row became known, and a slot whose rank fell since
    the refill is offered: a row that was used and will not be used again is the best victim of all. So the victims are
    the best there are, as long as all batches were known.
    """

    def __init__(self, state: SlotState) -> None:
        self._map, self._scores, self._next_use_index = state.map, state.scores, state.next_use_index
        self._num_pinned_slots = state.num_pinned
        none = torch.empty(0, dtype=torch.int64, device=self._map.device)
        self._none = _Ranked(none, none, none, None if self._next_use_index is None else none.int())
        self.clear()

    def clear(self) -> None:
        """Forget the ranking."""
        self._queue, self._cursor = self._none, 0
        self._offered: list[tuple[int, _Ranked]] = []  # with the batch that used them
        self._set_worst(-1)

    def pop(self, count: int, oldest_pinned: int) -> Tensor:
        """Take up to `count` slots whose last batch is before `oldest_pinned`: int64 [<= count]."""
        victims = self._take(count, oldest_pinned)
        if victims.numel() < count:
            # The slots taken above still hold their rows, so the new ranking has them again: start over.
            self._refill(count, oldest_pinned)
            victims = self._take(count, oldest_pinned)
            if victims.numel() < count:
                self.clear()  # nobody will evict these
        return victims

    def offer(self, slots: Tensor, next_uses: Tensor, batch: int) -> None:
        """Consider `slots` (int64 [M], distinct) that `batch` used, with their rows' next uses (int32 [M], 0: none)."""
        self._offered = [part for part in self._offered if part[0] != batch]  # offered by a refill for this batch
        if self._worst < 0:
            return
        better = self._better(slots, next_uses)
        if better.slots.numel():
            self._offered.append((batch, better))
        if sum(part.slots.numel() for _, part in self._offered) > self._map.num_used // 2:
            self.clear()  # nearly everything passes the bound, so it is out of date

    def ranks(self, slots: Tensor) -> Tensor:
        """Return the present ranks of `slots` (int64 [M]), whether they may be evicted or not: int64 [M]."""
        return self._rank(slots).ranks

    def _better(self, slots: Tensor, next_uses: Tensor) -> _Ranked:
        """Return those of `slots` that rank among the ranked ones; arguments as for `offer`."""
        use_stamps, _, score_bits = self._state()
        bounds = (self._worst, self._worst_next_use)
        kept = loops.offer(slots.numpy(), next_uses.numpy(), *bounds, use_stamps, score_bits)
        return _Ranked(*map(torch.from_numpy, kept))

    def _state(self) -> tuple[loops.Int64s, loops.Int32s, loops.Int32s]:
        """Return what compiled loops rank by, [S + 1] each: use stamps; next uses, empty without an index of them; and
        the bits of the scores, which order like the non-negative scores, empty without scores."""
        none, index, scores = np.empty(0, np.int32), self._next_use_index, self._scores.of_slots()
        next_uses = none if index is None else index.next_use_array
        return self._map.stamps_array, next_uses, none if scores is None else scores.numpy().view(np.int32)

    def _next_usable(self, count: int, oldest_pinned: int) -> tuple[_Ranked, Tensor]:
        """Return a window of the queue with `count` usable entries, or the whole rest, and the positions of these."""
        remaining = self._queue.slots.numel() - self._cursor
        for width in (2 * count, remaining):  # most entries are usable, so a short window nearly always suffices
            window = self._queue.window(self._cursor, self._cursor + min(width, remaining))
            usable = self._usable(window, oldest_pinned)
            if usable.numel() >= count or width >= remaining:
                break
        return window, usable

    def _take(self, count: int, oldest_pinned: int) -> Tensor:
        """Take the lowest ranks of the queue and, with an index of next uses, of the slots offered since the refill."""
        if self._next_use_index is None:
            window, usable = self._next_usable(count, oldest_pinned)
            usable = usable[:count]
            if 0 < usable.numel() == count:
                self._cursor += int(usable[-1]) + 1
            return window.slots.index_select(0, usable)
        ready = [part for batch, part in self._offered if batch < oldest_pinned]
        pinned = [(batch, part) for batch, part in self._offered if batch >= oldest_pinned]
        victims, passed, waiting = self._lowest(count, oldest_pinned, ready)
        self._cursor += passed
        waiting = self._trim(waiting, 2 * count)
        self._offered = [(0, waiting), *pinned] if waiting.slots.numel() else pinned
        return victims

    def _lowest(self, count: int, oldest_pinned: int, ready: list[_Ranked]) -> tuple[Tensor, int, _Ranked]:
        """Return the `count` lowest slots of the queue and of `ready`, which were offered; the number of entries of the
        queue that are done with; and the slots that stay offered."""
        offered = [*ready, self._none]
        ready_slots = np.concatenate([part.slots.numpy() for part in offered])
        ready_stamps = np.concatenate([part.stamps.numpy() for part in offered])
        limits, state = (count, oldest_pinned, self._worst), self._state()
        found = loops.candidates(*self._queue.arrays(self._cursor), ready_slots, ready_stamps, *limits, *state)
        slots, stamps, ranks, places, usable, width = found
        bound = np.partition(ranks, count - 1)[count - 1] if ranks.size > count else _NEVER
        victims, passed, left = loops.choose(slots, ranks, places, usable, width, count, bound)
        waiting = slots[left]
        columns = (waiting, stamps[left], ranks[left], state[1][waiting])
        return torch.from_numpy(victims), passed, _Ranked(*map(torch.from_numpy, columns))

    def _trim(self, waiting: _Ranked, enough: int) -> _Ranked:
        """Keep the best `enough` of many offered slots, and end the ranking at the worst of these."""
        if waiting.slots.numel() <= 2 * enough:
            return waiting
        self._set_worst(int(waiting.ranks.kthvalue(enough).values))
        end = int(torch.searchsorted(self._queue.ranks, self._worst, right=True))
        self._queue = self._queue.window(0, max(end, self._cursor))
        return waiting.select((waiting.ranks <= self._worst).nonzero().flatten())

    def _set_worst(self, rank: int) -> None:
        """Note that every slot up to this rank is in the queue, offered, or pinned."""
        self._worst = rank
        self._worst_next_use = _NONE_KNOWN_USE if rank < loops.KNOWN_USE else loops.KNOWN_USE + loops.LAST_BATCH - rank

    def _usable(self, ranked: _Ranked, oldest_pinned: int) -> Tensor:
        """Positions of entries that may be evicted and whose rank still holds: int64."""
        usable = self._unused(ranked, oldest_pinned)
        if self._next_use_index is not None and ranked.next_uses is not None:
            usable &= self._next_use_index.next_use.index_select(0, ranked.slots) == ranked.next_uses
        return usable.nonzero().flatten()

    def _unused(self, ranked: _Ranked, oldest_pinned: int) -> Tensor:
        """True for entries that may be evicted and were not used since they were ranked: bool."""
        stamps = self._map.use_stamp.index_select(0, ranked.slots)
        return (stamps == ranked.stamps) & (stamps >> 32 < oldest_pinned)

    def _rank(self, slots: Tensor | None = None) -> _Ranked:
        """Rank `slots` (int64 [M]), or all that were ever used."""
        end = self._map.num_used + 1

        def select(tensor: Tensor) -> Tensor:
            return tensor[1:end] if slots is None else tensor.index_select(0, slots)

        ranked_slots = torch.arange(1, end, device=self._map.device) if slots is None else slots
        stamps = select(self._map.use_stamp)
        ranks = stamps >> 32
        scores = self._scores.of_slots()
        if scores is not None:  # the bits of a non-negative float32 order like the number itself
            ranks = (select(scores).view(torch.int32).long() << 32).bitwise_or_(ranks)
        if self._next_use_index is None:
            return _Ranked(ranked_slots, stamps, ranks, None)
        next_uses = select(self._next_use_index.next_use)
        ranks = torch.where(next_uses > 0, loops.KNOWN_USE + loops.LAST_BATCH - next_uses.long(), ranks)
        return _Ranked(ranked_slots, stamps, ranks, next_uses)

    def _refill(self, least: int, oldest_pinned: int) -> None:
        """Rank the lowest slots again, at least `least`, as far as these may be evicted."""
        about = ranking_size(least, self._map.num_used)
        self._queue, pinned = self._lowest_ranks(least, about, oldest_pinned)
        self._cursor, self._offered = 0, []
        if self._next_use_index is not None and self._queue.slots.numel():
            self._set_worst(int(self._queue.ranks[-1]))
            self._offer_pinned(pinned.select((pinned.ranks <= self._worst).nonzero().flatten()))

    def _lowest_ranks(self, least: int, about: int, oldest_pinned: int) -> tuple[_Ranked, _Ranked]:
        """Return the `about` lowest slots that may be evicted, ascending by rank and slot, fewer if there are not so
        many, but `least` if possible; and slots in flight, among them all of a rank that low."""
        num_used, bound = self._map.num_used, _NEVER - 1
        state = (*self._state(), num_used + 1, self._num_pinned_slots, oldest_pinned)
        stride = sample_stride(about, num_used)
        if stride:
            sample = np.sort(loops.lowest_ranks(*state, bound, stride)[1])
            size = -(-num_used // stride)
            bound = min([bound, *sample[size * about // num_used + size // 64 :][:1].tolist()])
        slots, ranks, pinned = loops.lowest_ranks(*state, bound, 1)
        if slots.size < least:  # an unlucky sample
            slots, ranks, pinned = loops.lowest_ranks(*state, _NEVER - 1, 1)
        order = ranks.argsort()
        loops.settle_ties(order, ranks)
        return self._rank(torch.from_numpy(slots[order[:about]])), self._rank(torch.from_numpy(pinned))

    def _offer_pinned(self, waiting: _Ranked) -> None:
        """Offer slots of batches in flight, which may be evicted once these are released."""
        batches = waiting.stamps >> 32
        for batch in batches.unique().tolist():
            self._offered.append((batch, waiting.select((batches == batch).nonzero().flatten())))
