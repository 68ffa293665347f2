"""`Quality`: how good predictions are, as a value.

With weights of samples, every figure but `samples` is a mean or a sum in which a sample counts by its weight.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from embershard.data.schema import Target


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
