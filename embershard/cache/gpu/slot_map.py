"""Map between rows and slots whose work on a batch is done by kernels."""

from __future__ import annotations

from torch import Tensor

from embershard.cache.config import MapKind
from embershard.cache.gpu import batch_kernels
from embershard.cache.gpu.key_map import PlacedArrayMap, PlacedHashedMap, PlacedKeyMap
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
        """Look up a batch's `keys` (int64 [N]) and stamp the slots found; see `batch_kernels.find`."""
        places, first = self._entries.places(keys), self.first_stamp(batch)
        return batch_kernels.find(keys, places, self._entries.cells, self.use_stamp, first, self.num_keys, numbers)

    def bind(self, keys: Tensor, slots: Tensor, batch: int) -> None:
        places = self._entries.claim(keys)
        state = (self._entries.cells, self.key_of_slot, self.use_stamp)
        batch_kernels.bind(keys, places, slots, *state, self.first_stamp(batch))

    @property
    def tallies(self) -> Tensor | None:
        """Numbers of the map over the keys that `note_tallies` wants to know: int64 [?]; None for none."""
        return self._entries.tallies

    def note_tallies(self, tallies: list[int]) -> None:
        """Note the numbers that `tallies` had just now."""
        self._entries.note_tallies(tallies)
