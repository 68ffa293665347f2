"""Memory of the hot rows that every rank has a copy of."""

from __future__ import annotations

from dataclasses import dataclass

from embershard.cache.key_map import ARRAY_ROW_BYTES, HASHED_SLOT_BYTES, map_kind
from embershard.sharding.sizes import ModelSize


@dataclass(frozen=True)
class HotRowsMemory:
    """Device memory of each rank for copies of hot rows; a `ModeMemory`.

    Attributes:
        num_bytes: of the rows and their optimizer states.
    """

    num_bytes: int

    def device_bytes(self, model: ModelSize, device: str) -> dict[str, int]:
        """Return the bytes of the copies and of the map that finds them; of a hashed map, the most."""
        rows = sum(table.rows for table in model.tables)
        most_hot = self.num_bytes // min(table.row_bytes() for table in model.tables)
        is_array = map_kind(None, rows, device) == "array"
        return {"hot_rows": self.num_bytes + (ARRAY_ROW_BYTES * rows if is_array else HASHED_SLOT_BYTES * most_hot)}
