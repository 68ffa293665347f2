"""The one source of randomness of this package: a 64-bit mixer over counters.

A counter-based generator has no state: the word of sample g is a function of (seed, stream, g), whatever the number of
ranks, the batch size, or the version of numpy.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Ids = NDArray[np.int64]

_MASK = 2**64 - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)
"""Odd, 2**64 / golden ratio: consecutive counters become far-apart inputs of the mixer."""
#: The one number of 64 bits that no table takes as an id, and the id of missing values in tables that take any other.
RESERVED_ID = -(2**63)
MISSING_ID = RESERVED_ID + 1


def mix64(words: Words) -> Words:
    """Return new words from a fixed bijection of 64-bit words whose output bits look independent.

    It is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). It has no seed, so an id keeps its
    hash for ever.
    """
    z = words >> np.uint64(30)
    z ^= words
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def make_key(*parts: int) -> int:
    """Return one 64-bit key of several integers, for example (seed, epoch, chunk)."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = add_part(key, np.full(1, part & _MASK, np.uint64))
    return int(key[0])


def text_keys(text: NDArray[np.uint8], lengths: NDArray[np.int32]) -> Words:
    """Return one 64-bit key [N] of each text: `make_key` of its length and its bytes as little-endian words.

    The last word is filled up with zeros. Texts of equal length up to 8 bytes never share a key.

    >>> text_keys(np.frombuffer(b"1fbe01fe", np.uint8), np.array([8])).tolist() == [
    ...     make_key(8, int.from_bytes(b"1fbe01fe", "little"))
    ... ]
    True

    Args:
        text: the bytes of all texts, one after another.
        lengths: [N], bytes of each; they sum to `len(text)`.
    """
    width = -(-int(lengths.max(initial=0)) // 8) * 8
    padded = np.zeros((len(lengths), width), np.uint8)
    padded[np.arange(width) < lengths[:, None]] = text
    words = padded.view("<u8")
    keys = add_part(np.zeros(len(lengths), np.uint64), lengths.astype(np.uint64))
    for number in range(words.shape[1]):
        keys = np.where(lengths > 8 * number, add_part(keys, words[:, number]), keys)
    return keys


def cell_bytes(column: pa.BinaryArray) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Return the bytes of all cells of an array without nulls, and each cell's length."""
    _, offsets, data = column.buffers()
    borders = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    text = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return text[borders[0] : borders[-1]], np.diff(borders)


def add_part(keys: Words, parts: Words) -> Words:
    """Return one 64-bit key of each key and one more integer: `make_key` adds its integers in this way.

    >>> int(add_part(np.array([make_key(5)], np.uint64), np.array([7], np.uint64))[0]) == make_key(5, 7)
    True
    """
    return mix64((keys + parts + np.uint64(1)) * _STEP)


def random_words(key: int, counters: Ids) -> Words:
    """Return the words number `counters` of stream `key`: uint64, of the counters' shape."""
    words = counters.astype(np.uint64)
    words *= _STEP
    words += np.uint64(key)
    return mix64(words)


def unit_floats(words: Words) -> NDArray[np.float64]:
    """Return floats in [0, 1) made of the upper 53 bits of the words."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(key: int, size: int) -> Ids:
    """Return a permutation of `0..size-1` that is a function of `key`."""
    return np.argsort(random_words(key, np.arange(size)), kind="stable")


def map_ids(ids: NDArray[np.integer], num_rows: int | Ids, mapping: str) -> Ids:
    """Return rows of raw ids: 1 + id mod (num_rows - 1), after `mix64` when `mapping` is "hash".

    `num_rows` is one number, or an array that broadcasts against `ids`. Row 0 is left to missing values; it is the row
    of all ids where there is no other. Negative ids wrap around as 64-bit words do.
    """
    words = ids.astype(np.uint64)
    if mapping == "hash":
        words = mix64(words)
    real_rows = np.asarray(num_rows - 1)
    rows = (words % np.maximum(real_rows, 1).astype(np.uint64)).astype(np.int64)
    rows += 1
    return np.where(real_rows > 0, rows, 0) if (real_rows == 0).any() else rows
