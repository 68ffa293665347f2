"""Sparse maps from row key to slot for kernels, which read and write entries by their places; and the hashed map's
kernels. Each kernel passes once over the keys, without the [N, cells of a bucket] tensors that torch's operations need.

Behind the buckets of a hashed map, whose cells are `num_cells`, are `SPILL_CELLS` for keys both of whose buckets are
full, and a last cell that nobody has. `tallies` (int64 [2]) counts keys in the map, and keys that went behind the
buckets.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from embershard.cache.gpu.launch import kernel, launch
from embershard.cache.key_map import BUCKET, HASHES, LOAD, ArrayKeyMap, HashedKeyMap, KeyMap
from embershard.cache.rows import memory
from embershard.errors import CacheError

_CONSTANTS: dict[str, Any] = {"FACTORS": HASHES, "BUCKET": BUCKET}


class PlacedKeyMap(KeyMap, Protocol):
    """`KeyMap` whose entries kernels read and write."""

    @property
    def cells(self) -> Tensor:
        """The entries by place, int32."""

    def places(self, keys: Tensor) -> Tensor:
        """Return the places of the entries of `keys` (int64 [N]): int64 [N]; -1 for absent keys."""

    def claim(self, keys: Tensor) -> Tensor:
        """Return the places of `keys` (int64 [M], distinct), int64 [M]; absent keys get one. The caller sets their
        entries at once."""

    def claim_absent(self, keys: Tensor) -> Tensor:
        """Return the places of `keys` (int64 [N], with repeats), int64 [N], as `claim` does."""

    @property
    def tallies(self) -> Tensor | None:
        """Numbers for `note_tallies`, int64 [2]; None if there are none."""

    def note_tallies(self, tallies: list[int]) -> None:
        """Note the numbers that the host read from `tallies`."""


class PlacedArrayMap(ArrayKeyMap):
    """`ArrayKeyMap` for kernels: the place of a key's entry is the key."""

    tallies = None

    @property
    def cells(self) -> Tensor:
        return self._entries

    def places(self, keys: Tensor) -> Tensor:
        return keys

    claim = claim_absent = places

    def note_tallies(self, tallies: list[int]) -> None:
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
    def cells(self) -> Tensor:
        return self._entries

    def places(self, keys: Tensor) -> Tensor:
        return self._look_up(keys)[0]

    def claim(self, keys: Tensor) -> Tensor:
        if self._has_spilled or self._most_live + keys.numel() > LOAD * self._num_cells:
            is_new = (keys >= 0) & (keys < self._num_keys) & (self.places(keys) < 0)
            is_new[1:] &= keys[1:] != keys[:-1]
            self._most_live, num_new = torch.stack([self.tallies[LIVE.value], is_new.sum()]).tolist()
            while self._has_spilled or self._most_live + num_new > LOAD * self._num_cells:
                self._grow()
        self._most_live += keys.numel()
        sizes = (self._num_buckets, self._num_cells)
        return claim(keys, self._keys, self.tallies, sizes, self._num_keys, **_CONSTANTS)

    def claim_absent(self, keys: Tensor) -> Tensor:
        absent = torch.where(self.places(keys) < 0, keys, self._num_keys)
        self.claim(absent.sort().values)
        return self.places(keys)

    def put(self, keys: Tensor, entries: Tensor | int) -> None:
        if not isinstance(entries, Tensor):
            entries = torch.full(keys.shape, entries, dtype=torch.int32, device=keys.device)
        cells = self.claim(keys)
        put(cells, entries, self._keys, self._entries, self.tallies)

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
        table = (self._keys, self._entries, self.tallies, (self._num_buckets, self._num_cells))
        return look_up(keys, *table, **_CONSTANTS)

    def _insert(self, keys: Tensor, entries: Tensor) -> None:
        self.put(keys, entries)

    def _grow(self) -> None:
        num_live = self._most_live
        memory.record_stream(self.tallies)
        super()._grow()
        self._most_live = num_live


SPILL_CELLS = 64
_BLOCK = 128  # keys of a program, each with the cells of a bucket
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
def _cell_of(  # type: ignore[no-untyped-def]
    key,
    held_keys,
    tallies,
    num_buckets,
    num_cells,
    inside,
    FACTORS: tl.constexpr,
    BUCKET: tl.constexpr,
    SPILL: tl.constexpr,
):
    cell = tl.zeros_like(key) - 1
    for which in tl.static_range(len(FACTORS)):
        start = _bucket(key, num_buckets, FACTORS[which]) * BUCKET
        cell = tl.maximum(cell, _cell_in(held_keys, start, key, inside, BUCKET, False)[0])
    if tl.load(tallies + SPILLED) > 0:
        for first in range(0, SPILL, BUCKET):
            start = tl.zeros_like(key) + num_cells + first
            cell = tl.maximum(cell, _cell_in(held_keys, start, key, inside, BUCKET, False)[0])
    return cell


@kernel("held_keys")
def _look_up(  # type: ignore[no-untyped-def]
    cells,
    entries,
    keys,
    held_keys,
    held_entries,
    tallies,
    num_buckets,
    num_cells,
    count,
    FACTORS: tl.constexpr,
    BUCKET: tl.constexpr,
    SPILL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    key = tl.load(keys + place, mask=inside, other=0)
    cell = _cell_of(key, held_keys, tallies, num_buckets, num_cells, inside, FACTORS, BUCKET, SPILL)
    tl.store(cells + place, cell, mask=inside)
    entry = tl.load(held_entries + cell, mask=inside & (cell >= 0), other=0)
    tl.store(entries + place, entry, mask=inside)


@kernel("held_keys")
def _claim(  # type: ignore[no-untyped-def]
    cells,
    keys,
    held_keys,
    tallies,
    no_key,
    num_buckets,
    num_cells,
    count,
    FACTORS: tl.constexpr,
    BUCKET: tl.constexpr,
    SPILL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    key = tl.load(keys + place, mask=inside, other=0)
    before = tl.load(keys + place - 1, mask=inside & (place > 0), other=-1)
    wanted = inside & (key != before) & (key >= 0) & (key < no_key)
    cell = _cell_of(key, held_keys, tallies, num_buckets, num_cells, wanted, FACTORS, BUCKET, SPILL)
    absent = wanted & (cell < 0)
    tl.atomic_add(tallies + LIVE, tl.sum(absent.to(tl.int64)))
    nowhere = tl.zeros_like(cell) + num_cells + SPILL
    left = absent
    while tl.sum(left.to(tl.int32)) > 0:
        start = _bucket(key, num_buckets, FACTORS[0]) * BUCKET
        _, num_free, target = _cell_in(held_keys, start, key, left, BUCKET, True)
        other_start = _bucket(key, num_buckets, FACTORS[1]) * BUCKET
        _, other_free, other_target = _cell_in(held_keys, other_start, key, left, BUCKET, True)
        target = tl.where(other_free > num_free, other_target, target)
        fits = left & ((num_free > 0) | (other_free > 0))
        # A lane without a target compares with what no cell holds, so it changes nothing.
        expected = tl.where(fits, -1, -3).to(tl.int32)
        found = tl.atomic_cas(held_keys + tl.where(fits, target, nowhere), expected, key.to(tl.int32))
        won = fits & (found == _NOBODY)
        cell = tl.where(won, target, cell)
        spills = left & ~fits
        spill = tl.atomic_add(tallies + SPILLED + tl.zeros_like(place), tl.zeros_like(key) + 1, mask=spills)
        spills = spills & (spill < SPILL)
        tl.store(held_keys + num_cells + spill, key.to(tl.int32), mask=spills)
        cell = tl.where(spills, num_cells + spill, cell)
        left = fits & ~won
    tl.store(cells + place, cell, mask=inside)


@kernel()
def _put(cells, values, held_keys, held_entries, tallies, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cell = tl.load(cells + place, mask=place < count, other=-1)
    value = tl.load(values + place, mask=place < count, other=0)
    is_gone = (cell >= 0) & (value == 0)
    tl.store(held_entries + cell, value, mask=cell >= 0)
    tl.store(held_keys + cell, tl.zeros_like(value) - 1, mask=is_gone)
    tl.atomic_add(tallies + LIVE, -tl.sum(is_gone.to(tl.int64)))


def look_up(
    keys: Tensor, held_keys: Tensor, held_entries: Tensor, tallies: Tensor, sizes: tuple[int, int], **constants: Any
) -> tuple[Tensor, Tensor]:
    """Look up `keys` (int64 [N]) in the cells of `held_keys` and `held_entries` (both int32).

    Args:
        sizes: number of buckets, and cells in front of the spilled keys.
        constants: `FACTORS`: bits 32 to 63 of the key's product with each choose its buckets; `BUCKET`: cells of one.

    Returns:
        Cells int64 [N], -1 for absent keys, and their entries int32 [N], 0 for absent keys.
    """
    cells, entries = keys.new_empty(keys.shape), held_entries.new_empty(keys.shape)
    table = (held_keys, held_entries, tallies, *sizes)
    launch(_look_up, keys.numel(), cells, entries, keys, *table, block=_BLOCK, SPILL=SPILL_CELLS, **constants)
    return cells, entries


def claim(
    keys: Tensor, held_keys: Tensor, tallies: Tensor, sizes: tuple[int, int], no_key: int, **constants: Any
) -> Tensor:
    """Return the cells of `keys` (int64 [N]), after giving one to each key that has none; arguments as for `look_up`.

    Args:
        keys: repeats of a key follow it at once, and get no cell here.
        no_key: numbers from this one on, and negative ones, get no cell.
    """
    cells = keys.new_empty(keys.shape)
    launch(
        _claim,
        keys.numel(),
        cells,
        keys,
        held_keys,
        tallies,
        no_key,
        *sizes,
        block=_BLOCK,
        SPILL=SPILL_CELLS,
        **constants,
    )
    return cells


def put(cells: Tensor, values: Tensor, held_keys: Tensor, held_entries: Tensor, tallies: Tensor) -> None:
    """Set the entries of `cells` (int64 [M], distinct; -1: skipped) to `values` (int32 [M]); 0 frees the cell."""
    launch(_put, cells.numel(), cells, values, held_keys, held_entries, tallies)
