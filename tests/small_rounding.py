"""The rounding of small rows in NumPy, as docs/decisions/rows.md words it: what the compiled loops must equal."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_F, _U = np.float32, np.uint32


def seed_of(table: str, seed: int) -> int:
    """The 32 bits of a table's seed."""
    digest = hashlib.blake2b(f"{seed} {table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little") ^ int.from_bytes(digest[4:], "little")


def random_bits(rows: Floats, numbers: NDArray[Any], seed: int, first_column: int) -> NDArray[np.uint32]:
    """32 bits for each weight: a hash of its own bits, its row and its column."""
    columns = np.arange(first_column, first_column + rows.shape[1], dtype=_U)
    keys = numbers.astype(_U) * _U(0x9E3779B9) + _U(seed)
    x = (rows.view(_U) ^ keys[:, None]) + columns * _U(0x85EBCA6B)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> _U(shift)
        x *= _U(factor)
    return x ^ (x >> _U(16))


def round_int8(
    rows: Floats, numbers: NDArray[Any], seed: int, first_column: int = 0, num_bits: int = 16, by_inverse: bool = False
) -> Floats:
    """Return the rows as whole multiples of their steps. `num_bits`, `by_inverse`: how it must not be done."""
    sizes = np.abs(rows)
    largest = sizes.max(1, keepdims=True)
    bits = (largest / _F(127)).view(_U)
    steps = ((bits + _U(0x7FFF) + ((bits >> _U(16)) & _U(1))) & _U(0xFFFF0000)).view(_F)  # to a bfloat16
    steps[steps < _F(2.0**-100)] = 0
    random = random_bits(rows, numbers, seed, first_column) & _U(2**num_bits - 1)
    parts = random.astype(_F) * _F(2.0**-num_bits)
    parts[sizes == largest] = _F(0.5)
    with np.errstate(all="ignore"):
        multiples = rows * (_F(1) / steps) if by_inverse else rows / steps
        codes = np.clip(np.floor(multiples + parts), -127, 127)
        return np.where(steps == 0, _F(0), (codes * steps).astype(_F))


def round_fp16(rows: Floats, numbers: NDArray[Any], seed: int, first_column: int = 0) -> Floats:
    """Return the rows as numbers of half precision."""
    random = random_bits(rows, numbers, seed, first_column) & _U(0x1FFF)
    normal = ((rows.view(_U) + random) & _U(0xFFFFE000)).view(_F)
    multiples = np.floor(np.abs(rows) * _F(2.0**24) + random.astype(_F) * _F(2.0**-13))
    small = np.copysign(multiples * _F(2.0**-24), rows).astype(_F)
    return np.where(np.abs(rows) < _F(2.0**-14), small, normal)
