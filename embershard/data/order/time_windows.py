"""Windows of time: which samples each of them has, and where it begins in the order of an epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embershard.data.hashing import Ids
from embershard.data.order.order import ChunkTable
from embershard.errors import DataError

#: So a row's window takes two bytes.
MOST_WINDOWS = 1 << 16
#: A number before that of every window.
NEVER = int(np.iinfo(np.int64).min)


@dataclass(frozen=True, eq=False)
class TimeWindows:
    """The windows of some chunks of files, in their order: W windows, which have K parts: rows of one chunk each.

    Memory: 24 bytes per part, and 2 bytes per sample of the chunks that have several windows.

    >>> windows = TimeWindows.of([0, 1], np.array([0, 0]), [np.array([7, 8, 7]), np.array([8])], 3600)
    >>> windows.part_rows.tolist(), windows.firsts.tolist(), windows.name(1)
    ([2, 1, 1], [0, 2], '1970-01-01 08:00:00')

    Attributes:
        seconds: of a window.
        numbers: int64 [W], rising: a window begins at its number times `seconds` after 1970.
        late: int64 [W], the late samples in each.
        part_chunk, part_window, part_rows: int64 [K], in time order: chunk, window (0..W-1) and number of rows of each.
        of_rows: by chunk, the window of each of its rows, uint16; of all rows together where it is the same.
    """

    seconds: int
    numbers: Ids
    late: Ids
    part_chunk: Ids
    part_window: Ids
    part_rows: Ids
    of_rows: dict[int, NDArray[np.uint16]]

    @classmethod
    def of(
        cls,
        chunks: Iterable[int],
        files: Ids,
        numbers: Iterable[Ids],
        seconds: int,
        *,
        in_turn: bool = False,
        newest: int | None = None,
    ) -> TimeWindows:
        """Find the windows of rows.

        Args:
            chunks: their numbers, in the order of the files.
            files: the file of each, never falling.
            numbers: of each chunk, the number of each row's window.
            in_turn: rows are late where an earlier file has a later window; else none is.
            newest: of files before these, the newest window: rows of an earlier one are late, too. There may be one
                window then, or none.

        Raises:
            DataError: there is one window, or there are more than `MOST_WINDOWS`.
        """
        chunks, found = list(chunks), [_distinct(each) for each in numbers]
        last = np.array([values[-1] for values, _, _ in found], np.int64)
        least = NEVER if newest is None else newest
        before = np.full(len(files), least)  # the newest window of earlier files
        if in_turn:
            first = np.searchsorted(files, files)
            before[first > 0] = np.maximum(np.maximum.accumulate(last)[first[first > 0] - 1], least)
        taken = [np.maximum(values, closed) for (values, _, _), closed in zip(found, before, strict=True)]
        distinct = np.unique(np.concatenate([np.empty(0, np.int64), *taken]))
        _check(len(distinct), seconds, least=2 if newest is None else 0)
        late, of_rows = np.zeros(len(distinct), np.int64), dict[int, NDArray[np.uint16]]()
        parts = [np.empty((3, 0), np.int64)]
        for chunk, (values, codes, counts), each in zip(chunks, found, taken, strict=True):
            windows = np.searchsorted(distinct, each)
            np.add.at(late, windows, np.where(values < each, counts, 0))
            here, places = np.unique(windows, return_inverse=True)
            rows = np.bincount(places, counts).astype(np.int64)
            parts.append(np.stack([np.full(len(here), chunk), here, rows]))
            of_rows[chunk] = (windows[codes] if len(here) > 1 else here).astype(np.uint16)
        chunk_of, window_of, rows_of = np.concatenate(parts, axis=1)
        order = np.lexsort((chunk_of, window_of))
        return cls(seconds, distinct, late, chunk_of[order], window_of[order], rows_of[order], of_rows)

    def table(self, files: Ids) -> ChunkTable:
        """Return the parts as chunks; `files` has the file of each chunk."""
        return ChunkTable(files[self.part_chunk], self.part_rows, self.part_window)

    @cached_property
    def firsts(self) -> Ids:
        """The position of each window's first sample in the order of an epoch: int64 [W]."""
        rows = np.bincount(self.part_window, self.part_rows, len(self.numbers)).astype(np.int64)
        return np.cumsum(rows) - rows

    def name(self, window: int) -> str:
        """Return the time in UTC at which a window begins, as ISO 8601 counts years: 0000 is the one before year 1."""
        return str(np.datetime64(int(self.numbers[window]) * self.seconds, "s")).replace("T", " ")

    def sentence(self) -> str:
        """Return a sentence for the user."""
        num_late, num_parts, num_chunks = int(self.late.sum()), len(self.part_rows), len(self.of_rows)
        often = (
            f" Each chunk of the files has rows of {num_parts / num_chunks:.1f} windows, and is parsed as often: files "
            "that are sorted by time train faster."
            if num_parts > 2 * num_chunks
            else ""
        )
        return (
            f"In time order: {len(self.numbers):,} windows of {self.seconds:,} s, from {self.name(0)} to "
            f"{self.name(len(self.numbers) - 1)} UTC; each but the first is evaluated before it trains. "
            f"Late samples: {num_late:,}.{often}"
        )


def _distinct(numbers: Ids) -> tuple[Ids, NDArray[Any], Ids]:
    """Return the distinct numbers, rising; the place of each row's among them, in few bytes; and the rows of each."""
    if (numbers == numbers[0]).all():
        return numbers[:1].copy(), np.zeros(1, np.uint8), np.array([len(numbers)])
    values, codes, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    return values, codes.astype(np.min_scalar_type(len(values) - 1)), counts


def _check(num_windows: int, seconds: int, least: int) -> None:
    if num_windows < least:
        raise DataError(
            f"data.time.window = {seconds}: got {num_windows} window of samples; needed two or more, since each is "
            "evaluated when the one before it has trained. Set a shorter one, in seconds"
        )
    if num_windows > MOST_WINDOWS:
        raise DataError(
            f"data.time.window = {seconds}: got {num_windows:,} windows; needed at most {MOST_WINDOWS:,}. Set a longer "
            "one, in seconds"
        )
