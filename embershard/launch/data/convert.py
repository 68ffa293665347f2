"""`embershard data convert`: text files to Parquet, and the columns of other files joined to them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embershard.errors import DataError
from embershard.launch.arguments import check_new_output, help_parts, positive
from embershard.launch.data.form import add_form, columns_of_files
from embershard.launch.screen import plain_console, say
from embershard.whole_file import whole_file

if TYPE_CHECKING:
    import pyarrow as pa

    from embershard.data.sources.table.whole_columns import WholeColumns

CONVERT_HELP = """Write text or Parquet files as one Parquet file, with the columns of other files joined to each row.

A joined file must have one column in common with what is there before it, with each value once in it. All rows of the
first file stay, in their order; the columns of a row without a partner are missing. Joined files are held in memory.

  embershard data convert clicks.csv -o clicks.parquet
  embershard data convert ratings.csv --join users.csv --join items.csv -o all.parquet
  embershard data convert u.data --columns user,item,rating,time --join u.user:user,age,job -o all.parquet
"""
_GROUP_ROWS = 16_384


def add_convert(actions: Any) -> None:
    """Add the action to `embershard data`."""
    action = actions.add_parser(
        "convert",
        help="write text files as Parquet, with other files joined to them",
        **help_parts(CONVERT_HELP),
    )
    action.add_argument("data", type=Path, metavar="FILE_OR_FOLDER", help="CSV, TSV or Parquet")
    action.add_argument("-o", dest="output", type=Path, required=True, metavar="FILE", help="the new Parquet file")
    action.add_argument(
        "--join",
        action="append",
        default=[],
        metavar="FILE[:NAME,...]",
        help="a file to join, with the names of its columns if it has no header; may be repeated",
    )
    action.add_argument(
        "--rows", type=positive, default=_GROUP_ROWS, metavar="N", help="rows of a row group (default: %(default)s)"
    )
    add_form(action)
    action.set_defaults(run=convert)


def convert(arguments: argparse.Namespace) -> int:
    """Run the action; return 0.

    Raises:
        DataError: a file cannot be read, or cannot be joined.
        ConfigError: the output cannot be written.
    """
    import pyarrow.parquet as pq

    output: Path = arguments.output
    check_new_output(output)
    files = columns_of_files(arguments.data, arguments)
    types = _types_of(files)
    joined = [Joined.read(text, arguments) for text in arguments.join]
    num_rows, writer = 0, None
    with whole_file(output) as partial:
        for table in _groups(_joined_batches(files, types, joined), arguments.rows):
            if writer is None:
                writer = pq.ParquetWriter(partial, table.schema, write_page_checksum=True)
            writer.write_table(table, row_group_size=arguments.rows)
            num_rows += table.num_rows
        if writer is None:
            raise DataError(f"{arguments.data}: no row in it")
        writer.close()
    lacking = (f"{each.num_lacking:,} rows have no {each.key} in {each.path}." for each in joined if each.num_lacking)
    say(plain_console(), f"{num_rows:,} rows with {len(writer.schema)} columns are in {output}.", *lacking)
    say(plain_console(), f"Next: embershard data inspect {output} -o run.toml")
    return 0


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
        import pyarrow as pa

        path, colon, names = text.rpartition(":")
        if not colon or Path(text).exists():
            path, names = text, ""
        files = columns_of_files(Path(path), arguments, names or None, is_joined=True)
        types = _types_of(files)
        batches = [batch for file in files for batch in file.batches(types)]
        return Joined(Path(path), pa.Table.from_batches(batches))

    def add_to(self, rows: pa.Table) -> pa.Table:
        """Return the rows with the columns of the file.

        Raises:
            DataError: there is not one column in common, or a value of it is in the file twice.
        """
        import pyarrow.compute as pc

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
        import pyarrow.compute as pc

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


def _types_of(files: list[WholeColumns]) -> dict[str, pa.DataType]:
    """Return the types of the columns of text files: integers, numbers or times where all cells are; else texts."""
    from embershard.launch.data.inspect import survey_files

    if not files[0].is_text:
        return {}
    return {name: column.inner for name, column in survey_files(files)[0].items()}


def _joined_batches(
    files: list[WholeColumns], types: dict[str, pa.DataType], joined: list[Joined]
) -> Iterator[pa.Table]:
    import pyarrow as pa

    for file in files:
        for batch in file.batches(types):
            table = pa.Table.from_batches([batch])
            for other in joined:
                table = other.add_to(table)
            yield table


def _groups(tables: Iterator[pa.Table], num_rows: int) -> Iterator[pa.Table]:
    """Yield the same rows in tables of a multiple of `num_rows`; the last one may have others."""
    import pyarrow as pa

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
