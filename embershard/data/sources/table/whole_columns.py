"""Files as a stream of all their columns: for a look at them, and for their conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embershard.data.block import BadRow, short
from embershard.data.config import TableConfig
from embershard.data.hashing import Ids
from embershard.data.sample_bits import Flags
from embershard.data.sources.input_file import InputFile
from embershard.data.sources.table.cells import read_cells
from embershard.data.sources.table.decode import readable, text_words
from embershard.data.sources.table.json_lines import JsonColumns, has_json_lines
from embershard.data.sources.table.parquet_files import is_parquet, parquet_schema
from embershard.data.sources.table.plain_text import first_bytes, plain_blocks
from embershard.data.sources.table.raw import PartColumns, is_text, named_once, typed_name
from embershard.data.sources.table.survey import FORMS, DistinctCount
from embershard.data.sources.table.text_files import TextColumns, column_names, has_header
from embershard.data.sources.table.text_forms import ROW_NAME, Given, cells_of, find_encoding, find_form, one_name_less
from embershard.data.sources.text import NEWLINE, without_blank_lines
from embershard.errors import DataError

_BATCH_ROWS = 1 << 16
_HEADER_BYTES = 1 << 16
_LEAST_DISTINCT = 0.95  # of many texts that all differ, as `DistinctCount` estimates them
#: Is called for each bad row.
OnBad = Callable[[BadRow], None]


@dataclass(frozen=True)
class WholeColumns:
    """All columns of a file. Those of text files are texts, until they get types.

    Attributes:
        form: of a text file: separator, quotes, missing values and, where there is no header, names of columns.
        has_row_names: the first column of a text file, which its header does not name, has names of rows.
    """

    file: InputFile
    form: TableConfig
    kind: Literal["text", "json", "parquet"]
    has_row_names: bool = False

    @staticmethod
    def at(path: Path, given: Given) -> WholeColumns:
        """Return the columns of a file.

        Raises:
            DataError: it cannot be read, or how it is written cannot be told.
        """
        file = InputFile.at(path)
        if is_parquet(file):
            return WholeColumns(file, TableConfig(), "parquet")
        plain = TableConfig(encoding=find_encoding(file, given))
        if has_json_lines(file, plain):
            return WholeColumns(file, plain, "json")
        form = find_form(file, given)
        has_row_names = given.columns is None and form.columns[:1] == (ROW_NAME,)
        return WholeColumns(file, form, "text", has_row_names=has_row_names)

    @property
    def is_text(self) -> bool:
        return self.kind == "text"

    @cached_property
    def schema(self) -> pa.Schema:
        """The names and types of the columns, those that its folders name at the end. Of JSON lines, all are read.

        Raises:
            DataError: the file is damaged, or its header has a name twice.
        """
        own = parquet_schema(self.file.path)[0] if self.kind == "parquet" else self._columns.schema
        added = [(name, pa.string()) for name in self.file.partitions if name not in own.names]
        return pa.schema([*((each.name, each.type) for each in own), *added])

    @cached_property
    def _columns(self) -> TextColumns | JsonColumns:
        if self.kind == "json":
            return JsonColumns.of(self.file, self.form, whole=True)
        header = first_bytes(self.file, self.form, _HEADER_BYTES).partition(b"\n")[0]
        names = column_names(self.file.path, header, self.form)
        return TextColumns(self.form, names, names)

    def batches(
        self, types: Mapping[str, pa.DataType] | None = None, on_bad: OnBad | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield all rows, some at a time; of a text file, those that are rows.

        Args:
            types: of columns of a text file; None: all are texts.
            on_bad: None: a bad row is an error.

        Raises:
            DataError: the file cannot be read, or has changed; or a row is bad: it has not as many cells as there are
                columns, or a cell that is not of its column's type.
        """
        path, names = self.file.path, self.schema.names
        if self.kind != "parquet":
            yield from self._rows(types or {}, on_bad)
            return
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as opened:
                own = named_once(opened.schema_arrow.names)
                part = PartColumns(path, own, self.file.partitions, names)
                for batch in opened.iter_batches(_BATCH_ROWS, use_threads=False):
                    table = pa.Table.from_batches([batch]).rename_columns(own)
                    yield from part.complete(table).combine_chunks().to_batches()
        except (pa.ArrowException, OSError, ValueError) as error:
            self.file.check(0)
            raise DataError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
        self.file.check(self.file.num_bytes)

    def _rows(self, types: Mapping[str, pa.DataType], on_bad: OnBad | None) -> Iterator[pa.RecordBatch]:
        columns, begins = self._columns, True
        part = PartColumns(self.file.path, columns.names, self.file.partitions, self.schema.names)
        row = 1 + self.form.skip_lines
        row_names = _RowNames(self) if self.has_row_names else None

        def note(bad: BadRow) -> None:
            if on_bad is None:
                raise DataError(str(bad))
            on_bad(bad)

        for block in plain_blocks(self.file, self.form):
            data = memoryview(block)
            if begins and self.is_text and has_header(block.partition(b"\n")[0], self.form):
                row, data = row + 1, data[block.find(b"\n") + 1 or len(block) :]
            begins = False
            lines, numbers = without_blank_lines(data)
            numbers, row = numbers + row, row + int(np.count_nonzero(np.frombuffer(data, np.uint8) == NEWLINE))
            if not len(numbers):
                continue
            table, places, others = columns.read_good(lines)
            if row_names is not None:
                row_names.check(table.column(0).combine_chunks(), others)
            for line, text in others.items():
                note(BadRow(self.file.path, int(numbers[line]), "", columns.explain(text)))
            yield self._typed(part.complete(table), numbers[places], types, note)

    def _typed(self, table: pa.Table, rows: Ids, types: Mapping[str, pa.DataType], note: OnBad) -> pa.RecordBatch:
        """Return the rows of a table all of whose cells are of their columns' types; `rows` are their numbers."""
        is_good, columns = np.ones(table.num_rows, np.bool_), []
        for name, cells in zip(table.column_names, table.columns, strict=True):
            texts, is_wrong, needed = _texts(cells.combine_chunks())
            form = FORMS.get(types.get(name, pa.string())) if pa.types.is_string(texts.type) else None
            values = texts
            if form is not None:
                (values, is_wrong), needed = read_cells(texts, [form]), f"needed {types[name]}, or nothing"
            for place in np.flatnonzero(is_wrong & is_good).tolist():
                note(BadRow(self.file.path, int(rows[place]), name, f"{name}={short(texts[place].as_py())}: {needed}"))
            is_good &= ~is_wrong
            columns.append(values)
        batch = pa.RecordBatch.from_arrays(columns, names=table.column_names)
        return batch if is_good.all() else batch.filter(pa.array(is_good))


class _RowNames:
    """Checks that the first column of a file has names of rows as R writes them, in all of its rows: rising numbers, or
    texts, another one in each row."""

    def __init__(self, file: WholeColumns) -> None:
        self._path, self._form = file.file.path, file.form
        self._last, self._texts = -1, DistinctCount()

    def check(self, cells: pa.Array, others: Mapping[int, bytes]) -> None:
        """Check the cells of some rows, and lines that are no rows.

        Raises:
            DataError: they say that another column may be the one that the header does not name.
        """
        names, words = self._form.columns[1:], text_words(cells)[0]
        try:
            numbers = cells.cast(pa.string()).cast(pa.int64()).to_numpy(zero_copy_only=False)
            are_names = bool((np.diff(numbers, prepend=self._last) > 0).all())
            self._last = int(numbers[-1]) if len(numbers) else self._last
        except pa.ArrowInvalid:
            self._texts.add(words)
            least = self._texts.count if self._texts.is_exact else _LEAST_DISTINCT * self._texts.count
            are_names = len(np.unique(words)) == len(words) and self._texts.estimate >= least
        shorter = next((text for text in others.values() if len(self._cells(text)) == len(names)), None)
        why = f"rows have {len(names) + 1} cells, the first of which does not tell rows apart, as names of rows do"
        if shorter is not None:
            why = f"rows have {len(names) + 1} cells, but not all: {short(shorter.decode('utf-8', 'replace').rstrip())}"
        if shorter is not None or not are_names:
            raise DataError(one_name_less(f"{self._path}:{self._form.skip_lines}", names, why))

    def _cells(self, line: bytes) -> list[str]:
        return cells_of(line.decode("utf-8", "replace").rstrip("\r\n"), self._form)


def _texts(cells: pa.Array) -> tuple[pa.Array, Flags, str]:
    """Return cells of bytes as texts; which of them are no UTF-8, and what is needed in their place."""
    if not pa.types.is_binary(cells.type):
        return cells, np.zeros(len(cells), np.bool_), ""
    try:
        return cells.cast(pa.string()), np.zeros(len(cells), np.bool_), ""
    except pa.ArrowInvalid:
        texts = readable(pa.chunked_array([cells])).combine_chunks()
        is_wrong = pc.fill_null(pc.not_equal(texts.cast(pa.binary()), cells), False)
        needed = "needed UTF-8, or the encoding that it is: --encoding, for instance latin-1"
        return texts, is_wrong.to_numpy(zero_copy_only=False), needed


def common_schema(files: Sequence[WholeColumns]) -> pa.Schema:
    """Return the columns of files that belong together, those of the first ones first. Of integers in one and numbers
    in another file, numbers.

    Raises:
        DataError: a column is of types that do not fit, or a file has other columns than the rest.
    """
    found = schemas[0] if (schemas := [file.schema for file in files]) else pa.schema([])
    for file, schema in zip(files, schemas, strict=True):
        for field in schema:
            place = found.get_field_index(field.name)
            try:
                found = found.append(field) if place < 0 else found.set(place, _common_field(found.field(place), field))
            except pa.ArrowException as error:
                what = " ".join(str(error).split())
                raise DataError(
                    f"{file.file.path}: a column is of another type than in {files[0].file.path} ({what}). Write one "
                    "of them with the other type"
                ) from None
    for file, schema in zip(files, schemas, strict=True):
        if 2 * len(schema) < len(found):
            raise DataError(
                f"{file.file.path} has the columns {', '.join(schema.names)[:300]}; needed those of "
                f"{files[0].file.path}: {', '.join(schemas[0].names)[:300]}. Give one kind of files at a time"
            )
    return found


def _common_field(one: pa.Field, other: pa.Field) -> pa.Field:
    """Return a column that has the values of two: as texts, where one has texts and the other single values, or their
    dictionary.

    Raises:
        pa.ArrowException: they do not fit.
    """
    try:
        return pa.unify_schemas([pa.schema([one]), pa.schema([other])], promote_options="permissive").field(0)
    except pa.ArrowException:
        kinds = [each.type.value_type if pa.types.is_dictionary(each.type) else each.type for each in (one, other)]
        if not any(map(is_text, kinds)) or any(map(pa.types.is_nested, kinds)):
            raise
        return pa.field(one.name, pa.string())


def all_batches(
    files: Sequence[WholeColumns], types: Mapping[str, pa.DataType] | None = None, on_bad: OnBad | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of all files with the columns of `common_schema`; what a file has not is missing. See
    `WholeColumns.batches`."""
    given = types or {}
    schema = pa.schema([(each.name, given.get(each.name, each.type)) for each in common_schema(files)])
    for file in files:
        for batch in file.batches(types, on_bad):
            there, columns = set(batch.schema.names), []
            for field in schema:
                column = batch.column(field.name) if field.name in there else pa.nulls(len(batch), field.type)
                try:
                    columns.append(column.cast(field.type))
                except pa.ArrowException as error:
                    what = " ".join(str(error).split())
                    raise DataError(
                        f"{file.file.path}: column {field.name!r} is {column.type} and, in other files, {field.type}, "
                        f"which has not all of its values ({what})"
                    ) from None
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


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
