"""Bytes of rows in a file, and of the memory in front of it."""

from __future__ import annotations

#: Host memory of a row in a file, wherever it is (its entry in the map, and a bit), of the checksum of a page, and of a
#: place for a row in memory beside the row itself (its key, stamp and uses), in bytes.
_FILED_ROW_BYTES, _SUM_BYTES, PLACE_BYTES = 4.125, 4, 28
#: Of the disk, of which a page of a file is one or more.
_UNIT_BYTES, _MOST_UNITS = 4096, 4
#: A page has no more waste than this share, where one of at most 16 KiB can.
_MOST_WASTE = 1 / 8
#: Most bytes of a rank's rows on the way to the file or from it.
FILE_BUFFER_BYTES = 150_000_000


def page_bytes_for(row_bytes: int) -> int:
    """Return the smallest page of a file without much waste; for rows of more than 16 KiB, their whole units.

    >>> page_bytes_for(64), page_bytes_for(1536), page_bytes_for(20_000)
    (4096, 8192, 20480)
    """
    for units in range(1, _MOST_UNITS + 1):
        page_bytes = units * _UNIT_BYTES
        if page_bytes >= row_bytes and page_bytes % row_bytes <= _MOST_WASTE * page_bytes:
            return page_bytes
    return -(-row_bytes // _UNIT_BYTES) * _UNIT_BYTES


def filed_row_bytes(row_bytes: int) -> float:
    """Return the host memory of a row in a file, wherever it is, with its share of the checksum of a page.

    >>> filed_row_bytes(64), filed_row_bytes(4096)
    (4.1875, 8.125)
    """
    return _FILED_ROW_BYTES + _SUM_BYTES / (page_bytes_for(row_bytes) // row_bytes)
