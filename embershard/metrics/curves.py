"""Curves of predictions of one label: ROC, precision over recall, reliability, and how scores are distributed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from embershard.data.schema import Task
from embershard.metrics.predictions import Predicted

Floats = NDArray[np.float64]
Points = list[list[float]]

#: Points of a curve, parts of the samples in a reliability diagram, and bars of a histogram, at most.
MOST_POINTS, MOST_PARTS, MOST_BARS = 200, 20, 40


@dataclass(frozen=True)
class Curves:
    """Curves of one label, each as lists of equal length; () where one is undefined.

    Attributes:
        roc: false and true positive rate, of the largest predictions up to each point.
        precision_recall: recall and precision.
        reliability: mean prediction and mean label of parts of the samples with equal weight, by rising prediction.
        histogram: middle of each bar, and its share of the positive and of the other samples; of numbers, of the
            predictions and of the labels.
    """

    roc: Points
    precision_recall: Points
    reliability: Points
    histogram: Points


def curves_of(task: Task, predicted: Predicted) -> Curves:
    """Return the curves of predictions [N] of one label.

    >>> curves_of("binary", Predicted(torch.tensor([2.0, 0.0, -2.0]), torch.tensor([1.0, 1.0, 0.0]))).roc
    [[0.0, 0.0, 0.0, 1.0], [0.0, 0.5, 1.0, 1.0]]
    """
    outputs = predicted.outputs.double()
    scores = (torch.sigmoid(outputs).float().double() if task == "binary" else outputs).numpy()
    labels = predicted.labels.double().numpy()
    weights = np.ones(len(labels)) if predicted.weights is None else predicted.weights.double().numpy()
    there = (weights > 0) & np.isfinite(scores + labels)
    order = np.argsort(-scores[there], kind="stable")
    scores, labels, weights = (each[there][order] for each in (scores, labels, weights))
    roc, precision_recall = _of_clicks(scores, labels, weights) if task == "binary" else ([], [])
    if task == "binary":
        values, shares = (scores, scores), (weights * labels, weights * (1 - labels))
    else:
        values, shares = (scores, labels), (weights, weights)
    return Curves(roc, precision_recall, _reliability(scores, labels, weights), _histogram(values, shares))


def _of_clicks(scores: Floats, labels: Floats, weights: Floats) -> tuple[Points, Points]:
    """Return ROC, and precision over recall, of samples with falling scores; equal ones are one point."""
    ends = np.flatnonzero(np.diff(scores, append=np.nan))
    true, false = np.cumsum(weights * labels)[ends], np.cumsum(weights * (1 - labels))[ends]
    if not len(ends) or true[-1] == 0 or false[-1] == 0:
        return [], []
    recall, rate, precision = true / true[-1], false / false[-1], true / (true + false)
    with_zero = np.append(0.0, rate), np.append(0.0, recall)
    return _thinned(with_zero[0] + with_zero[1], *with_zero), _thinned(recall, recall, precision)


def _thinned(progress: Floats, *curve: Floats) -> Points:
    """Return a curve with few points, the ends included, in about equal steps of a rising progress."""
    if len(progress) > MOST_POINTS:
        wanted = np.linspace(progress[0], progress[-1], MOST_POINTS - 1)
        kept = np.unique(np.append(np.searchsorted(progress, wanted), len(progress) - 1))
        curve = tuple(each[kept] for each in curve)
    return [each.tolist() for each in curve]


def _reliability(scores: Floats, labels: Floats, weights: Floats) -> Points:
    if not len(scores):
        return []
    scores, labels, weights = scores[::-1], labels[::-1], weights[::-1]
    begins = np.append(True, np.diff(scores) != 0)  # equal scores are in one part
    before = (np.cumsum(weights) - weights)[np.maximum.accumulate(np.where(begins, np.arange(len(scores)), 0))]
    part = np.minimum((before / weights.sum() * MOST_PARTS).astype(np.int64), MOST_PARTS - 1)
    sums = [np.bincount(part, each, MOST_PARTS) for each in (weights, weights * scores, weights * labels)]
    there = sums[0] > 0
    return [(each[there] / sums[0][there]).tolist() for each in sums[1:]]


def _histogram(values: tuple[Floats, Floats], weights: tuple[Floats, Floats]) -> Points:
    both = np.concatenate(values)
    if not len(both):
        return []
    edges = np.histogram_bin_edges(both, MOST_BARS)
    bars = []
    for each, weight in zip(values, weights, strict=True):
        counts, _ = np.histogram(each, edges, weights=weight)
        bars.append((counts / (counts.sum() or 1.0)).tolist())
    return [((edges[1:] + edges[:-1]) / 2).tolist(), *bars]
