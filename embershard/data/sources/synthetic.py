"""Generated samples with the popularity of Criteo Kaggle, and labels that a model can learn.

Everything about sample g is a function of (seed, g): any rank can make any sample, alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embershard.data.block import Block, Ids
from embershard.data.config import DataConfig
from embershard.data.hashing import make_key, mix64, random_words, unit_floats
from embershard.data.order.order import ChunkTable
from embershard.data.schema import Schema, SparseFeature
from embershard.data.sources.held_out import HeldOut, Share, alone, hold_out
from embershard.data.sources.source import Split, SplitChunks
from embershard.data.synthetic_config import SyntheticConfig

MLPERF_BAG_SIZES = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids per sample and table of MLPerf's DLRM-DCNv2 benchmark: 214 lookups a sample."""

_TABLE, _DENSE, _LABEL, _WEIGHT, _PAIR, _BAG, _SCATTER, _RARITY, _ID, _RENEWAL = range(1, 11)
_NUM_PROBES = 8192
_DENSE_SHARE = 0.25
"""Share of the hidden logit's variance that the dense features carry."""

Floats = NDArray[np.float64]
Dense = NDArray[np.float32]
NUM_HEAD = 10
_LEAST_TAIL = 0.0003
"""Published shares have three digits: a tail of "0.000" is at most half of the last digit, not nothing."""


class SyntheticSource:
    """Generated samples; see `SyntheticConfig`.

    Tables are called C1..C26 and use their rows 1..num_rows-1: no cell is missing, so row 0 does not occur. Those that
    take any id get words of 64 bits in place of rows.
    """

    def __init__(self, config: DataConfig, *, share: Share = alone) -> None:
        settings = config.synthetic
        sizes = settings.bag_sizes or (1,)
        self._bag_sizes = sizes * len(CRITEO_KAGGLE) if len(sizes) == 1 else sizes
        self._seed, self._num_dense = config.seed, settings.num_dense
        self._correlation = settings.correlation
        self.schema = self.schema_of(config)
        self.tables = [SyntheticTable(config.seed, *each, settings) for each in enumerate(CRITEO_KAGGLE)]
        self._starts = np.arange(0, settings.num_samples, config.chunk_rows)
        rows = np.minimum(config.chunk_rows, settings.num_samples - self._starts)
        held_out = hold_out(config, settings.num_samples, share)
        self._split = SplitChunks(np.zeros_like(self._starts), rows, [config.eval_fraction], held_out)
        self._hidden = HiddenModel(config.seed, self.tables, settings, *self._inputs(np.arange(_NUM_PROBES)))

    @staticmethod
    def schema_of(config: DataConfig) -> Schema:
        rows, most = [scaled_rows(table, config.synthetic) for table in CRITEO_KAGGLE], config.synthetic.id_rows
        sparse = tuple(
            SparseFeature(f"C{i + 1}", num_rows)
            if most is None or num_rows <= most
            else SparseFeature(f"C{i + 1}", most, takes_ids=True)
            for i, num_rows in enumerate(rows)
        )
        return Schema(tuple(f"I{i + 1}" for i in range(config.synthetic.num_dense)), sparse)

    @property
    def notes(self) -> tuple[str, ...]:
        return self._split.notes

    @property
    def held_out(self) -> HeldOut:
        return self._split.held_out

    def chunks(self, split: Split) -> ChunkTable:
        return self._split.table(split)

    def read(self, split: Split, chunk: int, rows: Ids) -> Block:
        """Make these samples and no others, so that a rank's work does not grow with the number of ranks."""
        physical, members = self._split.place(split, chunk)
        return self.samples(self._starts[physical] + members[rows])

    def samples(self, numbers: Ids) -> Block:
        """Return the samples with these numbers (0 .. num_samples-1)."""
        ids, dense, rarity = self._inputs(numbers)
        clicks = unit_floats(random_words(make_key(self._seed, _LABEL), numbers))
        labels = (clicks < self._hidden.probabilities(ids, dense, rarity)).astype(np.float32)
        triples = zip(self.tables, ids, self._bag_sizes, strict=True)
        return Block(dense, labels, tuple(table.bags(first, size) for table, first, size in triples), self._bag_sizes)

    def probabilities(self, numbers: Ids) -> Floats:
        """Return the true click probability of these samples: no model can learn a better score."""
        return self._hidden.probabilities(*self._inputs(numbers))

    def features(self, numbers: Ids) -> tuple[list[Ids], Dense]:
        """Return the first id of each table's bag, and the dense features (exponential, mean 1)."""
        return self._inputs(numbers)[:2]

    def _inputs(self, numbers: Ids) -> tuple[list[Ids], Dense, Floats | None]:
        """Return what `features` returns, and each sample's rarity (standard normal); None without correlation."""
        rarity = None
        if self._correlation:
            rarity = _normal(unit_floats(random_words(make_key(self._seed, _RARITY), numbers)))
        ids = [table.draw(numbers, rarity) for table in self.tables]
        counters = numbers[:, None] * self._num_dense + np.arange(self._num_dense)
        uniform = unit_floats(random_words(make_key(self._seed, _DENSE), counters))
        return ids, -np.log1p(-uniform.astype(np.float32) * np.float32(1 - 2**-23)), rarity


class SyntheticTable:
    """The ids of one table: popularity rank -> row, the same rank mostly being the same row."""

    def __init__(self, seed: int, number: int, public: PublicTable, settings: SyntheticConfig) -> None:
        self.num_rows = scaled_rows(public, settings)
        self.popularity = Popularity(public, self.num_rows - 1)
        self._most_weight = public.top_10
        self._locality, self._correlation = settings.locality, settings.correlation
        self._weight_key = make_key(seed, _WEIGHT, number)
        self._draw_key = make_key(seed, _TABLE, number)
        self._pair_key = make_key(seed, _PAIR, number)
        self._bag_key = make_key(seed, _BAG, number)
        self._id_key, self._renewal_key = make_key(seed, _ID, number), make_key(seed, _RENEWAL, number)
        self._takes_ids = settings.id_rows is not None and self.num_rows > settings.id_rows
        self._renewals_per_sample = settings.id_turnover / settings.num_samples
        self._swaps_per_sample = settings.drift / settings.num_samples
        self._step, self._shift = scatter(make_key(seed, _SCATTER, number), self.num_rows - 1)

    def draw(self, numbers: Ids, rarity: Floats | None = None) -> Ids:
        """Return one id for each of these samples, of which some have rarer rows than others (None: none)."""
        uniform = unit_floats(random_words(self._draw_key, numbers))
        if rarity is not None:
            uniform = correlated(uniform, rarity, self._correlation)
        ranks = self._ranks(uniform) if self._locality < 1 else self.popularity.ranks(uniform)
        rows = self.rows_of_ranks(self.drifted(ranks, numbers) if self._swaps_per_sample else ranks)
        return self.ids_of_rows(rows, numbers) if self._takes_ids else rows

    def _ranks(self, uniform: Floats) -> Ids:
        """Return the ranks of uniform numbers: a share by popularity, the others among all ranks alike."""
        is_local = uniform < self._locality
        popular = self.popularity.ranks(np.where(is_local, uniform / max(self._locality, 1e-300), 0.0))
        anywhere = (uniform - self._locality) / (1.0 - self._locality) * (self.num_rows - 1)
        return np.where(is_local, popular, np.clip(anywhere, 0, self.num_rows - 2).astype(np.int64))

    def rows_of_ranks(self, ranks: Ids) -> Ids:
        """Return the rows of popularity ranks at sample 0: a bijection onto 1..num_rows-1 that scatters hot rows."""
        rows = ranks * self._step
        rows += self._shift
        rows %= self.num_rows - 1
        rows += 1
        return rows

    def drifted(self, ranks: Ids, numbers: Ids) -> Ids:
        """Swap ranks j and last-j, each pair once, at a sample number that is drawn for the pair."""
        others = self.num_rows - 2 - ranks
        moments = unit_floats(random_words(self._pair_key, np.minimum(ranks, others)))
        return np.where(moments < numbers * self._swaps_per_sample, others, ranks)

    def ids_of_rows(self, rows: Ids, numbers: Ids) -> Ids:
        """Return the ids that rows stand for at these samples: odd words of 64 bits, which `RESERVED_ID` is not. A row
        gets its first new id at a moment of its own, and the others as regularly as the settings say."""
        moments = unit_floats(random_words(self._renewal_key, rows))
        renewals = (moments + numbers * self._renewals_per_sample).astype(np.int64)
        words = random_words(self._id_key, rows + renewals * self.num_rows)
        return (words | np.uint64(1)).view(np.int64)

    def bags(self, ids: Ids, size: int) -> Ids:
        """Return bags [n * size]: the id itself, then `size - 1` uniform rows, or ids, that are a function of it."""
        if size == 1:
            return ids
        words = random_words(self._bag_key, ids[:, None] * size + np.arange(size))
        if self._takes_ids:
            bags = (words | np.uint64(1)).view(np.int64)
        else:
            bags = (words % np.uint64(self.num_rows - 1)).astype(np.int64) + 1
        bags[:, 0] = ids
        return bags.ravel()

    def weights(self, rows: Ids) -> Floats:
        """Return the rows' weights in the hidden model: uniform, times the share of the ten most popular rows."""
        weights = unit_floats(random_words(self._weight_key, rows))
        weights -= 0.5
        weights *= self._most_weight
        return weights


class HiddenModel:
    """The source of labels: the sum of a weight per row and a weight per dense feature, through a sigmoid.

    Most of the signal lies in rows that occur often enough to be learned soon (`SyntheticTable.weights`). A sample's
    rarity adds `rarity_logit` per standard deviation. The first samples, `ids` and `dense`, set scale and bias.
    """

    def __init__(
        self,
        seed: int,
        tables: list[SyntheticTable],
        settings: SyntheticConfig,
        ids: list[Ids],
        dense: Dense,
        rarity: Floats | None,
    ) -> None:
        self._tables = tables
        weights = unit_floats(random_words(make_key(seed, _DENSE, _WEIGHT), np.arange(settings.num_dense)))
        self._dense_weights = (weights - 0.5).astype(np.float32)
        by_rows, by_dense = self._parts(ids, dense)
        self._rows_scale = settings.signal * math.sqrt(1 - _DENSE_SHARE) / by_rows.std()
        self._dense_scale = settings.signal * math.sqrt(_DENSE_SHARE) / by_dense.std()
        self._rarity_logit, self._bias = settings.rarity_logit, 0.0
        score = self._logits(ids, dense, rarity)
        low, high = -60.0 - float(score.max()), 60.0 - float(score.min())
        self._bias = bisect(lambda bias: _sigmoid(score + bias).mean() < settings.click_rate, low, high, 80)

    def probabilities(self, ids: list[Ids], dense: Dense, rarity: Floats | None) -> Floats:
        """Return P(label = 1) of each sample."""
        return _sigmoid(self._logits(ids, dense, rarity))

    def _logits(self, ids: list[Ids], dense: Dense, rarity: Floats | None) -> Floats:
        by_rows, by_dense = self._parts(ids, dense)
        logits = by_rows * self._rows_scale + by_dense * self._dense_scale + self._bias
        return logits if rarity is None else logits + self._rarity_logit * rarity

    def _parts(self, ids: list[Ids], dense: Dense) -> tuple[Floats, Floats]:
        total = np.zeros(len(dense))
        for table, rows in zip(self._tables, ids, strict=True):
            total += table.weights(rows)
        return total, (dense @ self._dense_weights).astype(np.float64)


def scaled_rows(public: PublicTable, settings: SyntheticConfig) -> int:
    """Return the rows of a table at the scale of the settings."""
    return max(3, round(public.num_rows * settings.scale))


def scatter(key: int, num_ids: int) -> tuple[int, int]:
    """Return step and shift of the bijection rank -> (rank * step + shift) mod num_ids; neighbours come apart."""
    step = max(1, round(num_ids * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, num_ids) != 1:
        step += 1
    return step, int(mix64(np.array([key], np.uint64))[0] % np.uint64(num_ids))


def correlated(uniform: Floats, rarity: Floats, correlation: float) -> Floats:
    """Return uniform numbers in [0, 1) of one feature, from independent ones [n] and what all features of a sample
    share (standard normal [n]): a Gaussian copula of one factor, so each feature keeps its distribution."""
    import torch  # takes seconds, and independent features need it not

    mixed = math.sqrt(correlation) * rarity + math.sqrt(1.0 - correlation) * _normal(uniform)
    return np.minimum(torch.special.ndtr(torch.from_numpy(mixed)).numpy(), 1.0 - 2.0**-53)


def _normal(uniform: Floats) -> Floats:
    """Return the standard normal quantiles of numbers in [0, 1)."""
    import torch

    return torch.special.ndtri(torch.from_numpy(np.maximum(uniform, 2.0**-60))).numpy()


def _sigmoid(logits: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-logits))


class PublicTable(NamedTuple):
    """Measured popularity of one table: rows, shares of lookups, and the exponent of rank ** -exponent."""

    num_rows: int
    top_1: float
    top_10: float
    zipf_exponent: float


CRITEO_KAGGLE: tuple[PublicTable, ...] = tuple(
    PublicTable(*row)
    for row in (
        (1460, 0.503, 0.909, 1.90),
        (583, 0.126, 0.429, 1.19),
        (10131227, 0.039, 0.186, 0.98),
        (2202608, 0.054, 0.251, 0.98),
        (305, 0.670, 0.979, 2.46),
        (24, 0.464, 1.000, 4.06),
        (12517, 0.010, 0.068, 0.66),
        (633, 0.592, 0.957, 2.18),
        (3, 0.885, 1.000, 6.71),
        (93145, 0.268, 0.327, 0.80),
        (5683, 0.021, 0.106, 0.73),
        (8351593, 0.039, 0.186, 0.98),
        (3194, 0.023, 0.124, 0.76),
        (27, 0.364, 0.987, 2.73),
        (14992, 0.020, 0.104, 0.76),
        (5461306, 0.039, 0.186, 0.97),
        (10, 0.425, 1.000, 1.05),
        (5652, 0.054, 0.233, 0.95),
        (2173, 0.414, 0.829, 1.23),
        (4, 0.414, 1.000, 0.62),
        (7046547, 0.039, 0.186, 0.98),
        (18, 0.817, 1.000, 4.41),
        (15, 0.444, 0.995, 2.86),
        (286181, 0.073, 0.381, 1.07),
        (105, 0.414, 0.930, 2.29),
        (142572, 0.414, 0.573, 1.08),
    )
)
"""Criteo Kaggle display advertising, C1..C26: 33,762,577 rows; shares over the data set's 45,840,617 samples,
exponents fitted to 80,000 samples. Counts and shares are facts about the data; no data are included."""


class Popularity:
    """Draws popularity ranks 0 (most often) .. num_ids - 1.

    The first ten ranks have shares `top_1 * rank ** -a`, with `a` such that they sum to `top_10`. The others share the
    rest by a power law of continuous rank with the measured exponent, whose inverse distribution function is a formula,
    so that drawing costs the same for 100 rows and for 10 million. A table that is scaled below a few hundred rows
    keeps its shares, and so gets a flat or even a rising tail.
    """

    def __init__(self, table: PublicTable, num_ids: int) -> None:
        num_head = min(NUM_HEAD, num_ids)
        tail = 0.0 if num_ids <= NUM_HEAD else max(1.0 - table.top_10, _LEAST_TAIL)
        self.num_ids = num_ids
        self.head = _head_shares(num_head, table.top_1, 1.0 - tail)
        self._steps = np.cumsum(self.head)
        self._head_sum = 1.0 - tail
        if not tail:
            self._steps[-1] = 1.0  # rounding must not leave room for a tail that is not there
        power = 1.0 - table.zipf_exponent
        self._power = power if abs(power) > 1e-6 else 1e-6
        self._low = (num_head + 0.5) ** self._power
        self._high = (num_ids + 0.5) ** self._power

    def ranks(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the ranks of uniform numbers in [0, 1): the inverse distribution function."""
        ranks = np.searchsorted(self._steps, uniform, side="right")
        tail = np.flatnonzero(ranks == NUM_HEAD)
        if len(tail):
            part = (uniform[tail] - self._head_sum) / (1.0 - self._head_sum)
            place = (self._low + part * (self._high - self._low)) ** (1.0 / self._power)
            ranks[tail] = np.clip(place - 0.5, NUM_HEAD, self.num_ids - 1)
        return ranks


def _head_shares(count: int, first: float, total: float) -> NDArray[np.float64]:
    """Return `count` falling shares that sum to `total`, the first of them `first` where that is possible."""
    ranks = np.arange(1, count + 1)
    shares = ranks ** -bisect(lambda power: first * (ranks**-power).sum() > total, 0.0, 64.0, 60)
    return shares * (total / shares.sum())


def bisect(is_too_low: Callable[[float], bool], low: float, high: float, num_steps: int) -> float:
    """Return the lower end of the interval [low, high] after so many halvings.

    >>> round(bisect(lambda x: x * x < 2, 0.0, 2.0, 40), 6)
    1.414214
    """
    for _ in range(num_steps):
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_low(middle) else (low, middle)
    return low
