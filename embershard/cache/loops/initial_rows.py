"""Compiled loops that write initial weights, of `ShardWeights` and `LazyRows`.

`pool` is `PoolWeights.arrays`: ends, first counters, counters per row, keys, lows and spans of the tables, and the
groups of 4 columns. Table t of the pool has rows [ends[t], ends[t + 1]).
"""

# mypy: disable-error-code="no-untyped-call, untyped-decorator"
from __future__ import annotations

import numba
import numpy as np
from numba.extending import overload

from embershard.cache.loops.compiled import compiled_when_called

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_HALF_WORD, _LOW_BITS = np.uint64(32), np.uint32(8)
_UNIT = np.float32(2.0**-24)


def stored(out, weight):  # type: ignore[no-untyped-def]
    """Return a float32 as an element of `out`, which is float32, or uint16 with the bits of float16."""
    raise NotImplementedError  # compiled below


@overload(stored, inline="always")
def _stored(out, weight):  # type: ignore[no-untyped-def]
    if isinstance(out.dtype, numba.types.Float):
        return lambda out, weight: weight
    return lambda out, weight: half_bits(weight)


@compiled_when_called()
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


@compiled_when_called(inline="always")
def philox(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    """Return the four words of a counter."""
    for _ in range(10):
        p0, p1 = _M0 * np.uint64(c0), _M1 * np.uint64(c2)
        c0, c1 = np.uint32(p1 >> _HALF_WORD) ^ c1 ^ k0, np.uint32(p1)
        c2, c3 = np.uint32(p0 >> _HALF_WORD) ^ c3 ^ k1, np.uint32(p0)
        k0, k1 = np.uint32(k0 + _W0), np.uint32(k1 + _W1)
    return c0, c1, c2, c3


@compiled_when_called(error_model="numpy")
def write_rows(out, at, row, stop, pool):  # type: ignore[no-untyped-def]
    """Write rows [row, stop) of a pool to `out` [4 * groups * rows], from element `at` on."""
    ends, firsts, widths, keys, lows, spans, groups = pool
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


@compiled_when_called(error_model="numpy")
def write_run(out, at, counter, num, key0, key1, low, span):  # type: ignore[no-untyped-def]
    """Write the weights of `num` counters from `counter` on to `out` from element `at` on."""
    here = out[at : at + 4 * num]  # indexed by the loop alone, the loop is compiled to vector instructions
    for number in range(num):
        n = np.uint64(counter) + np.uint64(number)
        c0, c1, c2, c3 = np.uint32(n), np.uint32(n >> _HALF_WORD), np.uint32(0), np.uint32(0)
        c0, c1, c2, c3 = philox(c0, c1, c2, c3, key0, key1)
        here[4 * number] = stored(out, low + span * (np.float32(c0 >> _LOW_BITS) * _UNIT))
        here[4 * number + 1] = stored(out, low + span * (np.float32(c1 >> _LOW_BITS) * _UNIT))
        here[4 * number + 2] = stored(out, low + span * (np.float32(c2 >> _LOW_BITS) * _UNIT))
        here[4 * number + 3] = stored(out, low + span * (np.float32(c3 >> _LOW_BITS) * _UNIT))


@compiled_when_called(error_model="numpy")
def write_rows_of_ids(rows, ids, out, pool):  # type: ignore[no-untyped-def]
    """Write the weights of `ids` [M] to `rows` [M] of a pool, in `out` [4 * groups * R].

    The words of a counter are two of the id, the group of columns in the whole table, and 1: those of rows end with 0.
    """
    ends, firsts, widths, keys, lows, spans, groups = pool
    for place in range(rows.size):
        row, n = rows[place], np.uint64(ids[place])
        table = np.searchsorted(ends, row, side="right") - 1
        first_group, key0, key1 = firsts[table] % widths[table], keys[table, 0], keys[table, 1]
        low, span, here = lows[table], spans[table], out[4 * groups * row : 4 * groups * (row + 1)]
        for number in range(groups):
            c0, c1, c2, c3 = np.uint32(n), np.uint32(n >> _HALF_WORD), np.uint32(first_group + number), np.uint32(1)
            c0, c1, c2, c3 = philox(c0, c1, c2, c3, key0, key1)
            here[4 * number] = stored(out, low + span * (np.float32(c0 >> _LOW_BITS) * _UNIT))
            here[4 * number + 1] = stored(out, low + span * (np.float32(c1 >> _LOW_BITS) * _UNIT))
            here[4 * number + 2] = stored(out, low + span * (np.float32(c2 >> _LOW_BITS) * _UNIT))
            here[4 * number + 3] = stored(out, low + span * (np.float32(c3 >> _LOW_BITS) * _UNIT))


@compiled_when_called()
def make_blocks_of(keys, made, shift, out, num_rows, pool):  # type: ignore[no-untyped-def]
    """Make the blocks of rows `keys` that are not `made`, in `out`; return their number."""
    count = 0
    for key in keys:
        block = key >> shift
        if not made[block]:
            count += make_blocks(block, block + 1, made, shift, out, num_rows, pool)
    return count


@compiled_when_called()
def make_blocks(first, stop, made, shift, out, num_rows, pool):  # type: ignore[no-untyped-def]
    """Make blocks [first, stop) that are not `made`, in `out`; return their number."""
    count = 0
    for block in range(first, stop):
        if not made[block]:
            row = block << shift
            end = min(row + (1 << shift), num_rows)
            write_rows(out, 4 * pool[6] * row, row, end, pool)
            made[block] = True
            count += 1
    return count


@compiled_when_called()
def read_rows(keys, places, made, shift, weights, out, pool):  # type: ignore[no-untyped-def]
    """Copy rows `keys` of `weights` to rows `places` of `out`, and write those of blocks that are not `made` there."""
    columns = 4 * pool[6]
    for number in range(keys.size):
        key, at = keys[number], columns * places[number]
        if made[key >> shift]:
            out[at : at + columns] = weights[columns * key : columns * (key + 1)]
        else:
            write_rows(out, at, key, key + 1, pool)


@compiled_when_called()
def read_blocks(first, stop, made, shift, weights, out, pool):  # type: ignore[no-untyped-def]
    """Copy rows [first, stop) of `weights` to `out`, and write those of blocks that are not `made` there."""
    row, columns = first, 4 * pool[6]
    while row < stop:
        block = row >> shift
        end, at = min(stop, (block + 1) << shift), columns * (row - first)
        if made[block]:
            out[at : at + columns * (end - row)] = weights[columns * row : columns * end]
        else:
            write_rows(out, at, row, end, pool)
        row = end
