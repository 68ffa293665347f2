"""Map between rows and slots whose work on a batch is done by kernels: they find a batch's keys, number the rows to
fill, and bind rows to slots.

Sizes that a kernel finds stay on the device: buffers are as long as the batch, and a vector of numbers (`numbers`,
int64 [NUM_NUMBERS]) tells how much of them counts. The loops of `loops/slots.py` do the same work on a CPU.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from embershard.cache.config import MapKind
from embershard.cache.gpu.key_map import PlacedArrayMap, PlacedHashedMap, PlacedKeyMap
from embershard.cache.gpu.launch import kernel, launch
from embershard.cache.slot_map import SlotMap


class KernelSlotMap(SlotMap):
    """`SlotMap` for plans by kernels; the arguments are the same."""

    _entries: PlacedKeyMap

    def _make_entries(self, kind: MapKind) -> PlacedKeyMap:
        if kind == "hashed":
            return PlacedHashedMap(self.num_keys, self.num_slots, self.device)
        return PlacedArrayMap(self.num_keys, self.device)

    @property
    def entries_by_place(self) -> Tensor:
        """Entries of the map over the keys, int32, by place."""
        return self._entries.cells

    def places(self, keys: Tensor) -> Tensor:
        """Return the places of the entries of `keys` (int64 [N]): int64 [N], -1 where a key has none."""
        return self._entries.places(keys)

    def claim_places(self, keys: Tensor) -> Tensor:
        """Return the places of the entries of `keys` (int64 [N]), int64 [N]; keys without one get one. The caller sets
        these entries at once."""
        return self._entries.claim_absent(keys)

    def find_missed(self, keys: Tensor, batch: int, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Look up a batch's `keys` (int64 [N]) and stamp the slots found; see `find`."""
        places, first = self._entries.places(keys), self.first_stamp(batch)
        return find(keys, places, self._entries.cells, self.use_stamp, first, self.num_keys, numbers)

    def bind(self, keys: Tensor, slots: Tensor, batch: int) -> None:
        places = self._entries.claim(keys)
        state = (self._entries.cells, self.key_of_slot, self.use_stamp)
        bind(keys, places, slots, *state, self.first_stamp(batch))

    @property
    def tallies(self) -> Tensor | None:
        """Numbers of the map over the keys that `note_tallies` wants to know: int64 [?]; None for none."""
        return self._entries.tallies

    def note_tallies(self, tallies: list[int]) -> None:
        """Note the numbers that `tallies` had just now."""
        self._entries.note_tallies(tallies)


# Places in `numbers`.
OUT_OF_RANGE = tl.constexpr(0)  # keys that are no rows
MISSED = tl.constexpr(1)  # ids that were not found
FILLS = tl.constexpr(2)  # their distinct rows
NUM_OF_BATCH = 3

_NO_KEY = tl.constexpr(2**31 - 1)  # above every key


@kernel()
def _find(  # type: ignore[no-untyped-def]
    keys, places, entries, use_stamps, numbers, slots, first_stamp, num_keys, count, BLOCK: tl.constexpr
):
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < count
    key = tl.load(keys + position, mask=inside, other=0)
    is_row = (key >= 0) & (key < num_keys)
    place = tl.load(places + position, mask=inside, other=-1)
    slot = tl.maximum(tl.load(entries + place, mask=inside & is_row & (place >= 0), other=0), 0).to(tl.int64)
    tl.store(slots + position, slot, mask=inside)
    # The last position that uses a slot leaves its stamp.
    tl.atomic_max(use_stamps + slot, first_stamp + position.to(tl.int64), mask=slot > 0)
    tl.atomic_add(numbers + OUT_OF_RANGE, tl.sum((inside & ~is_row).to(tl.int64)))


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


@kernel()
def _mark_new(ascending, is_new, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    key = tl.load(ascending + place, mask=inside, other=_NO_KEY)
    before = tl.load(ascending + place - 1, mask=inside & (place > 0), other=-1)
    tl.store(is_new + place, ((key != _NO_KEY) & (key != before)).to(tl.int32), mask=inside)


@kernel()
def _number_fills(  # type: ignore[no-untyped-def]
    ascending, order, running, fill_keys, fill_of_id, numbers, count, BLOCK: tl.constexpr
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    key = tl.load(ascending + place, mask=inside, other=_NO_KEY)
    is_missed = key != _NO_KEY
    fill = tl.load(running + place, mask=is_missed, other=0) - 1
    tl.store(fill_keys + fill, key.to(tl.int64), mask=is_missed)  # the same number has the same key
    position = tl.load(order + place, mask=inside, other=0)
    tl.store(fill_of_id + position, fill, mask=inside)
    after = tl.load(ascending + place + 1, mask=inside & (place + 1 < count), other=_NO_KEY)
    is_last = is_missed & (after == _NO_KEY)
    tl.store(numbers + MISSED + tl.zeros_like(place), (place + 1).to(tl.int64), mask=is_last)
    tl.store(numbers + FILLS + tl.zeros_like(place), (fill + 1).to(tl.int64), mask=is_last)


@kernel()
def _give_slots(slots, fill_of_id, fill_slots, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    fill = tl.load(fill_of_id + position, mask=position < count, other=-1)
    slot = tl.load(fill_slots + fill, mask=fill >= 0, other=0)
    tl.store(slots + position, slot, mask=fill >= 0)


@kernel()
def _bind(  # type: ignore[no-untyped-def]
    keys, places, slots, entries, key_of_slot, use_stamps, stamp, count, BLOCK: tl.constexpr
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    slot = tl.load(slots + place, mask=inside, other=0)
    entry = tl.load(places + place, mask=inside, other=0)
    tl.store(entries + entry, slot.to(tl.int32), mask=inside)
    tl.store(key_of_slot + slot, tl.load(keys + place, mask=inside, other=0).to(tl.int32), mask=inside)
    tl.store(use_stamps + slot, tl.zeros_like(slot) + stamp, mask=inside)


def find(
    keys: Tensor, places: Tensor, entries: Tensor, use_stamps: Tensor, first_stamp: int, num_keys: int, numbers: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Look up `keys` [N] and stamp the slots found: position p with `first_stamp` + p, the last of a slot's.

    Args:
        places: [N] of the keys in `entries` (int32); -1 where a key has none.
        use_stamps: [S + 1].
        num_keys: R; other keys are counted in `numbers`.

    Returns:
        Slots int64 [N], 0 where a key is not cached; bool [N], True at the position whose stamp a slot has; and int32
        [N], the keys that are not cached, and a number above all keys elsewhere.
    """
    slots, missed_keys = torch.empty_like(keys), torch.empty_like(keys, dtype=torch.int32)
    first_hits = torch.empty_like(keys, dtype=torch.bool)
    count = keys.numel()
    launch(_find, count, keys, places, entries, use_stamps, numbers, slots, first_stamp, num_keys)
    launch(_mark_missed, count, keys, slots, use_stamps, first_hits, missed_keys, first_stamp, num_keys)
    return slots, first_hits, missed_keys


def number_fills(missed_keys: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number the distinct rows of a batch that were not found, in ascending order. `numbers` gets their count, and that
    of the ids.

    Args:
        missed_keys: int32 [N], as `find` returned them.

    Returns:
        The rows' keys int64 [N], of which the first ones count; for each id the number of its row, int32 [N], -1 where
        it was found; and the positions of all ids, int64 [N], first those not found, by key.
    """
    ascending, order = missed_keys.sort()
    running = torch.empty_like(missed_keys)
    count = missed_keys.numel()
    launch(_mark_new, count, ascending, running)
    running = running.cumsum(0, dtype=torch.int32)
    fill_keys, fill_of_id = torch.empty_like(order), torch.empty_like(missed_keys)
    launch(_number_fills, count, ascending, order, running, fill_keys, fill_of_id, numbers)
    return fill_keys, fill_of_id, order


def give_slots(slots: Tensor, fill_of_id: Tensor, fill_slots: Tensor) -> None:
    """Write the slots of the rows to fill (`fill_slots` int64 [M]) into a batch's `slots` (int64 [N])."""
    launch(_give_slots, slots.numel(), slots, fill_of_id, fill_slots)


def bind(
    keys: Tensor, places: Tensor, slots: Tensor, entries: Tensor, key_of_slot: Tensor, use_stamps: Tensor, stamp: int
) -> None:
    """Bind `keys`, at `places` of `entries`, to `slots` (all int64 [M], distinct), with use stamp `stamp`."""
    launch(_bind, keys.numel(), keys, places, slots, entries, key_of_slot, use_stamps, stamp)
