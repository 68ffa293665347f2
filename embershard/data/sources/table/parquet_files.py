"""Parquet files as chunks of columns: a chunk is a row group, which is decoded as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embershard.data.config import TableConfig
from embershard.data.hashing import Ids
from embershard.data.sources.folder import one_format
from embershard.data.sources.input_file import InputFile
from embershard.data.sources.table.raw import PartColumns, RawChunk, check_types, is_list, named_once, needed_columns
from embershard.errors import DataError, NoRowsError
from embershard.whole_file import whole_file

_PARQUET_MAGIC = b"PAR1"
_READ_ERRORS = (pa.ArrowException, OSError, ValueError, OverflowError)


def is_parquet(file: InputFile) -> bool:
    """Return True if a file begins as a Parquet file does, or is named so."""
    is_named = file.path.suffix == ".parquet"
    return is_named or bytes(file.read(0, min(len(_PARQUET_MAGIC), file.num_bytes))) == _PARQUET_MAGIC


def are_parquet(files: list[InputFile]) -> bool:
    """Return whether all files are Parquet, or none is.

    Raises:
        DataError: some are.
    """
    parquet = [is_parquet(file) for file in files]
    if any(parquet) and not all(parquet):
        both = files[parquet.index(True)].path, files[parquet.index(False)].path
        raise DataError(f"{both[0]} is Parquet and {both[1]} is not; {one_format(*both)}")
    return all(parquet)


class ParquetFiles:
    """The row groups of Parquet files; see `TableFiles`."""

    def __init__(self, files: list[InputFile], settings: TableConfig, *, needs_labels: bool) -> None:
        self._files = opened = _ParquetFile.open_all(files, settings, needs_labels)
        self.has_lists = any(file.has_lists for file in opened)
        self._groups = [(file, group) for file in opened for group in range(len(file.group_rows))]
        self.chunk_file = np.repeat(np.arange(len(files)), [len(file.group_rows) for file in opened])
        self.chunk_rows = np.concatenate([file.group_rows for file in opened])
        num_unverifiable = sum(not file.has_page_checksums() for file in opened)
        self.notes = PartColumns.notes([file.part for file in opened])
        if num_unverifiable:
            self.notes += (
                f"{num_unverifiable} of {len(files)} Parquet files have no page checksums: a flipped bit in "
                "their values cannot be found. Write them with checksums (pyarrow: write_page_checksum=True).",
            )

    def need(self, columns: list[str]) -> None:
        for file in self._files:
            file.part.need(columns)

    def read(self, chunk: int, columns: list[str] | None = None) -> RawChunk:
        file, group = self._groups[chunk]
        table = file.read(group, columns)
        first_row = 1 + int(file.group_rows[:group].sum())
        return RawChunk(file.input.path, table, np.arange(table.num_rows), first_row)


def parquet_schema(path: Path) -> tuple[pa.Schema, pq.FileMetaData]:
    """Return the columns of a Parquet file, with a name for one that has none, and its metadata.

    Raises:
        DataError: it is none, is damaged, or has a column's name twice.
    """
    try:
        with pq.ParquetFile(path) as opened:
            schema, metadata = opened.schema_arrow, opened.metadata
    except _READ_ERRORS as error:
        what = " ".join(str(error).split())
        with path.open("rb") as file:
            first = file.read(len(_PARQUET_MAGIC))
        if first != _PARQUET_MAGIC:
            raise DataError(
                f'{path}: is no Parquet file, since it begins with {first!r}. Text is read by data.kind = "table", and '
                "from files that are not called .parquet; if it was Parquet, fetch it again"
            ) from None
        raise DataError(f"{path}: not a sound Parquet file ({what}); fetch it again") from None
    twice = next((name for name in schema.names if schema.names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}: has the column {twice!r} twice; write it again with another name for one of them")
    if "" in schema.names:
        schema = pa.schema([each.with_name(name) for each, name in zip(schema, named_once(schema.names), strict=True)])
    return schema, metadata


def stored_names(opened: pq.ParquetFile, names: Sequence[str]) -> list[str]:
    """Return what columns are called in the file: the one without a name has one here."""
    stored = opened.schema_arrow.names
    unnamed = named_once(stored)[stored.index("")] if "" in stored else None
    return ["" if name == unnamed else name for name in names]


def first_rows(part: PartColumns, most: int) -> RawChunk:
    """Return at most `most` rows of the wanted columns from the beginning of a Parquet file.

    Raises:
        DataError: they cannot be read.
    """
    try:
        with pq.ParquetFile(part.path) as opened:
            columns = part.own()
            stored = stored_names(opened, columns)
            batches = islice(opened.iter_batches(most, columns=stored, use_threads=False), 1)
            schema = pa.schema([opened.schema_arrow.field(name) for name in stored])
            table = part.complete(pa.Table.from_batches(batches, schema).rename_columns(columns))
    except _READ_ERRORS as error:
        what = " ".join(str(error).split())
        raise DataError(f"{part.path}: its first rows cannot be read ({what}); fetch it again") from None
    return RawChunk(part.path, table, np.arange(table.num_rows), 1)


def parquet_parts(
    files: Sequence[InputFile], settings: TableConfig, *, needs_labels: bool
) -> list[tuple[pa.Schema, pq.FileMetaData, PartColumns]]:
    """Return the columns of Parquet files, and their metadata.

    Raises:
        DataError: one is damaged, or has not the columns that features need, or of another type; or none has a row.
    """
    found = []
    for file in files:
        try:
            found.append(parquet_schema(file.path))
        except DataError:
            file.check(0)
            raise
    if not any(metadata.num_rows for _, metadata in found):
        raise NoRowsError(f"{files[0].path}: no row in it; remove it, or fetch it again")
    names = [schema.names for schema, _ in found]
    parts = PartColumns.of_files(files, names, settings, needs_labels=needs_labels)
    for file, (schema, _) in zip(files, found, strict=True):
        check_types(file.path, schema, settings)
    return [(*each, part) for each, part in zip(found, parts, strict=True)]


@dataclass(frozen=True)
class _ParquetFile:
    """One file's metadata, with its columns checked."""

    input: InputFile
    metadata: pq.FileMetaData
    group_rows: Ids
    part: PartColumns
    has_lists: bool

    @staticmethod
    def open_all(files: list[InputFile], settings: TableConfig, needs_labels: bool) -> list[_ParquetFile]:
        opened = []
        parts = parquet_parts(files, settings, needs_labels=needs_labels)
        for file, (schema, metadata, part) in zip(files, parts, strict=True):
            rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            has_lists = any(is_list(schema.field(name).type) for name in part.own(needed_columns(settings)))
            opened.append(_ParquetFile(file, metadata, np.array(rows, np.int64), part, has_lists))
        return opened

    def read(self, group: int, columns: list[str] | None) -> pa.Table:
        """Return the wanted columns, or `columns`, of a row group, each in one piece."""
        path, place = self.input.path, self._place(group)
        try:
            with pq.ParquetFile(path, metadata=self.metadata, page_checksum_verification=True) as opened:
                own = self.part.own(columns)
                stored = stored_names(opened, own)
                table = opened.read_row_group(group, columns=stored, use_threads=False).rename_columns(own)
        except _READ_ERRORS as error:
            self.input.check(place)
            what = " ".join(str(error).split())
            raise DataError(
                f"{path}: row group {group}, at byte {place:,}, cannot be read ({what}); fetch it again"
            ) from None
        self.input.check(place)
        if table.num_rows != self.group_rows[group]:
            raise DataError(f"{path}: row group {group} has {table.num_rows} rows, needed {self.group_rows[group]}")
        return self.part.complete(table.combine_chunks(), columns)

    def has_page_checksums(self) -> bool:
        """Return True if the file's first page, if there is one, has one; writers give one to every page, or to none.

        The header is a struct of Thrift's compact protocol: three required i32 (page type, two sizes), then the
        optional checksum. 0x15 begins an i32 that is the next field; its value is a varint.
        """
        if not len(self.group_rows):
            return True
        start, at = max(0, self._place(0)), 0
        header = bytes(self.input.read(start, min(start + 32, self.input.num_bytes)))
        for _ in range(3):
            at += 1
            while at < len(header) and header[at] & 0x80:
                at += 1
            at += 1
        return header[at : at + 1] == b"\x15"

    def _place(self, group: int) -> int:
        """Return the first byte of a row group."""
        column = self.metadata.row_group(group).column(0)
        return int(column.dictionary_page_offset or column.data_page_offset)


def write_samples(samples: Iterable[Mapping[str, Any]], path: str | Path, group_rows: int = 16_384) -> int:
    """Write dicts as the rows of a new Parquet file, and return their number. Memory does not grow with it.

    A value is a number, a text, a bool, a datetime, a list of them, or None. The first `group_rows` samples decide the
    columns and their types.

    >>> write_samples([{"click": 1, "user": "a"}, {"click": 0, "user": None}], "clicks.parquet")
    2

    Raises:
        DataError: there is no sample, or a later one has a value of another type, or a column that the first have not.
    """
    rows, schema, count = iter(samples), None, 0
    with whole_file(Path(path)) as partial:
        writer = None
        while group := [dict(row) for row in islice(rows, group_rows)]:
            try:
                table = pa.Table.from_pylist(group, schema)
            except pa.ArrowException as error:
                raise DataError(f"samples {count:,} to {count + len(group) - 1:,}: {error}") from None
            if schema is None:
                schema = table.schema
                writer = pq.ParquetWriter(partial, schema, write_page_checksum=True)
            if new := sorted({name for row in group for name in row} - set(schema.names)):
                raise DataError(
                    f"a sample has {new[0]!r}, which the first {group_rows:,} have not; needed the same keys"
                )
            assert writer is not None
            writer.write_table(table)
            count += len(group)
        if writer is None:
            raise DataError("there is no sample to write")
        writer.close()
    return count
