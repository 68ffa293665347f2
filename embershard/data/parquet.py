"""Parquet files with declared columns: numbers, ids, and bags of ids."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from embershard.data.batch import Schema, SparseFeature
from embershard.data.block import Block
from embershard.data.config import DataConfig, ParquetConfig
from embershard.data.hashing import map_ids
from embershard.data.order import ChunkTable
from embershard.data.source import RecentlyUsed, Split, SplitChunks, list_files
from embershard.errors import ConfigError, DataError, IdOutOfRangeError

Ids = NDArray[np.int64]


class ParquetSource:
    """Parquet files; see :class:`~embershard.data.ParquetConfig`.

    A chunk is a row group, which is decoded as a whole: row groups of about a batch are best. Missing ids and
    missing bags become row 0 of their table, missing (or NaN) dense values 0; an empty list is an empty bag.
    """

    def __init__(self, config: DataConfig) -> None:
        settings = config.parquet
        if not settings.sparse:
            raise ConfigError('data.kind = "parquet" needs data.parquet.sparse and .num_rows: the id columns')
        assert config.path is not None
        paths = list_files(config.path, settings.files, "data.parquet.files")
        share = [0.0 if config.eval_path else config.eval_fraction] * len(paths)
        if config.eval_path:
            held_out = list_files(config.eval_path, settings.files, "data.parquet.files")
            paths, share = paths + held_out, share + [1.0] * len(held_out)
        pairs = zip(settings.sparse, settings.num_rows, strict=True)
        sparse = tuple(SparseFeature(name, rows) for name, rows in pairs)
        self.schema = Schema(settings.dense, sparse, settings.label)
        self._settings = settings
        self._files = [_File.open(path, settings) for path in paths]
        self._has_bags = any(file.has_bags for file in self._files)
        self._groups = [(file, g) for file in self._files for g in range(len(file.group_rows))]
        owners = np.repeat(np.arange(len(paths)), [len(file.group_rows) for file in self._files])
        self._split = SplitChunks(owners, np.concatenate([f.group_rows for f in self._files]), share)
        self._decoded = RecentlyUsed(self._decode, capacity=2 + config.num_workers)

    def chunks(self, split: Split) -> ChunkTable:
        """See :class:`~embershard.data.Source`."""
        return self._split.table(split)

    def read(self, split: Split, chunk: int, rows: Ids) -> Block:
        """See :class:`~embershard.data.Source`. Decodes the whole row group, and keeps it for a while."""
        physical, first = self._split.place(split, chunk)
        return self._decoded.get(physical).take(first + rows)

    def _decode(self, number: int) -> Block:
        file, group = self._groups[number]
        return _Group(file, group, self._settings).block(self._has_bags)


@dataclass(frozen=True)
class _File:
    """One file's metadata, with its columns checked."""

    path: Path
    metadata: Any
    group_rows: Ids
    has_bags: bool

    @staticmethod
    def open(path: Path, settings: ParquetConfig) -> _File:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            file = pq.ParquetFile(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path}: not a sound Parquet file ({error}); fetch it again") from None
        with file:
            schema, metadata = file.schema_arrow, file.metadata
        if metadata.num_rows == 0:
            raise DataError(f"{path}: no row in it; remove it, or fetch it again")
        _check_columns(path, schema.names, (settings.label, *settings.dense, *settings.sparse))
        for name in (settings.label, *settings.dense):
            _check_type(path, schema.field(name), _is_number, "a number")
        for name in settings.sparse:
            _check_type(path, schema.field(name), _is_id, "an integer, or a list of integers")
        rows = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        has_bags = any(_is_list(schema.field(name).type) for name in settings.sparse)
        return _File(path, metadata, np.array(rows), has_bags)


class _Group:
    """Decodes one row group."""

    def __init__(self, file: _File, group: int, settings: ParquetConfig) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

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
        """The samples; with a length for every bag when any file has bags."""
        settings = self._settings
        labels = self._numbers(settings.label)
        wrong = np.flatnonzero(~np.isin(labels, (0, 1)))
        if len(wrong):
            self._fail(wrong[0], settings.label, labels[wrong[0]], "a label must be 0 or 1")
        dense = np.empty((len(labels), len(settings.dense)), np.float32)
        for column, name in enumerate(settings.dense):
            dense[:, column] = self._dense(name)
        pairs = zip(settings.sparse, settings.num_rows, strict=True)
        values, lengths = zip(*(self._bags(name, rows) for name, rows in pairs), strict=True)
        sizes: NDArray[np.int32] | tuple[int, ...] = np.stack(lengths) if has_bags else (1,) * len(values)
        return Block(dense, labels, values, sizes)

    def _column(self, name: str) -> Any:
        return self._table.column(name).chunk(0)

    def _numbers(self, name: str) -> NDArray[np.float32]:
        import pyarrow as pa

        return self._column(name).cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)

    def _dense(self, name: str) -> NDArray[np.float32]:
        numbers = self._numbers(name)
        endless = np.flatnonzero(np.isinf(numbers))
        if len(endless):
            self._fail(endless[0], name, numbers[endless[0]], "needed a finite number")
        numbers = np.nan_to_num(numbers, nan=0.0)
        return np.log1p(np.maximum(numbers, 0)) if self._settings.dense_transform == "log1p" else numbers

    def _bags(self, name: str, num_rows: int) -> tuple[Ids, NDArray[np.int32]]:
        """Rows of all bags, and how many each bag has. Plain integers are bags of one."""
        import pyarrow as pa
        import pyarrow.compute as pc

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

    def _rows(self, ids: Any, name: str, num_rows: int, lengths: NDArray[np.int32]) -> Ids:
        """Rows of an arrow array of ids; null becomes row 0."""
        missing = ids.is_null().to_numpy(zero_copy_only=False)
        raw = ids.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        if self._settings.id_mapping == "none":
            wrong = np.flatnonzero((raw < 0) | (raw >= num_rows))
            if len(wrong):
                sample = int(np.searchsorted(np.cumsum(lengths), wrong[0], side="right"))
                self._fail(sample, name, raw[wrong[0]], f"needed a row in 0..{num_rows - 1}", IdOutOfRangeError)
            return raw
        rows = map_ids(raw, num_rows, self._settings.id_mapping)
        rows[missing] = 0
        return rows

    def _fail(self, row: int, name: str, value: Any, needed: str, error: type[DataError] = DataError) -> NoReturn:
        raise error(f"{self._path}:{self._first_row + row + 1} {name}={value}: {needed}")


def _check_columns(path: Path, there: list[str], wanted: Iterable[str]) -> None:
    for name in wanted:
        if name not in there:
            close = difflib.get_close_matches(name, there, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has: {', '.join(there[:20])}"
            raise DataError(f"{path}: no column {name!r}; {hint}")


def _check_type(path: Path, field: Any, is_right: Any, needed: str) -> None:
    if not is_right(field.type):
        raise DataError(f"{path}: column {field.name!r} is of type {field.type}; needed {needed}")


def _is_number(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_id(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_integer(kind.value_type if _is_list(kind) else kind))
