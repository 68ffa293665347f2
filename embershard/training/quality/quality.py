"""`Quality`: how good predictions are, as a value.

With weights of samples, every figure but `samples` is a mean or a sum in which a sample counts by its weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from embershard.data.schema import Target
from embershard.errors import ConfigError


@dataclass(frozen=True)
class Quality:
    """Quality of predicted probabilities. A figure that is undefined for the samples is None."""

    main: ClassVar[str] = "auc"

    samples: int
    """Samples of all ranks."""

    logloss: float | None
    """Mean cross entropy in nats; None without samples."""

    auc: float | None
    """Area under the ROC curve, exact; None when all labels are equal."""

    ne: float | None
    """Normalized entropy: logloss over that of always predicting the mean label; None when all labels are equal."""

    accuracy: float | None
    """Share of samples whose prediction is on the label's side of 0.5."""

    calibration: float | None
    """Sum of predictions over the number of clicks: 1 is perfect; None without clicks."""


@dataclass(frozen=True)
class RegressionQuality:
    """Quality of predicted numbers. A figure that is undefined for the samples is None."""

    main: ClassVar[str] = "rmse"

    samples: int
    """Samples of all ranks."""

    rmse: float | None
    """Root of the mean squared distance from the labels; None without samples."""

    mae: float | None
    """Mean distance from the labels; None without samples."""

    r2: float | None
    """1 - mean squared distance over the labels' variance: 1 is perfect, 0 is always predicting the mean label; None
    when all labels are equal."""


@dataclass(frozen=True)
class LabelQualities:
    """Quality for each of several labels, by its name."""

    samples: int
    of: dict[str, Quality | RegressionQuality]


AnyQuality = Quality | RegressionQuality | LabelQualities


def quality_values(quality: AnyQuality) -> dict[str, Any]:
    """Return all figures by name; of several labels a figure is named as `auc/click`.

    >>> quality_values(LabelQualities(9, {"stars": RegressionQuality(9, 0.5, 0.4, None)}))
    {'samples': 9, 'rmse/stars': 0.5, 'mae/stars': 0.4, 'r2/stars': None}
    """
    if not isinstance(quality, LabelQualities):
        return asdict(quality)
    found: dict[str, Any] = {"samples": quality.samples}
    for label, each in quality.of.items():
        found |= {f"{name}/{label}": value for name, value in asdict(each).items() if name != "samples"}
    return found


def main_values(quality: AnyQuality) -> dict[str, float | None]:
    """Return the one figure by which to judge each label, by name: the AUC, or the RMSE.

    >>> main_values(RegressionQuality(9, 0.5, 0.4, None))
    {'rmse': 0.5}
    """
    if isinstance(quality, LabelQualities):
        return {f"{each.main}/{label}": getattr(each, each.main) for label, each in quality.of.items()}
    return {quality.main: getattr(quality, quality.main)}


def metric_names(target: Target) -> list[str]:
    """Return the names of all figures of a model, `samples` left out, as `quality_values` has them.

    >>> metric_names(Target(("click", "buy")))[:2]
    ['logloss/click', 'auc/click']
    """
    kind = Quality if target.task == "binary" else RegressionQuality
    names = [each.name for each in fields(kind) if each.name != "samples"]
    if len(target.labels) == 1:
        return names
    return [f"{name}/{label}" for label in target.labels for name in names]


#: Figures by which evaluations are compared, and whether more is better. (Calibration is best at 1.)
MORE_IS_BETTER = {
    "auc": True, "accuracy": True, "r2": True, "logloss": False, "ne": False, "rmse": False, "mae": False
}  # fmt: skip


@dataclass(frozen=True)
class Judge:
    """Compares evaluations by one figure; of several labels by that of one, or by the mean over all.

    >>> judge = Judge.of(None, Target(("click", "buy")))
    >>> judge.value({"auc/click": 0.7, "auc/buy": 0.75, "logloss/buy": 0.2}), judge.is_better(0.7, than=0.7)
    (0.725, False)
    """

    metric: str

    @classmethod
    def of(cls, metric: str | None, target: Target) -> Judge:
        """Return the judge of `train.metric`; by default of the AUC, or the RMSE.

        Raises:
            ConfigError: no model of this target has such a figure, or it has no direction.
        """
        if metric is None:
            return cls("auc" if target.task == "binary" else "rmse")
        names = [name for name in metric_names(target) if name.partition("/")[0] in MORE_IS_BETTER]
        known = list(dict.fromkeys([name.partition("/")[0] for name in names] + names))
        if metric not in known:
            raise ConfigError(f"train.metric: got {metric!r}, needed one of {', '.join(known)}.")
        return cls(metric)

    def value(self, quality: Mapping[str, Any]) -> float | None:
        """Return the figure among those of `quality_values`; None where it is undefined, or not finite."""
        found = [value for name, value in quality.items() if self.metric in (name, name.partition("/")[0])]
        is_defined = found and all(value is not None and math.isfinite(value) for value in found)
        return math.fsum(found) / len(found) if is_defined else None

    def is_better(self, value: float | None, than: float | None) -> bool:
        """Return whether a value is better than another one; an undefined one is not, and is worse than any other."""
        if value is None or than is None:
            return value is not None
        return value > than if MORE_IS_BETTER[self.metric.partition("/")[0]] else value < than
