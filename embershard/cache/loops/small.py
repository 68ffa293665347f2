"""Compiled loops over small rows: rounding to what a small type holds, and the exact ways to host memory and back.

A row's weights are rounded in place, as float32. What the host has of such a row is the same, number for number:
narrowing and widening lose nothing. Rounding is stochastic, and its random bits are a hash of the weight's own bits, of
its row and column in the whole table and of the table's seed: no state, and a row that was rounded stays as it is.

`tables` are `SmallRows.tables`: of each table of the pool the first key, what to add to a key for the row in the whole
table, the table's seed, and the first column of this shard. The last entry has the number of keys.

int8: the step of a row is its largest weight over 127, rounded to bfloat16; weights are whole multiples of it. The
largest is rounded to nearest, so that it is 127 steps, and the step comes out the same again. fp16: half precision.

Processors do such loops 8 weights or more at a time, if each reads and writes a row by one array (`bits` where there
are both), and finds the largest weight by its bits: two arrays of one memory might be of any overlap, and which float
is larger depends on their order where one is a NaN. It halves the time.
"""

# mypy: disable-error-code="no-untyped-call, untyped-decorator"
from __future__ import annotations

import numba
import numpy as np

from embershard.cache.loops.compiled import compiled_when_called

_F, _I, _U = np.float32, numba.int32, np.uint32
_LEVELS = np.float32(127.0)
_MOST_BITS = 0x71800000  # of 2^100: a step needs its room to be rounded, and such weights have diverged
_LEAST_STEP = np.float32(2.0**-100)  # smaller ones would lose bits
_MOST_HALF_BITS = 0x477FE000  # of 65504
_NORMAL_HALF_BITS = 0x38800000  # of 2^-14
#: In place of a step: the row is full, and the first four codes are its number among those. No step is negative.
_FULL = 0xFFFF
_ONE_STEP = 0x3F80  # of a row of zeros: 0 is a row that was never written
#: Halfs are kept with these bits turned over: fresh memory, which is 0, is then a NaN, and no row that was written.
_TURNED = 0x7E00


@compiled_when_called(inline="always")
def _table_of(key, tables):  # type: ignore[no-untyped-def]
    low, high = 0, tables.shape[0] - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if tables[middle, 0] <= key:
            low = middle
        else:
            high = middle
    return low


@compiled_when_called(inline="always")
def _mixed(bits):  # type: ignore[no-untyped-def]
    """Mix 32 bits (the finalizer of C. Wellons' hash "lowbias32")."""
    bits = _I(bits ^ _I(_I(bits >> _I(16)) & _I(0xFFFF)))
    bits = _I(bits * _I(0x7FEB352D))
    bits = _I(bits ^ _I(_I(bits >> _I(15)) & _I(0x1FFFF)))
    bits = _I(bits * _I(-2073254261))
    return _I(bits ^ _I(_I(bits >> _I(16)) & _I(0xFFFF)))


@compiled_when_called(inline="always")
def _largest(bits, place):  # type: ignore[no-untyped-def]
    """Return the bits of the largest magnitude of a row; those of a NaN are above all numbers'."""
    most = _I(0)
    for column in range(bits.shape[1]):
        size = _I(bits[place, column] & _I(0x7FFFFFFF))
        most = size if size > most else most
    return most


@compiled_when_called(inline="always")
def _step(largest):  # type: ignore[no-untyped-def]
    """Return the step of a row: a 127th of its largest weight, rounded to the 8 significant bits of a bfloat16."""
    step = largest / _LEVELS
    split = _F(step * _F(65537.0))
    step = _F(split - _F(split - step))
    return step if step >= _LEAST_STEP else _F(0.0)


@compiled_when_called(error_model="numpy")
def round_to_codes(rows, bits, places, keys, tables, steps, seen, number):  # type: ignore[no-untyped-def]
    """Round rows to codes of a step, but for full ones.

    Args:
        rows: float32 [S, D]; `bits`: the same memory, int32, by which it is read and written.
        places: int64 [M] of the rows, which may repeat.
        keys: int64 [M] of the rows.
        steps: uint16 [R] of the host rows: tells which are full.
        seen: int32 [S] of places, and the `number` that marks those of this call; or [0]: the places differ.

    Returns:
        The first position in `places` of a row that holds no finite number of a usable size; -1: none does.
    """
    bad = -1
    for position in range(places.size):
        place, key = places[position], keys[position]
        if steps[key] == _FULL or (seen.size and seen[place] == number):
            continue
        if seen.size:
            seen[place] = number
        table = _table_of(key, tables)
        row_key = _I(_I(_I(key + tables[table, 1]) * _I(-1640531527)) + _I(tables[table, 2]))
        first = _I(tables[table, 3])
        most = _largest(bits, place)
        if most >= _I(_MOST_BITS):
            bad = position if bad < 0 else bad
            continue
        step = _step(np.int32(most).view(_F))
        if step == _F(0.0):
            for column in range(rows.shape[1]):
                bits[place, column] = _I(0)
            continue
        for column in range(rows.shape[1]):
            own = bits[place, column]
            random = _mixed(_I(_I(own ^ row_key) + _I((_I(column) + first) * _I(-2048144789))))
            # 16 bits: the sum with a code is exact, so a whole number stays one.
            part = _F(_I(random & _I(0xFFFF))) * _F(2.0**-16)
            part = _F(0.5) if _I(own & _I(0x7FFFFFFF)) == most else part
            code = np.floor(
                _F(np.int32(own).view(_F) / step) + part
            )  # not times 1 / step: that is no whole number again
            code = code if code < _LEVELS else _LEVELS
            code = code if code > -_LEVELS else -_LEVELS
            bits[place, column] = _F(code * step).view(np.int32)
    return bad


@compiled_when_called(error_model="numpy")
def narrow_to_codes(codes, words, steps, full, keys, rows, places):  # type: ignore[no-untyped-def]
    """Write rows [S, D] at `places` to host rows `keys` (both int64 [M]): codes int8 [R, D] with their memory as int32
    `words`, steps uint16 [R]; those of full rows to `full` float32 [K, D]. Return how many were not rounded."""
    inexact = 0
    for position in range(keys.size):
        key, place = keys[position], places[position]
        if steps[key] == _FULL:
            number = words[key, 0]
            for column in range(rows.shape[1]):
                full[number, column] = rows[place, column]
            continue
        most = _I(0)
        for column in range(rows.shape[1]):
            size = _I(_F(rows[place, column]).view(np.int32) & _I(0x7FFFFFFF))
            most = size if size > most else most
        step = _step(np.int32(most).view(_F))
        if step == _F(0.0):
            steps[key] = _ONE_STEP
            for column in range(rows.shape[1]):
                codes[key, column] = 0
            inexact += most != _I(0)
            continue
        is_other = False
        for column in range(rows.shape[1]):
            weight = rows[place, column]
            code = np.rint(_F(weight / step))
            codes[key, column] = np.int8(code)
            is_other |= _F(code * step) != weight
        steps[key] = np.uint16(_F(step).view(_U) >> _U(16))
        inexact += is_other
    return inexact


@compiled_when_called()
def mark_full(words, steps, keys):  # type: ignore[no-untyped-def]
    """Mark host rows `keys` int64 [K] as full, with their positions."""
    for position in range(keys.size):
        steps[keys[position]] = _FULL
        words[keys[position], 0] = position


@compiled_when_called()
def widen_codes(codes, words, steps, full, keys, rows, places, unmade):  # type: ignore[no-untyped-def]
    """Do what `narrow_to_codes` does, the other way. Write the positions of rows that were never written to `unmade`
    int64 [M], and return their number."""
    count = 0
    for position in range(keys.size):
        key, place = keys[position], places[position]
        step_bits = steps[key]
        if step_bits == 0:
            unmade[count] = position
            count += 1
        elif step_bits == _FULL:
            number = words[key, 0]
            for column in range(rows.shape[1]):
                rows[place, column] = full[number, column]
        else:
            step = _U(_U(step_bits) << _U(16)).view(_F)
            for column in range(rows.shape[1]):
                rows[place, column] = _F(codes[key, column]) * step
    return count


@compiled_when_called(error_model="numpy")
def round_to_halfs(rows, bits, places, keys, tables, seen, number):  # type: ignore[no-untyped-def]
    """Round rows to half precision; as `round_to_codes`. A weight above 65504 is of no usable size."""
    bad = -1
    for position in range(places.size):
        place, key = places[position], keys[position]
        if seen.size:
            if seen[place] == number:
                continue
            seen[place] = number
        table = _table_of(key, tables)
        row_key = _I(_I(_I(key + tables[table, 1]) * _I(-1640531527)) + _I(tables[table, 2]))
        first = _I(tables[table, 3])
        if _largest(bits, place) > _I(_MOST_HALF_BITS):
            bad = position if bad < 0 else bad
            continue
        for column in range(rows.shape[1]):
            own = bits[place, column]
            size = _I(own & _I(0x7FFFFFFF))
            random = _I(_mixed(_I(_I(own ^ row_key) + _I((_I(column) + first) * _I(-2048144789)))) & _I(0x1FFF))
            # Below 2^-14 halfs are whole multiples of 2^-24.
            multiple = np.floor(np.int32(size).view(_F) * _F(2.0**24) + _F(random) * _F(2.0**-13))
            small = _I(_F(multiple * _F(2.0**-24)).view(np.int32) | _I(own ^ size))
            normal = _I(_I(own + random) & _I(~0x1FFF))
            bits[place, column] = small if size < _I(_NORMAL_HALF_BITS) else normal
    return bad


@compiled_when_called(error_model="numpy")
def narrow_to_halfs(halfs, keys, rows, bits, places):  # type: ignore[no-untyped-def]
    """Write rows at `places` to host rows `keys` of `halfs` uint16 [R, D]. Return how many were not rounded."""
    inexact = 0
    for position in range(keys.size):
        key, place = keys[position], places[position]
        is_other = False
        for column in range(rows.shape[1]):
            own = bits[place, column]
            size = _I(own & _I(0x7FFFFFFF))
            sign = _I(_I(own >> _I(16)) & _I(0x8000))
            if size < _I(_NORMAL_HALF_BITS):
                multiple = abs(rows[place, column]) * _F(2.0**24)
                half = _I(multiple)
                is_other |= _F(half) != multiple
            else:
                half = _I(_I(size - _I(0x38000000)) >> _I(13))
                is_other |= (size & _I(0x1FFF)) != 0 or size > _I(_MOST_HALF_BITS)
            halfs[key, column] = np.uint16(_I(sign | half) ^ _I(_TURNED))
        inexact += is_other
    return inexact


@compiled_when_called()
def widen_halfs(halfs, keys, rows, bits, places, unmade):  # type: ignore[no-untyped-def]
    """Do what `narrow_to_halfs` does, the other way; `unmade` as in `widen_codes`."""
    count = 0
    for position in range(keys.size):
        key, place = keys[position], places[position]
        if halfs[key, 0] == 0:
            unmade[count] = position
            count += 1
            continue
        for column in range(rows.shape[1]):
            half = _I(_I(halfs[key, column]) ^ _I(_TURNED))
            size, sign = _I(half & _I(0x7FFF)), _I(_I(half & _I(0x8000)) << _I(16))
            small = _F(_F(size) * _F(2.0**-24)).view(np.int32)
            normal = _I(_I(size << _I(13)) + _I(0x38000000))
            bits[place, column] = _I((small if size < _I(0x400) else normal) | sign)
    return count
