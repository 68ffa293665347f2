"""Sparse int32 map from row key to slot: an array over all keys; on a GPU also hashed, for pools whose keys would take
more memory than their slots.

Planning reads the entries of a whole batch at once and writes those that change, so both maps work on tensors of keys.
Kernels look keys up in a hashed map (`gpu/key_map.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
    """Resolve the kind for a pool of `num_rows` rows. On a GPU, whose memory is short, large pools are hashed; on a CPU
    none is, whatever is wanted: the pages of an array are allocated as its rows are cached."""
    if device_type != "cuda":
        return "array"
    return wanted or ("hashed" if num_rows > _MOST_ARRAY_ROWS else "array")


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


class HashedKeyMap(ABC):
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
        return self._look_up(keys)[1]

    @abstractmethod
    def put(self, keys: Tensor, entries: Tensor | int) -> None:
        """Do what `KeyMap.put` does."""

    def clear_negative(self) -> None:
        cells = (self._entries < 0).nonzero().flatten()
        self._entries.index_fill_(0, cells, 0)
        self._keys.index_fill_(0, cells, NOBODY)

    def dense(self) -> Tensor:
        live = (self._keys != NOBODY).nonzero().flatten()
        entries = torch.zeros(self._num_keys, dtype=torch.int32, device=self._keys.device)
        return entries.scatter_(0, self._keys.index_select(0, live).long(), self._entries.index_select(0, live))

    @abstractmethod
    def _look_up(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return cells (int64 [N], -1 for absent keys) and entries (int32 [N], 0 for absent keys) of `keys`."""

    def _grow(self) -> None:
        live = (self._keys != NOBODY).nonzero().flatten()
        keys, entries = self._keys.index_select(0, live).long(), self._entries.index_select(0, live)
        memory.record_stream(self._keys, self._entries)
        self._allocate(2 * self._num_cells, self._keys.device)
        self._most_live = 0
        self.put(keys, entries)
