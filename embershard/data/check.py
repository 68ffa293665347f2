"""A first look at the files of a run's data, before anything is started: in a second, and without torch."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from embershard.data.config import DataConfig
from embershard.data.input_file import InputFile, files_at
from embershard.data.table.config import TableConfig, settings_of
from embershard.data.table.decode import ChunkDecoder
from embershard.data.table.parquet_files import are_parquet, parquet_schema
from embershard.data.table.raw import RawChunk, check_columns, check_types
from embershard.data.table.text_columns import columns_of, first_bytes
from embershard.errors import ConfigError, DataError

_FIRST_BYTES = 1 << 18


def need_path(config: DataConfig) -> None:
    """Raise `ConfigError` where a source that reads files has no path."""
    if config.kind != "synthetic" and config.path is None:
        raise ConfigError(f'data.kind = "{config.kind}" needs data.path: a file, or a folder of files')


def check_data(config: DataConfig) -> None:
    """Check that the files are there; of "parquet" and "table" that every column is, and has the type that its feature
    needs. Of a text file, the first lines are read.

    Raises:
        ConfigError: a setting that this kind of data needs is missing.
        DataError: a file is missing, empty or damaged, or a column is missing or of another type.
    """
    need_path(config)
    patterns = () if config.kind == "synthetic" else getattr(config, config.kind).files
    files = [
        file
        for path in (config.path, config.eval_path)
        if path is not None
        for file in files_at(path, patterns, config.kind)
    ]
    if config.kind not in ("parquet", "table"):
        return
    settings = settings_of(config)
    if config.kind == "parquet" or are_parquet(files):
        for file in files:
            schema, _ = parquet_schema(file.path)
            check_columns(file.path, schema.names, settings, needs_labels=True)
            check_types(file.path, schema, settings)
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
    decoder = ChunkDecoder(RawChunk(file.path, table, np.arange(num_lines), 1 + (not settings.columns)))
    for feature in settings.of_kind("dense").values():
        decoder.numbers(str(feature.column))
    for feature in settings.of_kind("sparse").values():
        decoder.bags(feature, (settings.max_bag_size, "data.table.max_bag_size"))
    decoder.labels(settings)
    if decoder.bad:
        raise DataError(str(decoder.bad[min(decoder.bad)]))
