"""Initial weights from a counter: each is a function of seed, table, row and column, of nothing else.

So any block of rows can be made by itself, at any time, on any rank, under any plan. The generator is Philox4x32-10
(Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): 64 bits of key, which are the
seed and the table's name here, and a counter give four words of 32 bits. Four columns of a row are a group; counter n
of a table of W groups per row is group n mod W of row n div W. A weight is low + (high - low) * u in float32, with
the upper 24 bits of a word as u in [0, 1), and is rounded to the table's type.
"""

# mypy: disable-error-code="no-untyped-call, untyped-decorator"
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

_GROUP = 4  # columns per counter
_SCRATCH_FLOATS = 1 << 18

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_HALF_WORD, _LOW_BITS = np.uint64(32), np.uint32(8)
_UNIT = np.float32(2.0**-24)


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
        #: The first arguments of the loops below.
        self.arrays = (ends, first_rows * groups + np.array(first_groups, np.int64), groups, keys, lows, spans)
        self.groups = columns // _GROUP

    def write(self, out: Tensor, row: int) -> None:
        """Write the weights of the pool's rows from `row` on to `out` float32 or float16 [n, columns], contiguous."""
        write_rows(as_array(out), 0, row, row + out.shape[0], *self.arrays, self.groups)


def as_array(weights: Tensor) -> NDArray[Any]:
    """Return contiguous weights as a flat array; those of 16 bits as uint16, which numba can handle."""
    flat = weights.detach().view(-1)
    return flat.view(torch.int16).numpy().view(np.uint16) if weights.dtype == torch.float16 else flat.numpy()


def stored(out, weight):  # type: ignore[no-untyped-def]
    """Return a float32 as an element of `out`, which is float32, or uint16 with the bits of float16."""
    raise NotImplementedError  # compiled below


@overload(stored, inline="always")
def _stored(out, weight):  # type: ignore[no-untyped-def]
    if isinstance(out.dtype, numba.types.Float):
        return lambda out, weight: weight
    return lambda out, weight: half_bits(weight)


@numba.njit(nogil=True, cache=True)
def half_bits(weight):  # type: ignore[no-untyped-def]
    """Return the bits of a float32 rounded to float16, half to even; infinite from 65520 on."""
    bits = np.float32(weight).view(np.uint32)
    sign, size = (bits >> np.uint32(16)) & np.uint32(0x8000), bits & np.uint32(0x7FFFFFFF)
    if size >= np.uint32(0x47800000):  # 2^16
        return np.uint16(sign | np.uint32(0x7C00))
    if size < np.uint32(0x38800000):  # 2^-14: multiples of 2^-24
        return np.uint16(sign | np.uint32(np.rint(np.abs(weight) * np.float32(2.0**24))))
    odd = (size >> np.uint32(13)) & np.uint32(1)
    return np.uint16(sign | ((size + np.uint32(0xFFF) + odd - np.uint32(0x38000000)) >> np.uint32(13)))


@numba.njit(nogil=True, cache=True, error_model="numpy")
def write_rows(out, at, row, stop, ends, firsts, widths, keys, lows, spans, groups):  # type: ignore[no-untyped-def]
    """Write rows [row, stop) of a pool to `out` [4 * groups * rows], from element `at` on.

    Table t of the pool has rows [ends[t], ends[t + 1]), its first counter in `firsts` and its counters per row in
    `widths`.
    """
    table = np.searchsorted(ends, row, side="right") - 1
    while row < stop:
        while ends[table + 1] <= row:
            table += 1
        end = min(stop, ends[table + 1])
        counter = firsts[table] + (row - ends[table]) * widths[table]
        key0, key1, low, span = keys[table, 0], keys[table, 1], lows[table], spans[table]
        if widths[table] == groups:  # whole rows: one run of counters
            write_run(out, at, counter, (end - row) * groups, key0, key1, low, span)
            at += 4 * groups * (end - row)
        else:
            for _ in range(end - row):
                write_run(out, at, counter, groups, key0, key1, low, span)
                at += 4 * groups
                counter += widths[table]
        row = end


@numba.njit(nogil=True, cache=True, error_model="numpy")
def write_run(out, at, counter, num, key0, key1, low, span):  # type: ignore[no-untyped-def]
    """Write the weights of `num` counters from `counter` on to `out` from element `at` on."""
    here = out[at : at + 4 * num]  # indexed by the loop alone, the loop is compiled to vector instructions
    for number in range(num):
        n = np.uint64(counter) + np.uint64(number)
        c0, c1, c2, c3 = np.uint32(n), np.uint32(n >> _HALF_WORD), np.uint32(0), np.uint32(0)
        k0, k1 = key0, key1
        for _ in range(10):
            p0, p1 = _M0 * np.uint64(c0), _M1 * np.uint64(c2)
            c0, c1 = np.uint32(p1 >> _HALF_WORD) ^ c1 ^ k0, np.uint32(p1)
            c2, c3 = np.uint32(p0 >> _HALF_WORD) ^ c3 ^ k1, np.uint32(p0)
            k0, k1 = np.uint32(k0 + _W0), np.uint32(k1 + _W1)
        here[4 * number] = stored(out, low + span * (np.float32(c0 >> _LOW_BITS) * _UNIT))
        here[4 * number + 1] = stored(out, low + span * (np.float32(c1 >> _LOW_BITS) * _UNIT))
        here[4 * number + 2] = stored(out, low + span * (np.float32(c2 >> _LOW_BITS) * _UNIT))
        here[4 * number + 3] = stored(out, low + span * (np.float32(c3 >> _LOW_BITS) * _UNIT))
