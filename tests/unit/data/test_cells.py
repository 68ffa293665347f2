"""Cells and lines that are no values: found as if each were read alone, at the cost of a few reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.data.config import TableConfig
from embershard.data.sources.table import text_files
from embershard.data.sources.table.cells import FLOATS, INTEGER_WORDS, INTEGERS, SECONDS, read_cells
from embershard.data.sources.table.text_files import TextColumns
from tests.covering import examples

FORMS = {"floats": FLOATS, "integers": INTEGERS, "integer words": INTEGER_WORDS, "seconds": SECONDS}
CELLS = [
    "1",
    "2.5",
    "-3",
    "1e3",
    "true",
    "FALSE",
    "free",
    "12,50",
    "nan",
    "inf",
    ".",
    "-",
    "1e",
    "0x1F",
    "+3",
    " 7",
    "1e999",
]
CELLS += ["18446744073709551615", "9223372036854775808", "-9223372036854775809", "9" * 25, "20240131", "20240131.5"]
CELLS += ["2024-01-01", "2024-01-01 10:00", "2023-02-29", "2024-01-01T10:00:00Z", "2024-01-01 10:00+02:00", "yesterday"]
LINES = [
    "1,a",
    "0",
    "1,x,y",
    "",
    ",",
    '1,"b',
    '1,"b,c"',
    '"1","a"',
    '1,5" screen',
    'a,b"c',
    "1,a\rb",
    '1,b"c,"d',
    '"a,b"',
]


@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
@given(cells=st.lists(st.sampled_from(["7", "7", "7", *CELLS, None]), max_size=60), last=st.binary(max_size=3))
@examples(60)
def test_a_cell_is_what_it_is_alone(forms, cells, last):
    column = pa.array([*(cell if cell is None else cell.encode() for cell in cells), last, b"7"], pa.binary())
    values, is_wrong = read_cells(column, forms)
    alone = [read_cells(column.slice(place, 1), forms) for place in range(len(column))]
    assert str(values.to_pylist()) == str([found[0].as_py() for found, _ in alone])
    assert is_wrong.tolist() == [bool(wrong[0]) for _, wrong in alone]


@pytest.mark.parametrize(
    ("forms", "good", "bad"),
    [
        (FLOATS, "7.5", ["free", "12,50", "7.5.1"]),
        (INTEGER_WORDS, "7", ["x", "9" * 25, "7.5"]),
        (SECONDS, "2024-01-01 10:00:00", ["yesterday", "2024-02-31", "20240131"]),
        (SECONDS, "2024-01-01 10:00:00", ["2024-01-01 10:00:00Z"] * 2000),
    ],
)
def test_few_bad_cells_take_few_reads(forms, good, bad):
    """Among 4,096; each was read alone before."""
    num_reads = 0

    def counted(form):
        def read(column):
            nonlocal num_reads
            num_reads += 1
            return form.read(column)

        return replace(form, read=read)

    column = pa.array([good.encode()] * (4096 - len(bad)) + [cell.encode() for cell in bad])
    _, is_wrong = read_cells(column, [counted(form) for form in forms])
    assert is_wrong.sum() == (len(bad) if len(bad) < 10 else 0)
    assert num_reads < 30


def columns(**options) -> TextColumns:
    return TextColumns(TableConfig({}, **options), ["label", "user"], ["label", "user"])


def rows_of(read: TextColumns, line: bytes) -> list[dict[str, bytes]]:
    """The row that Arrow makes of a line alone; none, where it makes none."""
    try:
        return read.read(memoryview(line), 1).to_pylist()
    except (pa.ArrowException, ValueError):
        return []


@pytest.mark.slow
@pytest.mark.parametrize("quoted", [True, False])
@given(
    lines=st.lists(st.sampled_from(["1,a", "1,a", *LINES]) | st.text('"",,ab\r', max_size=12), min_size=1, max_size=30),
    end=st.sampled_from(["\n", "\r\n"]),
)
@examples(100)
def test_a_line_is_what_it_is_alone(quoted, lines, end):
    read = columns(quoted=quoted)
    table, places, failed = read.read_good(memoryview(end.join([*lines, "0,z"]).encode()))
    alone = [rows_of(read, (line + end).encode()) for line in [*lines, "0,z"]]
    assert sorted(failed) == [number for number, rows in enumerate(alone) if not rows]
    assert places.tolist() == [number for number, rows in enumerate(alone) if rows]
    assert table.to_pylist() == [row for rows in alone for row in rows]


@pytest.mark.parametrize("line", ["100", "1,a,b", "1,a\rb", '1,"open', '"1,""x"",'])
def test_bad_lines_take_no_reads(monkeypatch, line):
    """Halves of halves were read before: about fifty times as often."""
    lines = [line if number in (9, 1000, 4000) else "1,a" for number in range(4096)]
    num_reads, read = 0, text_files.csv.read_csv

    def counted(*arguments):
        nonlocal num_reads
        num_reads += 1
        return read(*arguments)

    monkeypatch.setattr(text_files.csv, "read_csv", counted)
    _, places, failed = columns().read_good(memoryview("\n".join(lines).encode()))
    assert list(failed) == [9, 1000, 4000]
    assert np.array_equal(np.sort(np.append(places, [9, 1000, 4000])), np.arange(4096))
    assert num_reads == 1
