"""Parquet files with declared columns: numbers, ids, and bags of ids."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embershard.data.bad_rows import BadRow, ParsedChunk
from embershard.data.block import Block, Ids, Lengths, transform_dense
from embershard.data.config import DataConfig, ParquetConfig
from embershard.data.hashing import map_ids
from embershard.data.input_file import InputFile
from embershard.data.schema import Schema, SparseFeature
from embershard.data.source import FileSource, SplitChunks, list_files
from embershard.errors import ConfigError, DataError, IdOutOfRangeError


class ParquetSource(FileSource):
    """Parquet files; see `ParquetConfig`.

    A chunk is a row group, which is decoded as a whole: row groups of about a batch are best. Missing ids and missing
    bags become row 0 of their table, missing (or NaN) dense values 0; an empty list is an empty bag.

    Args:
        needs_labels: False: the samples of a file without the column of labels have the label NaN.
    """

    def __init__(self, config: DataConfig, *, needs_labels: bool = True) -> None:
        schema = self.schema_of(config)
        self._settings = config.parquet
        inputs, held_out = list_files(config, self._settings.files)
        files = [_File.open(file, self._settings, needs_labels) for file in inputs]
        self._has_bags = any(file.has_bags for file in files)
        self._num_unverifiable = sum(not file.has_page_checksums() for file in files)
        self._num_files = len(files)
        self._groups = [(file, group) for file in files for group in range(len(file.group_rows))]
        owners = np.repeat(np.arange(len(files)), [len(file.group_rows) for file in files])
        split = SplitChunks(owners, np.concatenate([file.group_rows for file in files]), held_out)
        super().__init__(schema, split, num_kept=2 + config.num_workers, tolerates_bad_rows=config.bad_rows != "stop")

    @property
    def notes(self) -> tuple[str, ...]:
        if not self._num_unverifiable:
            return ()
        return (
            f"{self._num_unverifiable} of {self._num_files} Parquet files have no page checksums: a flipped bit in "
            "their values cannot be found. Write them with checksums (pyarrow: write_page_checksum=True).",
        )

    @staticmethod
    def schema_of(config: DataConfig) -> Schema:
        settings = config.parquet
        if not settings.sparse:
            raise ConfigError('data.kind = "parquet" needs data.parquet.sparse and .num_rows: the id columns')
        return Schema(settings.dense, tuple(map(SparseFeature, settings.sparse, settings.num_rows)), settings.label)

    def parse(self, number: int, most_bad: int | None = None) -> ParsedChunk:
        file, group = self._groups[number]
        return _Group(file, group, self._settings).parse(self._has_bags)


@dataclass(frozen=True)
class _File:
    """One file's metadata, with its columns checked."""

    input: InputFile
    metadata: pq.FileMetaData
    group_rows: Ids
    has_bags: bool
    has_labels: bool

    @property
    def path(self) -> Path:
        return self.input.path

    @staticmethod
    def open(file: InputFile, settings: ParquetConfig, needs_labels: bool) -> _File:
        path = file.path
        try:
            with pq.ParquetFile(path) as opened:
                schema, metadata = opened.schema_arrow, opened.metadata
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            file.check(0)
            what = " ".join(str(error).split())
            raise DataError(f"{path}: not a sound Parquet file ({what}); fetch it again") from None
        if metadata.num_rows == 0:
            raise DataError(f"{path}: no row in it; remove it, or fetch it again")
        has_labels = needs_labels or settings.label in schema.names
        for name in ([settings.label] if has_labels else []) + [*settings.dense]:
            _check_column(path, schema, name, _is_number, "a number")
        for name in settings.sparse:
            _check_column(path, schema, name, _is_id, "an integer, or a list of integers")
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        has_bags = any(_is_list(schema.field(name).type) for name in settings.sparse)
        return _File(file, metadata, np.array(rows, np.int64), has_bags, has_labels)

    def has_page_checksums(self) -> bool:
        """Return True if the file's first page has one; writers give one to every page, or to none.

        The header is a struct of Thrift's compact protocol: three required i32 (page type, two sizes), then the
        optional checksum. 0x15 begins an i32 that is the next field; its value is a varint.
        """
        start, at = max(0, self.place(0)), 0
        header = bytes(self.input.read(start, min(start + 32, self.input.num_bytes)))
        for _ in range(3):
            at += 1
            while at < len(header) and header[at] & 0x80:
                at += 1
            at += 1
        return header[at : at + 1] == b"\x15"

    def place(self, group: int) -> int:
        """Return the first byte of a row group."""
        column = self.metadata.row_group(group).column(0)
        return int(column.dictionary_page_offset or column.data_page_offset)


class _Group:
    """Decodes one row group."""

    def __init__(self, file: _File, group: int, settings: ParquetConfig) -> None:
        self._path, self._settings, self._has_labels = file.path, settings, file.has_labels
        self._first_row = int(file.group_rows[:group].sum())
        self._bad: dict[int, BadRow] = {}
        columns = [*settings.dense, *settings.sparse] + ([settings.label] if file.has_labels else [])
        place = file.place(group)
        try:
            with pq.ParquetFile(file.path, metadata=file.metadata, page_checksum_verification=True) as opened:
                table = opened.read_row_group(group, columns=columns, use_threads=False)
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            file.input.check(place)
            what = " ".join(str(error).split())
            raise DataError(
                f"{file.path}: row group {group}, at byte {place:,}, cannot be read ({what}); fetch it again"
            ) from None
        file.input.check(place)
        if table.num_rows != file.group_rows[group]:
            raise DataError(
                f"{file.path}: row group {group} has {table.num_rows} rows, needed {file.group_rows[group]}"
            )
        self._table = table.combine_chunks()

    def parse(self, has_bags: bool) -> ParsedChunk:
        """Return samples and bad rows; the samples have a length for every bag when any file has bags."""
        settings = self._settings
        labels = np.full(self._table.num_rows, np.nan, np.float32)
        if self._has_labels:
            labels = self._numbers(settings.label)
            self._note(~np.isin(labels, (0, 1)), settings.label, labels, "a label must be 0 or 1")
        dense = np.array([self._numbers(name) for name in settings.dense], np.float32)
        dense = dense.reshape(len(settings.dense), len(labels)).T.copy()
        for name, numbers in zip(settings.dense, dense.T, strict=True):
            self._note(np.isinf(numbers), name, numbers, "needed a finite number, below 3.4e38")
        dense[~np.isfinite(dense)] = 0
        transform_dense(dense, settings.dense_transform)
        values, lengths = zip(*map(self._bags, settings.sparse, settings.num_rows), strict=True)
        sizes: Lengths = np.stack(lengths) if has_bags else (1,) * len(values)
        block = Block(dense, labels, values, sizes)
        if not self._bad:
            return ParsedChunk(block)
        bad = dict(sorted(self._bad.items()))
        return ParsedChunk(block.take(np.setdiff1d(np.arange(len(labels)), list(bad))), bad)

    def _column(self, name: str) -> pa.Array:
        return self._table.column(name).chunk(0)

    def _numbers(self, name: str) -> NDArray[np.float32]:
        return self._column(name).cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)

    def _bags(self, name: str, num_rows: int) -> tuple[Ids, NDArray[np.int32]]:
        """Return the rows of all bags, and the size of each. Plain integers are bags of one."""
        column = self._column(name)
        if not _is_list(column.type):
            lengths = np.ones(len(column), np.int32)
            return self._rows(column, name, num_rows, lengths), lengths
        column = column.cast(pa.list_(column.type.value_type))
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int32)
        most = self._settings.max_bag_size
        needed = f"needed at most {most:,} (data.parquet.max_bag_size)"
        self._note(lengths > most, name, lengths, needed, unit=" ids")
        rows = self._rows(column.flatten(), name, num_rows, lengths)
        if column.null_count:
            missing = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
            rows = np.insert(rows, np.cumsum(lengths)[missing], 0)
            lengths[missing] = 1
        return rows, lengths

    def _rows(self, ids: pa.Array, name: str, num_rows: int, lengths: NDArray[np.int32]) -> Ids:
        """Return the rows of ids in bags of these lengths; null becomes row 0."""
        raw = ids.fill_null(0).to_numpy(zero_copy_only=False)
        if self._settings.id_mapping == "none":
            wrong = np.flatnonzero((raw < 0) | (raw >= num_rows))  # as they are in the file, unsigned ones too
            samples, firsts = np.unique(
                np.searchsorted(np.cumsum(lengths, dtype=np.int64), wrong, side="right"), return_index=True
            )
            needed = f"needed a row in 0..{num_rows - 1}"
            for sample, place in zip(samples.tolist(), wrong[firsts].tolist(), strict=True):
                self._note_row(sample, name, f"{name}={raw[place]}: {needed}", IdOutOfRangeError)
            return raw.astype(np.int64)
        rows = map_ids(raw, num_rows, self._settings.id_mapping)
        rows[ids.is_null().to_numpy(zero_copy_only=False)] = 0
        return rows

    def _note(self, is_wrong: NDArray[np.bool_], name: str, values: NDArray[Any], needed: str, unit: str = "") -> None:
        """Note the rows for which `is_wrong` [n] is true as bad."""
        for row in np.flatnonzero(is_wrong).tolist():
            self._note_row(row, name, f"{name}={values[row]}{unit}: {needed}")

    def _note_row(self, row: int, name: str, problem: str, error: type[DataError] = DataError) -> None:
        self._bad.setdefault(row, BadRow(self._path, self._first_row + row + 1, name, problem, error))


def _check_column(
    path: Path, schema: pa.Schema, name: str, is_right: Callable[[pa.DataType], bool], needed: str
) -> None:
    if name not in schema.names:
        close = difflib.get_close_matches(name, schema.names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has: {', '.join(schema.names[:20])}"
        raise DataError(f"{path}: no column {name!r}; {hint}")
    if not is_right(kind := schema.field(name).type):
        raise DataError(f"{path}: column {name!r} is of type {kind}; needed {needed}")


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_id(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind.value_type if _is_list(kind) else kind)
