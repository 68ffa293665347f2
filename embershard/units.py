"""Sizes with units: all that embershard prints or draws is in KiB, MiB, GiB and TiB. Rows and tables of texts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NamedTuple

#: Of a table for a newcomer: title, value, and what it means.
Row = tuple[str, str, str]


class ShownTable(NamedTuple):
    """A table of texts: `left` and `right` are the titles of columns, by how they are aligned."""

    title: str
    left: Sequence[str]
    right: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Parse a size, as a type for argparse: in powers of two (80GiB) or of ten (80GB, as vendors give it).

    >>> parse_bytes("80GB"), parse_bytes("1.5GiB"), parse_bytes("4096")
    (80000000000, 1610612736, 4096)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"got {text!r}; needed a size such as 4GiB, 512MiB, 80GB or a number of bytes")
    return round(float(match[1]) * _UNITS[(match[2] or "").upper()])


def size(count: float) -> str:
    """Format a number of bytes.

    >>> size(1.5 * 2**30), size(1000), size(80e9)
    ('1.50 GiB', '1000 B', '74.51 GiB')
    """
    for unit, unit_bytes in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= unit_bytes:
            return f"{count / unit_bytes:.2f} {unit}"
    return f"{count:.0f} B"


def number(value: float | None, form: str) -> str:
    """Format a number; None is n/a.

    >>> number(0.5, ".1%"), number(None, ".1%")
    ('50.0%', 'n/a')
    """
    return "n/a" if value is None else format(value, form)
