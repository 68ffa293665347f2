"""Differences of two models: their figures are those of the trainer, and their intervals hold what they should."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from embershard.data import Target
from embershard.errors import ConfigError
from embershard.extras.compare import comparison
from embershard.extras.compare.comparison import Samples, compare
from embershard.extras.compare.resampling import resampled_auc, resampled_sums
from embershard.metrics.figures import names_of
from embershard.metrics.predictions import Predicted, judge

pytestmark = pytest.mark.extra


def clicks(count: int, seed: int, noise: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, and the predictions of two models that are as good."""
    rng = np.random.default_rng(seed)
    logit = rng.normal(-1, 1, count)
    labels = (rng.random(count) < 1 / (1 + np.exp(-logit))).astype(float)
    a, b = (1 / (1 + np.exp(-logit - rng.normal(0, noise, count))) for _ in range(2))
    return labels, a, b


@pytest.mark.smoke
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("task", ["binary", "regression"])
def test_figures_are_those_of_an_evaluation(task: Any, weighted: bool) -> None:
    labels, a, _ = clicks(500, seed=1)
    weights = np.random.default_rng(2).random(500).astype(np.float32) if weighted else None
    a = a.astype(np.float32)
    outputs = torch.logit(torch.tensor(a)) if task == "binary" else torch.tensor(a)
    quality = judge(
        Target(task=task), Predicted(outputs, torch.tensor(labels), None if weights is None else torch.tensor(weights))
    )
    metrics = names_of(task)
    found = compare(Samples(labels, weights), a.astype(float), a.astype(float), metrics, num_replicates=2)
    assert {each.metric: each.a for each in found} == pytest.approx({name: quality[name] for name in metrics}, rel=1e-5)
    assert all(each.low == each.high == 0 and not each.is_different for each in found)


@pytest.mark.smoke
def test_replicates_are_those_of_written_out_draws() -> None:
    """Each unit counts as often for sums and for areas, whichever order the samples have."""
    labels, a, _ = clicks(200, seed=3)
    a = a.round(1)
    units = np.arange(200) // 3
    counts = np.stack([resampled_sums((units == unit)[:, None], 5, units)[:, 0] for unit in range(67)], axis=1)
    counts = counts / np.bincount(units)
    assert set(np.unique(counts)) <= set(range(10))
    for replicate, auc in enumerate(resampled_auc(a, labels, 5, units=units)):
        weight = counts[replicate][units]
        above = (a[:, None] > a) + 0.5 * (a[:, None] == a)
        pairs = np.outer(weight * labels, weight * (1 - labels))
        assert auc == pytest.approx((above * pairs).sum() / pairs.sum())


def test_draws_are_poissons() -> None:
    drawn = resampled_sums(np.ones((1, 1)), 200_000)[:, 0]
    for count in range(4):
        assert (drawn == count).mean() == pytest.approx(math.exp(-1) / math.factorial(count), abs=5e-3)
    both = resampled_sums(np.eye(2), 100_000)
    assert abs(np.corrcoef(both.T)[0, 1]) < 0.02
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.02


@pytest.mark.parametrize("metric", ["auc", "logloss"])
def test_equal_models_seldom_differ_and_a_better_one_does(metric: str) -> None:
    """At 95 %, of 100 pairs of equally good models 5 differ by chance, give or take: 1 to 11 with a chance of 99 %."""
    by_chance = 0
    for seed in range(100):
        labels, a, b = clicks(400, seed)
        (found,) = compare(Samples(labels), a, b, [metric], num_replicates=400, seed=seed)
        by_chance += found.is_different
    assert 1 <= by_chance <= 11
    labels, a, _ = clicks(4000, seed=7, noise=2.0)
    _, b, _ = clicks(4000, seed=7, noise=0.5)
    (found,) = compare(Samples(labels), a, b, [metric])
    assert found.better == "B"
    assert found.low < found.b - found.a < found.high


@pytest.mark.parametrize("spread", [0.0, 0.4], ids=["samples alone", "seeds that differ"])
def test_over_seeds_equal_models_seldom_differ(spread: float) -> None:
    """With 5 seeds each, of which every one is as good as its luck. The control leaves the seeds' luck out."""
    wrong, without = 0, 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        logit = rng.normal(-1, 1, 300)
        labels = (rng.random(300) < 1 / (1 + np.exp(-logit))).astype(float)
        noise = np.exp(rng.normal(0, spread, (2, 5, 1)))
        a, b = 1 / (1 + np.exp(-logit - noise * rng.normal(size=(2, 5, 300))))
        (found,) = compare(Samples(labels), a, b, ["logloss"], num_replicates=100, seed=seed)
        wrong += found.is_different
        (alone,) = compare(Samples(labels), a.mean(axis=0), b.mean(axis=0), ["logloss"], num_replicates=100, seed=seed)
        without += abs(found.b - found.a) > (alone.high - alone.low) / 2
    assert wrong <= 11
    assert (without > 20) == bool(spread)


def test_over_seeds_a_better_model_is_found() -> None:
    labels, *_ = clicks(2000, seed=7)
    a, b = (np.stack([clicks(2000, 7, noise)[model] for model in (1, 2)]) for noise in (1.0, 0.5))
    (found,) = compare(Samples(labels), a, b, ["logloss"])
    assert found.better == "B"
    each = [compare(Samples(labels), a[place], b[place], ["logloss"])[0] for place in (0, 1)]
    assert (found.a, found.b) == pytest.approx((np.mean([of.a for of in each]), np.mean([of.b for of in each])))
    (same,) = compare(Samples(labels), a, a, ["logloss"])
    assert (same.low, same.high, same.p_value, same.better) == (0, 0, 1, "")


def test_samples_of_a_group_are_drawn_together() -> None:
    """Copies of a sample tell nothing new: drawn one by one they would make the interval too narrow."""
    labels, a, b = (np.repeat(each, 9) for each in clicks(300, seed=11))
    alone, together = (
        compare(Samples(labels, groups=groups), a, b, ["auc"])[0] for groups in (None, np.arange(300).repeat(9))
    )
    width = (together.high - together.low) / (alone.high - alone.low)
    assert width == pytest.approx(3, rel=0.15)


def test_means_over_groups() -> None:
    rng = np.random.default_rng(0)
    labels, a, b = clicks(3000, seed=5)
    groups = rng.integers(-1, 200, 3000)
    found = {
        each.metric: each for each in compare(Samples(labels, groups=groups), a, b, ["gauc", "ndcg@5", "recall@1"])
    }
    assert set(found) == {"gauc", "ndcg@5", "recall@1"}
    assert 0.5 < found["gauc"].a < 1
    assert all(each.low < each.b - each.a < each.high for each in found.values())


@pytest.mark.parametrize(
    ("metric", "message"),
    [("gauc", "--group"), ("ndcg@5", "--group"), ("ndcg", "needed some of"), ("gauc@3", "needed")],
)
def test_metrics_that_cannot_be_had(metric: str, message: str) -> None:
    labels, a, b = clicks(20, seed=0)
    groups = None if message == "--group" else np.zeros(20, np.int64)
    with pytest.raises(ConfigError, match=message):
        compare(Samples(labels, groups=groups), a, b, [metric])


def test_a_figure_that_is_undefined_is_left_out() -> None:
    found = compare(Samples(np.ones(9)), np.full(9, 0.5), np.full(9, 0.6), names_of("binary"))
    assert [each.metric for each in found] == ["logloss", "accuracy", "calibration"]
    assert comparison.compare(Samples(np.empty(0)), np.empty(0), np.empty(0), ["auc", "logloss"]) == []
