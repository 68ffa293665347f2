"""Index of the next known use of each row.

A batch is *known* as soon as its ids are; its rows need not be cached. The best row to evict is the one whose next use
is furthest (Belady 1966), so every slot needs the batch of its row's next use. The index keeps it exact with one pass
over a batch's ids when the batch becomes known and one when it is prepared, however many batches are known.

The uses of a row in the known batches form a chain. Every use has a number; for each use, the chain holds the batch of
the row's next use, so preparing a batch tells at once when each of its rows is used again. Appending to a chain
needs the row's last known use: its number is kept beside the slot of a cached row and, negated, in the slot map's entry
of a row that is not cached (its *trace*). That entry would be 0 otherwise, so the index takes no memory per row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embershard.cache import loops
from embershard.cache.rows import memory
from embershard.cache.slot_map import SlotMap

_WRAP = 2**30  # use numbers run from 1 to this and start again
_LEAST_CHAIN = 1024


@dataclass(frozen=True, eq=False)
class KnownBatch:
    """A batch whose ids are known, with U distinct rows.

    Attributes:
        number: of the known batch, counted from 1.
        first_use: number of the batch's first use, less one, not wrapped.
        uses: int32 [U], one of the batch's uses of each distinct row, counted from 0.
        positions: int32 [U] of these uses in the batch.

    >>> NextUseIndex(SlotMap(num_keys=9, num_slots=2)).know(torch.tensor([5, 7, 5])).num_rows
    2
    """

    number: int
    first_use: int
    uses: Tensor
    positions: Tensor

    @property
    def num_rows(self) -> int:
        """U, the number of distinct rows."""
        return self.positions.numel()

    @property
    def num_bytes(self) -> int:
        """Memory, in bytes."""
        return self.uses.nbytes + (0 if self.positions is self.uses else self.positions.nbytes)


class NextUseIndex:
    """Next known use of the row in every slot.

    Args:
        tables: those whose rows have next uses; None: all.

    Attributes:
        next_use: int32 [S + 1], number of the known batch that uses the slot's row next; 0: no known use.
        next_use_array: on a CPU, the memory of `next_use`, for compiled loops.

    >>> index = NextUseIndex(SlotMap(num_keys=9, num_slots=2))
    >>> first, second = index.know(torch.tensor([5, 7, 5])), index.know(torch.tensor([5]))
    >>> slots, next_uses = index.arrive(first, torch.tensor([1, 2, 1]))  # rows 5 and 7 are in slots 1 and 2
    >>> sorted(zip(slots.tolist(), next_uses.tolist()))
    [(1, 2), (2, 0)]
    """

    def __init__(self, slot_map: SlotMap, tables: OtherTables | None = None) -> None:
        self._map, self._tables = slot_map, tables
        self._takes_part = None if tables is None else tables.features.numpy()
        self._all_take_part = self._takes_part is None or bool(self._takes_part.all())
        next_use = torch.zeros(slot_map.num_slots + 1, dtype=torch.int32, device=slot_map.device)
        self._set_slots(next_use, next_use.clone())
        self._known: deque[KnownBatch] = deque()
        self._newest = 0
        self._end = 0  # number of uses so far, not wrapped
        # Ring: next_batch[use % capacity]. The extra cell at its end takes writes that belong to no use.
        self._set_ring(torch.zeros(_LEAST_CHAIN + 1, dtype=torch.int32, device=slot_map.device))

    def _set_slots(self, next_use: Tensor, last_use: Tensor) -> None:
        self.next_use = next_use
        self._last_use = last_use  # number of the last known use of the slot's row
        # Their memory, for compiled loops.
        self.next_use_array: loops.Int32s = memory.array_of(next_use)
        self._last_use_array: loops.Int32s = memory.array_of(last_use)

    def _set_ring(self, next_batch: Tensor) -> None:
        self._next_batch = next_batch
        self._next_batch_array: loops.Int32s = memory.array_of(next_batch)

    @property
    def device_bytes(self) -> int:
        """Device memory kept per slot, in bytes."""
        return sum(t.nbytes for t in (self.next_use, self._last_use))

    @property
    def chain_bytes(self) -> int:
        """Memory of the chains, in bytes: at most four times the need at the time a batch last became known."""
        return self._next_batch.nbytes

    @property
    def knows_most(self) -> bool:
        """True if half of the numbers of uses are taken by known batches: with all of them, uses would be mixed up."""
        return bool(self._known) and 2 * (self._end - self._known[0].first_use) >= _WRAP

    def know(self, keys: Tensor, feature_lengths: Tensor | None = None) -> KnownBatch:
        """Append a batch to the known ones.

        Args:
            keys: int64 [N].
            feature_lengths: int64 [F], ids per feature; None only without `tables`.

        Raises:
            IndexError: on a CPU, a key is not in [0, R). Nothing became known.
        """
        self._newest += 1
        batch = self._know(keys, feature_lengths)
        self._known.append(batch)
        return batch

    def _know(self, keys: Tensor, feature_lengths: Tensor | None) -> KnownBatch:
        array, size = self._map.key_array(keys), keys.numel()
        lengths = np.array([size]) if feature_lengths is None else feature_lengths.contiguous().numpy()
        takes_part = np.ones(lengths.size, np.bool_) if self._takes_part is None else self._takes_part
        count = size if self._all_take_part else int(lengths[takes_part].sum())
        first_use = self._reserve(count)
        uses = np.empty(count, np.int32)
        positions = uses if self._all_take_part else np.empty(count, np.int32)
        state = (self._map.array, self.next_use_array, self._last_use_array, self._next_batch_array)
        found = loops.know(array, lengths, takes_part, *state, first_use, self._newest, _WRAP, uses, positions)
        assert found >= 0, f"{lengths.sum()} ids in {lengths.size} features, {size} ids in the batch"
        start = count - found
        kept = torch.from_numpy(uses[start:].copy())  # without the memory of repeats
        places = kept if positions is uses else torch.from_numpy(positions[start:].copy())
        return KnownBatch(self._newest, first_use, kept, places)

    def arrive(self, batch: KnownBatch, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        """Remove the oldest known batch, which was prepared; its ids are in `slots` (int64 [N]).

        Returns:
            Its distinct slots int64 [U], and the number of the known batch that uses each one next, int32 [U]; None if
            `batch` is not the oldest known batch: it was forgotten or has arrived before.
        """
        if not self._is_oldest(batch):
            return None
        self._known.popleft()
        uses, positions = batch.uses.numpy(), batch.positions.numpy()
        distinct, later = np.empty(uses.size, np.int64), np.empty(uses.size, np.int32)
        state = (self._next_batch_array, self.next_use_array, self._last_use_array)
        loops.arrive(slots.numpy(), uses, positions, batch.first_use, _WRAP, *state, distinct, later)
        return torch.from_numpy(distinct), torch.from_numpy(later)

    def skip(self, batch: KnownBatch, keys: Tensor) -> None:
        """Remove the oldest known batch, with these keys (int64 [N]), which will not be prepared."""
        if not self._is_oldest(batch):
            return
        self._known.popleft()
        self._take_back(batch, keys)

    def _take_back(self, batch: KnownBatch, keys: Tensor) -> None:
        distinct = keys.index_select(0, batch.positions)
        entries = self._map.entries(distinct)
        later = self._later(batch)
        self._advance(entries.clamp_min(0).long(), later)
        over = ((entries < 0) & (later == 0)).nonzero().flatten()
        self._map.set_traces(distinct.index_select(0, over), 0)

    def unbind(self, keys: Tensor, slots: Tensor) -> None:
        """Unbind `keys` from `slots` (both int64 [M]) in the map, which keeps their traces."""
        self._map.unbind(keys, self.traces(slots))

    def traces(self, slots: Tensor) -> Tensor:
        """Return the traces of rows about to be evicted from `slots` (int64 [M]): int32 [M]."""
        return -self._last_use.index_select(0, slots)

    def bind(self, keys: Tensor, slots: Tensor, batch: int) -> None:
        """Bind `keys` to `slots` in the map, as its `bind` does, with the traces that it has of them."""
        self.take_traces(keys, slots)
        self._map.bind(keys, slots, batch)

    def take_traces(self, keys: Tensor, slots: Tensor) -> None:
        """Take over the traces of `keys`, about to be bound to `slots` (both int64 [M]), while the map has them."""
        state = (self._map.array, self.next_use_array, self._last_use_array)
        loops.take_traces(keys.numpy(), slots.numpy(), *state, self._soon)

    @property
    def _soon(self) -> int:
        """The next use of a row with a trace, which gives only the last of its known uses. The safe guess is the oldest
        known batch; if that batch is the one being prepared, `arrive` replaces the guess."""
        return self._known[0].number if self._known else 0

    def forget(self) -> None:
        """Forget all known batches."""
        self._known.clear()
        self.next_use.zero_()
        self._last_use.zero_()
        self._next_batch.zero_()
        self._map.forget_traces()

    def grow(self, num_slots: int) -> None:
        """Add slots, up to `num_slots` in all."""
        extra = self.next_use.new_zeros(num_slots + 1 - self.next_use.numel())
        memory.record_stream(self.next_use, self._last_use)
        self._set_slots(torch.cat([self.next_use, extra]), torch.cat([self._last_use, extra]))

    def _is_oldest(self, batch: KnownBatch) -> bool:
        """True if `batch` is the oldest known batch. Older batches are dropped first: batches arrive in order, so no
        caller has them (an exception came right after they became known)."""
        while self._known and self._known[0].number < batch.number:
            self._known.popleft()
        return bool(self._known) and self._known[0] is batch

    def _later(self, batch: KnownBatch) -> Tensor:
        """Return the known batch that uses each of the batch's distinct rows next: int32 [U], 0 for none."""
        return self._next_batch.index_select(0, self._cells(self._numbers(batch.first_use, batch.uses)))

    def _advance(self, slots: Tensor, later: Tensor) -> None:
        """Set the next uses of `slots` (int64 [U]) to `later` (int32 [U]); without one, clear the last use."""
        self.next_use.scatter_(0, slots, later)
        last = self._last_use.gather(0, slots)
        self._last_use.scatter_(0, slots, last.masked_fill_(later == 0, 0))

    def _reserve_ascending(self, count: int) -> tuple[int, int]:
        """Reserve `count` uses whose numbers do not start again among them; return what `_reserve` does, and the number
        of the first use."""
        if self._end % _WRAP + count > _WRAP:
            self._end += -self._end % _WRAP
        first_use = self._reserve(count)
        return first_use, first_use % _WRAP + 1

    def _numbers(self, first_use: int, uses: Tensor) -> Tensor:
        return ((uses + first_use % _WRAP) & (_WRAP - 1)) + 1

    def _cells(self, numbers: Tensor) -> Tensor:
        """Ring cells of use numbers (int32; 0: no use): int64, same shape."""
        capacity = self._next_batch.numel() - 1
        return (numbers & (capacity - 1)).masked_fill_(numbers == 0, capacity).long()

    def _reserve(self, count: int) -> int:
        """Clear room in the ring for `count` uses; return the number of uses before them."""
        first_use, self._end = self._end, self._end + count
        oldest = self._known[0].first_use if self._known else first_use
        needed, capacity = self._end - oldest, self._next_batch.numel() - 1
        if needed > capacity or _LEAST_CHAIN < capacity > 4 * needed:
            capacity = self._resize(oldest, first_use, needed)
        self._clear((first_use + 1) % capacity, count)
        return first_use

    def _clear(self, start: int, count: int) -> None:
        """Clear `count` cells of the ring, from `start` on."""
        stop, capacity = start + count, self._next_batch.numel() - 1
        ring = self._next_batch_array if self._next_batch_array.size else self._next_batch
        ring[start : min(stop, capacity)] = 0
        ring[: max(0, stop - capacity)] = 0

    def _resize(self, oldest: int, end: int, needed: int) -> int:
        """Make a ring for `needed` uses that keeps the uses from `oldest` to `end`; return its capacity. At least a
        quarter of the old or new ring's uses lie between two changes, so each use pays for a few cells at most."""
        alive = self._numbers(oldest, torch.arange(end - oldest, dtype=torch.int32, device=self._map.device))
        kept = self._next_batch.index_select(0, self._cells(alive))
        capacity = self._next_batch.numel() - 1
        while needed > capacity:
            capacity *= 2
        while _LEAST_CHAIN < capacity >= 4 * needed:
            capacity //= 2
        memory.record_stream(self._next_batch)
        self._set_ring(self._next_batch.new_zeros(capacity + 1))
        self._next_batch.scatter_(0, self._cells(alive), kept)
        return capacity


_MOST_ROWS = 65_535  # keys of two bytes; with more, FBGEMM's sort gains nothing
_SHARE = 10


def pinned_tables(rows: Sequence[int], num_slots: int) -> dict[int, tuple[int, int]]:
    """Choose a pool's tables to pin: number of the table -> first slot and rows.

    These are the smallest tables that together take at most a tenth of the slots. Nearly all of their rows are hot
    anyway; in consecutive slots FBGEMM sorts their ids in fewer passes (decision 0008).
    """
    pinned: dict[int, tuple[int, int]] = {}
    first = 1
    for table in sorted(range(len(rows)), key=lambda table: rows[table]):
        if 0 < rows[table] <= _MOST_ROWS and (first - 1 + rows[table]) * _SHARE <= num_slots:
            pinned[table] = (first, rows[table])
            first += rows[table]
    return pinned


class OtherTables:
    """Selects a batch's ids of tables that are not pinned; pinned rows need no next use.

    Args:
        row_offsets: first key of each table of the pool.
        table_of_feature: for each feature, the number of its table.
        pinned_keys: int64 [K], all rows of the pinned tables, in slots 1 to K.

    Attributes:
        features: bool [F], True for those whose table is not pinned.
        num_pinned: K.
    """

    def __init__(self, row_offsets: Sequence[int], table_of_feature: Sequence[int], pinned_keys: Tensor) -> None:
        are_pinned = torch.isin(torch.tensor(row_offsets, dtype=torch.int64), pinned_keys)
        self.features = ~are_pinned[torch.tensor(table_of_feature, dtype=torch.int64)]
        self.num_pinned = pinned_keys.numel()
