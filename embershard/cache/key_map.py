"""Sparse int32 map from row key to slot: as an array over all keys, or hashed, for pools whose keys would take more
memory than their slots.

Planning reads the entries of a whole batch at once and writes those that change, so both work on tensors of keys, on
any device.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, Protocol

import torch
from torch import Tensor

from embershard.cache.rows import memory

MapKind = Literal["array", "hashed"]

ARRAY_ROW_BYTES = 4
HASHED_SLOT_BYTES = 24
_CELL_BYTES = 8
_BUCKET = 8  # cells that are read together: 32 bytes of keys, one sector of device memory
_LOAD = 0.75  # share of the cells in use beyond which the table grows
_NOBODY = -1
_HASHES = (-7046029254386353131, -4417276706812531889)  # odd; 2**64 / golden ratio, and another
_MOST_ARRAY_ROWS = 2**27  # 512 MiB
_HAS_TRITON = find_spec("triton") is not None


def map_kind(wanted: MapKind | None, num_rows: int, device_type: str) -> MapKind:
    """The kind in force for a pool of so many rows: on a GPU, whose memory is short, large pools are hashed."""
    if wanted is not None:
        return wanted
    return "hashed" if device_type == "cuda" and num_rows > _MOST_ARRAY_ROWS else "array"


class KeyMap(Protocol):
    """int32 entries by key; 0 where none was put."""

    @property
    def num_bytes(self) -> int:
        """Memory, in bytes."""

    def get(self, keys: Tensor) -> Tensor:
        """Entries of ``keys`` (int64 [N]): int32 [N]."""

    def put(self, keys: Tensor, entries: Tensor | int) -> None:
        """Set the entries (int32 [M], or one for all) of ``keys`` (int64 [M]). A key may occur several times if its
        entries are not 0: one of them stands."""

    def clear_negative(self) -> None:
        """Entries below 0 become 0."""

    def dense(self) -> Tensor:
        """All entries: int32 [R]."""


class ArrayKeyMap:
    """4 bytes per key. The pages of a new array are taken as they are written.

    Args:
        num_keys: R.
    """

    def __init__(self, num_keys: int, device: torch.device) -> None:
        self._entries = memory.zeros(num_keys, torch.int32).to(device)

    @property
    def num_bytes(self) -> int:
        """Memory, in bytes."""
        return self._entries.numel() * ARRAY_ROW_BYTES

    def get(self, keys: Tensor) -> Tensor:
        """See :class:`KeyMap`."""
        return self._entries.gather(0, keys)

    def put(self, keys: Tensor, entries: Tensor | int) -> None:
        """See :class:`KeyMap`."""
        self._entries.scatter_(0, keys, entries)

    def clear_negative(self) -> None:
        """See :class:`KeyMap`."""
        self._entries.clamp_(min=0)

    def dense(self) -> Tensor:
        """The array itself."""
        return self._entries


class HashedKeyMap:
    """Memory follows the entries that are not 0: 24 bytes for each slot, as long as traces are not more than slots.

    Every key has two buckets of eight cells, and its entry stands in either; a new one goes to the emptier bucket. So
    a cell that is given up needs no marker, and two reads find any key. Which cell a key gets may differ from run to
    run on a GPU; what is found does not.

    Args:
        num_keys: R, below 2**31.
        num_slots: S; the table grows where more entries than it has room for are not 0.
    """

    def __init__(self, num_keys: int, num_slots: int, device: torch.device) -> None:
        self._num_keys = num_keys
        self._allocate(max(2 * _BUCKET, (num_slots + 1) * HASHED_SLOT_BYTES // _CELL_BYTES), device)
        self._most_live = 0  # keys in the table, at most

    def _allocate(self, num_cells: int, device: torch.device) -> None:
        self._num_buckets = num_cells // _BUCKET
        self._keys = torch.full((num_cells,), _NOBODY, dtype=torch.int32, device=device)
        self._entries = torch.zeros(num_cells, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory, in bytes."""
        return self._keys.numel() * _CELL_BYTES

    def get(self, keys: Tensor) -> Tensor:
        """See :class:`KeyMap`.

        Raises:
            IndexError: on a CPU, a key is not in [0, R).
        """
        if keys.is_cpu and keys.numel() and not (int(keys.min()) >= 0 and int(keys.max()) < self._num_keys):
            raise IndexError(f"keys from {int(keys.min())} to {int(keys.max())}, needed 0 to {self._num_keys - 1}")
        return self._look_up(keys)[1]

    def put(self, keys: Tensor, entries: Tensor | int) -> None:
        """See :class:`KeyMap`."""
        if not isinstance(entries, Tensor):
            entries = torch.full(keys.shape, entries, dtype=torch.int32, device=keys.device)
        cells, _ = self._look_up(keys)
        present = (cells >= 0).nonzero().flatten()
        taken, values = cells.index_select(0, present), entries.index_select(0, present)
        self._entries.scatter_(0, taken, values)
        self._keys.index_fill_(0, taken.index_select(0, (values == 0).nonzero().flatten()), _NOBODY)
        absent = ((cells < 0) & (entries != 0)).nonzero().flatten()
        if absent.numel():
            self._insert(keys.index_select(0, absent), entries.index_select(0, absent))

    def clear_negative(self) -> None:
        """See :class:`KeyMap`."""
        cells = (self._entries < 0).nonzero().flatten()
        self._entries.index_fill_(0, cells, 0)
        self._keys.index_fill_(0, cells, _NOBODY)

    def dense(self) -> Tensor:
        """All entries as an array, made now: int32 [R]."""
        live = (self._keys != _NOBODY).nonzero().flatten()
        entries = torch.zeros(self._num_keys, dtype=torch.int32, device=self._keys.device)
        return entries.scatter_(0, self._keys.index_select(0, live).long(), self._entries.index_select(0, live))

    def _look_up(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Cells of ``keys``, int64 [N], -1 where a key has none, and their entries, int32 [N], 0 where it has none."""
        if keys.is_cpu or not _HAS_TRITON:
            cells = self._find(keys)
            return cells, self._entries.gather(0, cells.clamp_min(0)).masked_fill_(cells < 0, 0)
        from embershard.cache import hash_kernels  # triton is not installed everywhere

        return hash_kernels.look_up(keys, self._keys, self._entries, self._num_buckets, _BUCKET, _HASHES)

    def _find(self, keys: Tensor) -> Tensor:
        """Cells of ``keys``: int64 [N]; -1 where a key has none."""
        wanted, cells = keys.int().unsqueeze(1), torch.full_like(keys, _NOBODY)
        held = self._keys[: self._num_buckets * _BUCKET].view(-1, _BUCKET)
        for buckets in self._buckets(keys):
            is_it = held.index_select(0, buckets) == wanted
            lane = is_it.to(torch.uint8).argmax(1)
            cells = torch.where(is_it.any(1), buckets * _BUCKET + lane, cells)
        return cells

    def _buckets(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Both buckets of ``keys``: int64 [N] each."""
        first, second = (((keys * factor) >> 32) & 0xFFFFFFFF for factor in _HASHES)
        return (first * self._num_buckets) >> 32, (second * self._num_buckets) >> 32

    def _insert(self, keys: Tensor, entries: Tensor) -> None:
        """Keys that are not in the table. Those that met in a cell try again: a few rounds."""
        self._make_room(keys.numel())
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
        """The first free cell of each key's emptier bucket: int64 [M]; None when a key has none in either. So a bucket
        takes one key at a time, and the next ones see how full it is."""
        held = self._keys[: self._num_buckets * _BUCKET].view(-1, _BUCKET)
        first, second = self._buckets(keys)
        is_free = [held.index_select(0, buckets) == _NOBODY for buckets in (first, second)]
        num_free = [free.sum(1) for free in is_free]
        takes_second = num_free[1] > num_free[0]
        if not bool(torch.maximum(*num_free).all()):
            return None
        free = torch.where(takes_second.unsqueeze(1), is_free[1], is_free[0])
        lane = free.to(torch.uint8).argmax(1)
        return torch.where(takes_second, second, first) * _BUCKET + lane

    def _make_room(self, count: int) -> None:
        limit = _LOAD * self._keys.numel()
        if self._most_live + count > limit:
            self._most_live = int((self._keys != _NOBODY).sum())
            while self._most_live + count > _LOAD * self._keys.numel():
                self._grow()
        self._most_live += count

    def _grow(self) -> None:
        live = (self._keys != _NOBODY).nonzero().flatten()
        keys, entries = self._keys.index_select(0, live).long(), self._entries.index_select(0, live)
        memory.record_stream(self._keys, self._entries)
        self._allocate(2 * self._keys.numel(), self._keys.device)
        self._most_live = 0
        self._insert(keys, entries)
