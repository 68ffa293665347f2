"""Sparse maps from row key to slot for kernels, which read and write entries by their places."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from embershard.cache.gpu import hash_kernels
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
        super()._allocate(num_cells + hash_kernels.SPILL_CELLS + 1, device)
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
            self._most_live, num_new = torch.stack([self.tallies[hash_kernels.LIVE.value], is_new.sum()]).tolist()
            while self._has_spilled or self._most_live + num_new > LOAD * self._num_cells:
                self._grow()
        self._most_live += keys.numel()
        sizes = (self._num_buckets, self._num_cells)
        return hash_kernels.claim(keys, self._keys, self.tallies, sizes, self._num_keys, **_CONSTANTS)

    def claim_absent(self, keys: Tensor) -> Tensor:
        absent = torch.where(self.places(keys) < 0, keys, self._num_keys)
        self.claim(absent.sort().values)
        return self.places(keys)

    def put(self, keys: Tensor, entries: Tensor | int) -> None:
        if not isinstance(entries, Tensor):
            entries = torch.full(keys.shape, entries, dtype=torch.int32, device=keys.device)
        cells = self.claim(keys)
        hash_kernels.put(cells, entries, self._keys, self._entries, self.tallies)

    def clear_negative(self) -> None:
        super().clear_negative()
        self.tallies[hash_kernels.LIVE.value] = (self._keys >= 0).sum()

    def note_tallies(self, tallies: list[int]) -> None:
        """Note the numbers that the host read from `tallies`.

        Raises:
            CacheError: keys were lost.
        """
        self._most_live, num_spilled = tallies
        self._has_spilled = num_spilled > 0
        if num_spilled > hash_kernels.SPILL_CELLS:
            raise CacheError(
                f"the hashed slot map lost {num_spilled - hash_kernels.SPILL_CELLS} of {self._most_live} keys, whose "
                'buckets were full; set cache.slot_map = "array"'
            )

    def _look_up(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        table = (self._keys, self._entries, self.tallies, (self._num_buckets, self._num_cells))
        return hash_kernels.look_up(keys, *table, **_CONSTANTS)

    def _insert(self, keys: Tensor, entries: Tensor) -> None:
        self.put(keys, entries)

    def _grow(self) -> None:
        num_live = self._most_live
        memory.record_stream(self.tallies)
        super()._grow()
        self._most_live = num_live
