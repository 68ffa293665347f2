"""Sizes of a model, as planning needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_ITEM_BYTES = {"fp32": 4, "fp16": 2}


@dataclass(frozen=True)
class TableSize:
    """One embedding table, and its optimizer's state per row.

    Attributes:
        state_bytes: optimizer state of a row that does not depend on its columns (row-wise Adagrad: 4).
        state_bytes_per_column: optimizer state per column (Adagrad: 4, Adam: 8).
    """

    table: str
    rows: int
    dim: int
    dtype: Literal["fp32", "fp16"] = "fp32"
    state_bytes: int = 0
    state_bytes_per_column: int = 0

    def weight_bytes(self, columns: int | None = None) -> int:
        """Return the bytes of a row's weights, with so many columns (default: all)."""
        return _ITEM_BYTES[self.dtype] * (self.dim if columns is None else columns)

    def optimizer_bytes(self, columns: int | None = None) -> int:
        """Return the bytes of a row's optimizer state."""
        return self.state_bytes + self.state_bytes_per_column * (self.dim if columns is None else columns)

    def row_bytes(self, columns: int | None = None) -> int:
        """Return the bytes of a row's payload: weights and optimizer state."""
        return self.weight_bytes(columns) + self.optimizer_bytes(columns)


@dataclass(frozen=True)
class ModelSize:
    """Tables of a model, and sizes of its dense part.

    >>> ModelSize((TableSize("t0", rows=100, dim=16, state_bytes=4),), 0, 0, 0, 0).table_bytes
    6800

    Attributes:
        tables: in the model's order.
        dense_flops_per_sample: floating-point operations of forward and backward.
        dense_state_bytes: gradients and optimizer states of the dense parameters.
        activation_bytes_per_sample: kept by the dense forward for the backward.
    """

    tables: tuple[TableSize, ...]
    dense_flops_per_sample: float
    dense_parameter_bytes: int
    dense_state_bytes: int
    activation_bytes_per_sample: float

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return sum(table.rows for table in self.tables)

    @property
    def table_bytes(self) -> int:
        """Weights and optimizer states of all tables."""
        return sum(table.rows * table.row_bytes() for table in self.tables)


@dataclass(frozen=True)
class PlacedShard:
    """One shard of a table on one rank.

    Attributes:
        row_start, row_stop: its rows.
        columns: number of its columns.
        sharding: TorchRec's sharding type.
        kernel: "cached", "device" or "replicated".
        exchange: "pooled" or "rows".
    """

    table: TableSize
    rank: int
    row_start: int
    row_stop: int
    columns: int
    sharding: str
    kernel: str
    exchange: str = "pooled"

    @property
    def rows(self) -> int:
        """Rows of the shard."""
        return self.row_stop - self.row_start

    @property
    def row_bytes(self) -> int:
        """Row payload of the shard's columns, in bytes."""
        return self.table.row_bytes(self.columns)
