"""A first look at the files of a run's data, before anything is started: in a second, and without torch."""

from __future__ import annotations

from embershard.data.config import DataConfig
from embershard.data.sources.input_file import files_at
from embershard.errors import ConfigError


def need_path(config: DataConfig) -> None:
    """Raise `ConfigError` where a source that reads files has no path."""
    if config.kind != "synthetic" and config.path is None:
        raise ConfigError(f'data.kind = "{config.kind}" needs data.path: a file, or a folder of files')


def check_data(config: DataConfig) -> None:
    """Check that the files are there; of "parquet" and "table" that every column is, with a type and, in the first
    rows, values that its feature takes.

    Raises:
        ConfigError: a setting that this kind of data needs is missing.
        DataError: a file is missing, empty or damaged, a column is missing or of another type, or a value does not fit.
    """
    need_path(config)
    patterns = () if config.kind == "synthetic" else getattr(config, config.kind).files
    files = [
        file
        for path in (config.path, config.eval_path)
        if path is not None
        for file in files_at(path, patterns, config.kind)
    ]
    if config.kind in ("parquet", "table"):
        from embershard.data.sources.table.check import check_table  # it loads pyarrow

        check_table(config, files)
