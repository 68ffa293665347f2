"""Hexadecimal text to integers, for whole columns at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_DIGITS = 8
_INVALID = 0xFF


def _digit_values() -> NDArray[np.uint8]:
    values = np.full(256, _INVALID, np.uint8)
    for value, digit in enumerate(b"0123456789abcdef"):
        values[digit] = value
        values[ord(chr(digit).upper())] = value
    return values


_VALUES = _digit_values()


def parse_hex(data: NDArray[np.uint8], lengths: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """The numbers that cells of 0 to 8 hexadecimal digits stand for.

    Args:
        data: ASCII of all cells, one after another.
        lengths: [N], characters of each cell; they sum to ``len(data)``.

    Returns:
        values uint64 [N], 0 for an empty cell; and bad bool [N], true for cells that are too long or not hex.
    """
    digits = _VALUES[data]
    filled = lengths > 0
    if len(data) == MAX_DIGITS * np.count_nonzero(filled) and lengths.max(initial=0) <= MAX_DIGITS:
        words = digits.reshape(-1, MAX_DIGITS)  # every cell is empty or has 8 digits: no gather is needed
        values = np.zeros(len(lengths), np.uint64)
        values[filled] = _join_digits(words)
        bad = np.zeros(len(lengths), np.bool_)
        if digits.max(initial=0) == _INVALID:
            bad[filled] = (words == _INVALID).any(axis=1)
        return values, bad
    ends = np.cumsum(lengths)
    places = ends[:, None] - np.arange(MAX_DIGITS, 0, -1)
    inside = places >= (ends - lengths)[:, None]
    words = np.where(inside, digits[np.where(inside, places, 0)], np.uint8(0))
    return _join_digits(words), (lengths > MAX_DIGITS) | (words == _INVALID).any(axis=1)


def _join_digits(digits: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """uint64 [N] of 8 digit values each, uint8 [N, 8], the most significant first.

    The 8 bytes are read as one little-endian word; neighbours are joined in three steps: digits of 4 bits to
    bytes, bytes to 16 bits, 16 to 32 bits.
    """
    word = np.ascontiguousarray(digits).view("<u8").ravel().astype(np.uint64)
    for shift, mask in ((4, 0x000F000F000F000F), (8, 0x000000FF000000FF), (16, 0x000000000000FFFF)):
        low, keep = np.uint64(shift), np.uint64(mask)
        word = ((word & keep) << low) | ((word >> np.uint64(2 * shift)) & keep)
    return word
