"""Index of next uses whose work on a batch is done by kernels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from embershard.cache.gpu import known_kernels
from embershard.cache.gpu.readback import Count, Readback
from embershard.cache.gpu.slot_map import KernelSlotMap
from embershard.cache.next_use import KnownBatch, NextUseIndex
from embershard.cache.pinned_tables import OtherTables


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
        self._places = slot_map
        self._num_pinned = 0 if tables is None else tables.num_pinned
        self.readback = Readback()

    def know(self, keys: Tensor, feature_lengths: Tensor | None = None) -> MarkedBatch:
        self._newest += 1
        (first_use, first), places = self._reserve_ascending(keys.numel()), self._places.claim_places(keys)
        state = (self._places.entries_by_place, self.next_use, self._last_use, self._next_batch)
        which = (self._places.num_keys, self._num_pinned, first, self._newest)
        marks = known_kernels.know(keys, places, *state, *which)
        batch = MarkedBatch(self._newest, first_use, marks, marks, first, self.readback.count(marks.sum()))
        self._known.append(batch)
        return batch

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
        return slots, known_kernels.advance(slots, batch.positions, *state, batch.first)

    def admit(self, keys: Tensor, slots: Tensor) -> None:
        soon = self._known[0].number if self._known else 0
        state = (self._places.entries_by_place, self.next_use, self._last_use)
        known_kernels.admit(self._places.places(keys), slots, *state, soon)

    def _take_back(self, batch: KnownBatch, keys: Tensor) -> None:
        positions = batch.positions.nonzero().flatten().int()
        super()._take_back(KnownBatch(batch.number, batch.first_use, positions, positions), keys)
