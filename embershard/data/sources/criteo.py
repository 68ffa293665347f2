"""Criteo's click logs: tab-separated, 1 label, 13 integers, 26 hexadecimal categoricals, no header."""

from __future__ import annotations

import binascii
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embershard.data.block import transform_dense
from embershard.data.config import NUM_CRITEO_DENSE, DataConfig
from embershard.data.hashing import Ids, map_ids
from embershard.data.schema import Schema, SparseFeature
from embershard.data.sources.held_out import Share, alone
from embershard.data.sources.text import LineFormat, LineSource, joined_cells
from embershard.data.synthetic_config import NUM_CRITEO_SPARSE

DENSE = tuple(f"I{i + 1}" for i in range(NUM_CRITEO_DENSE))
SPARSE = tuple(f"C{i + 1}" for i in range(NUM_CRITEO_SPARSE))
MAX_DIGITS = 8
_FORMAT = LineFormat(
    ("\t", "tab"), ("label", *DENSE, *SPARSE), ("label", *DENSE), "label, 13 integers, 26 categoricals"
)
_MOST = float(np.finfo(np.float32).max)


class CriteoSource(LineSource):
    """Criteo TSV files; see `CriteoConfig`.

    Row 0 of every table stands for a missing cell; ids become rows 1..num_rows-1.
    """

    def __init__(self, config: DataConfig, *, share: Share = alone) -> None:
        self._config = config.criteo
        super().__init__(config, self.schema_of(config), _FORMAT, share)

    @staticmethod
    def schema_of(config: DataConfig) -> Schema:
        return Schema(DENSE, tuple(map(SparseFeature, SPARSE, config.criteo.rows_per_table)))

    def parse_cells(self, table: pa.Table) -> tuple[NDArray[np.float32], Sequence[Ids]]:
        dense = np.stack([table.column(name).to_numpy() for name in DENSE], axis=1)
        missing = np.isnan(dense)
        if missing.sum() != sum(table.column(name).null_count for name in DENSE) or np.isinf(dense).any():
            raise ValueError("an integer is not a number that fits 32 bits")
        dense[missing] = 0
        transform_dense(dense, self._config.dense_transform)
        text, lengths = joined_cells(table, SPARSE)
        ids = parse_hex(text, lengths).reshape(NUM_CRITEO_SPARSE, -1)
        rows = map_ids(ids, np.array(self._config.rows_per_table)[:, None], self._config.id_mapping)
        rows[lengths.reshape(rows.shape) == 0] = 0
        return dense, tuple(rows)

    def cell_problem(self, name: str, cell: str) -> str | None:
        if name in SPARSE:
            is_hex = len(cell) <= MAX_DIGITS and all(c in "0123456789abcdefABCDEF" for c in cell)
            return None if is_hex else f"needed 1 to {MAX_DIGITS} hexadecimal digits, or nothing"
        try:
            number = float(cell or "0")
        except ValueError:
            number = float("nan")
        return None if abs(number) <= _MOST else "needed a number below 3.4e38, or nothing where it is missing"


def parse_hex(text: NDArray[np.uint8], lengths: NDArray[np.int32]) -> NDArray[np.uint32]:
    """Return the numbers [N] of cells of 0 to 8 hexadecimal digits, 0 for an empty cell.

    >>> parse_hex(np.frombuffer(b"ffA1", np.uint8), np.array([2, 0, 2])).tolist()
    [255, 0, 161]

    Args:
        text: ASCII of all cells, one after another.
        lengths: [N], characters of each cell; they sum to `len(text)`.

    Raises:
        ValueError: a cell is too long, or not hexadecimal.
    """
    digits = np.full((len(lengths), MAX_DIGITS), ord("0"), np.uint8)
    digits[np.arange(MAX_DIGITS) >= MAX_DIGITS - lengths[:, None]] = text
    return np.frombuffer(binascii.unhexlify(digits.data), ">u4")
