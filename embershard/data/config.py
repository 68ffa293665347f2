"""The settings of the data package. Each field's meaning is the string below it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from embershard.errors import ConfigError

NUM_CRITEO_DENSE = 13
NUM_CRITEO_SPARSE = 26


def _need(ok: bool, name: str, got: Any, needed: str) -> None:
    if not ok:
        raise ConfigError(f"data.{name} = {got!r}; needed {needed}")


def _as_tuple(owner: object, *names: str) -> None:
    """Turn lists (what TOML gives) into tuples, so that a frozen config is hashable and cannot be edited."""
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, list):
            object.__setattr__(owner, name, tuple(value))


@dataclass(frozen=True)
class SyntheticConfig:
    """Samples drawn from the popularity statistics of the Criteo Kaggle data set."""

    num_samples: int = 1_000_000
    """Samples in an epoch, the held-out part included. Every epoch has the same samples."""
    scale: float = 0.01
    """Rows of every table relative to Criteo Kaggle (1.0: 26 tables, 33,762,577 rows); at least 3 each."""
    num_dense: int = 13
    """Dense features of a sample."""
    bag_sizes: tuple[int, ...] = ()
    """Ids per sample and table: empty = 1 each; one number = the same for all tables; or a number per table.
    The first id of a bag is drawn, the others are a fixed function of it (as MLPerf makes multi-hot data)."""
    drift: float = 0.0
    """Share of the popularity ranks that belong to another row at the end of an epoch than at its start."""
    signal: float = 2.0
    """Standard deviation of the hidden model's logit: the larger, the higher the AUC that can be reached."""
    click_rate: float = 0.224
    """Share of samples with label 1."""

    def __post_init__(self) -> None:
        _as_tuple(self, "bag_sizes")
        _need(self.num_samples >= 1, "synthetic.num_samples", self.num_samples, "at least 1")
        _need(0 < self.scale <= 100, "synthetic.scale", self.scale, "a number in (0, 100]")
        _need(self.num_dense >= 1, "synthetic.num_dense", self.num_dense, "at least 1")
        _need(
            len(self.bag_sizes) in (0, 1, NUM_CRITEO_SPARSE) and all(size >= 1 for size in self.bag_sizes),
            "synthetic.bag_sizes",
            self.bag_sizes,
            f"no number, 1 number or {NUM_CRITEO_SPARSE} numbers, each at least 1",
        )
        _need(0 <= self.drift <= 1, "synthetic.drift", self.drift, "a number in [0, 1]")
        _need(0 < self.signal <= 10, "synthetic.signal", self.signal, "a number in (0, 10]")
        _need(0 < self.click_rate < 1, "synthetic.click_rate", self.click_rate, "a number in (0, 1)")


@dataclass(frozen=True)
class CriteoConfig:
    """Criteo TSV: 1 label, 13 integers, 26 hexadecimal categoricals; no header; an empty cell is missing."""

    num_rows: int | tuple[int, ...] = 100_000
    """Rows per table, the reserved row 0 included: one number for all 26 tables, or 26 numbers."""
    id_mapping: Literal["modulo", "hash"] = "modulo"
    """How an id becomes a row in 1..num_rows-1: its remainder, or the remainder of a 64-bit mix of it."""
    dense_transform: Literal["log1p", "none"] = "log1p"
    """What is done to the integers: log(1 + max(x, 0)), or nothing. A missing one is 0 in both cases."""
    files: tuple[str, ...] = ("day_*", "train*", "part-*", "*.tsv", "*.tsv.gz")
    """Names that count as data files when ``path`` is a folder (shell patterns)."""

    def __post_init__(self) -> None:
        _as_tuple(self, "num_rows", "files")
        rows = self.num_rows if isinstance(self.num_rows, tuple) else (self.num_rows,) * NUM_CRITEO_SPARSE
        _need(
            len(rows) == NUM_CRITEO_SPARSE and all(n >= 2 for n in rows),
            "criteo.num_rows",
            self.num_rows,
            f"one number or {NUM_CRITEO_SPARSE} numbers, each at least 2 (row 0 is reserved for missing)",
        )
        _need(self.id_mapping in ("modulo", "hash"), "criteo.id_mapping", self.id_mapping, '"modulo" or "hash"')
        _need(
            self.dense_transform in ("log1p", "none"),
            "criteo.dense_transform",
            self.dense_transform,
            '"log1p" or "none"',
        )
        _need(len(self.files) > 0, "criteo.files", self.files, 'at least one pattern ("*" takes every file)')

    @property
    def rows_per_table(self) -> tuple[int, ...]:
        """Rows of each of the 26 tables."""
        return self.num_rows if isinstance(self.num_rows, tuple) else (self.num_rows,) * NUM_CRITEO_SPARSE


@dataclass(frozen=True)
class ParquetConfig:
    """Parquet files with declared columns; a list column is a bag of ids."""

    dense: tuple[str, ...] = ()
    """Names of the numeric columns."""
    sparse: tuple[str, ...] = ()
    """Names of the id columns: integers, or lists of integers."""
    num_rows: tuple[int, ...] = ()
    """Rows of each id column's table, in the order of ``sparse``, the reserved row 0 included."""
    label: str = "label"
    """Name of the column of clicks: 0 or 1."""
    id_mapping: Literal["modulo", "hash", "none"] = "modulo"
    """How an id becomes a row in 1..num_rows-1, as for Criteo. "none": ids are rows, and are checked."""
    dense_transform: Literal["log1p", "none"] = "none"
    """What is done to the dense columns: log(1 + max(x, 0)), or nothing."""
    files: tuple[str, ...] = ("*.parquet",)
    """Names that count as data files when ``path`` is a folder (shell patterns)."""

    def __post_init__(self) -> None:
        _as_tuple(self, "dense", "sparse", "num_rows", "files")
        _need(
            len(self.num_rows) == len(self.sparse) and all(n >= 2 for n in self.num_rows),
            "parquet.num_rows",
            self.num_rows,
            f"{len(self.sparse)} numbers, one for each of data.parquet.sparse, each at least 2",
        )
        mappings = ("modulo", "hash", "none")
        _need(self.id_mapping in mappings, "parquet.id_mapping", self.id_mapping, f"one of {mappings}")
        transforms = ("log1p", "none")
        _need(
            self.dense_transform in transforms,
            "parquet.dense_transform",
            self.dense_transform,
            f"one of {transforms}",
        )
        _need(len(self.files) > 0, "parquet.files", self.files, 'at least one pattern ("*" takes every file)')


@dataclass(frozen=True)
class DataConfig:
    """Where the samples come from, and in which order they are read."""

    kind: Literal["synthetic", "criteo", "parquet"] = "synthetic"
    """The source: generated samples, Criteo TSV files, or Parquet files."""
    path: str | None = None
    """A file, or a folder of files. Needed by "criteo" and "parquet"."""
    eval_path: str | None = None
    """Held-out file or folder. Without it the tail of every file is held out (``eval_fraction``)."""
    eval_fraction: float = 0.1
    """Share of every file, at its end, that is held out. Not used when ``eval_path`` is given."""
    seed: int = 0
    """Fixes the order of the samples and, for "synthetic", the samples themselves."""
    shuffle: bool = True
    """Read the training samples in a seeded order, another one each epoch. False: in the files' order."""
    chunk_rows: int = 4096
    """Rows that are parsed, and mixed with each other, together. About a rank's batch is right. Parquet files
    bring their own chunks: their row groups."""
    shuffle_window: int = 64
    """Chunks among which the order of chunks is mixed."""
    num_workers: int = 2
    """Threads of this rank that parse ahead of training. 0: parse when a batch is asked for."""
    prefetch_batches: int = 8
    """Batches of this rank that may lie ready, or be in work, at a time."""
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    """Settings of kind "synthetic"."""
    criteo: CriteoConfig = field(default_factory=CriteoConfig)
    """Settings of kind "criteo"."""
    parquet: ParquetConfig = field(default_factory=ParquetConfig)
    """Settings of kind "parquet"."""

    def __post_init__(self) -> None:
        kinds = ("synthetic", "criteo", "parquet")
        _need(self.kind in kinds, "kind", self.kind, f"one of {kinds}")
        if self.kind == "synthetic":
            no_effect = 'nothing: kind "synthetic" reads no file (set data.kind to use it)'
            _need(self.path is None, "path", self.path, no_effect)
            _need(self.eval_path is None, "eval_path", self.eval_path, no_effect)
        _need(
            0 <= self.eval_fraction < 1 and math.isfinite(self.eval_fraction),
            "eval_fraction",
            self.eval_fraction,
            "a number in [0, 1)",
        )
        _need(0 <= self.seed < 2**63, "seed", self.seed, "an integer in [0, 2**63)")
        _need(self.chunk_rows >= 1, "chunk_rows", self.chunk_rows, "at least 1")
        _need(self.shuffle_window >= 1, "shuffle_window", self.shuffle_window, "at least 1")
        _need(self.num_workers >= 0, "num_workers", self.num_workers, "0 or more")
        _need(self.prefetch_batches >= 1, "prefetch_batches", self.prefetch_batches, "at least 1")
