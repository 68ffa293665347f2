"""Ways in which a file of samples is bad, and things with the name of a file that are none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

#: In a file with fewer rows, there is no row to spoil in each way.
LEAST_ROWS = 7


def _cell(column: str, text: str) -> Callable[[Path], None]:
    """Return what puts a text into a cell in the middle of a CSV file."""

    def spoil(path: Path) -> None:
        header, *rows = path.read_text().splitlines()
        cells = rows[len(rows) // 2].split(",")
        cells[header.replace('"', "").split(",").index(column)] = text
        rows[len(rows) // 2] = ",".join(cells)
        path.write_text("\n".join([header, *rows]) + "\n")

    return spoil


def _column(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    return lambda path: pq.write_table(change(pq.read_table(path)), path)


def _flip(path: Path) -> None:
    """Flip a bit of a value of the last column: only the page's checksum tells."""
    data = bytearray(path.read_bytes())
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(3)
    data[chunk.data_page_offset + chunk.total_compressed_size - 1] ^= 1
    path.write_bytes(data)


def _of_ids(value: int) -> Callable[[pa.Table], pa.Table]:
    """Return what puts an id at the end of a column, where no first look finds it."""

    def change(table: pa.Table) -> pa.Table:
        users = [*table["user"].to_pylist()[:-1], value]
        return table.set_column(table.column_names.index("user"), "user", [users])

    return change


WAYS: dict[str, Callable[[Path], None]] = {
    "csv: a text among ids": _cell("user", "zebra"),
    "csv: a label that is none": _cell("label", "7"),
    "csv: a number that is too large": _cell("number", "1e39"),
    "csv: a time that is none": _cell("at", "yesterday"),
    "csv: a cell too many": _cell("user", "1,2"),
    "parquet: a column is missing": _column(lambda table: table.drop_columns(["item"])),
    "parquet: a column of another type": _column(lambda table: table.set_column(2, "user", [[0.5] * len(table)])),
    "parquet: an id without a row": _column(_of_ids(10**6)),
    "parquet: a flipped bit": _flip,
    "parquet: cut short": lambda path: path.write_bytes(path.read_bytes()[:-9]),
}


def ending_of(way: str) -> str:
    """Return the ending of the names of files that can be bad in this way."""
    return f".{way.partition(':')[0]}"


def spoil(way: str, path: Path) -> None:
    """Make a good file bad."""
    WAYS[way](path)


def make_no_files(folder: Path) -> list[str]:
    """Make what has the name of a file and is none: nothing of it may end a run. Return the names."""
    names = ["part_loop.csv", "part_gone.csv", "part_folder.csv", "part_pipe.csv"]
    loop, gone, directory, pipe = (folder / name for name in names)
    os.symlink(loop.name, loop)
    os.symlink("nowhere", gone)
    directory.mkdir()
    os.mkfifo(pipe)
    return names
