"""Compiled loops of `FileRows`: whole pages between a file and memory, and rows between pages and tables.

Pages are read and written by libc, called from a loop that holds no lock of Python's: many threads keep a disk busy.
"""

# mypy: disable-error-code="no-untyped-call, untyped-decorator, no-untyped-def"
from __future__ import annotations

from typing import Any

import numba
import numpy as np

from embershard.cache.loops.compiled import Int32s, Int64s, compiled, compiled_when_called

_OF_PAGES = numba.int64(numba.int64, numba.int64, numba.int64, numba.int64)
_pread: Any = numba.types.ExternalFunction("pread64", _OF_PAGES)
_pwrite: Any = numba.types.ExternalFunction("pwrite64", _OF_PAGES)
#: Pages that one call moves at most, so that many threads share long runs.
_MOST_TOGETHER = 256
#: Of XXH64: its primes, and the bits by which it rotates.
_P1, _P2, _P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_1, _7, _12, _18, _29, _31, _32, _33 = (np.uint64(bits) for bits in (1, 7, 12, 18, 29, 31, 32, 33))
_46, _52, _57, _63 = (np.uint64(bits) for bits in (46, 52, 57, 63))


@compiled
def _end_of_run(pages: Int64s, places: Int64s, start: int) -> int:
    """Return the end of the pages from `start` on that follow one another in the file and in memory."""
    stop = start + 1
    while (
        stop < pages.size
        and stop - start < _MOST_TOGETHER
        and pages[stop] == pages[stop - 1] + 1
        and places[stop] == places[stop - 1] + 1
    ):
        stop += 1
    return stop


@compiled
def move_pages(file: int, pages: Int64s, page_bytes: int, address: int, places: Int64s, writes: bool) -> int:
    """Read pages of an open file to places in memory, counted in pages from `address`, or write them from there; return
    how many were moved: fewer than all where the system moved fewer bytes, or gave an error."""
    start = 0
    while start < pages.size:
        stop = _end_of_run(pages, places, start)
        num_bytes, offset = (stop - start) * page_bytes, pages[start] * page_bytes
        at = address + places[start] * page_bytes
        moved = _pwrite(file, at, num_bytes, offset) if writes else _pread(file, at, num_bytes, offset)
        if moved != num_bytes:
            return start
        start = stop
    return start


@numba.njit(inline="always")
def _add_word(lane, word):
    lane += np.uint64(word) * _P2
    return ((lane << _31) | (lane >> _33)) * _P1


@numba.njit(inline="always")
def _end_of_sum(a, b, c, d, num_bytes):
    found = ((a << _1) | (a >> _63)) + ((b << _7) | (b >> _57)) + ((c << _12) | (c >> _52)) + ((d << _18) | (d >> _46))
    for lane in (a, b, c, d):
        found = (found ^ _add_word(np.uint64(0), lane)) * _P1 + _P4
    found += np.uint64(num_bytes)
    found = (found ^ (found >> _33)) * _P2
    found = (found ^ (found >> _29)) * _P3
    return np.int32(found ^ (found >> _32))


@compiled
def sum_pages(words: Int64s, page_words: int, places: Int64s, sums: Int32s) -> None:
    """Write the checksums of pages at places in memory to `sums` [n]: the lower half of XXH64, without a seed. Any
    change of bits within 8 bytes changes one of its four lanes. Two pages at a time: one waits for memory."""
    for number in range(0, places.size, 2):
        other = min(number + 1, places.size - 1)
        one, two = places[number] * page_words, places[other] * page_words
        a, b, c, d = _P1 + _P2, _P2, np.uint64(0), np.uint64(0) - _P1
        e, f, g, h = a, b, c, d
        for word in range(0, page_words, 4):
            a, e = _add_word(a, words[one + word]), _add_word(e, words[two + word])
            b, f = _add_word(b, words[one + word + 1]), _add_word(f, words[two + word + 1])
            c, g = _add_word(c, words[one + word + 2]), _add_word(g, words[two + word + 2])
            d, h = _add_word(d, words[one + word + 3]), _add_word(h, words[two + word + 3])
        sums[number] = _end_of_sum(a, b, c, d, 8 * page_words)
        sums[other] = _end_of_sum(e, f, g, h, 8 * page_words)


@compiled_when_called()
def rows_from_pages(words, starts, out, places):
    """Copy rows out of pages: row i begins at word `starts[i]` and goes to row `places[i]` of `out` [P, W]."""
    for number in range(starts.size):
        start, place = starts[number], places[number]
        for word in range(out.shape[1]):
            out[place, word] = words[start + word]


@compiled_when_called()
def rows_to_pages(words, starts, rows, places):
    """Copy rows into pages, the way back."""
    for number in range(starts.size):
        start, place = starts[number], places[number]
        for word in range(rows.shape[1]):
            words[start + word] = rows[place, word]


@compiled_when_called()
def set_bits(bits, numbers):
    """Set the bits of some numbers in an array of bytes."""
    for number in numbers:
        bits[number >> 3] |= np.uint8(1 << (number & 7))


@compiled_when_called()
def are_set(bits, numbers, found):
    """Write to `found` bool [M] whether the bits of the numbers are set."""
    for place in range(numbers.size):
        number = numbers[place]
        found[place] = (bits[number >> 3] >> (number & 7)) & 1


@compiled_when_called()
def pages_to_keep(bits, pages, counts, rows_per_page, num_rows, found):
    """Write to `found` whether each of `pages` has more rows whose bits are set than its number in `counts`."""
    for place in range(pages.size):
        first = pages[place] * rows_per_page
        total = 0
        for row in range(first, min(first + rows_per_page, num_rows)):
            total += (bits[row >> 3] >> (row & 7)) & 1
        found[place] = total > counts[place]
