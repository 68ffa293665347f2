"""`DataConfig`, and the settings of each kind of data. Each field's meaning is the string below it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from embershard.data.config_fields import NEEDED_FORMAT, check_fields, freeze_lists, is_time_format
from embershard.data.label_needs import label_needs
from embershard.data.schema import Pooling, Target, Task
from embershard.data.synthetic_config import NUM_CRITEO_SPARSE, SyntheticConfig
from embershard.data.text_form import TextForm
from embershard.data.time_config import WITH_NAMES, TimeConfig
from embershard.errors import ConfigError
from embershard.settings.resume_rules import AsEvalFiles, AsFiles, Free, OfModel, OfTraining

DataKind = Literal["synthetic", "criteo", "avazu", "parquet", "table"]
SplitKind = Literal["tail", "random", "hash", "time", "last"]
IdMapping = Literal["text", "hash", "modulo", "none", "hour", "weekday", "ids", "text_ids"]
EVAL_FRACTION = 0.1  # by default
NUM_CRITEO_DENSE = 13
NUM_AVAZU_HASHED = 21
_MOST_CHUNKS = 10_000_000  # of generated samples: each takes 50 bytes or so
#: The dense feature of tables that have none, which models need: 1 in every sample. No column is called so.
CONSTANT = "\x00constant"
#: Rows of the tables of hours and of weekdays: row 0 is that of a missing time.
TIME_ROWS = {"hour": 25, "weekday": 8}
#: Mappings of features whose table takes any id of 64 bits.
ID_MAPPINGS = ("ids", "text_ids")
_LEAST_QUANTILES = 2
_TEXTS = ("csv", "tsv", "txt", "json", "jsonl", "ndjson", "inter")
_COMPRESSED = ("[gxz]*", "bz2")
#: Names of data files in a folder: by their ending, and as Hadoop, Spark, Hive, `split` and TensorFlow name parts.
DATA_FILES = (
    *("*.parquet", "*.pq", "*.parq", "*.tab", "*.psv"),
    *(f"*.{kind}" for kind in _TEXTS),
    *(f"*.{kind}.{end}" for kind in _TEXTS for end in _COMPRESSED),
    *("part-*[0-9]", "00[0-9][0-9][0-9][0-9]_[0-9]*", "x[a-z][a-z]", "*-[0-9]*-of-[0-9]*"),
    *(f"part-*[0-9].{end}" for end in _COMPRESSED),
)
_ONE_PATTERN = 'at least one pattern ("*" takes every file)'


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
        check_fields(self, "criteo.", num_rows=num_rows, files=(len(self.files) > 0, _ONE_PATTERN))

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
        check_fields(self, "avazu.", num_rows=num_rows, files=(len(self.files) > 0, _ONE_PATTERN))

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
    files: AsFiles[tuple[str, ...]] = ("*.parquet", "*.pq")
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
            files=(len(self.files) > 0, _ONE_PATTERN),
        )

    def as_table(self) -> TableConfig:
        """Return the same columns as settings of kind "table".

        Raises:
            ConfigError: a column is named twice.
        """
        dense = {name: TableFeature("dense", scale=self.dense_transform) for name in self.dense}
        pairs = zip(self.sparse, self.num_rows, strict=True)
        sparse = {name: TableFeature("sparse", num_rows=rows, mapping=self.id_mapping) for name, rows in pairs}
        names = [*self.dense, *self.sparse]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"the schema has columns twice: {', '.join(twice)}; every name must be unique")
        return TableConfig({**dense, **sparse}, self.label, max_bag_size=self.max_bag_size, files=self.files)


@dataclass(frozen=True)
class TableFeature:
    """One feature of a sample, and the column that it is read from.

    >>> TableFeature(kind="sparse", num_rows=1000).mapping
    'text'
    """

    kind: Literal["dense", "sparse"]
    """A number, or a category (or several: a bag) that looks up rows of an embedding table."""
    column: str | None = None
    """Name of the column. Default: the feature's name. Several features may read one column."""
    scale: Literal["none", "log1p", "standardize", "quantile", "days"] = "none"
    """Of a dense feature: log(1 + max(x, 0)); (x - mean) / std; x's place among `quantiles`, in [0, 1]; or of a time
    the days since 1970, standardized by mean and std."""
    mean: float | None = None
    """For scale = "standardize" and "days"; with std, "log1p" and "quantile" are standardized, too. `embershard data
    inspect` finds it."""
    std: float | None = None
    """The same; above 0."""
    quantiles: tuple[float, ...] = ()
    """For scale = "quantile": rising numbers. The first becomes 0, the last 1."""
    num_rows: int | None = None
    """Rows of a sparse feature's table, the reserved row 0 included: at least 2, with mapping "none" 1. With "ids" and
    "text_ids" the table's capacity (docs/ids.md). Not for "hour" and "weekday"."""
    mapping: IdMapping = "text"
    """Row of a sparse value. "text": by the 64-bit hash of the value as text. Of integers: "hash" by a 64-bit mix,
    "modulo" by the remainder, "none": they are rows. Of a time, in UTC: "hour" and "weekday". Tables that take any id:
    "ids" takes integers as they are, "text_ids" the 64-bit hash of text."""
    table: str | None = None
    """Name of a sparse feature's embedding table: features with the same name share one, and need the same `num_rows`,
    `mapping` and `pooling`. Default: the feature's name."""
    pooling: Pooling = "sum"
    """What the rows of a sparse feature's bag give: their "sum", or their "mean"."""
    separator: str | None = None
    """Between the values of a cell of text: the cell is a bag of them then, in their order. "[,]": a list in brackets,
    as JSON and Python write it."""
    stripped: bool = False
    """Blanks around a text are no part of it, nor around the texts between separators; blanks alone are a missing
    value. Around numbers and times they never are."""

    def __post_init__(self) -> None:
        freeze_lists(self)

    def check(self, name: str) -> None:
        """Raise `ConfigError` where a setting of the feature `name` is missing, wrong, or has no effect."""
        is_sparse, at = self.kind == "sparse", f"table.features.{name}."
        is_time = self.mapping in TIME_ROWS
        rising = all(a < b for a, b in zip(self.quantiles, self.quantiles[1:], strict=False))
        needs_rows = is_sparse and not is_time
        least_rows = 1 if self.mapping == "none" else 2  # with one, all values would be the row of missing ones
        found_by = "`embershard data inspect` finds it"

        needs_std, has_std = self.scale in ("standardize", "days"), self.std is not None
        may_have = needs_std or self.scale in ("log1p", "quantile")
        only = (
            f'a number where scale = "standardize" or "days" ({found_by}); mean and std, or neither, where it is '
            '"log1p" or "quantile"; and nothing otherwise'
        )
        no_effect = f"nothing: it has no effect on a {self.kind} feature"
        check_fields(
            self,
            at,
            column=(self.column != "", "the name of a column"),
            scale=(not is_sparse or self.scale == "none", no_effect),
            mean=((self.mean is not None) == (needs_std or (may_have and has_std)), only),
            std=((has_std or not needs_std) and (self.std is None or (may_have and self.std > 0)), f"{only}, above 0"),
            quantiles=(
                (len(self.quantiles) >= _LEAST_QUANTILES and rising)
                if self.scale == "quantile"
                else not self.quantiles,
                f'at least {_LEAST_QUANTILES} rising numbers where scale = "quantile" (`embershard data inspect` finds '
                "them), and none otherwise",
            ),
            num_rows=(
                (self.num_rows is not None and self.num_rows >= least_rows) if needs_rows else self.num_rows is None,
                f"at least {least_rows}"
                if needs_rows
                else f"nothing: a {'time' if is_sparse else 'dense feature'} needs none",
            ),
            mapping=(is_sparse or self.mapping == "text", no_effect),
            table=(is_sparse or self.table is None, no_effect),
            pooling=(is_sparse or self.pooling == "sum", no_effect),
            separator=(
                self.separator is None or (is_sparse and not is_time and self.separator != ""),
                "nothing, or the text between the values of a cell of a sparse feature that is no time",
            ),
            stripped=(
                not self.stripped or (is_sparse and self.mapping in ("text", "text_ids")),
                "false: it has an effect on texts only",
            ),
        )

    @property
    def table_rows(self) -> int:
        """Rows of a sparse feature's table."""
        return TIME_ROWS.get(self.mapping) or self.num_rows or 0

    @property
    def takes_ids(self) -> bool:
        """True if its table takes any id of 64 bits."""
        return self.mapping in ID_MAPPINGS


@dataclass(frozen=True)
class TableConfig(TextForm):
    """CSV, TSV, JSON lines and Parquet files with declared columns.

    >>> TableConfig(features={"user": TableFeature("sparse", num_rows=1000)}).label
    'label'
    """

    features: OfModel[dict[str, TableFeature]] = field(default_factory=dict, hash=False)
    """The features of a sample by name, in order: a section per feature."""
    label: OfTraining[str | tuple[str, ...]] = "label"
    """Name of the column of labels; or names: the model then has an output for each. 0 or 1; any number with
    `label_at_least` or task = "regression"."""
    task: OfModel[Task | tuple[Task, ...]] = "binary"
    """"binary": scores are probabilities of label 1. "regression": scores are numbers, near the labels in the mean of
    the squared distance. "multiclass": labels are among `classes`; there is a score for each class, and their sum is 1.
    Of several labels, one for all or one each."""
    classes: OfModel[dict[str, tuple[float, ...]]] = field(default_factory=dict, hash=False)
    """Of each label with task = "multiclass", the numbers that it can be. A class has a label of its own, `stars=4`."""
    label_at_least: OfTraining[float | tuple[float, ...] | None] = None
    """A binary label is 1 where the column's number is at least this, else 0; of several, one number for all or a
    number each. Default: the columns have 0 and 1."""
    label_is: OfTraining[str | None] = None
    """A binary label is 1 where the column's cell is this text, else 0: "yes". Of one label only."""
    label_mean: OfTraining[float | tuple[float, ...] | None] = None
    """With task = "regression": where the model's outputs start, about the mean label; of several such labels, a number
    each. `embershard data inspect` finds it. Default: 0."""
    label_masks: OfTraining[tuple[str, ...]] = ()
    """Of several labels, for each the label before it, or column of numbers, that is 0 where a sample has not this
    label, as ["", "click"]; "": all samples have it. It then trains nothing there, and counts in no figure."""
    missing_labels: OfTraining[Literal["bad_row", "masked"]] = "bad_row"
    """Of several labels: what a missing cell of one is. "bad_row": no sample; "masked": a sample without it."""
    label_weights: OfTraining[tuple[float, ...]] = ()
    """Of several labels: the factor of each label's loss, above 0. Default: 1 each."""
    weight: OfTraining[str | None] = None
    """Column of numbers of at least 0: factor of a sample's loss, and its share of held-out metrics. Default: 1."""
    format: OfTraining[dict[str, str]] = field(default_factory=dict, hash=False)
    """How columns of times are written, by column, if not as 2024-12-31 23:59:59 nor as seconds since 1970: "ms", "us"
    or "ns" since 1970, or a format of strptime, for instance "%d.%m.%Y"."""
    decimal: OfTraining[dict[str, Literal[".", ","]]] = field(default_factory=dict, hash=False)
    """The decimal mark of numbers in text, by column, where they are not plain: "," reads 1.250,50 and 12,50 €, "."
    reads 1,250.50 and $12.50."""
    max_bag_size: OfTraining[int] = 10_000
    """Most values of a bag. A row with a larger one is not a sample."""
    files: AsFiles[tuple[str, ...]] = DATA_FILES
    """Shell patterns of the names of data files, where `path` is a folder; letters may be large or small."""

    def __post_init__(self) -> None:
        freeze_lists(self)
        check_fields(
            self,
            "table.",
            **label_needs(
                self.labels,
                task=self.task,
                classes=self.classes,
                least=self.label_at_least,
                mean=self.label_mean,
                weights=self.label_weights,
                masks=self.label_masks,
                missing=self.missing_labels,
            ),
            label_is=(
                self.label_is is None
                or (self.tasks == ("binary",) and self.label_at_least is None and self.label_is != ""),
                'nothing, or a text, with one label, task = "binary" and no label_at_least',
            ),
            weight=(self.weight != "", "the name of a column"),
            format=(all(map(is_time_format, self.format.values())), NEEDED_FORMAT),
            decimal=(set(self.decimal.values()) <= {".", ","}, 'for each column "." or ","'),
            **self.text_needs(),
            max_bag_size=(self.max_bag_size >= 1, "at least 1"),
            files=(len(self.files) > 0, _ONE_PATTERN),
        )
        mappings: dict[str, tuple[str, str]] = {}
        for name, feature in self.features.items():
            feature.check(name)
            if feature.kind == "sparse":
                other, mapping = mappings.setdefault(feature.table or name, (name, feature.mapping))
                if mapping != feature.mapping:
                    raise ConfigError(
                        f"data.table.features.{name}: shares a table with {other!r}, whose mapping is {mapping!r}, and "
                        f"has mapping {feature.mapping!r}: one value would have two rows. Give both the same."
                    )

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the columns of labels."""
        return (self.label,) if isinstance(self.label, str) else self.label

    @property
    def judging_columns(self) -> list[str]:
        """Columns of labels, their masks and the samples' weights, each once."""
        return list(dict.fromkeys([*self.labels, *filter(None, (*self.label_masks, self.weight))]))

    @property
    def target(self) -> Target:
        """What is predicted of a sample."""
        mean = self.label_mean
        means = mean if isinstance(mean, tuple) else () if mean is None else (mean,)
        may_be_missing = any(self.label_masks) or self.missing_labels == "masked"
        named = Target(self.labels, self.task, self.label_weights, self.weight, means, may_be_missing)
        return named.with_classes(self.classes)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The task of each column of labels."""
        return self.task if isinstance(self.task, tuple) else (self.task,) * len(self.labels)

    def thresholds(self) -> tuple[float | None, ...]:
        """Return from which number on each label is 1; None: it has 0 and 1, or is no binary one."""
        least, tasks = self.label_at_least, self.tasks
        each = iter(least if isinstance(least, tuple) else (least,) * len(tasks))
        return tuple(next(each) if task == "binary" else None for task in tasks)

    def of_kind(self, kind: Literal["dense", "sparse"]) -> dict[str, TableFeature]:
        """Return the features of a kind by name, in order, with their columns."""
        found = {name: feature for name, feature in self.features.items() if feature.kind == kind}
        return {name: replace(feature, column=feature.column or name) for name, feature in found.items()}


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
    """Held-out (validation) file or folder. Without it samples of `path` are held out (`split`, `eval_fraction`)."""
    eval_fraction: OfTraining[float] = EVAL_FRACTION
    """Share of the samples that is held out for validation; with 1, nothing is left to train on. Not used when
    `eval_path` is given. `split` says which samples; with "last", other numbers than 0 and 1 have no effect."""
    split: OfTraining[SplitKind] = "tail"
    """Which samples are held out. "tail": the end of every file. "random": samples by chance. Of kinds "table" and
    "parquet" also "hash": all samples of some values of `split_column`; "time": the latest ones by `split_time`;
    "last": the last sample of each value of `split_column`, by `split_time`, or without it in the files' order."""
    split_column: OfTraining[str | None] = None
    """With `split` "hash" and "last": name of the column whose values, for instance users, decide."""
    split_time: OfTraining[str | None] = None
    """With `split` "time" and "last": name of a column of times, seconds since 1970, or texts that are times."""
    split_seed: OfTraining[int] = 0
    """With `split` "random" and "hash": which samples, or values, chance takes. `seed` has no effect on that: runs that
    differ in it have the same held-out samples."""
    time: TimeConfig = field(default_factory=TimeConfig)
    """Training in time order."""
    follow: OfTraining[bool] = False
    """The folder `path` grows: its new files train as they come, in turn and in time order (docs/data.md)."""
    idle_seconds: Free[float | None] = None
    """With `follow`: the run ends, as if the data ended, when no new file came for so long. Default: it waits on."""
    bad_files: Free[Literal["stop", "skip"]] = "stop"
    """With `follow`, at a file that cannot be read or has too many bad rows: stop there, or leave it out."""
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
    deal: Free[Literal["order", "cost"]] = "order"
    """Which samples of a global batch each rank trains: a slice of them in their order; or as many, chosen so that they
    cost about the same on all ranks (docs/data.md)."""
    deal_cost: Free[tuple[str, int, int] | None] = None
    """With `deal` "cost": [feature, a, b]: a sample with T ids of it costs a T + b T^2. Default: by the history's."""
    deal_ranks: Free[int | None] = None
    """With `deal` "cost": so many neighbours share their slices, of which each then reads all. Default: all ranks."""
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
        deals, undealt = self.deal == "cost", 'nothing: it has no effect without data.deal = "cost"'
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
            deal_cost=(deals or self.deal_cost is None, undealt),
            deal_ranks=(deals or self.deal_ranks is None, undealt),
        )
        self._check_split()
        self.time.check_with(self.kind, self.split, self.eval_fraction, EVAL_FRACTION)
        self.time.check_following(self.follow, self.idle_seconds, self.bad_files)
        if self.synthetic.num_samples > (most := _MOST_CHUNKS * self.chunk_rows):
            raise ConfigError(
                f"data.synthetic.num_samples = {self.synthetic.num_samples}; needed at most {most:,}, which are "
                f"{_MOST_CHUNKS:,} chunks of data.chunk_rows = {self.chunk_rows} samples"
            )

    def _check_split(self) -> None:
        split, share = self.split, self.eval_fraction
        is_usual, has_names = split in ("tail", "random"), self.has_names
        by_value, by_time, by_chance = split in ("hash", "last"), split in ("time", "last"), split in ("random", "hash")
        no_effect, a_name = f'it has no effect with data.split = "{split}"', "the name of a column"
        check_fields(
            self,
            "",
            split=(
                split == "tail" or (self.eval_path is None and (is_usual or has_names)),
                f'"tail" or "random": data of kind "{self.kind}" have no columns with names'
                if self.eval_path is None
                else '"tail": data.eval_path says what is held out',
            ),
            eval_fraction=(
                split != "last" or share in (0, EVAL_FRACTION, 1),
                f'{EVAL_FRACTION}, 0 or 1 with data.split = "last": one sample of each value is held out',
            ),
            split_column=(
                bool(self.split_column) if by_value else self.split_column is None,
                a_name if by_value else f"nothing: {no_effect}",
            ),
            split_time=(
                bool(self.split_time) or (split == "last" and self.split_time is None)
                if by_time
                else self.split_time is None,
                a_name if by_time else f"nothing: {no_effect}",
            ),
            split_seed=(
                0 <= self.split_seed < 2**63 if by_chance else self.split_seed == 0,
                "an integer in [0, 2**63)" if by_chance else f"0: {no_effect}",
            ),
        )

    @property
    def has_names(self) -> bool:
        """True if columns of the files have names."""
        return self.kind in WITH_NAMES

    @property
    def has_ids(self) -> bool:
        """True if a feature's table takes any id of 64 bits."""
        if self.kind == "synthetic":
            return self.synthetic.id_rows is not None
        return self.kind == "table" and any(feature.takes_ids for feature in self.table.features.values())

    @property
    def is_in_time_order(self) -> bool:
        """True if samples train window by window."""
        return self.time.column is not None and self.eval_fraction != 1

    @property
    def comes_in_turn(self) -> bool:
        """True if files are read in the natural order of their names, and a row may be late."""
        return self.is_in_time_order and (self.follow or self.time.files == "in_turn")

    def unfollowed(self) -> DataConfig:
        """Return settings that read what a folder that is followed has now."""
        time = replace(self.time, files="in_turn" if self.follow else self.time.files)
        return replace(self, time=time, follow=False, idle_seconds=None, bad_files="stop")

    @property
    def held_out_share(self) -> float:
        """Share of the samples at `path` that is held out."""
        return 0.0 if self.is_in_time_order or self.eval_path is not None else self.eval_fraction

    @property
    def why_nothing(self) -> str:
        """Why nothing is held out to the end, where nothing is."""
        return "data.time.column is set" if self.is_in_time_order else "data.eval_fraction is 0"

    @property
    def file_patterns(self) -> tuple[str, ...]:
        """Shell patterns of the names of data files; none for generated samples."""
        return () if self.kind == "synthetic" else getattr(self, self.kind).files


def columns_of_files(config: DataConfig) -> TableConfig:
    """Return the declared columns of the files of kind "parquet" or "table".

    Raises:
        ConfigError: there is no sparse feature, or a column twice.
    """
    if config.kind == "parquet":
        if not config.parquet.sparse:
            raise ConfigError('data.kind = "parquet" needs data.parquet.sparse and .num_rows: the id columns')
        return config.parquet.as_table()
    if not config.table.of_kind("sparse"):
        raise ConfigError(
            'data.kind = "table" needs data.table.features, one of them with kind = "sparse". '
            "`embershard data inspect FILE -o run.toml` writes them"
        )
    return config.table


def _row_need(rows: tuple[int, ...], num_tables: int) -> tuple[bool, str]:
    """Return whether there are as many row counts as tables, and the words for what is needed."""
    is_met = len(rows) == num_tables and all(n >= 1 for n in rows)
    return is_met, f"one number or {num_tables} numbers, each at least 1"
