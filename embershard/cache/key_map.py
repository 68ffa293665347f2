"""Sparse int32 map from row key to slot: an array over all keys, or hashed, for pools whose keys would take more memory
than their slots.

Planning reads the entries of a whole batch at once and writes those that change, so both maps work on tensors of keys,
on any device.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from embershard.cache.config import MapKind
from embershard.cache.rows import memory

ARRAY_ROW_BYTES = 4
HASHED_SLOT_BYTES = 24
_CELL_BYTES = 8
BUCKET = 8  # cells read together: 32 bytes of keys, one sector of device memory
LOAD = 0.75  # the table grows beyond this share of used cells
NOBODY = -1
HASHES = (-7046029254386353131, -4417276706812531889)  # odd; 2**64 / golden ratio, and another
_MOST_ARRAY_ROWS = 2**27  # 512 MiB


def map_kind(wanted: MapKind | None, num_rows: int, device_type: str) -> MapKind:
    """Resolve the kind for a pool of `num_rows` rows. On a GPU, whose memory is short, large pools are hashed."""
    if wanted is not None:
        return wanted
    return "hashed" if device_type == "cuda" and num_rows > _MOST_ARRAY_ROWS else "array"


class KeyMap(Protocol):
    """int32 entries by key; 0 by default."""

    @property
    def num_bytes(self) -> int:
        """Device memory, in bytes."""

    def get(self, keys: Tensor) -> Tensor:
        """Return the entries of `keys` (int64 [N]): int32 [N]."""

    def put(self, keys: Tensor, entries: Tensor | int) -> None:
        """Set the entries (int32 [M], or one for all) of `keys` (int64 [M]). Of a key that occurs several times, whose
        entries must not be 0, one entry is kept."""

    def clear_negative(self) -> None:
        """Set negative entries to 0."""

    def dense(self) -> Tensor:
        """Return all entries: int32 [R]."""


class ArrayKeyMap:
    """Array of 4 bytes per key. The pages of a new array are allocated as they are written.

    Args:
        num_keys: R.
    """

    def __init__(self, num_keys: int, device: torch.device) -> None:
        self._entries = memory.zeros(num_keys, torch.int32).to(device)

    @property
    def num_bytes(self) -> int:
        """Device memory, in bytes."""
        return self._entries.numel() * ARRAY_ROW_BYTES

    def get(self, keys: Tensor) -> Tensor:
        return self._entries.gather(0, keys)

    def put(self, keys: Tensor, entries: Tensor | int) -> None:
        self._entries.scatter_(0, keys, entries)

    def clear_negative(self) -> None:
        self._entries.clamp_(min=0)

    def dense(self) -> Tensor:
        return self._entries


class HashedKeyMap:
    """Hash table of the entries that are not 0: 24 bytes for each slot, as long as there are no more traces than slots.

    Every key has two buckets of eight cells, and its entry is in one of them; a new entry goes to the emptier bucket.
    So a freed cell needs no marker, and two reads find any key.

    Args:
        num_keys: R, below 2**31.
        num_slots: S; the table grows if it has to hold more entries than there is room for.
    """

    def __init__(self, num_keys: int, num_slots: int, device: torch.device) -> None:
        self._num_keys = num_keys
        self._allocate(max(2 * BUCKET, (num_slots + 1) * HASHED_SLOT_BYTES // _CELL_BYTES), device)
        self._most_live = 0  # upper bound of the keys in the table

    def _allocate(self, num_cells: int, device: torch.device) -> None:
        self._num_cells, self._num_buckets = num_cells, num_cells // BUCKET
        self._keys = torch.full((num_cells,), NOBODY, dtype=torch.int32, device=device)
        self._entries = torch.zeros(num_cells, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Device memory, in bytes."""
        return self._keys.numel() * _CELL_BYTES

    def get(self, keys: Tensor) -> Tensor:
        """Return the entries of `keys`, as `KeyMap.get` does.

        Raises:
            IndexError: on a CPU, a key is not in [0, R).
        """
        if keys.is_cpu and keys.numel() and not (int(keys.min()) >= 0 and int(keys.max()) < self._num_keys):
            raise IndexError(f"keys from {int(keys.min())} to {int(keys.max())}, needed 0 to {self._num_keys - 1}")
        return self._look_up(keys)[1]

    def put(self, keys: Tensor, entries: Tensor | int) -> None:
        if not isinstance(entries, Tensor):
            entries = torch.full(keys.shape, entries, dtype=torch.int32, device=keys.device)
        cells, _ = self._look_up(keys)
        present = (cells >= 0).nonzero().flatten()
        taken, values = cells.index_select(0, present), entries.index_select(0, present)
        self._entries.scatter_(0, taken, values)
        self._keys.index_fill_(0, taken.index_select(0, (values == 0).nonzero().flatten()), NOBODY)
        absent = ((cells < 0) & (entries != 0)).nonzero().flatten()
        if absent.numel():
            self._insert(keys.index_select(0, absent), entries.index_select(0, absent))

    def clear_negative(self) -> None:
        cells = (self._entries < 0).nonzero().flatten()
        self._entries.index_fill_(0, cells, 0)
        self._keys.index_fill_(0, cells, NOBODY)

    def dense(self) -> Tensor:
        live = (self._keys != NOBODY).nonzero().flatten()
        entries = torch.zeros(self._num_keys, dtype=torch.int32, device=self._keys.device)
        return entries.scatter_(0, self._keys.index_select(0, live).long(), self._entries.index_select(0, live))

    def _look_up(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return cells (int64 [N], -1 for absent keys) and entries (int32 [N], 0 for absent keys) of `keys`."""
        wanted, cells = keys.int().unsqueeze(1), torch.full_like(keys, NOBODY)
        held = self._keys[: self._num_buckets * BUCKET].view(-1, BUCKET)
        for buckets in self._buckets(keys):
            is_it = held.index_select(0, buckets) == wanted
            lane = is_it.to(torch.uint8).argmax(1)
            cells = torch.where(is_it.any(1), buckets * BUCKET + lane, cells)
        return cells, self._entries.gather(0, cells.clamp_min(0)).masked_fill_(cells < 0, 0)

    def _buckets(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return both buckets of `keys`: int64 [N] each."""
        first, second = (((keys * factor) >> 32) & 0xFFFFFFFF for factor in HASHES)
        return (first * self._num_buckets) >> 32, (second * self._num_buckets) >> 32

    def _insert(self, keys: Tensor, entries: Tensor) -> None:
        """Insert keys that are absent. Of several keys that choose one cell, one gets it; the others try again."""
        count = keys.numel()
        if self._most_live + count > LOAD * self._num_cells:
            self._most_live = int((self._keys != NOBODY).sum())
            while self._most_live + count > LOAD * self._num_cells:
                self._grow()
        self._most_live += count
        while keys.numel():
            cells = self._free_cells(keys)
            if cells is None:
                self._grow()
                self._most_live += keys.numel()
                continue
            wanted = keys.int()
            self._keys.scatter_(0, cells, wanted)
            is_placed = self._keys.gather(0, cells) == wanted
            placed, left = is_placed.nonzero().flatten(), (~is_placed).nonzero().flatten()
            self._entries.scatter_(0, cells.index_select(0, placed), entries.index_select(0, placed))
            keys, entries = keys.index_select(0, left), entries.index_select(0, left)

    def _free_cells(self, keys: Tensor) -> Tensor | None:
        """Return the first free cell of each key's emptier bucket: int64 [M]; None if both buckets of a key are full.
        So a bucket takes one key per round, and the next round sees how full it is."""
        held = self._keys[: self._num_buckets * BUCKET].view(-1, BUCKET)
        first, second = self._buckets(keys)
        is_free = [held.index_select(0, buckets) == NOBODY for buckets in (first, second)]
        num_free = [free.sum(1) for free in is_free]
        takes_second = num_free[1] > num_free[0]
        if not bool(torch.maximum(*num_free).all()):
            return None
        free = torch.where(takes_second.unsqueeze(1), is_free[1], is_free[0])
        lane = free.to(torch.uint8).argmax(1)
        return torch.where(takes_second, second, first) * BUCKET + lane

    def _grow(self) -> None:
        live = (self._keys != NOBODY).nonzero().flatten()
        keys, entries = self._keys.index_select(0, live).long(), self._entries.index_select(0, live)
        memory.record_stream(self._keys, self._entries)
        self._allocate(2 * self._num_cells, self._keys.device)
        self._most_live = 0
        self._insert(keys, entries)
