"""Sparse maps from row key to slot for kernels, which read and write entries by their places; and the hashed map's
kernels. Each kernel passes once over the keys, without the [N, cells of a bucket] tensors that torch's operations need.

Behind the buckets of a hashed map, whose cells are `num_cells`, are `SPILL_CELLS` for keys both of whose buckets are
full, and a last cell that nobody has. `tallies` (int64 [2]) counts keys in the map, and keys that went behind the
buckets.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from embershard.cache.gpu.launch import kernel, launch
from embershard.cache.key_map import BUCKET, HASHES, LOAD, ArrayKeyMap, HashedKeyMap
from embershard.cache.rows import memory
from embershard.errors import CacheError

#: Of a map over the keys, as kernels take it: keys and entries by place, tallies, buckets, and places in buckets.
Table = tuple[Tensor, Tensor, Tensor, int, int]


class PlacedArrayMap(ArrayKeyMap):
    """`ArrayKeyMap` for kernels: the place of a key's entry is the key.

    Attributes:
        tallies: numbers for `note_tallies`, int64 [2]; None if there are none.
    """

    tallies = None

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of kernels that look keys up in `table`, for `place_of`; and the keys of a program (`block`)."""
        return {"FACTORS": (), "BUCKET": 0, "SPILL": 0}

    @property
    def cells(self) -> Tensor:
        """The entries by place, int32."""
        return self._entries

    @property
    def table(self) -> Table:
        """What `place_of` looks keys up in."""
        return (self._entries, self._entries, self._entries, 0, 0)

    def claim(self, keys: Tensor) -> Tensor:
        """Return the places of `keys` (int64 [M], distinct), int64 [M]; absent keys get one, -1 if there is none. The
        caller sets their entries at once."""
        return keys

    def claim_absent(self, keys: Tensor) -> None:
        """Give a place to those of `keys` (int64 [N], with repeats) that have none. The caller sets their entries at
        once."""

    def note_tallies(self, tallies: list[int]) -> None:
        """Note the numbers that the host read from `tallies`."""
        raise AssertionError("an array has no tallies")


class PlacedHashedMap(HashedKeyMap):
    """`HashedKeyMap` for kernels. It takes 65 cells more, for keys both of whose buckets are full; with the first of
    these it grows before the next batch. Which cell a key gets may differ from run to run; the entries found do not.

    `put` takes distinct keys.
    """

    def _allocate(self, num_cells: int, device: torch.device) -> None:
        super()._allocate(num_cells + SPILL_CELLS + 1, device)
        self._num_cells, self._num_buckets = num_cells, num_cells // BUCKET
        self.tallies = torch.zeros(2, dtype=torch.int64, device=device)
        self._has_spilled = False

    @property
    def constants(self) -> dict[str, Any]:
        return {"FACTORS": HASHES, "BUCKET": BUCKET, "SPILL": SPILL_CELLS, "block": BLOCK}

    @property
    def cells(self) -> Tensor:
        return self._entries

    @property
    def table(self) -> Table:
        return (self._keys, self._entries, self.tallies, self._num_buckets, self._num_cells)

    def claim(self, keys: Tensor) -> Tensor:
        if self._has_spilled or self._most_live + keys.numel() > LOAD * self._num_cells:
            self._most_live = int(self.tallies[LIVE.value])
            # Room for more than are new: else the host would wait at every batch that might not fit.
            while self._has_spilled or self._most_live + keys.numel() > LOAD * self._num_cells:
                self._grow()
        self._most_live += keys.numel()
        cells, (held_keys, _, tallies, *sizes) = torch.empty_like(keys, dtype=torch.int64), self.table
        table = (held_keys, tallies, self._num_keys, *sizes)
        launch(_claim, keys.numel(), cells, keys, *table, **self.constants)
        return cells

    def claim_absent(self, keys: Tensor) -> None:
        absent = torch.empty_like(keys, dtype=torch.int32)
        launch(_mark_absent, keys.numel(), absent, keys, *self.table, self._num_keys, **self.constants)
        self.claim(absent.sort().values)

    def put(self, keys: Tensor, entries: Tensor | int) -> None:
        if not isinstance(entries, Tensor):
            entries = torch.full(keys.shape, entries, dtype=torch.int32, device=keys.device)
        cells = self.claim(keys)
        launch(_put, cells.numel(), cells, entries, self._keys, self._entries, self.tallies)

    def clear_negative(self) -> None:
        super().clear_negative()
        self.tallies[LIVE.value] = (self._keys >= 0).sum()

    def note_tallies(self, tallies: list[int]) -> None:
        """Note the numbers that the host read from `tallies`.

        Raises:
            CacheError: keys were lost.
        """
        self._most_live, num_spilled = tallies
        self._has_spilled = num_spilled > 0
        if num_spilled > SPILL_CELLS:
            raise CacheError(
                f"the hashed slot map lost {num_spilled - SPILL_CELLS} of {self._most_live} keys, whose "
                'buckets were full; set cache.slot_map = "array"'
            )

    def _look_up(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        cells, entries = keys.new_empty(keys.shape), self._entries.new_empty(keys.shape)
        launch(_look_up, keys.numel(), cells, entries, keys, *self.table, **self.constants)
        return cells, entries

    def _grow(self) -> None:
        num_live = self._most_live
        memory.record_stream(self.tallies)
        super()._grow()
        self._most_live = num_live


PlacedKeyMap = PlacedArrayMap | PlacedHashedMap
SPILL_CELLS = 64
BLOCK = 128  # keys of a program, each with the cells of a bucket
LIVE, SPILLED = tl.constexpr(0), tl.constexpr(1)
_NOBODY = tl.constexpr(-1)


@triton.jit
def _bucket(key, num_buckets, FACTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    hashed = ((key * FACTOR) >> 32) & 0xFFFFFFFF
    return (hashed * num_buckets) >> 32


@triton.jit
def _cell_in(held_keys, start, key, inside, CELLS: tl.constexpr, FRESH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The cell of `key` among `CELLS` from `start`, -1 for none; how many of them are free; and the first of these.
    `FRESH`: as other programs have left them by now."""
    lanes = start[:, None] + tl.arange(0, CELLS)[None, :]
    held = tl.load(held_keys + lanes, mask=inside[:, None], other=-2, volatile=FRESH)
    cell = tl.max(tl.where(held == key.to(tl.int32)[:, None], lanes, -1), axis=1)
    is_free = held == _NOBODY
    first = tl.min(tl.where(is_free, lanes, 0x7FFFFFFFFFFFFFFF), axis=1)
    return cell, tl.sum(is_free.to(tl.int32), axis=1), first


@triton.jit
def place_of(  # type: ignore[no-untyped-def]
    key, held_keys, tallies, num_buckets, num_cells, inside,
    FACTORS: tl.constexpr, BUCKET: tl.constexpr, SPILL: tl.constexpr,
):  # fmt: skip
    """The place of each key that is `inside`, -1 for none; in an array (`BUCKET` 0) the key is its own."""
    if BUCKET == 0:
        place = key
    else:
        place = tl.zeros_like(key) - 1
        for which in tl.static_range(len(FACTORS)):
            start = _bucket(key, num_buckets, FACTORS[which]) * BUCKET
            place = tl.maximum(place, _cell_in(held_keys, start, key, inside, BUCKET, False)[0])
        if tl.load(tallies + SPILLED) > 0:
            for first in range(0, SPILL, BUCKET):
                start = tl.zeros_like(key) + num_cells + first
                place = tl.maximum(place, _cell_in(held_keys, start, key, inside, BUCKET, False)[0])
    return tl.where(inside, place, -1)


@kernel("held_keys")
def _look_up(  # type: ignore[no-untyped-def]
    cells, entries, keys, held_keys, held_entries, tallies, num_buckets, num_cells, count,
    FACTORS: tl.constexpr, BUCKET: tl.constexpr, SPILL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    key = tl.load(keys + place, mask=inside, other=0)
    cell = place_of(key, held_keys, tallies, num_buckets, num_cells, inside, FACTORS, BUCKET, SPILL)
    tl.store(cells + place, cell, mask=inside)
    entry = tl.load(held_entries + cell, mask=inside & (cell >= 0), other=0)
    tl.store(entries + place, entry, mask=inside)


@kernel("held_keys")
def _mark_absent(  # type: ignore[no-untyped-def]
    absent, keys, held_keys, held_entries, tallies, num_buckets, num_cells, no_key, count,
    FACTORS: tl.constexpr, BUCKET: tl.constexpr, SPILL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep the keys without a cell: `absent` int32 [count]; `no_key` elsewhere."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + place, mask=place < count, other=-1)
    inside = (key >= 0) & (key < no_key)
    cell = place_of(key, held_keys, tallies, num_buckets, num_cells, inside, FACTORS, BUCKET, SPILL)
    tl.store(absent + place, tl.where(inside & (cell < 0), key, no_key).to(tl.int32), mask=place < count)


@kernel("held_keys")
def _claim(  # type: ignore[no-untyped-def]
    cells, keys, held_keys, tallies, no_key, num_buckets, num_cells, count,
    FACTORS: tl.constexpr, BUCKET: tl.constexpr, SPILL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Give a cell to each of `keys` that is below `no_key` and has none; repeats of a key follow it at once, and get no
    cell here. `cells`: those of the keys, -1 for none."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    key = tl.load(keys + place, mask=inside, other=0).to(tl.int64)
    before = tl.load(keys + place - 1, mask=inside & (place > 0), other=-1)
    wanted = inside & (key != before) & (key >= 0) & (key < no_key)
    cell = place_of(key, held_keys, tallies, num_buckets, num_cells, wanted, FACTORS, BUCKET, SPILL)
    left = wanted & (cell < 0)
    num_absent = tl.sum(left.to(tl.int64))
    tl.atomic_add(tallies + LIVE, num_absent, mask=num_absent > 0, sem="relaxed")
    start = _bucket(key, num_buckets, FACTORS[0]) * BUCKET
    other_start = _bucket(key, num_buckets, FACTORS[1]) * BUCKET
    while tl.sum(left.to(tl.int32)) > 0:
        _, num_free, target = _cell_in(held_keys, start, key, left, BUCKET, True)
        _, other_free, other_target = _cell_in(held_keys, other_start, key, left, BUCKET, True)
        target = tl.where(other_free > num_free, other_target, target)
        fits = left & ((num_free > 0) | (other_free > 0))
        # A lane without a target compares a cell of its own bucket with what no cell holds, so it changes nothing; in
        # one cell for all of them these would queue.
        expected = tl.where(fits, -1, -3).to(tl.int32)
        found = tl.atomic_cas(held_keys + tl.where(fits, target, start), expected, key.to(tl.int32), sem="relaxed")
        won = fits & (found == _NOBODY)
        cell = tl.where(won, target, cell)
        spills = left & ~fits
        one = tl.zeros_like(key) + 1
        spill = tl.atomic_add(tallies + SPILLED + tl.zeros_like(place), one, mask=spills, sem="relaxed")
        spills = spills & (spill < SPILL)
        tl.store(held_keys + num_cells + spill, key.to(tl.int32), mask=spills)
        cell = tl.where(spills, num_cells + spill, cell)
        left = fits & ~won
    tl.store(cells + place, cell, mask=inside)


@kernel()
def _put(cells, values, held_keys, held_entries, tallies, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Set the entries of `cells` (-1: skipped), which are distinct, to `values`; 0 frees the cell."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cell = tl.load(cells + place, mask=place < count, other=-1)
    value = tl.load(values + place, mask=place < count, other=0)
    is_gone = (cell >= 0) & (value == 0)
    tl.store(held_entries + cell, value, mask=cell >= 0)
    tl.store(held_keys + cell, tl.zeros_like(value) - 1, mask=is_gone)
    num_gone = tl.sum(is_gone.to(tl.int64))
    tl.atomic_add(tallies + LIVE, -num_gone, mask=num_gone > 0, sem="relaxed")
