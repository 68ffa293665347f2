"""From a configuration to its source, and what the configuration says before any file is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from embershard.data.batch import Schema, SparseFeature
from embershard.data.config import NUM_CRITEO_DENSE, DataConfig
from embershard.data.source import Source
from embershard.data.synthetic import SyntheticSource
from embershard.errors import ConfigError


def open_source(config: DataConfig) -> Source:
    """The source that ``config`` describes.

    Raises:
        ConfigError: a setting that this kind of source needs is missing.
        DataError: files are missing, empty, or not what they should be.
    """
    if config.kind == "synthetic":
        return SyntheticSource(config)
    if config.path is None:
        raise ConfigError(f'data.kind = "{config.kind}" needs data.path: a file, or a folder of files')
    if config.kind == "criteo":
        from embershard.data.criteo import CriteoSource  # its parser takes a while to import

        return CriteoSource(config)
    from embershard.data.parquet import ParquetSource

    return ParquetSource(config)


def declared_schema(config: DataConfig) -> Schema:
    """Return the schema that the settings declare. No file is opened.

    >>> schema = declared_schema(DataConfig(kind="criteo"))
    >>> len(schema.dense), schema.sparse[0].name
    (13, 'C1')
    """
    if config.kind == "synthetic":
        return SyntheticSource(config).schema
    if config.kind == "parquet":
        dense, sparse = config.parquet.dense, zip(config.parquet.sparse, config.parquet.num_rows, strict=True)
        return Schema(tuple(dense), tuple(SparseFeature(*feature) for feature in sparse))
    return Schema(
        tuple(f"I{number}" for number in range(1, NUM_CRITEO_DENSE + 1)),
        tuple(SparseFeature(f"C{number}", rows) for number, rows in enumerate(config.criteo.rows_per_table, start=1)),
    )


def kind_of_files(path: Path) -> Literal["criteo", "parquet"]:
    """Return the kind of data that a file or folder has, by its name: Parquet, or else Criteo's text."""
    is_parquet = path.suffix == ".parquet" or (path.is_dir() and any(path.glob("*.parquet")))
    return "parquet" if is_parquet else "criteo"
