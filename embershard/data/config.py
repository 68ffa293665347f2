"""The settings of all sources, and `DataConfig`. Each field's meaning is the string below it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from embershard.data.config_checks import ONE_PATTERN, check_fields, freeze_lists
from embershard.data.sources.table.config import TableConfig
from embershard.errors import ConfigError
from embershard.resume_rules import AsEvalFiles, AsFiles, Free, OfModel, OfTraining

DataKind = Literal["synthetic", "criteo", "avazu", "parquet", "table"]
NUM_CRITEO_DENSE = 13
NUM_CRITEO_SPARSE = 26
NUM_AVAZU_HASHED = 21
_MOST_CHUNKS = 10_000_000  # of generated samples: each takes 50 bytes or so


@dataclass(frozen=True)
class SyntheticConfig:
    """Samples drawn from the popularity statistics of the Criteo Kaggle data set.

    >>> SyntheticConfig(bag_sizes=[2]).bag_sizes
    (2,)
    """

    num_samples: OfTraining[int] = 1_000_000
    """Samples in an epoch, the held-out part included. Every epoch has the same samples."""
    scale: OfModel[float] = 0.01
    """Rows of every table relative to Criteo Kaggle (1.0: 26 tables, 33,762,577 rows); at least 3 each."""
    num_dense: OfModel[int] = 13
    """Dense features of a sample."""
    bag_sizes: OfTraining[tuple[int, ...]] = ()
    """Ids per sample and table: empty = 1 each; one number = the same for all tables; or a number per table.
    The first id of a bag is drawn, the others are a fixed function of it (as MLPerf makes multi-hot data)."""
    drift: OfTraining[float] = 0.0
    """Share of the popularity ranks that belong to another row at the end of an epoch than at its start."""
    locality: OfTraining[float] = 1.0
    """Share of the lookups that follow the published popularity. The others go to all rows alike: 0 is uniform."""
    correlation: OfTraining[float] = 0.0
    """Correlation in [0, 1) of the features' popularity in a sample: with 0 they are drawn independently; the larger,
    the more samples have popular rows only, or rare rows in many features. Popularity of a single feature stays."""
    rarity_logit: OfTraining[float] = 0.0
    """Change of the hidden model's logit per standard deviation of a sample's rarity: with a positive number, samples
    of popular rows are clicked less often. Needs `correlation`."""
    signal: OfTraining[float] = 2.0
    """Standard deviation of the hidden model's logit: the larger, the higher the AUC that can be reached."""
    click_rate: OfTraining[float] = 0.224
    """Share of samples with label 1."""

    def __post_init__(self) -> None:
        freeze_lists(self)
        is_bags = len(self.bag_sizes) in (0, 1, NUM_CRITEO_SPARSE) and all(size >= 1 for size in self.bag_sizes)
        check_fields(
            self,
            "synthetic.",
            num_samples=(self.num_samples >= 1, "at least 1"),
            scale=(0 < self.scale <= 100, "a number in (0, 100]"),
            num_dense=(self.num_dense >= 1, "at least 1"),
            bag_sizes=(is_bags, f"no number, 1 number or {NUM_CRITEO_SPARSE} numbers, each at least 1"),
            drift=(0 <= self.drift <= 1, "a number in [0, 1]"),
            locality=(0 <= self.locality <= 1, "a number in [0, 1]"),
            correlation=(0 <= self.correlation < 1, "a number in [0, 1)"),
            rarity_logit=(
                -5 <= self.rarity_logit <= 5 and (self.rarity_logit == 0 or self.correlation > 0),
                "a number in [-5, 5], and 0 without synthetic.correlation",
            ),
            signal=(0 < self.signal <= 10, "a number in (0, 10]"),
            click_rate=(0 < self.click_rate < 1, "a number in (0, 1)"),
        )


@dataclass(frozen=True)
class CriteoConfig:
    """Criteo TSV: 1 label, 13 integers, 26 hexadecimal categoricals; no header; an empty cell is missing.

    >>> CriteoConfig(num_rows=1000).rows_per_table[:3]
    (1000, 1000, 1000)
    """

    num_rows: OfModel[int | tuple[int, ...]] = 100_000
    """Rows per table, the reserved row 0 included: one number for all 26 tables, or 26 numbers."""
    id_mapping: OfModel[Literal["modulo", "hash"]] = "modulo"
    """An id's row in 1..num_rows-1 follows from its remainder, or from the remainder of a 64-bit mix of it."""
    dense_transform: OfModel[Literal["log1p", "none"]] = "log1p"
    """Change of the integers: log(1 + max(x, 0)), or none. A missing integer is 0 in both cases."""
    files: AsFiles[tuple[str, ...]] = ("day_*", "train*", "part-*", "*.tsv", "*.tsv.gz")
    """Shell patterns of the names of data files, where `path` is a folder."""

    def __post_init__(self) -> None:
        freeze_lists(self)
        num_rows = _row_need(self.rows_per_table, NUM_CRITEO_SPARSE)
        check_fields(self, "criteo.", num_rows=num_rows, files=(len(self.files) > 0, ONE_PATTERN))

    @property
    def rows_per_table(self) -> tuple[int, ...]:
        """Rows of each of the 26 tables."""
        return self.num_rows if isinstance(self.num_rows, tuple) else (self.num_rows,) * NUM_CRITEO_SPARSE


@dataclass(frozen=True)
class AvazuConfig:
    """Avazu CSV: a header, then id, click, hour and 21 categoricals, whose values are hashed.

    >>> AvazuConfig(num_rows=1000).rows_per_table[:3]
    (1000, 1000, 1000)
    """

    num_rows: OfModel[int | tuple[int, ...]] = 100_000
    """Rows per table, the reserved row 0 included: one number for the 21 tables of C1 to C21, or 21 numbers. The tables
    of hour_of_day and weekday have 25 and 8 rows."""
    files: AsFiles[tuple[str, ...]] = ("train*", "part-*")
    """Shell patterns of the names of data files, where `path` is a folder."""

    def __post_init__(self) -> None:
        freeze_lists(self)
        num_rows = _row_need(self.rows_per_table, NUM_AVAZU_HASHED)
        check_fields(self, "avazu.", num_rows=num_rows, files=(len(self.files) > 0, ONE_PATTERN))

    @property
    def rows_per_table(self) -> tuple[int, ...]:
        """Rows of each of the 21 tables of hashed values."""
        return self.num_rows if isinstance(self.num_rows, tuple) else (self.num_rows,) * NUM_AVAZU_HASHED


@dataclass(frozen=True)
class ParquetConfig:
    """Parquet files with declared columns; a list column is a bag of ids.

    >>> ParquetConfig(dense=("age",), sparse=("user", "item"), num_rows=(1000, 50)).id_mapping
    'modulo'
    """

    dense: OfModel[tuple[str, ...]] = ()
    """Names of the numeric columns."""
    sparse: OfModel[tuple[str, ...]] = ()
    """Names of the id columns: integers, or lists of integers."""
    num_rows: OfModel[tuple[int, ...]] = ()
    """Rows of each id column's table, in the order of `sparse`, the reserved row 0 included: at least 2, with
    `id_mapping` "none" 1."""
    label: OfTraining[str] = "label"
    """Name of the column of clicks: 0 or 1."""
    id_mapping: OfModel[Literal["modulo", "hash", "none"]] = "modulo"
    """An id's row in 1..num_rows-1, as for Criteo. "none": ids are rows, and are checked."""
    max_bag_size: OfTraining[int] = 10_000
    """Most ids of a bag. A row with a larger one is not a sample."""
    dense_transform: OfModel[Literal["log1p", "none"]] = "none"
    """Change of the dense columns: log(1 + max(x, 0)), or none."""
    files: AsFiles[tuple[str, ...]] = ("*.parquet",)
    """Shell patterns of the names of data files, where `path` is a folder."""

    def __post_init__(self) -> None:
        freeze_lists(self)
        least = 1 if self.id_mapping == "none" else 2
        needed = f"{len(self.sparse)} numbers, one for each of data.parquet.sparse, each at least {least}"
        is_rows = len(self.num_rows) == len(self.sparse) and all(n >= least for n in self.num_rows)
        check_fields(
            self,
            "parquet.",
            num_rows=(is_rows, needed),
            max_bag_size=(self.max_bag_size >= 1, "at least 1"),
            files=(len(self.files) > 0, ONE_PATTERN),
        )


@dataclass(frozen=True)
class DataConfig:
    """The source of the samples, and the order in which they are read.

    >>> DataConfig(kind="criteo", path="logs/", criteo=CriteoConfig(id_mapping="hash")).eval_fraction
    0.1
    """

    kind: OfModel[DataKind] = "synthetic"
    """The source: generated samples, Criteo TSV files, Avazu CSV files, Parquet files of numbers and ids, or tables:
    CSV, TSV and Parquet files of your own."""
    path: AsFiles[str | None] = None
    """A file, or a folder of files. Needed by all kinds but "synthetic"."""
    eval_path: AsEvalFiles[str | None] = None
    """Held-out file or folder. Without it the tail of every file is held out (`eval_fraction`)."""
    eval_fraction: OfTraining[float] = 0.1
    """Share of every file, at its end, that is held out; with 1, nothing is left to train on. Not used when `eval_path`
    is given."""
    seed: OfTraining[int] = 0
    """Fixes the order of the samples and, for "synthetic", the samples themselves."""
    shuffle: OfTraining[bool] = True
    """Read the training samples in a seeded order, a new one each epoch. False: in the files' order."""
    chunk_rows: OfTraining[int] = 4096
    """Rows of a chunk, which is parsed as a whole and mixed in itself. About a rank's batch is right. The chunks of
    Parquet files are their row groups."""
    shuffle_window: OfTraining[int] = 64
    """Chunks of a window. Chunks are mixed with others of their window."""
    bad_rows: Free[Literal["stop"] | float] = "stop"
    """What happens when a row is not a sample: the run stops, or, up to this share of the rows, another sample takes
    its place (held-out rows are left out). Such rows are listed in the run's bad_rows.jsonl."""
    num_workers: Free[int] = 2
    """Threads of this rank that parse ahead of training. 0: parse when a batch is asked for."""
    prefetch_batches: Free[int] = 8
    """Most batches of this rank that are ready or in work at a time."""
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    """Settings of kind "synthetic"."""
    criteo: CriteoConfig = field(default_factory=CriteoConfig)
    """Settings of kind "criteo"."""
    avazu: AvazuConfig = field(default_factory=AvazuConfig)
    """Settings of kind "avazu"."""
    parquet: ParquetConfig = field(default_factory=ParquetConfig)
    """Settings of kind "parquet"."""
    table: TableConfig = field(default_factory=TableConfig)
    """Settings of kind "table"."""

    def __post_init__(self) -> None:
        reads_files = self.kind != "synthetic"
        is_share = not isinstance(self.bad_rows, str) and 0 < self.bad_rows < 1
        no_effect = 'nothing: kind "synthetic" reads no file (set data.kind to use it)'
        check_fields(
            self,
            "",
            path=(reads_files or self.path is None, no_effect),
            eval_path=(reads_files or self.eval_path is None, no_effect),
            eval_fraction=(0 <= self.eval_fraction <= 1, "a number in [0, 1]"),
            seed=(0 <= self.seed < 2**63, "an integer in [0, 2**63)"),
            chunk_rows=(self.chunk_rows >= 1, "at least 1"),
            bad_rows=(
                self.bad_rows == "stop" or (is_share and reads_files),
                '"stop", or a share in (0, 1), for instance 0.001' if reads_files else f'"stop", or {no_effect}',
            ),
            shuffle_window=(self.shuffle_window >= 1, "at least 1"),
            num_workers=(self.num_workers >= 0, "0 or more"),
            prefetch_batches=(self.prefetch_batches >= 1, "at least 1"),
        )
        most = _MOST_CHUNKS * self.chunk_rows
        if self.synthetic.num_samples > most:
            raise ConfigError(
                f"data.synthetic.num_samples = {self.synthetic.num_samples}; needed at most {most:,}, which are "
                f"{_MOST_CHUNKS:,} chunks of data.chunk_rows = {self.chunk_rows} samples"
            )


def _row_need(rows: tuple[int, ...], num_tables: int) -> tuple[bool, str]:
    """Return whether there are as many row counts as tables, and the words for what is needed."""
    is_met = len(rows) == num_tables and all(n >= 1 for n in rows)
    return is_met, f"one number or {num_tables} numbers, each at least 1"
