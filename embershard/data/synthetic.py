"""Generated samples with the popularity of Criteo Kaggle, and labels that a model can learn.

Everything about sample g is a function of (seed, g): any rank can make any sample, alone.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from embershard.data.batch import Schema, SparseFeature
from embershard.data.block import Block
from embershard.data.config import DataConfig, SyntheticConfig
from embershard.data.hashing import make_key, mix64, random_words, unit_floats
from embershard.data.order import ChunkTable
from embershard.data.popularity import CRITEO_KAGGLE, Popularity, TableStatistics
from embershard.data.source import Split, SplitChunks

MLPERF_BAG_SIZES = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids per sample and table of MLPerf's DLRM-DCNv2 benchmark: 214 lookups a sample."""

_TABLE, _DENSE, _LABEL, _WEIGHT, _PAIR, _BAG, _SCATTER = range(1, 8)
_NUM_PROBES = 8192
_DENSE_SHARE = 0.25
"""Share of the hidden logit's variance that the dense features carry."""

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


class SyntheticSource:
    """Generated samples; see :class:`~embershard.data.SyntheticConfig`.

    Tables are called C1..C26 and use their rows 1..num_rows-1: no cell is missing, so row 0 does not occur.
    """

    def __init__(self, config: DataConfig) -> None:
        settings = config.synthetic
        sizes = settings.bag_sizes or (1,)
        sizes = sizes * len(CRITEO_KAGGLE) if len(sizes) == 1 else sizes
        self._tables = [
            SyntheticTable(config.seed, number, statistics, settings) for number, statistics in enumerate(CRITEO_KAGGLE)
        ]
        self._bag_sizes = sizes
        self._seed = config.seed
        self._num_dense = settings.num_dense
        self.schema = Schema(
            tuple(f"I{i + 1}" for i in range(settings.num_dense)),
            tuple(SparseFeature(f"C{i + 1}", table.num_rows) for i, table in enumerate(self._tables)),
        )
        starts = np.arange(0, settings.num_samples, config.chunk_rows)
        self._starts = starts
        rows = np.minimum(config.chunk_rows, settings.num_samples - starts)
        self._split = SplitChunks(np.zeros_like(starts), rows, [config.eval_fraction])
        self._hidden = HiddenModel(self, settings)

    def chunks(self, split: Split) -> ChunkTable:
        """See :class:`~embershard.data.Source`."""
        return self._split.table(split)

    def read(self, split: Split, chunk: int, rows: Ids) -> Block:
        """Makes these samples and no others, so a rank's work does not grow with the number of ranks."""
        physical, first = self._split.place(split, chunk)
        return self.samples(self._starts[physical] + first + rows)

    def samples(self, numbers: Ids) -> Block:
        """The samples with these numbers (0 .. num_samples-1)."""
        ids, dense = self.features(numbers)
        clicks = unit_floats(random_words(make_key(self._seed, _LABEL), numbers))
        labels = (clicks < self._hidden.probabilities(ids, dense)).astype(np.float32)
        pairs = zip(self._tables, ids, self._bag_sizes, strict=True)
        values = tuple(table.bags(first, size) for table, first, size in pairs)
        return Block(dense, labels, values, self._bag_sizes)

    def probabilities(self, numbers: Ids) -> Floats:
        """True click probability of these samples: the best score that any model can learn."""
        return self._hidden.probabilities(*self.features(numbers))

    def features(self, numbers: Ids) -> tuple[list[Ids], NDArray[np.float32]]:
        """First id of each table's bag, and the dense features (exponential, mean 1)."""
        ids = [table.draw(numbers) for table in self._tables]
        counters = numbers[:, None] * self._num_dense + np.arange(self._num_dense)
        uniform = unit_floats(random_words(make_key(self._seed, _DENSE), counters))
        return ids, -np.log1p(-uniform.astype(np.float32) * np.float32(1 - 2**-23))


class SyntheticTable:
    """The ids of one table: popularity rank -> row, the same rank mostly being the same row."""

    def __init__(self, seed: int, number: int, statistics: TableStatistics, settings: SyntheticConfig) -> None:
        self.statistics = statistics
        self.num_rows = max(3, round(statistics.num_rows * settings.scale))
        self.weight_key = make_key(seed, _WEIGHT, number)
        self.popularity = Popularity(statistics, self.num_rows - 1)
        self._draw_key = make_key(seed, _TABLE, number)
        self._pair_key = make_key(seed, _PAIR, number)
        self._bag_key = make_key(seed, _BAG, number)
        self._swaps_per_sample = settings.drift / settings.num_samples
        self._step, self._shift = _scatter(make_key(seed, _SCATTER, number), self.num_rows - 1)

    def draw(self, numbers: Ids) -> Ids:
        """One id for each of these samples."""
        uniform = unit_floats(random_words(self._draw_key, numbers))
        ranks = self.popularity.ranks(uniform)
        if self._swaps_per_sample:
            ranks = self._drifted(ranks, numbers)
        return self.rows_of_ranks(ranks)

    def rows_of_ranks(self, ranks: Ids) -> Ids:
        """Rows of popularity ranks at sample 0: a bijection onto 1..num_rows-1 that scatters hot rows."""
        rows = ranks * self._step
        rows += self._shift
        rows %= self.num_rows - 1
        rows += 1
        return rows

    def bags(self, ids: Ids, size: int) -> Ids:
        """Bags [n * size]: the id itself, then ``size - 1`` uniform rows that are a function of it."""
        if size == 1:
            return ids
        words = random_words(self._bag_key, ids[:, None] * size + np.arange(size))
        bags = (words % np.uint64(self.num_rows - 1)).astype(np.int64) + 1
        bags[:, 0] = ids
        return bags.ravel()

    def _drifted(self, ranks: Ids, numbers: Ids) -> Ids:
        """Ranks j and last-j swap their rows once, at a sample number that is drawn for each pair."""
        last = self.num_rows - 2
        others = last - ranks
        moments = unit_floats(random_words(self._pair_key, np.minimum(ranks, others)))
        return np.where(moments < numbers * self._swaps_per_sample, others, ranks)


class HiddenModel:
    """Where labels come from: the sum of a weight per row and a weight per dense feature, through a sigmoid.

    Rows' weights are uniform hashes of (table, row), times the share of the table's ten most popular rows:
    most of the signal lies in rows that occur often enough to be learned soon. The first samples set scale
    and bias.
    """

    def __init__(self, source: SyntheticSource, settings: SyntheticConfig) -> None:
        self._tables = source._tables
        weights = unit_floats(random_words(make_key(source._seed, _DENSE, _WEIGHT), np.arange(settings.num_dense)))
        self._dense_weights = (weights - 0.5).astype(np.float32)
        ids, dense = source.features(np.arange(_NUM_PROBES))
        by_rows, by_dense = self._parts(ids, dense)
        self._rows_scale = settings.signal * math.sqrt(1 - _DENSE_SHARE) / by_rows.std()
        self._dense_scale = settings.signal * math.sqrt(_DENSE_SHARE) / by_dense.std()
        score = by_rows * self._rows_scale + by_dense * self._dense_scale
        self._bias = _bias_for(score, settings.click_rate)

    def probabilities(self, ids: list[Ids], dense: NDArray[np.float32]) -> Floats:
        """P(label = 1) of each sample."""
        by_rows, by_dense = self._parts(ids, dense)
        return _sigmoid(by_rows * self._rows_scale + by_dense * self._dense_scale + self._bias)

    def _parts(self, ids: list[Ids], dense: NDArray[np.float32]) -> tuple[Floats, Floats]:
        total = np.zeros(len(dense))
        for table, rows in zip(self._tables, ids, strict=True):
            weights = unit_floats(random_words(table.weight_key, rows))
            weights -= 0.5
            weights *= table.statistics.top_10
            total += weights
        return total, (dense @ self._dense_weights).astype(np.float64)


def _scatter(key: int, num_ids: int) -> tuple[int, int]:
    """Step and shift of the bijection rank -> (rank * step + shift) mod num_ids; neighbours come apart."""
    step = max(1, round(num_ids * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, num_ids) != 1:
        step += 1
    return step, int(mix64(np.array([key], np.uint64))[0] % np.uint64(num_ids))


def _sigmoid(logits: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-logits))


def _bias_for(score: Floats, click_rate: float) -> float:
    """The number that makes the mean of sigmoid(score + bias) the click rate (bisection)."""
    low, high = -60.0 - float(score.max()), 60.0 - float(score.min())
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(score + middle).mean() < click_rate else (low, middle)
    return low
