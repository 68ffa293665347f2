"""A first look at the files of a run's data, before anything is started: in a second, and without torch."""

from __future__ import annotations

from embershard.data.config import DataConfig
from embershard.data.sources.input_file import list_files, need_path


def check_data(config: DataConfig) -> None:
    """Check that the files are there; of "parquet" and "table" that every column is, with a type and, in the first
    rows, values that its feature takes.

    Raises:
        ConfigError: a setting that this kind of data needs is missing.
        DataError: a file is missing, empty or damaged, a column is missing or of another type, or a value does not fit.
    """
    need_path(config)
    files, _ = list_files(config)
    if config.kind in ("parquet", "table"):
        from embershard.data.sources.table.source import check_table  # it loads pyarrow

        check_table(config, files)
