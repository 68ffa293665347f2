"""Files as a stream of all their columns: for a look at them, and for their conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv

from embershard.data.config import TableConfig
from embershard.data.sources.input_file import InputFile
from embershard.data.sources.table.parquet_files import is_parquet, parquet_schema
from embershard.data.sources.table.raw import typed_name
from embershard.data.sources.table.text_files import first_bytes, header_names
from embershard.errors import DataError

SEPARATORS = ("\t", "|", ";", ",")
_BATCH_ROWS = 1 << 16
_BLOCK_BYTES = 1 << 22
_HEADER_BYTES = 1 << 16


@dataclass(frozen=True)
class WholeColumns:
    """All columns of a file. Those of text files are texts, until they get types.

    Attributes:
        form: separator, quotes, missing values and, where there is no header, names of columns of a text file.
        encoding: of a text file.
    """

    file: InputFile
    form: TableConfig
    encoding: str = "utf-8"

    @staticmethod
    def at(path: Path, form: TableConfig, encoding: str, separator: str | None = None) -> WholeColumns:
        """Return the columns of a file.

        Args:
            separator: of a text file; None: the one that its first line has most of.
        """
        file = InputFile.at(path)
        if separator is None and not is_parquet(file):
            line = _first_line(file, encoding)
            separator = max(SEPARATORS, key=line.count) if any(each in line for each in SEPARATORS) else ","
        return WholeColumns(file, replace(form, separator=separator or form.separator), encoding)

    @property
    def is_text(self) -> bool:
        return not is_parquet(self.file)

    def schema(self) -> pa.Schema:
        """Return the names and types of the columns.

        Raises:
            DataError: the file is damaged, or its header has a name twice.
        """
        if not self.is_text:
            return parquet_schema(self.file.path)[0]
        first = _first_line(self.file, self.encoding).encode()
        names = list(self.form.columns) or header_names(self.file.path, first, self.form)
        return pa.schema([(name, pa.string()) for name in names])

    def batches(
        self, types: Mapping[str, pa.DataType] | None = None, on_bad: Callable[[csv.InvalidRow], str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield all rows, some at a time. A quoted cell of a text file may have line breaks.

        Args:
            types: of columns of a text file; None: all are texts.
            on_bad: is called for a line that has not as many cells as there are columns, and returns "skip" or "error".

        Raises:
            DataError: the file cannot be read, or has changed; or a cell is not of its column's type.
        """
        path, schema = self.file.path, self.schema()
        try:
            if not self.is_text:
                with pq.ParquetFile(path, page_checksum_verification=True) as opened:
                    yield from opened.iter_batches(_BATCH_ROWS, use_threads=False)
            else:
                yield from self._lines(schema, types or {}, on_bad)
        except (pa.ArrowException, OSError, ValueError) as error:
            self.file.check(0)
            what = " ".join(str(error).split())
            hint = ". If it is not UTF-8: --encoding, for instance latin-1" if "UTF" in what.upper() else ""
            raise DataError(f"{path}: cannot be read ({what}){hint}") from None
        self.file.check(self.file.num_bytes)

    def _lines(
        self,
        schema: pa.Schema,
        types: Mapping[str, pa.DataType],
        on_bad: Callable[[csv.InvalidRow], str] | None,
    ) -> Iterator[pa.RecordBatch]:
        form = self.form
        reader = csv.open_csv(
            pa.input_stream(str(self.file.path), compression="gzip" if self.file.is_gzip() else None),
            csv.ReadOptions(
                use_threads=False,
                block_size=_BLOCK_BYTES,
                column_names=schema.names,
                skip_rows=0 if form.columns else 1,
                encoding=self.encoding,
            ),
            csv.ParseOptions(
                delimiter=form.separator,
                quote_char='"' if form.quoted else False,
                newlines_in_values=form.quoted,
                invalid_row_handler=on_bad,
            ),
            csv.ConvertOptions(
                column_types={name: types.get(name, pa.string()) for name in schema.names},
                null_values=list(form.null_values),
                strings_can_be_null=True,
            ),
        )
        with reader:
            yield from reader


def _first_line(file: InputFile, encoding: str) -> str:
    return first_bytes(file, _HEADER_BYTES).partition(b"\n")[0].decode(encoding, "backslashreplace")


def without_types(table: pa.Table) -> pa.Table:
    """Return the same rows where names of columns have no types, as `typed_name` knows them: sequences are lists."""
    for place, name in enumerate(table.column_names):
        plain, kind = typed_name(name)
        column = table.column(place)
        if kind.endswith("_seq") and pa.types.is_string(column.type):
            column = pc.split_pattern(column, " ")
            column = column.cast(pa.list_(pa.float64())) if kind == "float_seq" else column
        table = table.set_column(place, plain, column)
    return table
