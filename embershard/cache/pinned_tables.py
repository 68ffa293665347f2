"""Tables so small that all their rows are always cached."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embershard.cache.slot_map import SlotMap

_MOST_ROWS = 65_535  # keys of two bytes; with more, FBGEMM's sort gains nothing
_SHARE = 10


def pinned_tables(rows: Sequence[int], num_slots: int) -> dict[int, tuple[int, int]]:
    """Choose a pool's tables to pin: number of the table -> first slot and rows.

    These are the smallest tables that together take at most a tenth of the slots. Nearly all of their rows are hot
    anyway; in consecutive slots FBGEMM sorts their ids in fewer passes (docs/decisions/0008).
    """
    pinned: dict[int, tuple[int, int]] = {}
    first = 1
    for table in sorted(range(len(rows)), key=lambda table: rows[table]):
        if 0 < rows[table] <= _MOST_ROWS and (first - 1 + rows[table]) * _SHARE <= num_slots:
            pinned[table] = (first, rows[table])
            first += rows[table]
    return pinned


class OtherTables:
    """Selects a batch's ids of tables that are not pinned; pinned rows need no next use.

    Args:
        row_offsets: first key of each table of the pool.
        table_of_feature: for each feature, the number of its table.
        pinned_keys: int64 [K], all rows of the pinned tables, in slots 1 to K.

    Attributes:
        features: bool [F], True for those whose table is not pinned.
        num_pinned: K.
    """

    def __init__(self, row_offsets: Sequence[int], table_of_feature: Sequence[int], pinned_keys: Tensor) -> None:
        are_pinned = torch.isin(torch.tensor(row_offsets, dtype=torch.int64), pinned_keys)
        self.features = ~are_pinned[torch.tensor(table_of_feature, dtype=torch.int64)]
        self.num_pinned = pinned_keys.numel()

    def select(self, keys: Tensor, slot_map: SlotMap) -> tuple[Tensor, Tensor | None]:
        """Return those of `keys` (int64 [N]) that are not pinned, and their positions (int32; None: all)."""
        if not self.num_pinned:
            return keys, None
        entries = slot_map.entries(keys)  # below 1: not cached, so not pinned
        positions = ((entries < 1) | (entries > self.num_pinned)).nonzero().flatten().int()
        return keys.index_select(0, positions), positions
