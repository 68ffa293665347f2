"""Parquet files with declared columns: numbers, ids, and bags of ids."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embershard.data.batch import Schema, SparseFeature
from embershard.data.block import Block, Ids, Lengths, transform_dense
from embershard.data.config import DataConfig, ParquetConfig
from embershard.data.hashing import map_ids
from embershard.data.source import FileSource, SplitChunks, list_files
from embershard.errors import ConfigError, DataError, IdOutOfRangeError


class ParquetSource(FileSource):
    """Parquet files; see `ParquetConfig`.

    A chunk is a row group, which is decoded as a whole: row groups of about a batch are best. Missing ids and missing
    bags become row 0 of their table, missing (or NaN) dense values 0; an empty list is an empty bag.
    """

    def __init__(self, config: DataConfig) -> None:
        schema = self.schema_of(config)
        self._settings = config.parquet
        paths, held_out = list_files(config, self._settings.files)
        files = [_File.open(path, self._settings) for path in paths]
        self._has_bags = any(file.has_bags for file in files)
        self._groups = [(file, group) for file in files for group in range(len(file.group_rows))]
        owners = np.repeat(np.arange(len(files)), [len(file.group_rows) for file in files])
        split = SplitChunks(owners, np.concatenate([file.group_rows for file in files]), held_out)
        super().__init__(schema, split, num_kept=2 + config.num_workers)

    @staticmethod
    def schema_of(config: DataConfig) -> Schema:
        settings = config.parquet
        if not settings.sparse:
            raise ConfigError('data.kind = "parquet" needs data.parquet.sparse and .num_rows: the id columns')
        return Schema(settings.dense, tuple(map(SparseFeature, settings.sparse, settings.num_rows)), settings.label)

    def parse(self, number: int) -> Block:
        file, group = self._groups[number]
        return _Group(file, group, self._settings).block(self._has_bags)


@dataclass(frozen=True)
class _File:
    """One file's metadata, with its columns checked."""

    path: Path
    metadata: pq.FileMetaData
    group_rows: Ids
    has_bags: bool

    @staticmethod
    def open(path: Path, settings: ParquetConfig) -> _File:
        try:
            with pq.ParquetFile(path) as file:
                schema, metadata = file.schema_arrow, file.metadata
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path}: not a sound Parquet file ({error}); fetch it again") from None
        if metadata.num_rows == 0:
            raise DataError(f"{path}: no row in it; remove it, or fetch it again")
        for name in (settings.label, *settings.dense):
            _check_column(path, schema, name, _is_number, "a number")
        for name in settings.sparse:
            _check_column(path, schema, name, _is_id, "an integer, or a list of integers")
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        has_bags = any(_is_list(schema.field(name).type) for name in settings.sparse)
        return _File(path, metadata, np.array(rows), has_bags)


class _Group:
    """Decodes one row group."""

    def __init__(self, file: _File, group: int, settings: ParquetConfig) -> None:
        self._path, self._settings = file.path, settings
        self._first_row = int(file.group_rows[:group].sum())
        columns = [settings.label, *settings.dense, *settings.sparse]
        try:
            with pq.ParquetFile(file.path, metadata=file.metadata, page_checksum_verification=True) as opened:
                table = opened.read_row_group(group, columns=columns, use_threads=False)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{file.path}: row group {group} cannot be read ({error}); fetch it again") from None
        self._table = table.combine_chunks()

    def block(self, has_bags: bool) -> Block:
        """Return the samples, with a length for every bag when any file has bags."""
        settings = self._settings
        labels = self._numbers(settings.label)
        wrong = np.flatnonzero(~np.isin(labels, (0, 1)))
        if len(wrong):
            self._fail(wrong[0], settings.label, labels[wrong[0]], "a label must be 0 or 1")
        dense = np.array([self._numbers(name) for name in settings.dense], np.float32)
        dense = dense.reshape(len(settings.dense), len(labels)).T.copy()
        endless = np.argwhere(np.isinf(dense))
        if len(endless):
            row, column = endless[0]
            self._fail(row, settings.dense[column], dense[row, column], "needed a finite number")
        dense[np.isnan(dense)] = 0
        transform_dense(dense, settings.dense_transform)
        values, lengths = zip(*map(self._bags, settings.sparse, settings.num_rows), strict=True)
        sizes: Lengths = np.stack(lengths) if has_bags else (1,) * len(values)
        return Block(dense, labels, values, sizes)

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
        rows = self._rows(column.flatten(), name, num_rows, lengths)
        if column.null_count:
            missing = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
            rows = np.insert(rows, np.cumsum(lengths)[missing], 0)
            lengths[missing] = 1
        return rows, lengths

    def _rows(self, ids: pa.Array, name: str, num_rows: int, lengths: NDArray[np.int32]) -> Ids:
        """Return the rows of ids in bags of these lengths; null becomes row 0."""
        raw = ids.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        if self._settings.id_mapping == "none":
            wrong = np.flatnonzero((raw < 0) | (raw >= num_rows))
            if len(wrong):
                sample = int(np.searchsorted(np.cumsum(lengths), wrong[0], side="right"))
                self._fail(sample, name, raw[wrong[0]], f"needed a row in 0..{num_rows - 1}", IdOutOfRangeError)
            return raw
        rows = map_ids(raw, num_rows, self._settings.id_mapping)
        rows[ids.is_null().to_numpy(zero_copy_only=False)] = 0
        return rows

    def _fail(self, row: int, name: str, value: np.number, needed: str, error: type[DataError] = DataError) -> NoReturn:
        raise error(f"{self._path}:{self._first_row + row + 1} {name}={value}: {needed}")


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
