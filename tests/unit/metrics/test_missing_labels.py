"""Labels that samples have not: they count in no figure and no loss of a label."""

from __future__ import annotations

import pytest
import torch

from embershard.data import Target
from embershard.metrics.figures import Judge, metric_names, metric_of
from embershard.metrics.predictions import Predicted, judge
from embershard.models.loss import loss_of
from embershard.training.parts.loss_monitor import label_sums

TARGET = Target(("click", "buy", "stars"), ("binary", "binary", "regression"), may_be_missing=True)


def predicted(*, weighted: bool) -> Predicted:
    torch.manual_seed(0)
    labels = torch.stack([(torch.randn(60) > 0).float(), (torch.randn(60) > 0).float(), torch.randn(60)], dim=1)
    labels[labels[:, 0] == 0, 1] = float("nan")
    labels[::3, 2] = float("nan")
    return Predicted(torch.randn(60, 3), labels, torch.rand(60) if weighted else None)


@pytest.mark.parametrize("weighted", [False, True])
def test_figures_are_those_of_the_samples_with_the_label(weighted):
    target = Target(TARGET.labels, TARGET.task, weight="w" if weighted else None, may_be_missing=True)
    whole = predicted(weighted=weighted)
    values = judge(target, whole)
    for place, (name, task) in enumerate(zip(TARGET.labels, TARGET.tasks, strict=True)):
        there = ~whole.labels[:, place].isnan()
        weights = None if whole.weights is None else whole.weights[there]
        alone = Predicted(whole.outputs[there, place], whole.labels[there, place], weights)
        own = judge(Target((name,), task), alone)
        assert own.pop("samples") == values.get(f"samples/{name}", 60) == there.sum()
        assert own == {each: values[f"{each}/{name}"] for each in own}
    assert set(metric_names(target)) == {name for name in values if metric_of(name) != "samples"}
    counts = {name for name in values if metric_of(name) == "samples"}
    assert counts == {"samples", "samples/buy", "samples/stars"}


def test_a_label_that_no_sample_has_has_no_figure():
    whole = predicted(weighted=False)
    whole.labels[:, 1] = float("nan")
    values = judge(TARGET, whole)
    assert {values[f"{name}/buy"] for name in ("auc", "ne", "logloss", "accuracy", "calibration")} == {None}
    assert values["auc/click"] is not None


def test_tasks_are_judged_by_the_auc_of_those_that_have_one():
    judge_of_all = Judge.of(None, TARGET)
    assert judge_of_all.value({"auc/click": 0.6, "auc/buy": 0.8, "rmse/stars": 1.0}) == pytest.approx(0.7)
    assert Judge.of("rmse/stars", TARGET).is_better(0.5, than=0.6)


def test_sums_of_parts_are_those_of_the_whole():
    outputs, labels, _ = predicted(weighted=False)
    whole = label_sums(TARGET, outputs, labels, None)
    parts = sum(label_sums(TARGET, outputs[part], labels[part], None) for part in (slice(0, 7), slice(7, 60)))
    assert torch.allclose(whole, parts, rtol=1e-12)
    assert whole[3:].tolist() == (~labels.isnan()).sum(dim=0).tolist()
    losses = whole[:3] / 60
    assert losses.sum() == pytest.approx(float(loss_of(TARGET, outputs.double(), labels.double(), None)), rel=1e-12)
    assert not label_sums(Target(), outputs[:, 0], labels[:, 0], None).numel()
