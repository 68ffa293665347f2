"""Figures of groups against textbook loops, and against torchmetrics where it has them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.functional.retrieval import retrieval_normalized_dcg, retrieval_precision, retrieval_recall

from embershard.metrics.ranking import GroupFigures, by_group, weighted_mean

PLACES = (1, 3, 10)


def gauc(found: GroupFigures) -> float | None:
    return weighted_mean(found.auc, found.weight)


def mean_over_orders(predictions: np.ndarray, labels: np.ndarray, place: int) -> tuple[float, float, float]:
    """NDCG, precision and recall of one group: each sample's chance of each place, equal predictions in any order."""
    gain = hits = 0.0
    for prediction, label in zip(predictions, labels, strict=True):
        above, equal = int((predictions > prediction).sum()), int((predictions == prediction).sum())
        for where in range(above, above + equal):
            if where < place:
                gain += label / equal / math.log2(where + 2)
                hits += label / equal
    best = sum(label / math.log2(where + 2) for where, label in enumerate(sorted(labels, reverse=True)[:place]))
    total = float(labels.sum())
    return gain / best if best else math.nan, hits / place, hits / total if total else math.nan


def area(predictions: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> float:
    """AUC of one group, pair by pair."""
    above = pairs = 0.0
    for p, y, w in zip(predictions, labels, weights, strict=True):
        for q, z, v in zip(predictions, labels, weights, strict=True):
            if y > z:
                above += w * v * ((p > q) + 0.5 * (p == q))
                pairs += w * v
    return above / pairs if pairs else math.nan


SAMPLES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 1), st.integers(-2, 5), st.sampled_from([0.0, 0.5, 1.0, 2.0])),
    max_size=40,
)


@pytest.mark.slow
@given(SAMPLES)
def test_figures_are_those_of_the_textbook(samples: Sequence[tuple[int, int, int, float]]) -> None:
    predictions, labels, groups, weights = np.array(samples, float).reshape(-1, 4).T
    found = by_group(predictions / 4, labels, groups.astype(np.int64), weights, PLACES)
    names = sorted(set(groups.tolist()))
    assert len(found.auc) == len(names)
    for number, name in enumerate(names):
        mine = groups == name
        assert found.weight[number] == pytest.approx(weights[mine].sum())
        assert found.auc[number] == pytest.approx(area(predictions[mine], labels[mine], weights[mine]), nan_ok=True)
        for row, place in enumerate(PLACES):
            told = found.ndcg[row, number], found.precision[row, number], found.recall[row, number]
            assert told == pytest.approx(mean_over_orders(predictions[mine], labels[mine], place), nan_ok=True)


def test_figures_do_not_depend_on_the_order_of_the_samples() -> None:
    rng = np.random.default_rng(0)
    columns = (
        rng.integers(0, 9, 500) / 8,
        rng.integers(0, 2, 500).astype(float),
        rng.integers(0, 20, 500),
        rng.random(500),
    )
    found = by_group(*columns, places=PLACES)
    order = rng.permutation(500)
    again = by_group(*(each[order] for each in columns), places=PLACES)
    np.testing.assert_allclose(again.auc, found.auc, rtol=1e-12)
    np.testing.assert_allclose(again.ndcg, found.ndcg, rtol=1e-12)
    assert gauc(again) == pytest.approx(gauc(found), rel=1e-12)


@pytest.mark.parametrize("place", PLACES)
def test_figures_are_those_of_torchmetrics(place: int) -> None:
    """Of distinct predictions: equal ones it takes in the order of the samples."""
    rng = np.random.default_rng(place)
    for size in (1, 5, 30):
        predictions, labels = rng.permutation(size) / size, rng.integers(0, 2, size)
        labels[0] = 1
        found = by_group(predictions, labels, np.zeros(size), places=[place])
        columns = torch.tensor(predictions), torch.tensor(labels)
        k = {"top_k": place}
        assert found.ndcg[0, 0] == pytest.approx(float(retrieval_normalized_dcg(*columns, **k)))
        assert found.precision[0, 0] == pytest.approx(float(retrieval_precision(*columns, **k)))
        assert found.recall[0, 0] == pytest.approx(float(retrieval_recall(*columns, **k)))


def test_groups_without_a_figure_are_left_out_of_the_mean() -> None:
    found = by_group([0.9, 0.1, 0.5, 0.4, 0.3], [1, 0, 1, 1, 0], [0, 0, 1, 1, 2], places=[1])
    assert gauc(found) == 1.0
    assert weighted_mean(found.recall[0]) == 0.75
    assert gauc(by_group([0.5], [1], [0])) is None
    assert gauc(by_group([], [], [])) is None
