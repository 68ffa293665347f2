"""Bad rows that are tolerated count once, in whatever many epochs they are read."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from embershard.data.block import BadRow, BadRowTally
from embershard.errors import DataError
from embershard.training.parts import bad_rows
from embershard.training.parts.bad_rows import BadRows

ROWS = tuple(BadRow(Path("day_0"), row, "C1", f"row {row}") for row in range(1, 7))


class OneRank:
    is_first = True

    def all_gather_objects(self, value: object) -> list[object]:
        return [value]


def part_of(allowed: float = 0.1, num_samples: int = 100) -> BadRows:
    stream = SimpleNamespace(num_samples=num_samples, bad_rows=BadRowTally())
    config = SimpleNamespace(data=SimpleNamespace(bad_rows=allowed))
    failure = SimpleNamespace(noting=nullcontext)
    given = {"stream": stream, "config": config, "ranks": OneRank(), "input_failure": failure}
    return BadRows(SimpleNamespace(**given, steps=1, is_report_due=True))


def read(part: BadRows, num_samples: int, *bad: BadRow) -> list[tuple[int, tuple[BadRow, ...]]]:
    part.run.stream.bad_rows.add(num_samples, bad)
    return [(report.num_bad, report.rows) for report in part.after_step()]


def test_a_row_counts_once_in_several_epochs():
    part = part_of()
    assert read(part, 50, *ROWS[:2]) == [(2, ROWS[:2])]
    assert read(part, 50, ROWS[2]) == [(3, ROWS[2:3])]
    for _ in range(3):
        assert read(part, 100, *ROWS[:3]) == []
    assert read(part, 100, *ROWS[1:4]) == [(4, ROWS[3:4])]
    assert part.result() == {"bad_rows": 4}


def test_rows_beyond_those_that_are_known_count_each_time(monkeypatch):
    monkeypatch.setattr(bad_rows, "_MOST_KNOWN", 2)
    part = part_of()
    assert read(part, 100, *ROWS[:3]) == [(3, ROWS[:3])]
    assert read(part, 100, *ROWS[:3]) == [(4, ROWS[2:3])]


def test_the_share_that_is_allowed_is_of_all_that_was_read():
    part = part_of(0.02)
    for _ in range(5):
        read(part, 100, *ROWS[:2])
    with pytest.raises(DataError, match=r"13 bad rows in 600 samples \(2.17%\)"):
        read(part, 100, *ROWS[:3])
