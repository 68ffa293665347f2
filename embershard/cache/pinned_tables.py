"""Tables so small that all their rows stay on the device."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_ROWS = 65_535  # two bytes: with more, FBGEMM's sort gains nothing
_SHARE = 10


def pinned_tables(rows: Sequence[int], num_slots: int) -> dict[int, tuple[int, int]]:
    """Which tables of a pool stay: number of the table -> first slot and rows.

    The smallest ones, as long as they take no more than a tenth of the slots together. Nearly all of their rows are
    hot anyway; in consecutive slots FBGEMM sorts their ids in fewer passes (docs/decisions/0008).
    """
    pinned: dict[int, tuple[int, int]] = {}
    first = 1
    for table in sorted(range(len(rows)), key=lambda table: rows[table]):
        if 0 < rows[table] <= _MOST_ROWS and (first - 1 + rows[table]) * _SHARE <= num_slots:
            pinned[table] = (first, rows[table])
            first += rows[table]
    return pinned
