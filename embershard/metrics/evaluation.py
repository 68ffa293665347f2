"""`Evaluator`: judges predictions of held-out samples, all of them and slice by slice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.data import Source, Target
from embershard.data.sources.source import ColumnSource
from embershard.data.sources.table.decode import cell_words
from embershard.distributed import Ranks
from embershard.errors import ConfigError, DataError
from embershard.metrics.config import MetricsConfig
from embershard.metrics.curves import Curves, curves_of
from embershard.metrics.figures import Figures, Slices, names_of
from embershard.metrics.own_metric import try_own
from embershard.metrics.predictions import Predicted, PredictionBuffer, judge

#: Slices of samples without a value, and of values with few samples.
MISSING, OTHERS = "(missing)", "(others)"


@dataclass(frozen=True)
class Evaluation:
    """What held-out samples say of a model.

    Attributes:
        quality: figures over all of them.
        slices: figures by column and value: values with most samples first.
        curves: of each label.
    """

    quality: Figures
    slices: Slices = field(default_factory=dict)
    curves: dict[str, Curves] = field(default_factory=dict)


@dataclass(frozen=True)
class ValueNumbers:
    """A column of N samples.

    Attributes:
        numbers: int64 [N], which of the `values` each sample has; -1: none.
    """

    numbers: NDArray[np.int64]
    values: list[str]

    def slices(self, most: int) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """Yield the `most` values with most samples, and the others as one; and which samples each has, in order.

        >>> [name for name, _ in ValueNumbers(np.array([1, 0, -1, 1, 2]), ["a", "b", "c"]).slices(2)]
        ['b', '(missing)', '(others)']
        """
        order = np.argsort(self.numbers, kind="stable")
        numbers, starts, counts = np.unique(self.numbers[order], return_index=True, return_counts=True)
        places = np.argsort(-counts, kind="stable")
        for place in places[:most]:
            number, start = int(numbers[place]), int(starts[place])
            yield MISSING if number < 0 else self.values[number], order[start : start + counts[place]]
        if len(places) > most:
            yield OTHERS, np.flatnonzero(np.isin(self.numbers, numbers[places[most:]]))


def value_numbers(tables: Iterable[pa.Table], names: Sequence[str]) -> dict[str, ValueNumbers]:
    """Return columns of samples by name. Values are compared as texts, an empty one is none: as a feature takes them,
    whatever the format of the file (`cell_words`).

    Raises:
        ConfigError: a column has lists, or other cells that are no texts.
    """
    parts: dict[str, list[pa.Array]] = {name: [] for name in names}
    for table in tables:
        for name in names:
            try:
                parts[name].append(cell_words(pa.chunked_array(table[name]).combine_chunks()))
            except pa.ArrowException:
                raise ConfigError(
                    f"metrics: column {name!r} is of type {table[name].type}; needed one value in each row. Choose "
                    "another column for metrics.group and metrics.slices."
                ) from None
    found = {}
    for name, chunks in parts.items():
        column = pa.chunked_array(chunks, pa.dictionary(pa.int32(), pa.string())).unify_dictionaries()
        numbers = [chunk.indices.fill_null(-1).to_numpy() for chunk in column.chunks]
        values = column.chunk(0).dictionary.to_pylist() if numbers else []
        found[name] = ValueNumbers(np.concatenate([np.empty(0, np.int64), *numbers]), values)
    return found


class Evaluator:
    """Judges a model by predictions of held-out samples. All ranks make it, and call its methods, together.

    Args:
        source: of the samples that are judged most often: their columns are read once.

    Raises:
        ConfigError: the data have not the columns that `metrics` names, or a function that it names fails.
    """

    def __init__(self, target: Target, metrics: MetricsConfig, source: Source, ranks: Ranks) -> None:
        self._target, self._metrics, self._ranks = target, metrics, ranks
        self._source = source
        self._own: dict[str, ValueNumbers] | None = None
        if metrics.columns or metrics.own:
            ranks.from_first(self._check)

    def _check(self) -> None:
        """Raise where columns are missing, or not of single values, by the first chunk; or a function of one's own
        fails."""
        for name in self._metrics.own:
            try_own(name, self._metrics.folder)
        if not self._metrics.columns:
            return
        try:
            first = next(self._columns_of(self._source), None)
        except DataError as error:
            raise ConfigError(f"metrics.group, metrics.slices: {error}. Or leave them out.") from error
        if first is not None:
            value_numbers([first], self._metrics.columns)

    def judge(self, predictions: PredictionBuffer, source: Source) -> Evaluation:
        """Return what the predictions of all held-out samples of a source say, the same on any number of ranks."""
        predicted = predictions.in_order(self._ranks)
        return self._ranks.from_first(lambda: self.judge_samples(predicted, self._numbers_of(source)))

    def judge_samples(self, predicted: Predicted, columns: dict[str, ValueNumbers]) -> Evaluation:
        """Return what predictions of N samples say; N may be 0.

        Args:
            columns: those that `metrics` names, of the same samples.

        Raises:
            DataError: they are not of as many samples.
        """
        metrics, target = self._metrics, self._target
        for name, column in columns.items():
            if len(column.numbers) != len(predicted.labels):
                raise DataError(
                    f"column {name!r} was read for {len(column.numbers):,} held-out samples, and there are "
                    f"{len(predicted.labels):,} predictions: the files changed meanwhile; start again"
                )
        groups = None if metrics.group is None else torch.from_numpy(columns[metrics.group].numbers)
        quality = judge(target, predicted, metrics, groups)
        slices = {name: self._slices(predicted, groups, columns[name]) for name in metrics.slices}
        labels = zip(predicted.by_label(target).items(), target.tasks, strict=True)
        curves = {label: curves_of(task, own) for (label, own), task in labels}
        return Evaluation(quality, slices, curves)

    def _slices(self, predicted: Predicted, groups: Tensor | None, column: ValueNumbers) -> dict[str, Figures]:
        metrics, target, found = self._metrics, self._target, {}
        wanted = {"samples", *(name for task in target.tasks for name in metrics.of_task(task))}
        wanted |= {f"{name}/{label}" for label in target.classes for name in names_of("multiclass")}
        for value, numbers in column.slices(metrics.most_slices):
            rows = torch.from_numpy(numbers)
            own = None if groups is None else groups[rows]
            values = judge(target, predicted.take(rows), metrics, own)
            found[value] = {
                name: each for name, each in values.items() if name in wanted or name.partition("/")[0] in wanted
            }
        # Where some slices lack a label, all say how many samples have it.
        counts = sorted({name for figures in found.values() for name in figures if name.startswith("samples/")})
        return {value: {**dict.fromkeys(counts, figures["samples"]), **figures} for value, figures in found.items()}

    def _columns_of(self, source: Source) -> Iterator[pa.Table]:
        if not isinstance(source, ColumnSource):
            raise ConfigError(
                'metrics.group, metrics.slices: needed data of kind "table" or "parquet", whose columns have names. '
                "Leave them out."
            )
        return source.held_out_columns(list(self._metrics.columns))

    def _numbers_of(self, source: Source) -> dict[str, ValueNumbers]:
        if not self._metrics.columns:
            return {}
        if source is not self._source:
            return value_numbers(self._columns_of(source), self._metrics.columns)
        if self._own is None:
            self._own = value_numbers(self._columns_of(source), self._metrics.columns)
        return self._own
