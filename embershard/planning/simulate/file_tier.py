"""Host memory in front of a file, without contents: which rows have places, and what is read and written.

The places are those of a training (`RowPlaces`): nothing is modelled. A row on the device keeps its place, which is no
victim meanwhile. Batches claim their places some steps before they train; then their rows are read from the file, those
that were ever written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from embershard.cache.file.file_counts import FILE_COUNTS
from embershard.cache.file.places import READ_AHEAD, Claim, RowPlaces, leaving_together
from embershard.cache.file.sizes import page_bytes_for
from embershard.cache.next_use import KnownBatch

_Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Levels:
    """Sizes of the levels, in rows, and how the file is read.

    Attributes:
        num_slots: on the device.
        num_places: in host memory.
        rows_per_page: of the file; a page is read and written as a whole, a row at a time is kept.
        read_ahead: batches beyond the one in training that have their places.
    """

    num_slots: int
    num_places: int
    rows_per_page: int
    read_ahead: int = READ_AHEAD

    @classmethod
    def of(cls, num_slots: int, num_places: int, row_bytes: int) -> Levels:
        """Return the levels of a pool whose rows take so many bytes in a file."""
        return cls(num_slots, num_places, page_bytes_for(row_bytes) // row_bytes)

    def in_the_long_run(self, num_rows: int, fills: Callable[[int], float]) -> FileTraffic:
        """Return what is read from the file and written to it per step, in the long run, from counts alone: what a
        cache with a slot for each place would fill. As many rows leave memory, a sixteenth of it together.

        Args:
            num_rows: of the pool.
            fills: returns the rows that a cache with so many slots fills in a step.
        """
        if self.num_places >= num_rows:
            return FileTraffic(steps=1.0)
        num_pages, together = num_rows / self.rows_per_page, leaving_together(self.num_places)
        rows = fills(max(1, self.num_places - together // 2))  # on the mean: so many are free after rows have left
        written = rows / together * expected_pages(together, num_pages)
        patched = written if self.rows_per_page > 1 else 0.0
        return FileTraffic(1.0, 0.0, rows, expected_pages(rows, num_pages), rows, written, patched)


@dataclass(frozen=True)
class FileTraffic:
    """What was read from the file and written to it, in all or per step.

    Attributes:
        steps: that it was counted over.
        rows_drawn: that were never written before, so that their initial values are drawn.
        rows_read, pages_read: that were written before.
        rows_written, pages_written: that left host memory.
        pages_patched: of the written ones, those that have other written rows, so that they are read first.
        crowded_steps: that found no places for all batches of the read-ahead.

    >>> FileTraffic(steps=2, rows_read=6, pages_read=4, pages_written=3, pages_patched=1).moved_pages
    8
    """

    steps: float = 0
    rows_drawn: float = 0
    rows_read: float = 0
    pages_read: float = 0
    rows_written: float = 0
    pages_written: float = 0
    pages_patched: float = 0
    crowded_steps: float = 0

    @property
    def moved_pages(self) -> float:
        """Pages that the disk reads and writes."""
        return self.pages_read + self.pages_written + self.pages_patched

    @property
    def counts(self) -> dict[str, float]:
        """What a run counts of it, by name."""
        return {name: getattr(self, name) for name in FILE_COUNTS}

    def __add__(self, other: FileTraffic) -> FileTraffic:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return FileTraffic(*(a + b for a, b in pairs))

    def __sub__(self, other: FileTraffic) -> FileTraffic:
        return self + other.scaled(-1)

    def scaled(self, factor: float) -> FileTraffic:
        """Multiply every count by `factor`."""
        return FileTraffic(*(count * factor for count in dataclasses.astuple(self)))


class FileTier:
    """Places for rows in host memory, and which rows are in the file: to a `FilePart` as `FiledRows`, without the rows.

    Args:
        levels: sizes.
        pages: the page of every row, int64 [R], ascending.
        rate: of all rows, the share that these R are: where a part of them stands for all, its pages are estimated.

    >>> import torch
    >>> tier = FileTier(Levels(num_slots=1, num_places=1, rows_per_page=8), np.zeros(4, np.int64))
    >>> for row in (0, 1, 0):
    ...     keys = torch.tensor([row])
    ...     tier.bring_in(keys, None)
    ...     tier.unpin(keys)
    >>> tier.traffic.rows_drawn, tier.traffic.rows_read, tier.traffic.rows_written
    (2.0, 1.0, 2.0)
    """

    def __init__(self, levels: Levels, pages: _Numbers, rate: float = 1.0) -> None:
        self.levels = levels
        self.places = RowPlaces(pages.size, max(1, round(levels.num_places * rate)))
        self._file = _FileCounter(pages, levels.rows_per_page, rate)

    @property
    def traffic(self) -> FileTraffic:
        """What was counted so far."""
        return FileTraffic(**self._file.counts)

    def know(self, keys: Tensor, feature_lengths: Tensor) -> KnownBatch:
        """As `FiledRows.know`."""
        return self.places.know(keys, feature_lengths)

    def file(self, keys: Tensor, known: KnownBatch) -> bool:
        """As `FiledRows.file`."""
        if self.places.has_claim(known):
            return True
        claim = self.places.claim(keys, known)
        if claim is not None:
            self._file.add(claim)
        return claim is not None

    def bring_in(self, keys: Tensor, known: KnownBatch | None) -> None:
        """As `FiledRows.bring_in`.

        Raises:
            ValueError: the rows and those on the device need more places than there are.
        """
        if known is not None:
            self.places.release(known)
        if self.places.pin(keys):
            return
        claim = self.places.claim_now(keys)  # not claimed, or given away
        if claim is None:
            raise ValueError(
                f"{keys.numel()} rows of a batch and those on the device need more than "
                f"{self.places.num_places} places in host memory; give it more, or train smaller batches"
            )
        self._file.add(claim)
        self.places.pin(keys)

    def unpin(self, keys: Tensor) -> None:
        """As `FiledRows.unpin`."""
        self.places.unpin(keys)

    def skip(self, known: KnownBatch, keys: Tensor) -> None:
        """As `FiledRows.skip`."""
        self.places.skip(known, keys)

    def forget(self) -> None:
        """As `FiledRows.forget`."""
        self.places.forget()

    def count_step(self, is_crowded: bool) -> None:
        """Count a step, and whether the batches of its read-ahead did not all get places."""
        self._file.counts["steps"] += 1
        self._file.counts["crowded_steps"] += is_crowded


def expected_pages(rows: float, num_pages: float) -> float:
    """Return the distinct pages, of so many, that rows lie on which are spread by chance.

    >>> round(expected_pages(rows=1.0, num_pages=1e6), 3), round(expected_pages(rows=1e9, num_pages=5.0), 3)
    (1.0, 5.0)
    """
    return float(-num_pages * np.expm1(rows * np.log1p(-1 / num_pages))) if num_pages > 1 else min(1.0, rows)


class _FileCounter:
    """The rows that are in the file, and what claims of places read from it and write to it.

    Args:
        pages: of every row, [R].
        rows_per_page: of the file.
        rate: share of all rows that these are.
    """

    def __init__(self, pages: _Numbers, rows_per_page: int, rate: float) -> None:
        numbers, self._pages = np.unique(pages, return_inverse=True)
        self._num_filed = np.zeros(numbers.size, np.int64)  # by page
        self._is_filed = np.zeros(pages.size, np.bool_)
        self._rate, self._rows_per_page = rate, rows_per_page
        self.counts = {field.name: 0.0 for field in dataclasses.fields(FileTraffic)}

    def add(self, claim: Claim) -> None:
        """Count a claim: what leaves is written before the others are read."""
        if claim.leaving_keys.numel():
            self._write(claim.leaving_keys.numpy())
        keys = claim.keys.numpy()
        filed = keys[self._is_filed[keys]]
        self.counts["rows_drawn"] += (keys.size - filed.size) / self._rate
        self._count("read", filed)

    def _write(self, keys: _Numbers) -> None:
        new = keys[~self._is_filed[keys]]
        self._is_filed[keys] = True
        np.add.at(self._num_filed, self._pages[new], 1)
        pages = self._count("written", keys)
        if self._rate < 1:  # a page is read first unless none of its other rows was ever written
            share = 1 - (1 - self._is_filed.mean()) ** (self._rows_per_page - 1)
            self.counts["pages_patched"] += pages * share
            return
        touched, written = np.unique(self._pages[keys], return_counts=True)
        self.counts["pages_patched"] += int(np.count_nonzero(self._num_filed[touched] > written))

    def _count(self, how: str, keys: _Numbers) -> float:
        """Count rows that are moved together; return their pages."""
        rows, pages = keys.size / self._rate, float(np.unique(self._pages[keys]).size)
        if self._rate < 1:
            pages = expected_pages(rows, self._is_filed.size / self._rate / self._rows_per_page)
        self.counts[f"rows_{how}"] += rows
        self.counts[f"pages_{how}"] += pages
        return pages
