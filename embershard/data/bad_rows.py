"""Rows that are not samples: what is wrong with them, and what stands in their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embershard.data.hashing import Ids
from embershard.errors import DataError

if TYPE_CHECKING:  # it loads torch
    from embershard.data.block import Block

#: Bad rows that are kept for reports at a time; all are counted.
MOST_KEPT = 1000


@dataclass(frozen=True)
class BadRow:
    """A row that is not a sample.

    >>> print(BadRow(Path("day_0"), 12, "C2", "C2='xyz': needed 1 to 8 hexadecimal digits, or nothing"))
    day_0:12 C2='xyz': needed 1 to 8 hexadecimal digits, or nothing

    Attributes:
        row: its number in the file, from 1.
        column: the first column that is wrong; "" for the whole row.
        problem: what is wrong, with the value.
        error: the exception that says so where no bad row is tolerated.
    """

    path: Path
    row: int
    column: str
    problem: str
    error: type[DataError] = DataError

    def __str__(self) -> str:
        return f"{self.path}:{self.row} {self.problem}"


def short(value: object) -> str:
    """Return a value as Python writes it, cut after 80 characters: for `BadRow.problem`."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True)
class ParsedChunk:
    """A physical chunk: its samples, and its rows that are none.

    Attributes:
        samples: the good rows, in order.
        bad: the others, by their number in the chunk, from 0; in order.
    """

    samples: Block
    bad: Mapping[int, BadRow] = field(default_factory=dict)

    def take(self, rows: Ids, first: int, stop: int, *, replaces: bool) -> Block:
        """Return the samples number `rows` of the chunk, in that order; all are in [first, stop).

        Args:
            replaces: give a good row of [first, stop) in place of each bad one, so that there are `len(rows)` samples.
                The good ones are evenly spread, and a function of the chunk alone. Otherwise leave bad rows out.

        Raises:
            DataError: all rows of [first, stop) are bad, so that nothing can replace them.
        """
        if not self.bad:
            return self.samples.take(rows)
        bad = np.fromiter(self.bad, np.int64, len(self.bad))
        good = np.setdiff1d(np.arange(self.samples.num_samples + len(bad)), bad, assume_unique=True)
        is_bad = np.isin(rows, bad)
        found = rows[is_bad]
        taken = rows if replaces else rows[~is_bad]
        if replaces and len(found):
            good_here, bad_here = (each[(each >= first) & (each < stop)] for each in (good, bad))
            if not len(good_here):
                some = self.bad[int(found[0])]
                raise DataError(f"{some}; and no row near it is good: {len(bad_here)} bad rows one after another")
            taken = rows.copy()
            taken[is_bad] = good_here[np.searchsorted(bad_here, found) * len(good_here) // len(bad_here)]
        block = self.samples.take(np.searchsorted(good, taken))
        return dataclasses.replace(block, bad=tuple(self.bad[row] for row in found.tolist()))


@dataclass
class BadRowTally:
    """Counts the bad rows among samples that were read.

    Attributes:
        num_samples: samples read, bad rows included.
        num_bad: bad rows among them; a row counts each time that it is read.
        rows: the first `MOST_KEPT` of them.
    """

    num_samples: int = 0
    num_bad: int = 0
    rows: list[BadRow] = field(default_factory=list)

    def add(self, num_samples: int, bad: tuple[BadRow, ...]) -> None:
        """Count `num_samples` more, of which some are `bad`."""
        self.num_samples += num_samples
        self.num_bad += len(bad)
        self.rows += bad[: MOST_KEPT - len(self.rows)]

    def take(self) -> BadRowTally:
        """Return what was counted since the last call, and start again."""
        counted = dataclasses.replace(self)
        self.num_samples, self.num_bad, self.rows = 0, 0, []
        return counted
