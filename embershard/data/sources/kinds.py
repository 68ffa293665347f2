"""The kinds of data: the only place that maps `data.kind` to a source."""

from __future__ import annotations

from pathlib import Path

from embershard.data.config import DataConfig, DataKind
from embershard.data.schema import Schema
from embershard.data.sources.avazu import AvazuSource
from embershard.data.sources.check import need_path
from embershard.data.sources.criteo import CriteoSource
from embershard.data.sources.source import Source
from embershard.data.sources.synthetic import SyntheticSource
from embershard.data.sources.table.source import TableSource

_SOURCES: dict[DataKind, type[SyntheticSource] | type[CriteoSource] | type[AvazuSource] | type[TableSource]] = {
    "synthetic": SyntheticSource,
    "criteo": CriteoSource,
    "avazu": AvazuSource,
    "parquet": TableSource,
    "table": TableSource,
}


def open_source(config: DataConfig, *, needs_labels: bool = True) -> Source:
    """Open the source that `config` describes.

    Args:
        needs_labels: False: labels are NaN where files of "parquet" or "table" have no column of labels.

    >>> open_source(DataConfig(kind="synthetic")).chunks("train").num_samples
    900000

    Raises:
        ConfigError: a setting that this kind of source needs is missing.
        DataError: files are missing, empty, or damaged.
    """
    need_path(config)
    if config.kind in ("parquet", "table"):
        return TableSource(config, needs_labels=needs_labels)
    return _SOURCES[config.kind](config)


def schema_of(config: DataConfig) -> Schema:
    """Return the schema of a config's samples from the settings alone, without opening a file.

    >>> schema_of(DataConfig(kind="criteo")).num_dense
    13

    Raises:
        ConfigError: the settings name no sparse column, or a column twice.
    """
    return _SOURCES[config.kind].schema_of(config)


def kind_of_files(path: Path) -> DataKind:
    """Guess the kind of data in a file or folder from names.

    >>> kind_of_files(Path("clicks.parquet")), kind_of_files(Path("train.csv"))
    ('parquet', 'avazu')
    """
    names = [each.name for each in path.iterdir()] if path.is_dir() else [path.name]
    if any(name.endswith(".parquet") for name in names):
        return "parquet"
    return "avazu" if any(name.endswith((".csv", ".csv.gz")) for name in names) else "criteo"
