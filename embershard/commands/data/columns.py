"""The columns of files of any form; and `embershard data convert`, which writes them as Parquet, with the columns of
other files joined to the rows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embershard.data.block import BadRow, short
from embershard.data.config import TableConfig
from embershard.data.sources.input_file import files_at
from embershard.data.sources.table.cells import read_cells
from embershard.data.sources.table.survey import FORMS, ColumnSurvey, survey
from embershard.data.sources.table.whole_columns import WholeColumns, without_types
from embershard.errors import DataError, naming_file
from embershard.launch.arguments import check_new_output
from embershard.launch.screen import plain_console, say
from embershard.whole_file import whole_file

_MOST_LISTED = 10_000


def survey_files(
    files: list[WholeColumns], wanted: Mapping[str, tuple[str, str]] = MappingProxyType({})
) -> tuple[dict[str, ColumnSurvey], list[str]]:
    """Return what the columns of all files hold, and the lines that are no rows, each as a sentence.

    Args:
        wanted: as for `survey`.

    Raises:
        DataError: a file cannot be read, or has other columns than the first; or no file has a row.
    """
    schema = files[0].schema()
    for file in files:
        if (other := file.schema()) != schema:
            raise DataError(
                f"{file.file.path} has the columns {', '.join(map(str, other))[:300]}; needed those of "
                f"{files[0].file.path}: {', '.join(map(str, schema))[:300]}"
            )
    bad: list[str] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for file in files:
            yield from file.batches(on_bad=partial(skip, file.file.path))

    def skip(path: Path, row: Any) -> str:
        bad.append(f"{path}:{row.number} has {row.actual_columns} columns; needed {row.expected_columns}")
        return "skip"

    columns = survey(schema, batches(), has_null_values=files[0].is_text, wanted=wanted)
    if not next(iter(columns.values())).rows:
        behind = "" if files[0].form.columns else " behind its header"
        raise DataError(f"{files[0].file.path}: no row{behind}; needed at least one")
    return columns, bad


def convert(arguments: argparse.Namespace) -> int:
    """Run the action; return 0.

    Raises:
        DataError: a file cannot be read, or cannot be joined.
        ConfigError: the output cannot be written.
    """
    output: Path = arguments.output
    check_new_output(output)
    files = columns_of_files(arguments.data, arguments)
    stops = arguments.bad_rows == "stop"
    types = _types_of(files, stops=stops)
    skipped = SkippedRows(output.with_name(output.name + ".bad_rows.jsonl"), 0 if stops else arguments.bad_rows)
    joined = [Joined.read(text, arguments) for text in arguments.join]
    num_rows, writer = 0, None
    with whole_file(output) as unfinished:
        for table in _groups(_joined_batches(files, types, joined, None if stops else skipped), arguments.rows):
            if writer is None:
                writer = pq.ParquetWriter(unfinished, table.schema, write_page_checksum=True)
            writer.write_table(table, row_group_size=arguments.rows)
            num_rows += table.num_rows
        skipped.finish()
        if writer is None:
            raise DataError(f"{arguments.data}: no row in it")
        writer.close()
    if skipped.num_bad:
        say(plain_console(), f"{skipped.num_bad:,} bad rows were left out; they are listed in {skipped.path}.")
    lacking = (f"{each.num_lacking:,} rows have no {each.key} in {each.path}." for each in joined if each.num_lacking)
    say(plain_console(), f"{num_rows:,} rows with {len(writer.schema)} columns are in {output}.", *lacking)
    say(plain_console(), f"Next: embershard data inspect {output} -o run.toml")
    return 0


class SkippedRows:
    """Reads the rows of text files, but for those that are none, or have a cell that is not of its column's type.

    Attributes:
        num_bad: rows left out; of all `num_rows`.
        path: the list, one JSON object to a line with the keys file, row, column and problem; made with the first.
    """

    def __init__(self, path: Path, allowed: float) -> None:
        self.path, self.num_bad, self.num_rows, self._allowed = path, 0, 0, allowed
        self._listed: list[BadRow] = []

    def batches(self, file: WholeColumns, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        """Yield the good rows of a file."""
        no_rows: list[int] = []

        def skip(row: Any) -> str:
            no_rows.append(row.number)
            self._add(file, row.number, "", f"has {row.actual_columns} columns; needed {row.expected_columns}")
            return "skip"

        first = 1 + (not file.form.columns)
        for batch in file.batches(on_bad=skip):
            cuts = np.asarray(no_rows, np.int64) - np.arange(len(no_rows))
            numbers = np.arange(first, first + len(batch))
            numbers += np.searchsorted(cuts, numbers, "right")
            is_good, columns = np.ones(len(batch), np.bool_), []
            for name, texts in zip(batch.schema.names, batch.columns, strict=True):
                form = FORMS.get(types[name])
                values, is_wrong = (texts, ~is_good & False) if form is None else read_cells(texts, [form])
                for row in np.flatnonzero(is_wrong & is_good).tolist():
                    problem = f"{name}={short(texts[row].as_py())}: needed {types[name]}, or nothing"
                    self._add(file, int(numbers[row]), name, problem)
                is_good &= ~is_wrong
                columns.append(values)
            first += len(batch)
            self.num_rows += len(batch)
            yield pa.RecordBatch.from_arrays(columns, names=batch.schema.names).filter(pa.array(is_good))
        self.num_rows += len(no_rows)

    def _add(self, file: WholeColumns, row: int, column: str, problem: str) -> None:
        self.num_bad += 1
        if len(self._listed) < _MOST_LISTED:
            self._listed.append(BadRow(file.file.path, row, column, problem))

    def finish(self) -> None:
        """Write the list.

        Raises:
            DataError: more rows are bad than the share that is allowed.
        """
        if not self._listed:
            return
        with naming_file(self.path), self.path.open("w", encoding="utf-8") as list_file:
            for row in self._listed:
                found = {"file": str(row.path), "row": row.row, "column": row.column, "problem": row.problem}
                list_file.write(f"{json.dumps(found)}\n")
        if self.num_bad > self._allowed * self.num_rows:
            raise DataError(
                f"{self.num_bad:,} of {self.num_rows:,} rows are bad, --bad-rows {self._allowed:g} allows "
                f"{self._allowed:.3%}: {self._listed[0]}. They are listed in {self.path}"
            )


@dataclass
class Joined:
    """A file whose columns are joined to rows by the values of one column.

    Attributes:
        path: of the file.
        table: its rows.
        key: the column in common; "" before the first rows came.
        num_lacking: rows without a partner.
    """

    path: Path
    table: pa.Table
    key: str = ""
    num_lacking: int = 0

    @staticmethod
    def read(text: str, arguments: argparse.Namespace) -> Joined:
        """Read the file of `--join FILE[:NAME,...]`."""
        path, colon, names = text.rpartition(":")
        if not colon or Path(text).exists():
            path, names = text, ""
        files = columns_of_files(Path(path), arguments, names or None, is_joined=True)
        types = _types_of(files)
        batches = [batch for file in files for batch in file.batches(types)]
        return Joined(Path(path), without_types(pa.Table.from_batches(batches)))

    def add_to(self, rows: pa.Table) -> pa.Table:
        """Return the rows with the columns of the file.

        Raises:
            DataError: there is not one column in common, or a value of it is in the file twice.
        """
        if not self.key:
            self._find_key(rows)
        there = self.table.column(self.key).combine_chunks()
        wanted = rows.column(self.key).combine_chunks()
        if there.type != wanted.type:
            there, wanted = there.cast("string"), wanted.cast("string")
        places = pc.index_in(wanted, value_set=there, skip_nulls=True)
        self.num_lacking += places.null_count
        for name in self.table.column_names:
            if name != self.key:
                rows = rows.append_column(self.table.schema.field(name), self.table.column(name).take(places))
        return rows

    def _find_key(self, rows: pa.Table) -> None:
        common = [name for name in rows.column_names if name in self.table.column_names]
        if len(common) != 1:
            found = f"has {', '.join(common)}" if common else "has none"
            raise DataError(
                f"{self.path}: to be joined it needs one column in common with the rows, and {found}: "
                f"{', '.join(self.table.column_names)} beside {', '.join(rows.column_names)}. Give other names: "
                f"--join {self.path}:NAME,..."
            )
        self.key = common[0]
        counts = pc.value_counts(self.table.column(self.key))
        most = pc.max(counts.field("counts")).as_py()
        if most is not None and most > 1:
            value = counts.field("values")[pc.index(counts.field("counts"), most).as_py()].as_py()
            raise DataError(f"{self.path}: {self.key}={value!r} is in {most} rows; needed each value once")


def _types_of(files: list[WholeColumns], *, stops: bool = True) -> dict[str, pa.DataType]:
    """Return the types of the columns of text files: integers, numbers or times where all cells are, or where bad rows
    do not stop, nearly all; else texts.

    Raises:
        DataError: a line has not as many cells as there are columns, and bad rows stop.
    """
    if not files[0].is_text:
        return {}
    columns, bad_lines = survey_files(files)
    if bad_lines and stops:
        share = ceil(1e4 * len(bad_lines) / next(iter(columns.values())).rows) / 1e4
        raise DataError(f"{bad_lines[0]}. To leave such lines out, and list them: --bad-rows {share:g}")
    is_text = {name for name, each in columns.items() if each.declared not in ("", "float")}
    exact = {
        name: each.exact if stops or each.null_cells or each.written else each.inner for name, each in columns.items()
    }
    return {name: pa.string() if name in is_text else kind for name, kind in exact.items()}


def _joined_batches(
    files: list[WholeColumns], types: dict[str, pa.DataType], joined: list[Joined], skipped: SkippedRows | None
) -> Iterator[pa.Table]:
    for file in files:
        for batch in file.batches(types) if skipped is None or not file.is_text else skipped.batches(file, types):
            table = without_types(pa.Table.from_batches([batch]))
            for other in joined:
                table = other.add_to(table)
            yield table


def _groups(tables: Iterator[pa.Table], num_rows: int) -> Iterator[pa.Table]:
    """Yield the same rows in tables of a multiple of `num_rows`; the last one may have others."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        whole = sum(each.num_rows for each in waiting) // num_rows * num_rows
        if whole:
            rows = pa.concat_tables(waiting)
            yield rows.slice(0, whole)
            waiting = [rows.slice(whole)]
    rest = pa.concat_tables(waiting) if waiting else None
    if rest is not None and rest.num_rows:
        yield rest


def columns_of_files(
    path: Path, arguments: argparse.Namespace, names: str | None = None, *, is_joined: bool = False
) -> list[WholeColumns]:
    """Return the columns of the file, or of each data file in the folder, at `path`.

    Args:
        names: of the columns, in place of `--columns`.
        is_joined: neither `--columns` nor `--separator` is meant for it.

    Raises:
        DataError: there is no such file, or one is empty.
        ConfigError: an argument cannot be used.
    """
    given = names if is_joined else arguments.columns
    separator = None if is_joined else arguments.separator
    separator = "\t" if separator == "\\t" else separator
    form = TableConfig(
        columns=() if given is None else tuple(name.strip() for name in given.split(",")),
        quoted=not arguments.no_quotes,
        null_values=("", *arguments.null),
    )
    found = files_at(str(path), form.files, "table")
    return [WholeColumns.at(file.path, form, arguments.encoding, separator) for file in found]
