"""The settings of `data.kind = "table"`: which columns a sample has, and how their values are read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from embershard.data.config_checks import ONE_PATTERN, check_fields, freeze_lists
from embershard.data.schema import Pooling, Schema, SparseFeature, Target, Task
from embershard.errors import ConfigError
from embershard.resume_rules import AsFiles, OfModel, OfTraining

if TYPE_CHECKING:
    from embershard.data.config import DataConfig, ParquetConfig

#: The dense feature of tables that have none, which models need: 1 in every sample.
CONSTANT = "constant"

IdMapping = Literal["text", "hash", "modulo", "none", "hour", "weekday"]
#: Rows of the tables of hours and of weekdays: row 0 is that of a missing time.
TIME_ROWS = {"hour": 25, "weekday": 8}
_LEAST_QUANTILES = 2


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
    """For scale = "standardize" and "days". `embershard data inspect` finds it."""
    std: float | None = None
    """For scale = "standardize" and "days"; above 0."""
    quantiles: tuple[float, ...] = ()
    """For scale = "quantile": rising numbers. The first becomes 0, the last 1."""
    num_rows: int | None = None
    """Rows of a sparse feature's table, the reserved row 0 included: at least 2, with mapping "none" 1. Not for "hour"
    and "weekday"."""
    mapping: IdMapping = "text"
    """Row of a sparse value. "text": by the 64-bit hash of the value as text. Of integers: "hash" by a 64-bit mix,
    "modulo" by the remainder, "none": they are rows. Of a time, in UTC: "hour" and "weekday"."""
    table: str | None = None
    """Name of a sparse feature's embedding table: features with the same name share one, and need the same `num_rows`,
    `mapping` and `pooling`. Default: the feature's name."""
    pooling: Pooling = "sum"
    """What the rows of a sparse feature's bag give: their "sum", or their "mean"."""
    separator: str | None = None
    """Between the values of a cell of text: the cell is a bag of them then, in their order."""

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

        has_std = self.scale in ("standardize", "days")
        only = f'a number where scale = "standardize" or "days" ({found_by}), and nothing otherwise'
        no_effect = f"nothing: it has no effect on a {self.kind} feature"
        check_fields(
            self,
            at,
            column=(self.column != "", "the name of a column"),
            scale=(not is_sparse or self.scale == "none", no_effect),
            mean=((self.mean is not None) == has_std, only),
            std=((self.std is not None) == has_std and (self.std is None or self.std > 0), f"{only}, above 0"),
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
        )

    @property
    def table_rows(self) -> int:
        """Rows of a sparse feature's table."""
        return TIME_ROWS.get(self.mapping) or self.num_rows or 0


@dataclass(frozen=True)
class TableConfig:
    """CSV, TSV and Parquet files with declared columns.

    >>> TableConfig(features={"user": TableFeature("sparse", num_rows=1000)}).label
    'label'
    """

    features: OfModel[dict[str, TableFeature]] = field(default_factory=dict, hash=False)
    """The features of a sample by name, in order: a section per feature."""
    label: OfTraining[str | tuple[str, ...]] = "label"
    """Name of the column of labels; or names: the model then has an output for each. 0 or 1; any number with
    `label_at_least` or task = "regression"."""
    task: OfModel[Task] = "binary"
    """"binary": scores are probabilities of label 1. "regression": scores are numbers, near the labels in the mean of
    the squared distance."""
    label_at_least: OfTraining[float | tuple[float, ...] | None] = None
    """A label is 1 where the column's number is at least this, else 0; of several labels, one number for all or a
    number each. Default: the columns have 0 and 1."""
    label_mean: OfTraining[float | tuple[float, ...] | None] = None
    """With task = "regression": where the model's outputs start, about the mean label; of several labels, a number
    each. `embershard data inspect` finds it. Default: 0."""
    label_weights: OfTraining[tuple[float, ...]] = ()
    """Of several labels: the factor of each label's loss, above 0. Default: 1 each."""
    weight: OfTraining[str | None] = None
    """Name of a column of numbers of at least 0: the factor of a sample's loss, and its share of the held-out metrics.
    Default: 1 each."""
    separator: OfTraining[str] = ","
    """Between the cells of a line of a text file: one character."""
    columns: OfTraining[tuple[str, ...]] = ()
    """Names of the columns of text files without a header, in order. Default: the first line names them."""
    quoted: OfTraining[bool] = True
    """Cells of text files may be in double quotes, which may hold the separator. False: a quote is text."""
    null_values: OfTraining[tuple[str, ...]] = ("",)
    """Cells of text files that are missing values."""
    max_bag_size: OfTraining[int] = 10_000
    """Most values of a bag. A row with a larger one is not a sample."""
    files: AsFiles[tuple[str, ...]] = ("*.parquet", "*.csv", "*.tsv", "*.txt", "*.csv.gz", "*.tsv.gz", "*.txt.gz")
    """Shell patterns of the names of data files, where `path` is a folder."""

    def __post_init__(self) -> None:
        freeze_lists(self)
        self._check_target()
        check_fields(
            self,
            "table.",
            separator=(len(self.separator.encode()) == 1, 'one character, for instance "\\t"'),
            columns=(len(set(self.columns)) == len(self.columns), "every name once"),
            max_bag_size=(self.max_bag_size >= 1, "at least 1"),
            files=(len(self.files) > 0, ONE_PATTERN),
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

    def _check_target(self) -> None:
        labels, least = self.labels, self.label_at_least
        num_given = len(least) if isinstance(least, tuple) else len(labels)
        means = self.target.label_means
        check_fields(
            self,
            "table.",
            label=(
                len(labels) > 0 and all(labels) and len(set(labels)) == len(labels),
                "the name of a column, or names, each once",
            ),
            label_at_least=(
                num_given == len(labels) and (least is None or self.task == "binary"),
                f"one number, or {len(labels)}, one for each label"
                if self.task == "binary"
                else 'nothing: with task = "regression", labels are numbers as they are',
            ),
            label_mean=(
                not means or (self.task == "regression" and len(means) == len(labels)),
                f'{len(labels)} numbers with task = "regression", and nothing otherwise',
            ),
            label_weights=(
                not self.label_weights
                or (1 < len(labels) == len(self.label_weights) and all(each > 0 for each in self.label_weights)),
                f"{len(labels)} numbers above 0, one for each label"
                if len(labels) > 1
                else "nothing: there is one label",
            ),
            weight=(self.weight != "", "the name of a column"),
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the columns of labels."""
        return (self.label,) if isinstance(self.label, str) else self.label

    @property
    def target(self) -> Target:
        """What is predicted of a sample."""
        mean = self.label_mean
        means = mean if isinstance(mean, tuple) else () if mean is None else (mean,)
        return Target(self.labels, self.task, self.label_weights, self.weight, means)

    def thresholds(self) -> tuple[float | None, ...]:
        """Return from which number on each label is 1; None: it has 0 and 1."""
        least = self.label_at_least
        return least if isinstance(least, tuple) else (least,) * len(self.labels)

    @staticmethod
    def of_parquet(settings: ParquetConfig) -> TableConfig:
        """Return the same columns as `data.kind = "parquet"` has them."""
        dense = {name: TableFeature("dense", scale=settings.dense_transform) for name in settings.dense}
        pairs = zip(settings.sparse, settings.num_rows, strict=True)
        sparse = {name: TableFeature("sparse", num_rows=rows, mapping=settings.id_mapping) for name, rows in pairs}
        if len({*dense, *sparse}) < len(settings.dense) + len(settings.sparse):
            twice = [*settings.dense, *settings.sparse]
            names = sorted({name for name in twice if twice.count(name) > 1})
            raise ConfigError(f"the schema has columns twice: {', '.join(names)}; every name must be unique")
        return TableConfig(
            {**dense, **sparse}, settings.label, max_bag_size=settings.max_bag_size, files=settings.files
        )

    def need_sparse(self) -> None:
        """Raise `ConfigError` unless there is a sparse feature, which models need."""
        if not self.of_kind("sparse"):
            raise ConfigError(
                'data.kind = "table" needs data.table.features, one of them with kind = "sparse". '
                "`embershard data inspect FILE -o run.toml` writes them"
            )

    def of_kind(self, kind: Literal["dense", "sparse"]) -> dict[str, TableFeature]:
        """Return the features of a kind by name, in order, with their columns."""
        found = {name: feature for name, feature in self.features.items() if feature.kind == kind}
        return {name: replace(feature, column=feature.column or name) for name, feature in found.items()}


def settings_of(config: DataConfig) -> TableConfig:
    """Return the columns of either kind of data that has declared ones.

    Raises:
        ConfigError: there is no sparse feature, or a column twice.
    """
    if config.kind == "table":
        config.table.need_sparse()
        return config.table
    if not config.parquet.sparse:
        raise ConfigError('data.kind = "parquet" needs data.parquet.sparse and .num_rows: the id columns')
    return TableConfig.of_parquet(config.parquet)


def table_schema(config: DataConfig) -> Schema:
    """Return the schema of either kind of data that has declared columns.

    Raises:
        ConfigError: the settings name no sparse column, a column twice, or a shared table with two sizes.
    """
    settings = settings_of(config)
    sparse, dense = settings.of_kind("sparse"), tuple(settings.of_kind("dense"))
    if config.kind == "table" and not dense:
        dense = (CONSTANT,)
    features = tuple(
        SparseFeature(name, feature.table_rows, feature.table, feature.pooling) for name, feature in sparse.items()
    )
    return Schema(dense, features, settings.target)
