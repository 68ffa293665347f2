"""Checks that files have the columns that features need."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from embershard.data.config import DataConfig
from embershard.data.sources.input_file import InputFile
from embershard.data.sources.table.config import TableConfig, settings_of, table_schema
from embershard.data.sources.table.decode import ChunkDecoder
from embershard.data.sources.table.parquet_files import are_parquet, first_rows, parquet_schema
from embershard.data.sources.table.raw import RawChunk, check_columns, check_types
from embershard.data.sources.table.targets import labels_and_weights
from embershard.data.sources.table.text_columns import columns_of, first_bytes
from embershard.errors import DataError

_FIRST_BYTES = 1 << 18
_FIRST_ROWS = 1000


def check_table(config: DataConfig, files: list[InputFile]) -> None:
    """Check the columns of the files of "parquet" and "table": those that features need are there, with types and, in
    the first rows, values that fit.

    Raises:
        ConfigError: the features do not fit each other.
        DataError: a file is empty or damaged, a column is missing or of another type, or a value does not fit.
    """
    settings = settings_of(config)
    table_schema(config)
    if config.kind == "parquet" or are_parquet(files):
        for file in files:
            schema, _ = parquet_schema(file.path)
            columns = check_columns(file.path, schema.names, settings, needs_labels=True)
            check_types(file.path, schema, settings)
            if config.bad_rows == "stop":
                _check_values(first_rows(file.path, columns, _FIRST_ROWS), settings)
        return
    for file in files:
        _check_text(file, settings, stops=config.bad_rows == "stop")


def _check_text(file: InputFile, settings: TableConfig, *, stops: bool) -> None:
    """Raise `DataError` where the header or, where bad rows stop a run, one of the first lines does not fit."""
    data = first_bytes(file, _FIRST_BYTES)
    first, _, rest = data.partition(b"\n")
    columns = columns_of(file.path, first, settings, needs_labels=True)
    lines = data if settings.columns else rest
    whole = lines if len(data) < _FIRST_BYTES else lines[: lines.rfind(b"\n") + 1]
    num_lines = whole.count(b"\n") + (whole[-1:] not in (b"", b"\n"))
    if not stops or not num_lines:
        return
    try:
        table = columns.read(memoryview(whole), num_lines)
    except (pa.ArrowException, ValueError):
        return  # training names the row
    _check_values(RawChunk(file.path, table, np.arange(num_lines), 1 + (not settings.columns)), settings)


def _check_values(chunk: RawChunk, settings: TableConfig) -> None:
    """Raise `DataError` where a value does not fit its feature."""
    decoder = ChunkDecoder(chunk)
    for feature in settings.of_kind("dense").values():
        decoder.dense(feature)
    for feature in settings.of_kind("sparse").values():
        decoder.bags(feature, (settings.max_bag_size, "data.table.max_bag_size"))
    labels_and_weights(chunk, decoder, settings)
    if decoder.bad:
        raise DataError(str(decoder.bad[min(decoder.bad)]))
