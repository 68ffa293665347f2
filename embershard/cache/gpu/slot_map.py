"""Map between rows and slots whose work on a batch is done by kernels: they find a batch's keys, number the rows to
fill, and bind rows to slots.

Sizes that a kernel finds stay on the device: buffers are as long as the batch, and a vector of numbers (`numbers`,
int64 [NUM_NUMBERS]) tells how much of them counts. The loops of `loops/slots.py` do the same work on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from embershard.cache.config import MapKind
from embershard.cache.gpu.key_map import LIVE, PlacedArrayMap, PlacedHashedMap, PlacedKeyMap, place_of
from embershard.cache.gpu.launch import COUNTED, block_counts, kernel, launch
from embershard.cache.slot_map import SlotMap


class KernelSlotMap(SlotMap):
    """`SlotMap` for plans by kernels; the arguments are the same."""

    _entries: PlacedKeyMap

    def _make_entries(self, kind: MapKind) -> PlacedKeyMap:
        if kind == "hashed":
            return PlacedHashedMap(self.num_keys, self.num_slots, self.device)
        return PlacedArrayMap(self.num_keys, self.device)

    @property
    def key_map(self) -> PlacedKeyMap:
        """The map over the keys."""
        return self._entries

    def find_missed(self, keys: Tensor, batch: int, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Look up `keys` [N] and stamp the slots found: the last position of a slot leaves its stamp. Number the
        distinct rows that were not found, in ascending order.

        Args:
            numbers: gets the number of keys that are no rows, of ids that were not found, and of their rows.

        Returns:
            Slots int64 [N], 0 where a key is not cached; bool [N], True at the position whose stamp a slot has; the
            keys of the rows not found, int64 [N], of which the first ones count; for each id the number of its row
            among them, int32 [N], -1 where it was found; and the positions of all ids, int64 [N], first those not
            found, by key.
        """
        slots, missed_keys = torch.empty_like(keys), torch.empty_like(keys, dtype=torch.int32)
        first_hits = torch.empty_like(keys, dtype=torch.bool)
        count, first, stamps = keys.numel(), self.first_stamp(batch), self.use_stamp
        table, constants = self._entries.table, self._entries.constants
        launch(_find, count, keys, *table, stamps, numbers, slots, first, self.num_keys, **constants)
        launch(_mark_missed, count, keys, slots, stamps, first_hits, missed_keys, first, self.num_keys)
        (ascending, order), counts = missed_keys.sort(), block_counts(missed_keys)
        launch(_count_new, count, ascending, counts, block=COUNTED)
        fill_keys, fill_of_id = torch.empty_like(order), torch.empty_like(missed_keys)
        ends = counts.cumsum_(1)
        launch(_number_fills, count, ascending, order, ends, fill_keys, fill_of_id, numbers, block=COUNTED)
        return slots, first_hits, fill_keys, fill_of_id, order

    def bind(self, keys: Tensor, slots: Tensor, batch: int, uses: tuple[Tensor, Tensor, int] | None = None) -> None:
        """Bind `keys` to `slots`, as `SlotMap.bind` does.

        Args:
            uses: next and last uses of the slots, which the rows bring along as their traces, and the next use of a row
                with a trace; None: rows have none.
        """
        next_uses, last_uses, soon = (self.key_of_slot, self.key_of_slot, 0) if uses is None else uses
        places, entries = self._entries.claim(keys), self._entries.cells
        state = (entries, self.key_of_slot, self.use_stamp, next_uses, last_uses)
        which = (self.first_stamp(batch), soon)
        launch(_bind, keys.numel(), keys, places, slots, *state, *which, USES=uses is not None)

    def unbind(self, keys: Tensor, traces: Tensor | None = None) -> None:
        if traces is not None:
            super().unbind(keys, traces)
        else:
            self.unbind_from(keys, keys, None)

    def unbind_from(self, keys: Tensor, slots: Tensor, last_uses: Tensor | None) -> None:
        """Unbind `keys` from `slots` (both int64 [M]) and keep the last uses (int32 [S + 1]) as traces; None: no
        traces."""
        uses = self.key_of_slot if last_uses is None else last_uses
        constants = {**self._entries.constants, "USES": last_uses is not None}
        launch(_unbind, keys.numel(), keys, slots, *self._entries.table, uses, **constants)


# Places in `numbers`.
OUT_OF_RANGE = tl.constexpr(0)  # keys that are no rows
MISSED = tl.constexpr(1)  # ids that were not found
FILLS = tl.constexpr(2)  # their distinct rows
NUM_OF_BATCH = 3

_NO_KEY = tl.constexpr(2**31 - 1)  # above every key


@kernel("held_keys")
def _find(  # type: ignore[no-untyped-def]
    keys, held_keys, held_entries, tallies, num_buckets, num_cells, use_stamps, numbers, slots, first_stamp,
    num_keys, count,
    FACTORS: tl.constexpr, BUCKET: tl.constexpr, SPILL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < count
    key = tl.load(keys + position, mask=inside, other=0)
    is_row = inside & (key >= 0) & (key < num_keys)
    place = place_of(key, held_keys, tallies, num_buckets, num_cells, is_row, FACTORS, BUCKET, SPILL)
    slot = tl.maximum(tl.load(held_entries + place, mask=place >= 0, other=0), 0).to(tl.int64)
    tl.store(slots + position, slot, mask=inside)
    stamp = first_stamp + position.to(tl.int64)
    tl.atomic_max(use_stamps + slot, stamp, mask=slot > 0, sem="relaxed")
    num_wrong = tl.sum((inside & ~is_row).to(tl.int64))
    tl.atomic_add(numbers + OUT_OF_RANGE, num_wrong, mask=num_wrong > 0, sem="relaxed")


@kernel()
def _mark_missed(  # type: ignore[no-untyped-def]
    keys, slots, use_stamps, first_hits, missed_keys, first_stamp, num_keys, count, BLOCK: tl.constexpr
):
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < count
    slot = tl.load(slots + position, mask=inside, other=0)
    stamp = tl.load(use_stamps + slot, mask=slot > 0, other=-1)
    tl.store(first_hits + position, stamp == first_stamp + position.to(tl.int64), mask=inside)
    key = tl.load(keys + position, mask=inside, other=0)
    is_missed = (slot == 0) & (key >= 0) & (key < num_keys)
    tl.store(missed_keys + position, tl.where(is_missed, key, _NO_KEY).to(tl.int32), mask=inside)


@triton.jit
def _first_of_key(ascending, place, inside):  # type: ignore[no-untyped-def]
    """The missed keys at each `place`, and True at the first of a key."""
    key = tl.load(ascending + place, mask=inside, other=_NO_KEY)
    before = tl.load(ascending + place - 1, mask=inside & (place > 0), other=-1)
    return key, (key != _NO_KEY) & (key != before)


@kernel()
def _count_new(ascending, counts, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_new = _first_of_key(ascending, place, place < count)[1]
    tl.store(counts + tl.program_id(0), tl.sum(is_new.to(tl.int32)))


@kernel()
def _number_fills(  # type: ignore[no-untyped-def]
    ascending, order, ends, fill_keys, fill_of_id, numbers, count, BLOCK: tl.constexpr
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    key, is_new = _first_of_key(ascending, place, inside)
    is_missed = key != _NO_KEY
    before = tl.load(ends + tl.program_id(0) - 1, mask=tl.program_id(0) > 0, other=0)
    fill = before + tl.cumsum(is_new.to(tl.int32), 0) - 1
    fill = tl.where(is_missed, fill, -1)
    tl.store(fill_keys + fill, key.to(tl.int64), mask=is_new)
    position = tl.load(order + place, mask=inside, other=0)
    tl.store(fill_of_id + position, fill, mask=inside)
    after = tl.load(ascending + place + 1, mask=inside & (place + 1 < count), other=_NO_KEY)
    is_last = is_missed & (after == _NO_KEY)
    tl.store(numbers + MISSED + tl.zeros_like(place), (place + 1).to(tl.int64), mask=is_last)
    tl.store(numbers + FILLS + tl.zeros_like(place), (fill + 1).to(tl.int64), mask=is_last)


@kernel()
def give_slots(slots, fill_of_id, fill_slots, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the slots of the rows to fill (`fill_slots` int64 [M]) into a batch's `slots` (int64 [count])."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    fill = tl.load(fill_of_id + position, mask=position < count, other=-1)
    slot = tl.load(fill_slots + fill, mask=fill >= 0, other=0)
    tl.store(slots + position, slot, mask=fill >= 0)


@kernel()
def _bind(  # type: ignore[no-untyped-def]
    keys, places, slots, entries, key_of_slot, use_stamps, next_uses, last_uses, stamp, soon, count,
    USES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    slot = tl.load(slots + at, mask=inside, other=0)
    place = tl.load(places + at, mask=inside, other=-1)
    if USES:
        last = -tl.load(entries + place, mask=place >= 0, other=0)
        tl.store(last_uses + slot, last, mask=inside)
        tl.store(next_uses + slot, tl.where(last > 0, soon, 0), mask=inside)
    tl.store(entries + place, slot.to(tl.int32), mask=place >= 0)
    tl.store(key_of_slot + slot, tl.load(keys + at, mask=inside, other=0).to(tl.int32), mask=inside)
    tl.store(use_stamps + slot, tl.zeros_like(slot) + stamp, mask=inside)


@kernel("held_keys")
def _unbind(  # type: ignore[no-untyped-def]
    keys, slots, held_keys, held_entries, tallies, num_buckets, num_cells, last_uses, count,
    USES: tl.constexpr, FACTORS: tl.constexpr, BUCKET: tl.constexpr, SPILL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    key = tl.load(keys + at, mask=inside, other=0)
    place = place_of(key, held_keys, tallies, num_buckets, num_cells, inside, FACTORS, BUCKET, SPILL)
    trace = tl.zeros([BLOCK], tl.int32)
    if USES:
        slot = tl.load(slots + at, mask=inside, other=0)
        trace = -tl.load(last_uses + slot, mask=inside, other=0)
    tl.store(held_entries + place, trace, mask=place >= 0)
    if BUCKET > 0:
        is_gone = (place >= 0) & (trace == 0)
        tl.store(held_keys + place, tl.zeros_like(trace) - 1, mask=is_gone)
        num_gone = tl.sum(is_gone.to(tl.int64))
        tl.atomic_add(tallies + LIVE, -num_gone, mask=num_gone > 0, sem="relaxed")
