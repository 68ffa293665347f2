"""Which rows a pool has (`PoolShape`), and what TorchRec sees of them (`RowViews`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from embershard.cache.rows import memory
from embershard.cache.rows.initial_weights import ShardWeights

State = tuple[str, torch.Size, torch.dtype]


@dataclass(frozen=True, eq=False)
class PoolShape:
    """Which rows a pool of tables of the same dim has: R in all, table after table.

    The payload of a row is its weights [D] and every per-row optimizer state ([] or [D]); they always move together.

    Attributes:
        rows_per_table: rows of each table on this rank.
        dim: D, columns of each row on this rank.
        dtype: of the weights in slots.
        states: per-row optimizer states as (name, trailing shape, dtype); they start as zeros.
        initial: initial weights of each table, from a counter; None: zeros, which the caller overwrites.

    >>> shape = PoolShape([3, 1], 4, torch.float32, [("momentum", torch.Size([]), torch.float32)])
    >>> shape.num_rows, shape.row_offsets, shape.row_bytes
    (4, [0, 3], 20)
    """

    rows_per_table: Sequence[int]
    dim: int
    dtype: torch.dtype = torch.float32
    states: Sequence[State] = ()
    initial: Sequence[ShardWeights] | None = None

    @cached_property
    def num_rows(self) -> int:
        """R."""
        return sum(self.rows_per_table)

    @cached_property
    def row_offsets(self) -> list[int]:
        """Key of the first row of each table."""
        return [0, *itertools.accumulate(self.rows_per_table)][: len(self.rows_per_table)]

    @property
    def parts(self) -> list[tuple[torch.Size, torch.dtype]]:
        """Shape and type of a row's weights, and of each of its states."""
        return [(torch.Size([self.dim]), self.dtype), *((size, dtype) for _, size, dtype in self.states)]

    @property
    def weight_bytes(self) -> int:
        """Weights of a row in a slot, in bytes."""
        return self.dim * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Payload of a row in a slot, in bytes."""
        return sum(math.prod(size) * dtype.itemsize for size, dtype in self.parts)

    def empty(self, num_rows: int) -> list[Tensor]:
        """Return memory for some rows: [num_rows, ...] for each part."""
        return [torch.empty(num_rows, *size, dtype=dtype) for size, dtype in self.parts]


class RowViews:
    """The rows of a home as TorchRec refers to them: tensors of which it takes parts.

    A home that holds rows in another way has only addresses for them: they tell a row, take no page, and nobody reads
    or writes there.

    Args:
        shape: of the pool.
        own_rows: of each table, the first row and the number of the rows that this rank writes and saves.
        held: the memory of each part, weights and then states, [R, ...]; None: only addresses.

    Attributes:
        tensors: [R, ...] for each part.
        are_rows: all of them hold the rows.
        are_addresses: none of them does.
    """

    def __init__(self, shape: PoolShape, own_rows: Sequence[tuple[int, int]], held: Sequence[Tensor | None]) -> None:
        self._shape, self._own_rows = shape, own_rows
        self.tensors = [
            _addresses(shape.num_rows, *part) if rows is None else rows
            for rows, part in zip(held, shape.parts, strict=True)
        ]
        self.are_rows, self.are_addresses = None not in held, all(rows is None for rows in held)

    @property
    def names(self) -> list[str]:
        """What the tensors are."""
        return ["weights", *(name for name, *_ in self._shape.states)]

    @property
    def flat_weights(self) -> Tensor:
        """The weights, [R * D]."""
        return self.tensors[0].view(-1)

    def table_weights(self) -> list[Tensor]:
        """Return the weights of this rank's own rows of each table: views [rows, D]."""
        return self._own_of_tables(self.tensors[0])

    def table_states(self) -> list[list[Tensor]]:
        """Return the states of this rank's own rows of each table: views [rows, ...]."""
        split = [self._own_of_tables(state) for state in self.tensors[1:]]
        return [[state[table] for state in split] for table in range(len(self._own_rows))]

    def _own_of_tables(self, rows: Tensor) -> list[Tensor]:
        own = zip(self._shape.row_offsets, self._own_rows, strict=True)
        return [rows.detach()[offset + first : offset + first + count] for offset, (first, count) in own]

    def place_of(self, part: Tensor) -> tuple[int, int] | None:
        """Return the number of the tensor that a view is a part of, and the row that it begins with; None for other
        memory."""
        if part.is_cpu and part.numel():
            for number, rows in enumerate(self.tensors):
                start = part.data_ptr() - rows.data_ptr()
                if 0 <= start < rows.nbytes:
                    return number, start // rows[:1].nbytes
        return None


def _addresses(num_rows: int, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return memory [num_rows, ...] that takes no page, as long as nobody writes."""
    return memory.zeros(num_rows * math.prod(size), dtype, small_pages=True).view(num_rows, *size)
