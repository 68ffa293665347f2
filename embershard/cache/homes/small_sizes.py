"""Bytes of rows of small types, in their home and in slots."""

from __future__ import annotations

from typing import Literal

SmallType = Literal["fp16", "int8"]
#: Bytes of a row's weights besides its columns, and of each column.
_ROW_BYTES: dict[SmallType, tuple[int, int]] = {"fp16": (0, 2), "int8": (2, 1)}
#: Of a slot of small rows: which rows are full, and which were rounded for this batch.
MARK_BYTES = 4
#: Tables of so few rows stay full: each of their rows trains often, and they take little memory.
SMALL_TABLE_ROWS = 4096


def small_row_bytes(small_type: SmallType, columns: int) -> int:
    """Return the bytes of the weights of a small row in host memory.

    >>> small_row_bytes("int8", 16), small_row_bytes("fp16", 16)
    (18, 32)
    """
    of_row, of_column = _ROW_BYTES[small_type]
    return of_row + of_column * columns


def num_full_rows(num_rows: int, share: float) -> int:
    """Return how many rows of a table stay full, at most.

    >>> num_full_rows(1_000_000, share=0.01), num_full_rows(100, share=0.01), num_full_rows(100, share=0)
    (10000, 100, 0)
    """
    if not share:
        return 0
    return num_rows if num_rows <= SMALL_TABLE_ROWS else round(share * num_rows)
