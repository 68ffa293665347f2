"""When each row will be used next, as far as the known batches tell.

A batch is *known* when its ids are; nothing of it need be cached. The best row to put out is the one whose next use
is furthest (Belady 1966), so every slot needs the batch of its row's next use. It is kept exact at the cost of one
pass over a batch's ids when it becomes known and one when it is prepared. However many batches are known, nothing
is scanned.

The uses of a row in the known batches form a chain. Every use has a number; for each use the chain holds the batch of
the row's following use, so preparing a batch tells at once when each of its rows is used again. To append to the
chains, the last known use of each row must be found: it stands beside the slot of a cached row, and in the slot map's
entry, negated, for a row that is not cached. That entry would be 0 otherwise: the index takes no memory per row.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from embershard.cache.rows import memory
from embershard.cache.slot_map import SlotMap

_WRAP = 2**30  # use numbers go from 1 to this, and start again
_LEAST_CHAIN = 1024


@dataclass(frozen=True, eq=False)
class KnownBatch:
    """A batch whose ids are known; U distinct rows.

    Attributes:
        number: known batches are counted from 1.
        first_use: number of the batch's first use, less one, not wrapped.
        num_uses: N, of which one per distinct row counts.
        uses: int32 [U] which ones.
        positions: int32 [U] where in the batch they are.
    """

    number: int
    first_use: int
    num_uses: int
    uses: Tensor
    positions: Tensor

    @property
    def num_rows(self) -> int:
        """U."""
        return self.positions.numel()

    @property
    def num_bytes(self) -> int:
        """Memory, in bytes."""
        tensors = {t.data_ptr(): t for t in (self.uses, self.positions)}
        return sum(t.numel() * t.element_size() for t in tensors.values())


class NextUseIndex:
    """The next known use of every slot's row.

    Attributes:
        next_use: int32 [S + 1], number of the known batch that uses the slot's row next; 0: no known use.
    """

    def __init__(self, slot_map: SlotMap) -> None:
        self._map = slot_map
        self.next_use = torch.zeros(slot_map.num_slots + 1, dtype=torch.int32, device=slot_map.device)
        self._last_use = self.next_use.clone()  # number of the last known use of the slot's row
        self._known: deque[KnownBatch] = deque()
        self._newest = 0
        self._end = 0  # uses so far, not wrapped
        # Ring: next_batch[use % capacity]. The cell behind its end takes what belongs to no use.
        self._next_batch = torch.zeros(_LEAST_CHAIN + 1, dtype=torch.int32, device=slot_map.device)

    @property
    def device_bytes(self) -> int:
        """Memory beside the slots, in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.next_use, self._last_use))

    @property
    def chain_bytes(self) -> int:
        """Memory of the chains, in bytes: at most four times what was needed when a batch last became known."""
        return self._next_batch.numel() * self._next_batch.element_size()

    @property
    def known_bytes(self) -> int:
        """Memory of the chains and of the known batches, in bytes."""
        return self.chain_bytes + sum(batch.num_bytes for batch in self._known)

    def know(self, keys: Tensor, positions: Tensor | None = None) -> KnownBatch:
        """Append a batch to what is known.

        Args:
            keys: int64 [N].
            positions: int32 [N] of the keys in their batch, where they are not all of it.
        """
        self._newest += 1
        first_use, count = self._reserve(keys.numel()), keys.numel()
        uses = self._numbers(first_use, torch.arange(count, dtype=torch.int32, device=keys.device))
        entries = self._map.entries(keys)
        cached = entries > 0
        slots = entries.clamp_min(0).long()
        last = torch.where(cached, self._last_use.gather(0, slots), -entries)
        self._next_batch.index_fill_(0, self._cells(last), self._newest)
        unused_so_far = cached.logical_and_(last == 0).nonzero().flatten()
        self.next_use.index_fill_(0, slots.index_select(0, unused_so_far), self._newest)

        # Of a row's several uses in this batch one stands, whichever; the others are taken for it from now on.
        self._last_use.scatter_(0, slots, uses)
        standing = self._last_use.gather(0, slots) == uses
        absent = (entries <= 0).nonzero().flatten()
        if absent.numel():
            absent_keys, traces = keys.index_select(0, absent), -uses.index_select(0, absent)
            self._map.leave_traces(absent_keys, traces)
            standing.scatter_(0, absent, self._map.entries(absent_keys) == traces)
        chosen = standing.nonzero().flatten().int()
        places = chosen if positions is None else positions.index_select(0, chosen)
        batch = KnownBatch(self._newest, first_use, count, chosen, places)
        self._known.append(batch)
        return batch

    def arrive(self, batch: KnownBatch, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        """The oldest known batch was prepared; its ids are in ``slots`` (int64 [N]).

        Returns:
            Its distinct slots int64 [U], and the number of the batch that uses each one next, int32 [U]; None when
            the batch is not the oldest: it was forgotten, or has arrived before.
        """
        if not self._is_oldest(batch):
            return None
        self._known.popleft()
        distinct = slots.index_select(0, batch.positions)
        following = self._next_batch.index_select(0, self._cells(self._numbers(batch.first_use, batch.uses)))
        self.next_use.scatter_(0, distinct, following)
        last = self._last_use.gather(0, distinct)
        self._last_use.scatter_(0, distinct, last.masked_fill_(following == 0, 0))
        return distinct, following

    def skip(self, batch: KnownBatch, keys: Tensor) -> None:
        """The oldest known batch, with these keys (int64 [N]), will not be prepared."""
        if not self._is_oldest(batch):
            return
        distinct = keys.index_select(0, batch.positions)
        entries = self._map.entries(distinct)
        _, following = self.arrive(batch, keys.new_zeros(keys.numel())) or (None, entries)
        slots = entries.clamp_min(0).long()
        self.next_use.scatter_(0, slots, following)
        last = self._last_use.gather(0, slots)
        self._last_use.scatter_(0, slots, last.masked_fill_(following == 0, 0))
        over = ((entries < 0) & (following == 0)).nonzero().flatten()
        self._map.leave_traces(distinct.index_select(0, over), 0)

    def traces(self, slots: Tensor) -> Tensor:
        """What to leave in the map for rows that go out of ``slots`` (int64 [M]): int32 [M]."""
        return -self._last_use.index_select(0, slots)

    def admit(self, keys: Tensor, slots: Tensor) -> None:
        """These rows are about to be bound to these slots (both int64 [M]); their traces still are in the map."""
        last = -self._map.entries(keys)
        self._last_use.scatter_(0, slots, last)
        # A row that comes in other than by its own known batch: of its known uses only the last is at hand, and the
        # safe guess at the next one is "soon".
        soon = self._known[0].number if self._known else 0
        self.next_use.scatter_(0, slots, (last > 0).int() * soon)

    def forget(self) -> None:
        """Nothing is known any more."""
        self._known.clear()
        self.next_use.zero_()
        self._last_use.zero_()
        self._next_batch.zero_()
        self._map.forget_traces()

    def grow(self, num_slots: int) -> None:
        """The pool now has ``num_slots`` slots."""
        extra = self.next_use.new_zeros(num_slots + 1 - self.next_use.numel())
        memory.record_stream(self.next_use, self._last_use)
        self.next_use = torch.cat([self.next_use, extra])
        self._last_use = torch.cat([self._last_use, extra])

    def _is_oldest(self, batch: KnownBatch) -> bool:
        """Whether ``batch`` is the oldest known one. Older ones that are left will not come: batches come in order, so
        nobody heard of them (an exception came when they had just become known)."""
        while self._known and self._known[0].number < batch.number:
            self._known.popleft()
        return bool(self._known) and self._known[0] is batch

    def _numbers(self, first_use: int, uses: Tensor) -> Tensor:
        return ((uses + first_use % _WRAP) & (_WRAP - 1)) + 1

    def _cells(self, numbers: Tensor) -> Tensor:
        """Ring cells of use numbers (int32), where 0 is no use: int64, same shape."""
        capacity = self._next_batch.numel() - 1
        return (numbers & (capacity - 1)).masked_fill_(numbers == 0, capacity).long()

    def _reserve(self, count: int) -> int:
        """Room in the ring for ``count`` uses, cleared; the number of uses before them."""
        first_use, self._end = self._end, self._end + count
        oldest = self._known[0].first_use if self._known else first_use
        needed, capacity = self._end - oldest, self._next_batch.numel() - 1
        if needed > capacity or _LEAST_CHAIN < capacity > 4 * needed:
            capacity = self._resize(oldest, first_use, needed)
        start, stop = (first_use + 1) % capacity, (first_use + 1) % capacity + count
        self._next_batch[start : min(stop, capacity)] = 0
        self._next_batch[: max(0, stop - capacity)] = 0
        return first_use

    def _resize(self, oldest: int, end: int, needed: int) -> int:
        """A ring for ``needed`` uses, with the cells of those from ``oldest`` to ``end``; its capacity. The last change
        was at least a quarter of the old or new ring's uses ago, so that each use pays for a few cells at most."""
        alive = self._numbers(oldest, torch.arange(end - oldest, dtype=torch.int32, device=self._map.device))
        kept = self._next_batch.index_select(0, self._cells(alive))
        capacity = self._next_batch.numel() - 1
        while needed > capacity:
            capacity *= 2
        while _LEAST_CHAIN < capacity >= 4 * needed:
            capacity //= 2
        memory.record_stream(self._next_batch)
        self._next_batch = self._next_batch.new_zeros(capacity + 1)
        self._next_batch.scatter_(0, self._cells(alive), kept)
        return capacity
