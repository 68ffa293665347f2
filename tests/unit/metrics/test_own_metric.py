"""Figures of one's own: what their functions get and may return, and what is refused before a training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from embershard.data import Target
from embershard.distributed import Ranks
from embershard.errors import ConfigError
from embershard.metrics.config import MetricsConfig
from embershard.metrics.evaluation import Evaluator
from embershard.metrics.own_metric import Floats
from embershard.metrics.predictions import Predicted, judge
from embershard.settings.files import load_config
from embershard.training.config import RunConfig
from tests.unit.metrics.columns import Columns

PREDICTED = Predicted(
    torch.tensor([0.0, 2.0, -1.0, 3.0]), torch.tensor([0.0, 1.0, float("nan"), 1.0]), torch.tensor([1.0, 3.0, 5.0, 0.0])
)


def distance(scores: Floats, labels: Floats, weights: Floats) -> Floats:
    return np.abs(scores - labels)


def of_all(scores: Floats, labels: Floats, weights: Floats) -> float:
    scores[:], weights[:] = 9, 9  # copies, so that other figures are as they were
    return float(labels.sum())


def undefined(scores: Floats, labels: Floats, weights: Floats) -> float:
    return float("nan")


def fails(scores: Floats, labels: Floats, weights: Floats) -> float:
    return float(labels[99])


def pairs(scores: Floats, labels: Floats, weights: Floats) -> Floats:
    return np.stack([scores, labels], axis=1)


def named(*functions: object) -> MetricsConfig:
    return MetricsConfig(tuple(f"{__name__}:{getattr(each, '__name__', each)}" for each in functions))


def figures(predicted: Predicted, *functions: object, target: Target | None = None) -> list[float | None]:
    """The figures of these functions, in their order."""
    metrics = named(*functions)
    found = judge(target or Target(weight="w"), predicted, metrics)
    return [found[name] for name in metrics.names]


def test_a_number_of_each_sample_is_averaged_by_weights_and_one_of_all_is_the_figure():
    """The sample without a label counts for no figure; scores are probabilities."""
    there = torch.tensor([0.0, 2.0, 3.0]).double().sigmoid().numpy()
    own = np.abs(there - [0, 1, 1])
    assert figures(PREDICTED, of_all, distance, undefined) == [2.0, pytest.approx((own * [1, 3, 0]).sum() / 4), None]
    assert judge(Target(weight="w"), PREDICTED, named(of_all))["auc"] == judge(Target(weight="w"), PREDICTED)["auc"]


def test_scores_of_a_regression_are_numbers():
    predicted = Predicted(torch.tensor([2.5, -4.0]), torch.tensor([2.0, -1.0]))
    assert figures(predicted, distance, target=Target(task="regression")) == [1.75]


def test_without_samples_or_weights_there_is_no_figure():
    assert figures(PREDICTED.take(slice(0, 0)), of_all, distance) == [None, None]
    assert figures(PREDICTED.take(slice(3, 4)), distance) == [None]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fails, r"metrics.names: .*:fails failed: IndexError: .* \(.*test_own_metric.py, line \d+\)"),
        (pairs, r"metrics.names: .*:pairs returned numbers \[8, 2\] for 8 samples; needed one number, or \[8\]"),
        ("gone", r"metrics.names = .*test_own_metric.py has no function 'gone'; it has .*distance, of_all"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_the_training(function, message, ranks: Ranks):
    with pytest.raises(ConfigError, match=message):
        Evaluator(Target(), named(function), Columns(), ranks)


def test_the_folder_is_that_of_the_settings_file(tmp_path: Path):
    (tmp_path / "run.toml").write_text('[metrics]\nnames = ["auc", "own_profit:profit"]\n')
    (tmp_path / "own_profit.py").write_text("def profit(scores, labels, weights):\n    return 7\n")
    metrics = load_config(RunConfig, tmp_path / "run.toml").metrics
    assert (metrics.folder, metrics.own) == (str(tmp_path), ("own_profit:profit",))
    assert judge(Target(), Predicted(torch.ones(2), torch.ones(2)), metrics)["own_profit:profit"] == 7
    with pytest.raises(ConfigError, match=r"metrics.folder has no effect without"):
        MetricsConfig(("auc",), folder=str(tmp_path))
