"""What `embershard data convert` does: files of any form become one Parquet file, with the columns of others joined."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embershard.commands.data.columns import columns_of_files, patterns_of, survey_files
from embershard.data.block import BadRow
from embershard.data.hashing import Ids, Words
from embershard.data.sample_bits import Flags
from embershard.data.sources.folder import Listing
from embershard.data.sources.table.decode import MOST_BYTES, text_words
from embershard.data.sources.table.raw import is_list
from embershard.data.sources.table.text_forms import describe
from embershard.data.sources.table.whole_columns import WholeColumns, all_batches, without_types
from embershard.errors import DataError, naming_file
from embershard.launch.arguments import check_new_output
from embershard.launch.screen import plain_console, say
from embershard.whole_file import whole_file

_MOST_LISTED = 10_000


def convert(arguments: argparse.Namespace) -> int:
    """Run the action; return 0.

    Raises:
        DataError: a file cannot be read, or cannot be joined.
        ConfigError: the output cannot be written.
    """
    output: Path = arguments.output
    check_new_output(output)
    files = columns_of_files(arguments.data, arguments)
    if arguments.data.is_dir():
        say(plain_console(), *Listing.of(arguments.data, patterns_of(arguments), "table").sentences())
    stops = arguments.bad_rows == "stop"
    files, types = _types_of(files, stops=stops)
    if files[0].is_text and (form := describe(files[0].form)):
        say(plain_console(), f"{arguments.data}: {form}.")
    skipped = SkippedRows(output.with_name(output.name + ".bad_rows.jsonl"), 0 if stops else arguments.bad_rows)
    joined = [Joined.read(text, arguments, output.parent) for text in arguments.join]
    num_rows, writer = 0, None
    with whole_file(output) as unfinished:
        for table in _groups(_joined_batches(files, types, joined, None if stops else skipped), arguments.rows):
            if writer is None:
                writer = pq.ParquetWriter(unfinished, table.schema, write_page_checksum=True)
            writer.write_table(table, row_group_size=arguments.rows)
            num_rows += table.num_rows
        skipped.finish(num_rows)
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
    """The rows that are left out.

    Attributes:
        num_bad: their number.
        path: the list, one JSON object to a line with the keys file, row, column and problem; made with the first.
    """

    def __init__(self, path: Path, allowed: float) -> None:
        self.path, self.num_bad, self._allowed = path, 0, allowed
        self._listed: list[BadRow] = []

    def add(self, bad: BadRow) -> None:
        self.num_bad += 1
        if len(self._listed) < _MOST_LISTED:
            self._listed.append(bad)

    def finish(self, num_good: int) -> None:
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
        if self.num_bad > self._allowed * (num_rows := num_good + self.num_bad):
            raise DataError(
                f"{self.num_bad:,} of {num_rows:,} rows are bad, --bad-rows {self._allowed:g} allows "
                f"{self._allowed:.3%}: {self._listed[0]}. They are listed in {self.path}"
            )


def _of_joined(problem: str, path: str) -> str:
    """Return what is wrong with a joined file, with a remedy: most options say how the first files are written."""
    alone = f"embershard data convert {shlex.quote(path)}"
    then = "-o joined.parquet; then: --join joined.parquet"
    if "--columns NAME" in problem:
        what = re.sub(r" (Name the columns|Say which): .*", "", problem)
        return (
            f"{what} Name its columns: --join {shlex.quote(f'{path}:NAME,...')}. If that line is a header, convert it "
            f"alone first: {alone} --header {then}"
        )
    if "--separator" in problem:
        return f"{problem}. That is of the first files; convert this one alone first: {alone} --separator TEXT {then}"
    return problem


@dataclass
class Joined:
    """A file whose columns are joined to rows by the values of one column.

    Its rows are on disk, in a nameless file that is mapped; in memory are 16 bytes for each.

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
    _words: Words = field(default_factory=lambda: np.zeros(0, np.uint64))
    _places: Ids = field(default_factory=lambda: np.zeros(0, np.int64))

    @staticmethod
    def read(text: str, arguments: argparse.Namespace, folder: Path) -> Joined:
        """Read the file of `--join FILE[:NAME,...]`; `folder` has room for its rows."""
        path, colon, names = text.rpartition(":")
        if not colon or Path(text).exists():
            path, names = text, ""
        try:
            files = columns_of_files(Path(path), arguments, names or None, is_joined=True)
        except DataError as error:
            raise DataError(_of_joined(str(error), path)) from None
        files, types = _types_of(files)
        with naming_file(folder), tempfile.NamedTemporaryFile(dir=folder, prefix=".join") as kept:
            writer = None
            for batch in all_batches(files, types):
                table = _without_dictionaries(without_types(pa.Table.from_batches([batch])))
                writer = writer or pa.ipc.new_file(kept, table.schema)
                writer.write_table(table)
            assert writer is not None, "a survey found rows"
            writer.close()
            kept.flush()
            return Joined(Path(path), pa.ipc.open_file(pa.memory_map(kept.name)).read_all())

    def add_to(self, rows: pa.Table) -> pa.Table:
        """Return the rows with the columns of the file; values are compared as texts.

        Raises:
            DataError: there is not one column in common, or a value of it is in the file twice.
        """
        if not self.key:
            self._find_key(rows)
        words, is_missing = self._words_of(rows.column(self.key))
        at = np.searchsorted(self._words, words)
        at[at == len(self._words)] = 0
        has_partner = ~is_missing & (self._words[at] == words) if len(self._words) else is_missing & False
        self.num_lacking += int((~has_partner).sum())
        partners, places = self._partners(self._places[at[has_partner]])
        places = np.append(places, 0)[np.cumsum(has_partner) - 1]  # of a row that lacks one, any place
        taken = pa.array(places, mask=~has_partner)
        for name, column in zip(partners.column_names, partners.columns, strict=True):
            rows = rows.append_column(name, column.take(taken))
        return rows

    def _partners(self, places: Ids) -> tuple[pa.Table, Ids]:
        """Return the rows at `places`, without the key, and where among them each is. Only these are read: `take` of
        the table would copy whole columns."""
        table = self.table.drop_columns([self.key])
        starts = np.cumsum([0, *(len(chunk) for chunk in self.table.column(0).chunks)])
        order = np.argsort(places, kind="stable")
        borders = np.searchsorted(places[order], starts)
        parts = [
            table.slice(start, stop - start).take(places[order[first:last]] - start)
            for start, stop, first, last in zip(starts, starts[1:], borders, borders[1:], strict=False)
            if last > first
        ]
        return pa.concat_tables([table.slice(0, 0), *parts]).combine_chunks(), np.argsort(order)

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
        column = self.table.column(self.key)
        parts = [self._words_of(chunk) for chunk in column.chunks]
        words, is_missing = map(np.concatenate, zip(*parts, strict=True))
        self._places = np.argsort(words, kind="stable")
        self._places = self._places[~is_missing[self._places]]
        self._words = words[self._places]
        twice = np.flatnonzero(self._words[1:] == self._words[:-1])
        if len(twice):
            count = int((self._words == self._words[twice[0]]).sum())
            value = column[int(self._places[twice[0]])].as_py()
            raise DataError(f"{self.path}: {self.key}={value!r} is in {count} rows; needed each value once")

    def _words_of(self, column: pa.Array | pa.ChunkedArray) -> tuple[Words, Flags]:
        """Return the hash of each value, and which are missing."""
        if is_list(column.type):
            raise DataError(f"{self.path}: {self.key} is of type {column.type}; needed one value in each row")
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        words, sizes, is_missing = text_words(column)
        if len(sizes) and sizes.max() > MOST_BYTES:
            raise DataError(f"{self.path}: {self.key} has {sizes.max():,} bytes; needed at most {MOST_BYTES:,}")
        return words, is_missing


def _without_dictionaries(table: pa.Table) -> pa.Table:
    for place, kind in enumerate(table.schema.types):
        if pa.types.is_dictionary(kind):
            column = table.column(place).cast(kind.value_type)
            table = table.set_column(place, table.column_names[place], column)
    return table


def _types_of(files: list[WholeColumns], *, stops: bool = True) -> tuple[list[WholeColumns], dict[str, pa.DataType]]:
    """Return files as they are to be read; and the types of the columns of text files: integers, numbers or times where
    all cells are, or where bad rows do not stop, nearly all; else texts.

    Raises:
        DataError: a line has not as many cells as there are columns, and bad rows stop.
    """
    if not files[0].is_text:
        return files, {}
    files, columns, bad = survey_files(files, only_types=True)
    if bad and stops:
        share = ceil(1e4 * len(bad) / next(iter(columns.values())).rows) / 1e4
        raise DataError(f"{bad[0]}. To leave such lines out, and list them: --bad-rows {share:g}")
    is_text = {name for name, each in columns.items() if each.declared not in ("", "float")}
    exact = {
        name: each.exact if stops or each.null_cells or each.written else each.inner for name, each in columns.items()
    }
    return files, {name: pa.string() if name in is_text else kind for name, kind in exact.items()}


def _joined_batches(
    files: list[WholeColumns], types: dict[str, pa.DataType], joined: list[Joined], skipped: SkippedRows | None
) -> Iterator[pa.Table]:
    for batch in all_batches(files, types, None if skipped is None else skipped.add):
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
