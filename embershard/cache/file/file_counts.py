"""`FileCounts`: what a file of rows was read and written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

#: Of `FileCounts`, those that a plan predicts.
FILE_COUNTS = ("rows_read", "pages_read", "rows_written", "pages_written")


@dataclass(frozen=True)
class FileCounts:
    """What the file tier read and wrote.

    Attributes:
        rows_read, pages_read: of batches, from the file to host memory.
        rows_written, pages_written: of rows that left host memory.
        late_batches: that waited for reads when their rows were to be copied to the device.
        wait_seconds: that they waited.

    >>> FileCounts.total([FileCounts(rows_read=3), FileCounts(rows_read=4)]).rows_read
    7
    """

    rows_read: int = 0
    pages_read: int = 0
    rows_written: int = 0
    pages_written: int = 0
    late_batches: int = 0
    wait_seconds: float = 0.0

    @classmethod
    def total(cls, counts: Iterable[FileCounts]) -> FileCounts:
        """Return the sum."""
        return cls(*(sum(column) for column in zip(*map(astuple, counts), strict=True)))
