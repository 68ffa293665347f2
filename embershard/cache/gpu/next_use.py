"""Index of next uses whose work on a batch is done by kernels: they do what the loops `know`, `arrive` and
`take_traces` of `loops/next_uses.py` do on a CPU.

A batch's uses are numbered by position, from `first`; of several uses of a row in the batch, the last one stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from embershard.cache.gpu.key_map import place_of
from embershard.cache.gpu.launch import kernel, launch
from embershard.cache.gpu.readback import Count, Readback
from embershard.cache.gpu.slot_map import KernelSlotMap
from embershard.cache.next_use import KnownBatch, NextUseIndex, OtherTables


@dataclass(frozen=True, eq=False)
class MarkedBatch(KnownBatch):
    """A known batch whose number of distinct rows, U, may still be on the device only.

    Attributes:
        uses, positions: one tensor, bool [N]: True at one use of each distinct row. It takes a byte per id, where
            positions would take four per distinct row, or per id while their number is not known.
        first: number of the batch's first use.
        count: U.
    """

    first: int
    count: Count

    @property
    def num_rows(self) -> int:
        return int(self.count)


class KernelNextUseIndex(NextUseIndex):
    """`NextUseIndex` for plans by kernels. The host waits for nothing, but in `skip` and `forget`.

    Args:
        slot_map, tables: as for `NextUseIndex`.

    Attributes:
        readback: reads the number of rows of each known batch, with the next plan.
    """

    def __init__(self, slot_map: KernelSlotMap, tables: OtherTables | None = None) -> None:
        super().__init__(slot_map, tables)
        self._places, self._key_map = slot_map, slot_map.key_map
        self._num_pinned = 0 if tables is None else tables.num_pinned
        self.readback = Readback()

    def know(self, keys: Tensor, feature_lengths: Tensor | None = None) -> MarkedBatch:
        self._newest += 1
        first_use, first = self._reserve_ascending(keys.numel())
        self._key_map.claim_absent(keys)
        marks, count = torch.empty_like(keys, dtype=torch.bool), keys.numel()
        tally = keys.new_empty(1) if count else keys.new_zeros(1)
        table, constants = self._key_map.table, self._key_map.constants
        places, entries = torch.empty_like(keys) if constants["BUCKET"] else keys, table[1]
        links = (self.next_use, self._last_use, self._next_batch)
        which, capacity = (self._map.num_keys, self._num_pinned, first), self._next_batch.numel() - 1
        launch(_append, count, keys, places, tally, *table, *links, *which, self._newest, capacity, **constants)
        launch(_number_last, count, keys, places, entries, self._last_use, *which)
        launch(_mark_last, count, keys, places, entries, self._last_use, marks, tally, *which)
        batch = MarkedBatch(self._newest, first_use, marks, marks, first, self.readback.count(tally))
        self._known.append(batch)
        return batch

    def _clear(self, start: int, count: int) -> None:
        """Done by the kernels of `know`."""

    def arrive(self, batch: KnownBatch, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        """Remove the oldest known batch, as `NextUseIndex.arrive` does.

        Returns:
            `slots` [N], and the next uses of those where `batch` has a mark: int32 [N]; -1 elsewhere.
        """
        if not self._is_oldest(batch):
            return None
        self._known.popleft()
        assert isinstance(batch, MarkedBatch), "of another index"
        state = (self._next_batch, self.next_use, self._last_use)
        return slots, advance(slots, batch.positions, *state, batch.first)

    def bind(self, keys: Tensor, slots: Tensor, batch: int) -> None:
        self._places.bind(keys, slots, batch, (self.next_use, self._last_use, self._soon))

    def unbind(self, keys: Tensor, slots: Tensor) -> None:
        self._places.unbind_from(keys, slots, self._last_use)

    def _take_back(self, batch: KnownBatch, keys: Tensor) -> None:
        positions = batch.positions.nonzero().flatten().int()
        super()._take_back(KnownBatch(batch.number, batch.first_use, positions, positions), keys)


@triton.jit
def _entries_at(key, place, entries, num_keys, num_pinned):  # type: ignore[no-untyped-def]
    """Entries, and which keys take part: rows of tables that are not pinned."""
    takes_part = (key >= 0) & (key < num_keys) & (place >= 0)
    entry = tl.load(entries + place, mask=takes_part, other=0)
    return entry, takes_part & ((entry <= 0) | (entry > num_pinned))


@triton.jit
def _entries_of(keys, places, entries, position, count, num_keys, num_pinned):  # type: ignore[no-untyped-def]
    """Places besides."""
    inside = position < count
    place = tl.load(places + position, mask=inside, other=-1)
    key = tl.load(keys + position, mask=inside, other=-1)
    entry, takes_part = _entries_at(key, place, entries, num_keys, num_pinned)
    return place, entry, takes_part


@kernel("held_keys")
def _append(  # type: ignore[no-untyped-def]
    keys, places, tally, held_keys, held_entries, tallies, num_buckets, num_cells, next_uses, last_uses,
    next_batches, num_keys, num_pinned, first, batch, capacity, count,
    FACTORS: tl.constexpr, BUCKET: tl.constexpr, SPILL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < count
    key = tl.load(keys + position, mask=inside, other=-1)
    is_row = (key >= 0) & (key < num_keys)
    place = place_of(key, held_keys, tallies, num_buckets, num_cells, is_row, FACTORS, BUCKET, SPILL)
    if BUCKET > 0:
        tl.store(places + position, place, mask=inside)
    tl.store(next_batches + ((first + position) & (capacity - 1)), tl.zeros_like(position), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(tally, 0)
    entry, takes_part = _entries_at(key, place, held_entries, num_keys, num_pinned)
    is_cached = takes_part & (entry > 0)
    is_absent = takes_part & (entry <= 0)
    # The first use of a row finds the row's last use of an earlier batch; the others find `first`.
    mark = tl.zeros_like(entry) + first
    of_slot = tl.atomic_xchg(last_uses + entry, mark, mask=is_cached, sem="relaxed")
    of_key = tl.atomic_xchg(held_entries + place, -mark, mask=is_absent, sem="relaxed")
    last = tl.where(is_cached, of_slot, tl.where(is_absent, -of_key, first))
    to_batch = tl.zeros_like(entry) + batch
    # Links of this batch's own uses are those that other programs clear.
    is_earlier = ((last - first) & (capacity - 1)) >= count
    tl.store(next_batches + (last & (capacity - 1)), to_batch, mask=(last > 0) & (last != first) & is_earlier)
    tl.store(next_uses + entry, to_batch, mask=is_cached & (last == 0))


@kernel()
def _number_last(  # type: ignore[no-untyped-def]
    keys, places, entries, last_uses, num_keys, num_pinned, first, count, BLOCK: tl.constexpr
):
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place, entry, takes_part = _entries_of(keys, places, entries, position, count, num_keys, num_pinned)
    number = (first + position).to(tl.int32)
    tl.atomic_max(last_uses + entry, number, mask=takes_part & (entry > 0), sem="relaxed")
    tl.atomic_min(entries + place, -number, mask=takes_part & (entry <= 0), sem="relaxed")


@kernel()
def _mark_last(  # type: ignore[no-untyped-def]
    keys, places, entries, last_uses, marks, tally, num_keys, num_pinned, first, count, BLOCK: tl.constexpr
):
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, entry, takes_part = _entries_of(keys, places, entries, position, count, num_keys, num_pinned)
    last = tl.where(entry > 0, tl.load(last_uses + entry, mask=takes_part & (entry > 0), other=0), -entry)
    is_last = takes_part & (last == first + position)
    tl.store(marks + position, is_last, mask=position < count)
    tl.atomic_add(tally, tl.sum(is_last.to(tl.int64)), sem="relaxed")


@kernel()
def _advance(  # type: ignore[no-untyped-def]
    slots, marks, next_batches, next_uses, last_uses, later, first, capacity, count, BLOCK: tl.constexpr
):
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < count
    marked = tl.load(marks + position, mask=inside, other=0) != 0
    batch = tl.load(next_batches + ((first + position) & (capacity - 1)), mask=marked, other=-1)
    slot = tl.load(slots + position, mask=marked, other=0)
    tl.store(later + position, batch, mask=inside)
    tl.store(next_uses + slot, batch, mask=marked)
    tl.store(last_uses + slot, tl.zeros_like(batch), mask=marked & (batch == 0))


def advance(
    slots: Tensor, marks: Tensor, next_batches: Tensor, next_uses: Tensor, last_uses: Tensor, first: int
) -> Tensor:
    """Give the slots (int64 [N]) of a known batch, where `marks` is True, their rows' next uses.

    Returns:
        The batches that use the rows next, int32 [N]; 0 for none, -1 where `marks` is False.
    """
    later = torch.empty_like(slots, dtype=torch.int32)
    capacity = next_batches.numel() - 1
    launch(_advance, slots.numel(), slots, marks, next_batches, next_uses, last_uses, later, first, capacity)
    return later
