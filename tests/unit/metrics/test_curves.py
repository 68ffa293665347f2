"""Curves against torchmetrics and loops, with ties, weights, one class, and many samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_precision_recall_curve, binary_roc

from embershard.data import Target
from embershard.metrics.curves import MOST_POINTS, curves_of
from embershard.metrics.predictions import Predicted, judge


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(0, 1)), min_size=2, max_size=40))
def test_curves_are_torchmetrics(samples: list[tuple[int, int]]) -> None:
    logits, labels = (torch.tensor(each) for each in zip(*samples, strict=True))
    found = curves_of("binary", Predicted(logits.float(), labels.float()))
    if labels.sum() in (0, len(labels)):
        assert found.roc == found.precision_recall == []
        return
    p = logits.double().sigmoid().float()
    false, true, _ = binary_roc(p, labels)
    np.testing.assert_allclose(found.roc, [false.numpy(), true.numpy()], atol=1e-6)
    precision, recall, _ = binary_precision_recall_curve(p, labels)  # rising thresholds, and a point of their own
    np.testing.assert_allclose(found.precision_recall, [recall.numpy()[-2::-1], precision.numpy()[-2::-1]], atol=1e-6)


def test_weights_count_as_samples_and_few_points_keep_the_area() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5000)
    labels, weights = (torch.rand(5000) < logits.sigmoid()).float(), torch.randint(0, 4, (5000,))
    found = curves_of("binary", Predicted(logits, labels, weights.float()))
    repeated = curves_of("binary", Predicted(*(each.repeat_interleave(weights) for each in (logits, labels))))
    for name in ("roc", "precision_recall", "reliability", "histogram"):
        np.testing.assert_allclose(getattr(found, name), getattr(repeated, name), atol=1e-9, err_msg=name)
    assert 100 < len(found.roc[0]) <= MOST_POINTS
    assert (found.roc[0][0], found.roc[1][0], found.roc[0][-1], found.roc[1][-1]) == (0, 0, 1, 1)
    area = np.trapezoid(found.roc[1], found.roc[0])
    assert area == pytest.approx(judge(Target(), Predicted(logits, labels, weights))["auc"], abs=1e-3)


def test_reliability_is_the_mean_of_equal_parts() -> None:
    torch.manual_seed(1)
    logits, labels = torch.randn(2000), (torch.rand(2000) < 0.5).float()
    found = curves_of("binary", Predicted(logits, labels)).reliability
    order = logits.argsort()
    for row, values in enumerate((logits.sigmoid(), labels)):
        assert found[row] == pytest.approx(values[order].reshape(20, 100).double().mean(dim=1).tolist(), rel=1e-6)
    tied = curves_of("binary", Predicted(torch.zeros(50), labels[:50])).reliability
    assert tied == [[0.5], [pytest.approx(float(labels[:50].mean()))]]


def test_histogram_has_all_samples_and_numbers_have_no_roc() -> None:
    torch.manual_seed(2)
    logits, labels = torch.randn(300), (torch.rand(300) < 0.2).float()
    middles, clicks, others = curves_of("binary", Predicted(logits, labels)).histogram
    assert (len(middles), sum(clicks), sum(others)) == (40, pytest.approx(1), pytest.approx(1))
    numbers = curves_of("regression", Predicted(logits, logits + 10))
    assert numbers.roc == numbers.precision_recall == []
    assert np.dot(numbers.histogram[0], numbers.histogram[2]) == pytest.approx(10 + float(logits.mean()), abs=0.3)
    nothing = curves_of("binary", Predicted(torch.empty(0), torch.empty(0)))
    assert (nothing.roc, nothing.reliability, nothing.histogram) == ([], [], [])
    missing = curves_of("binary", Predicted(logits, torch.full((300,), torch.nan)))
    assert missing.reliability == []
