"""Two models on the same samples: the difference of their figures, and how much of it may be chance.

Letters: N samples, R replicates, S seeds with which both models were trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embershard.data.schema import Task
from embershard.errors import ConfigError
from embershard.extras.compare.resampling import resampled_auc, resampled_sums
from embershard.metrics.figures import OfGroups, OfOwn, OfPairs, OfSums, check_name, known_row, more_is_better
from embershard.metrics.own_metric import own_values
from embershard.metrics.ranking import by_group

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    """What is known of N samples beside the models' predictions.

    Attributes:
        labels: [N]; of a label with classes [N, C].
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
        more = more_is_better(self.metric)
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
        a, b: [N] or [S, N], what each model predicts: probabilities, or numbers for the metrics of a regression; of
            classes [S, N, C], their logits. Place s of both was trained with the same seed.
        metrics: of `METRICS`, those of groups as "gauc" and "ndcg@10".

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


def check_metric(metric: str, *, has_groups: bool) -> None:
    """Raise `ConfigError` where there is no such metric, or it cannot be compared, or it needs groups."""
    check_name(metric, "--metrics")
    row = known_row(metric)
    if row.is_recalibrated:
        raise ConfigError(f"--metrics: {metric} is of one run's setting, metrics.recalibration. Leave it out.")
    if row.is_of_groups and not has_groups:
        raise ConfigError(f"{metric} is a mean over groups of samples. Say which column has them: --group COLUMN.")


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
        self._hows: dict[str, OfSums | OfPairs | OfGroups | OfOwn] = {}
        self._units = _units(samples)

    def add(self, metric: str) -> None:
        """Note a metric. Raises as `check_metric`."""
        check_metric(metric, has_groups=self._samples.groups is not None)
        row = known_row(metric)
        has_classes = self._samples.labels.ndim == 2
        tasks: list[Task] = ["multiclass"] if has_classes else ["binary", "regression"]
        hows = [row.of[task] for task in tasks if task in row.of]
        if not hows:
            raise ConfigError(f"--metrics: {metric} is of labels {'without' if has_classes else 'with'} classes alone.")
        self._hows[metric] = hows[0]

    def of(self, metric: str) -> list[tuple[float, Floats]]:
        """Return the figure of each model, and its replicates [R]."""
        how = self._hows[metric]
        if isinstance(how, OfPairs):
            return [self._area(predictions) for predictions in self._models]
        return [
            (float(_figure(how, sums.sum(axis=0)[:, None])[0]), _figure(how, drawn[:, columns].T))
            for sums, drawn, columns in self._drawn[metric]
        ]

    def _area(self, predictions: Floats) -> tuple[float, Floats]:
        samples, (num_replicates, seed) = self._samples, self._options
        figures = by_group(predictions, samples.labels, weights=samples.weights)
        draws = resampled_auc(predictions, samples.labels, num_replicates, samples.weights, self._units, seed)
        return float(figures.auc[0]) if len(figures.auc) else float("nan"), draws

    @cached_property
    def _drawn(self) -> dict[str, list[tuple[Floats, Floats, slice]]]:
        """Of each metric and model what is summed, [U, C], the sums of all columns in each replicate, [R, all C], and
        which of them are its own."""
        found: dict[str, list[tuple[Floats, Floats, slice]]] = {}
        for kind in ((OfSums, OfOwn), OfGroups):
            own = {metric: how for metric, how in self._hows.items() if isinstance(how, kind)}
            if not own:
                continue
            each = [(metric, self._summed(metric, how, model)) for metric, how in own.items() for model in self._models]
            drawn = resampled_sums(
                np.concatenate([values for _, values in each], axis=1),
                self._options[0],
                self._numbers(of_groups=kind is OfGroups),
                self._options[1],
            )
            end = 0
            for metric, values in each:
                found.setdefault(metric, []).append((values, drawn, slice(end, end + values.shape[1])))
                end += values.shape[1]
        return found

    def _of_samples(self, metric: str, how: OfSums | OfOwn, predictions: Floats, weights: Floats) -> Floats:
        """Return what is summed of each sample, [N, C]."""
        labels = self._samples.labels
        if isinstance(how, OfSums):
            with np.errstate(all="ignore"):
                return np.stack(how.columns(predictions, labels, weights), axis=1)
        values = own_values(metric, ".", predictions, labels, weights)
        if not values.ndim:
            raise ConfigError(
                f"--metrics: {metric} returned a number of all samples; needed one of each, [{len(labels)}], since a "
                "comparison draws samples. Leave it out, or write it so."
            )
        return np.stack([weights * values, weights], axis=1)

    def _numbers(self, *, of_groups: bool) -> Ints | None:
        if of_groups:
            assert self._samples.groups is not None
            return np.unique(self._samples.groups[self._samples.groups >= 0])
        return None if self._units is None else np.unique(self._units)

    def _summed(self, metric: str, how: OfSums | OfGroups | OfOwn, predictions: Floats) -> Floats:
        """Return what is summed of each unit, [U, C]: of a mean over groups the values and the weights."""
        samples = self._samples
        weights = np.ones(len(samples.labels)) if samples.weights is None else samples.weights.astype(np.float64)
        if not isinstance(how, OfGroups):
            each = self._of_samples(metric, how, predictions, weights)
            if self._units is None:
                return each
            numbers, places = np.unique(self._units, return_inverse=True)
            return np.stack([np.bincount(places, column, len(numbers)) for column in each.T], axis=1)
        assert samples.groups is not None
        there = samples.groups >= 0
        own = predictions[there], samples.labels[there], samples.groups[there], weights[there]
        figures = by_group(*own, [int(metric.partition("@")[2])] if how.has_place else [])
        values = how.of_each(figures, 0)
        weight = np.where(np.isnan(values), 0.0, 1.0 if how.has_place else figures.weight)
        return np.stack([np.nan_to_num(values) * weight, weight], axis=1)


def _figure(how: OfSums | OfGroups | OfOwn, sums: Floats) -> Floats:
    """Return the figure of sums [C] or [C, R]; NaN where they have none."""
    columns = np.ascontiguousarray(sums, np.float64)
    with np.errstate(all="ignore"):
        if not isinstance(how, OfSums):
            return columns[0] / columns[1]
        return np.where(how.is_defined(*columns), how.figure(*columns), np.nan)


def _units(samples: Samples) -> Ints | None:
    """Return the unit of each sample: its group; a sample without one is a unit of its own."""
    if samples.groups is None:
        return None
    alone = samples.groups < 0
    units = samples.groups.copy()
    units[alone] = samples.groups.max(initial=-1) + 1 + np.arange(int(alone.sum()))
    return units
