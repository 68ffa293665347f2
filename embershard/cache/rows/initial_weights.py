"""Initial weights from a counter: each is a function of seed, table, row and column, of nothing else.

So any block of rows can be made by itself, at any time, on any rank, under any plan. The generator is Philox4x32-10
(Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): 64 bits of key, which are the
seed and the table's name here, and a counter give four words of 32 bits. Four columns of a row are a group; counter n
of a table of W groups per row is group n mod W of row n div W. A weight is low + (high - low) * u in float32, with
the upper 24 bits of a word as u in [0, 1), and is rounded to the table's type.

A row that gets another id draws by the id, wherever it is: the words of a counter are the lower and the upper
half of the id (as two's complement), the number of the group in the row, and 1. Those of rows end with 0.
"""

# mypy: disable-error-code="no-untyped-call, untyped-decorator"
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.cache import loops

_GROUP = 4  # columns per counter
_SCRATCH_FLOATS = 1 << 18


@dataclass(frozen=True)
class ShardWeights:
    """Initial weights of a table's shard: uniform in [low, high).

    >>> table = ShardWeights("clicks", seed=7, dim=8, low=-0.5, high=0.5)
    >>> whole, part = torch.empty(100, 8), torch.empty(10, 4)
    >>> table.write(whole)
    >>> ShardWeights("clicks", 7, 8, -0.5, 0.5, first_row=90, first_column=4).write(part)
    >>> torch.equal(part, whole[90:, 4:])
    True

    Attributes:
        table: its name.
        seed: of all tables.
        dim: columns of the whole table.
        low, high: range of the weights.
        first_row, first_column: place of the shard in the whole table.
    """

    table: str
    seed: int
    dim: int
    low: float
    high: float
    first_row: int = 0
    first_column: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """Two words of 32 bits: a hash of seed and name that is the same on every machine."""
        digest = hashlib.blake2b(f"{self.seed} {self.table}".encode(), digest_size=8).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")

    def write(self, out: Tensor) -> None:
        """Write the weights of the shard to `out` [rows, columns], of any dtype, on any device."""
        rows, columns = out.shape
        first_group, skipped = divmod(self.first_column, _GROUP)
        width = -(-(skipped + columns) // _GROUP) * _GROUP
        pool = PoolWeights([rows], [self], width, first_group)
        step = max(1, _SCRATCH_FLOATS // max(1, width))
        scratch = torch.empty(min(step, rows), width)
        for start in range(0, rows, step):
            part = scratch[: min(step, rows - start)]
            pool.write(part, start)
            out.data[start : start + step].copy_(part[:, skipped : skipped + columns])


class PoolWeights:
    """Initial weights of the tables of a pool, as arrays for compiled loops.

    Args:
        rows_per_table: rows of each shard.
        shards: the shards, in the pool's order.
        columns: of every shard, a multiple of 4.
        first_group: number of the first group of 4 columns; None: from each shard.
    """

    def __init__(
        self,
        rows_per_table: Sequence[int],
        shards: Sequence[ShardWeights],
        columns: int,
        first_group: int | None = None,
    ) -> None:
        groups = np.array([-(-shard.dim // _GROUP) for shard in shards], np.int64)
        first_rows = np.array([shard.first_row for shard in shards], np.int64)
        first_groups = [s.first_column // _GROUP if first_group is None else first_group for s in shards]
        assert columns % _GROUP == 0, f"{columns} columns"
        assert first_group is not None or not any(s.first_column % _GROUP for s in shards), "groups are cut"
        ends = np.cumsum([0, *rows_per_table], dtype=np.int64)
        lows = np.array([shard.low for shard in shards], np.float32)
        spans = np.array([shard.high for shard in shards], np.float32) - lows
        keys = np.array([shard.key for shard in shards], np.uint32).reshape(-1, 2)
        firsts = first_rows * groups + np.array(first_groups, np.int64)
        #: `pool` of the compiled loops.
        self.arrays = (ends, firsts, groups, keys, lows, spans, columns // _GROUP)

    def write(self, out: Tensor, row: int) -> None:
        """Write the weights of the pool's rows from `row` on to `out` float32 or float16 [n, columns], contiguous."""
        loops.write_rows(as_array(out), 0, row, row + out.shape[0], self.arrays)


def as_array(weights: Tensor) -> NDArray[Any]:
    """Return contiguous weights as a flat array; those of 16 bits as uint16, which numba can handle."""
    flat = weights.detach().view(-1)
    return flat.view(torch.int16).numpy().view(np.uint16) if weights.dtype == torch.float16 else flat.numpy()
