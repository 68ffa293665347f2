"""Opening the source that a configuration describes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from embershard.data.config import DataConfig
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


def kind_of_files(path: Path) -> Literal["criteo", "parquet"]:
    """Return the kind of data that a file or folder has, by its name: Parquet, or else Criteo's text."""
    is_parquet = path.suffix == ".parquet" or (path.is_dir() and any(path.glob("*.parquet")))
    return "parquet" if is_parquet else "criteo"
