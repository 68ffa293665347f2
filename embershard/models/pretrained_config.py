"""Settings of rows that a table begins with, from a file of vectors."""

from __future__ import annotations

from dataclasses import dataclass

from embershard.errors import ConfigError
from embershard.settings.resume_rules import OfTraining

_ENDINGS = (".parquet", ".npz")


@dataclass(frozen=True)
class PretrainedTable:
    """A file of vectors, one of each value.

    >>> PretrainedTable("items.parquet", values="item_id").vectors
    'embedding'

    Raises:
        ConfigError: the file is of another kind, or both of `values` and `rows` are given, or none.
    """

    file: OfTraining[str]
    """A Parquet file, or an npz of numpy: a column, or an array, of values or rows, and one of vectors."""

    values: OfTraining[str | None] = None
    """Name of the column of values, as the data have them in the feature's column: they become rows in the same way."""

    rows: OfTraining[str | None] = None
    """In place of `values`: name of the column of row numbers, as exports of tables have it ("row")."""

    vectors: OfTraining[str] = "embedding"
    """Name of the column of vectors: lists of as many numbers as the table's rows have, or an array [N, dim]."""

    def __post_init__(self) -> None:
        if not self.file.endswith(_ENDINGS):
            raise ConfigError(f"file: got {self.file!r}, needed a name that ends with {' or '.join(_ENDINGS)}.")
        if (self.values is None) == (self.rows is None):
            got = "both" if self.values is not None else "neither"
            raise ConfigError(f"values and rows: got {got}; needed the name of one column that says whose vectors.")
