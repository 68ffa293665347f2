"""Sizes with units."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Parse a size, as a type for argparse.

    >>> parse_bytes("80GB"), parse_bytes("1.5GiB"), parse_bytes("4096")
    (80000000000, 1610612736, 4096)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"got {text!r}; needed a size such as 4GB, 512MB, 1.5GiB or a number of bytes")
    return round(float(match[1]) * _UNITS[(match[2] or "").upper()])


def size(count: float) -> str:
    """Format a number of bytes.

    >>> size(1.234e9)
    '1.23 GB'
    """
    for unit, unit_bytes in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= unit_bytes:
            return f"{count / unit_bytes:.2f} {unit}"
    return f"{count:.0f} B"
