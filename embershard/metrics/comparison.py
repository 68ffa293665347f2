"""Two models on the same samples: the difference of their figures, and how much of it may be chance.

Letters: N samples, R replicates, S seeds with which both models were trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embershard.errors import ConfigError
from embershard.metrics.figures import GROUPED, MORE_IS_BETTER, metric_of
from embershard.metrics.ranking import by_group
from embershard.metrics.resampling import resampled_auc, resampled_sums

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_Columns = Callable[[Floats, Floats], tuple[Floats, ...]]
_Figure = Callable[[Floats], Floats]

_ETA = 1e-12  # least distance of a prediction from 0 and 1 in logarithms, as in `judge`


@dataclass(frozen=True)
class Samples:
    """What is known of N samples beside the models' predictions.

    Attributes:
        labels: [N].
        weights: [N]; None: 1 each.
        groups: [N], the number of each sample's group (its user, its session), from 0, or -1 for none: groups are drawn
            whole, since samples of a group are alike. None: samples are drawn one by one.
    """

    labels: Floats
    weights: Floats | None = None
    groups: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class PairedDifference:
    """A figure of two models, A and B.

    Attributes:
        a, b: the figure of each; of several seeds, its mean.
        low, high: of the interval in which b - a is with the confidence that was asked for.
        p_value: how often chance alone gives a difference as large. Of one seed by the replicates, so at least 1 / R.
    """

    metric: str
    a: float
    b: float
    low: float
    high: float
    p_value: float

    @property
    def is_different(self) -> bool:
        """True if the interval has no 0."""
        return self.low > 0 or self.high < 0

    @property
    def better(self) -> Literal["A", "B", ""]:
        """The better one; "" where they do not differ, or where nobody can say, as of a calibration."""
        more = MORE_IS_BETTER.get(metric_of(self.metric))
        if not self.is_different or more is None:
            return ""
        return "B" if (self.b > self.a) == more else "A"


def compare(
    samples: Samples,
    a: Floats,
    b: Floats,
    metrics: Sequence[str],
    *,
    confidence: float = 0.95,
    num_replicates: int = 1000,
    seed: int = 0,
) -> list[PairedDifference]:
    """Return the difference of each metric; one that is undefined for these samples is left out.

    Of one seed, the interval says what other samples could change. Of several, what other seeds could, too
    (`_over_seeds`).

    Args:
        a, b: [N] or [S, N], what each model predicts: probabilities, or numbers for the metrics of a regression. Place
            s of both was trained with the same seed.
        metrics: of `OF_TASK`, and with groups of `GROUPED`, as "gauc" and "ndcg@10".

    Raises:
        ConfigError: there is no such metric, or it needs groups.

    >>> labels = np.tile([0.0, 1.0], 500)
    >>> [found] = compare(Samples(labels), np.full(1000, 0.5), np.where(labels == 1, 0.8, 0.2), ["auc"])
    >>> found.a, found.b, found.better
    (0.5, 1.0, 'B')
    """
    of_seeds = [
        _figures(samples, pair, metrics, num_replicates, seed)
        for pair in zip(np.atleast_2d(a), np.atleast_2d(b), strict=True)
    ]
    found = []
    for metric in metrics:
        figures = np.array([of_seed[metric].figures for of_seed in of_seeds])
        replicates = np.stack([of_seed[metric].differences for of_seed in of_seeds])
        replicates = replicates[:, ~np.isnan(replicates).any(axis=0)]
        if np.isnan(figures).any() or replicates.shape[1] < 2:
            continue
        if len(of_seeds) == 1:
            interval = _of_one_seed(replicates[0], confidence)
        else:
            interval = _over_seeds(figures[:, 1] - figures[:, 0], replicates, confidence)
        figure_a, figure_b = figures.mean(axis=0).tolist()
        found.append(PairedDifference(metric, figure_a, figure_b, *interval))
    return found


class _Figures(NamedTuple):
    """A metric of both models: what it is, and the difference of B and A in each replicate, [R]."""

    figures: tuple[float, float]
    differences: Floats


def _figures(
    samples: Samples, models: tuple[Floats, Floats], metrics: Sequence[str], num_replicates: int, seed: int
) -> dict[str, _Figures]:
    draws = _Draws(samples, models, num_replicates, seed)
    for metric in metrics:
        draws.add(metric)
    found = {}
    for metric in metrics:
        (figure_a, draws_a), (figure_b, draws_b) = draws.of(metric)
        found[metric] = _Figures((figure_a, figure_b), draws_b - draws_a)
    return found


def _of_one_seed(replicates: Floats, confidence: float) -> tuple[float, float, float]:
    """Return the ends of the interval and the p-value, by the replicates' quantiles."""
    low, high = np.quantile(replicates, [(1 - confidence) / 2, (1 + confidence) / 2]).tolist()
    tail = min(float((replicates <= 0).mean()), float((replicates >= 0).mean()))
    return low, high, min(1.0, max(2 * tail, 1 / len(replicates)))


def _over_seeds(differences: Floats, replicates: Floats, confidence: float) -> tuple[float, float, float]:
    """Return the ends of the interval of the mean difference over all seeds and samples, and the p-value, by Student's
    t.

    The variance of the mean over S seeds and N samples is samples / N + seeds / S + both / (S N), where `both` is what
    a seed changes on one sample and not on another. Replicates, which draw samples alone, have the first and the last
    part; the variance of the differences between seeds has the two last. So the last one is taken out once: replicates
    of one seed vary by samples / N + both / N, those of the mean by samples / N + both / (S N).

    Args:
        differences: [S].
        replicates: [S, R], with the same draws for all seeds.
    """
    from scipy.special import stdtr, stdtrit

    count, mean = len(differences), float(differences.mean())
    of_samples = float(replicates.mean(axis=0).var(ddof=1))
    between_seeds = float(differences.var(ddof=1)) / count
    of_both = (float(replicates.var(axis=1, ddof=1).mean()) - of_samples) / (count - 1)
    variance = of_samples + max(between_seeds - of_both, 0.0)
    if variance == 0:
        return mean, mean, 1.0 if mean == 0 else 0.0
    # Welch and Satterthwaite: the seeds' variance is known of S - 1 differences, that of samples of very many.
    freedom = min((count - 1) * (variance / between_seeds) ** 2, 1e9) if between_seeds else 1e9
    half = float(stdtrit(freedom, (1 + confidence) / 2)) * variance**0.5
    return mean - half, mean + half, 2 * float(stdtr(freedom, -abs(mean) / variance**0.5))


class _Draws:
    """Figures of both models, and their replicates. Sums of all metrics are drawn together: a pass over the samples
    takes longer by its draws than by what it adds up."""

    def __init__(self, samples: Samples, models: tuple[Floats, Floats], num_replicates: int, seed: int) -> None:
        self._samples, self._models = samples, models
        self._options = num_replicates, seed
        self._sums: dict[str, tuple[_Columns | None, _Figure]] = {}
        self._units = _units(samples)

    def add(self, metric: str) -> None:
        """Note a metric.

        Raises:
            ConfigError: there is no such metric, or it needs groups.
        """
        name, _, place = metric.partition("@")
        is_grouped = name in GROUPED and (place == "" if name == "gauc" else place.isdigit() and int(place) > 0)
        if metric not in (*_OF_SUMS, "auc") and not is_grouped:
            known = ("auc", *_OF_SUMS, "gauc", "ndcg@10", "precision@10", "recall@10")
            raise ConfigError(f"got the metric {metric!r}, needed some of {', '.join(known)}.")
        if is_grouped and self._samples.groups is None:
            raise ConfigError(f"{metric} is a mean over groups of samples. Say which column has them: --group COLUMN.")
        if metric in _OF_SUMS:
            self._sums[metric] = _OF_SUMS[metric]
        elif is_grouped:
            self._sums[metric] = None, _ratio

    def of(self, metric: str) -> list[tuple[float, Floats]]:
        """Return the figure of each model, and its replicates [R]."""
        if metric == "auc":
            return [self._area(predictions) for predictions in self._models]
        figure = self._sums[metric][1]
        with np.errstate(invalid="ignore", divide="ignore"):
            return [
                (float(figure(sums.sum(axis=0))), figure(drawn[:, columns].T))
                for sums, drawn, columns in self._drawn[metric]
            ]

    def _area(self, predictions: Floats) -> tuple[float, Floats]:
        samples, (num_replicates, seed) = self._samples, self._options
        figures = by_group(predictions, samples.labels, np.zeros(len(predictions), np.int64), samples.weights)
        draws = resampled_auc(predictions, samples.labels, num_replicates, samples.weights, self._units, seed)
        return float(figures.auc[0]) if len(figures.auc) else float("nan"), draws

    @cached_property
    def _drawn(self) -> dict[str, list[tuple[Floats, Floats, slice]]]:
        """Of each metric and model what is summed, [U, C], the sums of all columns in each replicate, [R, all C], and
        which of them are its own."""
        found: dict[str, list[tuple[Floats, Floats, slice]]] = {}
        for of_groups in (False, True):
            own = [metric for metric, (columns, _) in self._sums.items() if (columns is None) == of_groups]
            if not own:
                continue
            make = self._of_groups if of_groups else self._of_samples
            each = [(metric, make(metric, predictions)) for metric in own for predictions in self._models]
            numbers = self._numbers(of_groups)
            drawn = resampled_sums(
                np.concatenate([values for _, values in each], axis=1), *self._options[:1], numbers, self._options[1]
            )
            end = 0
            for metric, values in each:
                found.setdefault(metric, []).append((values, drawn, slice(end, end + values.shape[1])))
                end += values.shape[1]
        return found

    def _numbers(self, of_groups: bool) -> Ints | None:
        if of_groups:
            assert self._samples.groups is not None
            return np.unique(self._samples.groups[self._samples.groups >= 0])
        return None if self._units is None else np.unique(self._units)

    def _of_samples(self, metric: str, predictions: Floats) -> Floats:
        columns = _OF_SUMS[metric][0]
        each = np.stack(columns(predictions, self._samples.labels), axis=1)
        if self._samples.weights is not None:
            each *= self._samples.weights[:, None]
        if self._units is None:
            return each
        numbers, places = np.unique(self._units, return_inverse=True)
        return np.stack([np.bincount(places, column, len(numbers)) for column in each.T], axis=1)

    def _of_groups(self, metric: str, predictions: Floats) -> Floats:
        samples, (name, _, place) = self._samples, metric.partition("@")
        assert samples.groups is not None
        there = samples.groups >= 0
        weights = None if samples.weights is None else samples.weights[there]
        columns = predictions[there], samples.labels[there], samples.groups[there], weights
        figures = by_group(*columns, [int(place)] if place else [])
        each: Floats = figures.auc if name == "gauc" else getattr(figures, name)[0]
        weight = np.where(np.isnan(each), 0.0, figures.weight if name == "gauc" else 1.0)
        return np.stack([np.nan_to_num(each) * weight, weight], axis=1)


def _units(samples: Samples) -> Ints | None:
    """Return the unit of each sample: its group; a sample without one is a unit of its own."""
    if samples.groups is None:
        return None
    alone = samples.groups < 0
    units = samples.groups.copy()
    units[alone] = samples.groups.max(initial=-1) + 1 + np.arange(int(alone.sum()))
    return units


def _ratio(sums: Floats) -> Floats:
    return np.asarray(sums[0] / sums[1])


def _entropies(p: Floats, y: Floats) -> tuple[Floats, ...]:
    p = np.clip(p, _ETA, 1 - _ETA)
    return -(y * np.log(p) + (1 - y) * np.log1p(-p)), y, np.ones(len(y))


def _normalized(sums: Floats) -> Floats:
    entropy, positive, count = sums
    mean = positive / count
    return np.asarray(entropy / count / -(mean * np.log(mean) + (1 - mean) * np.log1p(-mean)))


def _squares(p: Floats, y: Floats) -> tuple[Floats, ...]:
    return (p - y) ** 2, np.ones(len(y)), y, y**2


def _r2(sums: Floats) -> Floats:
    squared, count, total, squares = sums
    return np.asarray(1 - squared / (squares - total**2 / count))


#: Columns that are summed, of predictions and labels, and the figure of their sums.
_OF_SUMS: Mapping[str, tuple[_Columns, _Figure]] = {
    "ne": (_entropies, _normalized),
    "logloss": (_entropies, lambda sums: _ratio(sums[[0, 2]])),
    "accuracy": (lambda p, y: (((p > 0.5) == (y > 0.5)).astype(np.float64), np.ones(len(y))), _ratio),
    "calibration": (lambda p, y: (p, y), _ratio),
    "rmse": (_squares, lambda sums: np.sqrt(_ratio(sums))),
    "mae": (lambda p, y: (np.abs(p - y), np.ones(len(y))), _ratio),
    "r2": (_squares, _r2),
}
