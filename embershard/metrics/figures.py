"""`Quality`: how good predictions are, as a value.

With weights of samples, every figure but `samples` is a mean or a sum in which a sample counts by its weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from embershard.data.schema import Target, Task
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

    more: dict[str, float | None] = field(default_factory=dict)
    """Those that `metrics.names` asks for beside these, by name: "gauc", "ndcg@10"."""


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

    more: dict[str, float | None] = field(default_factory=dict)
    """As in `Quality`."""


@dataclass(frozen=True)
class ClassesQuality:
    """Quality of a label with classes, beside that of each class alone. None without samples."""

    main: ClassVar[str] = "accuracy"

    samples: int
    """Samples of all ranks."""

    logloss: float | None
    """Mean cross entropy of the softmax in nats."""

    accuracy: float | None
    """Share of samples whose class has the largest probability; of equal ones, the first counts."""

    more: dict[str, float | None] = field(default_factory=dict)
    """As in `Quality`; empty."""


@dataclass(frozen=True)
class LabelQualities:
    """Quality for each of several labels, by its name; of one with classes for each class, and for the label."""

    samples: int
    of: dict[str, Quality | RegressionQuality | ClassesQuality]


AnyQuality = Quality | RegressionQuality | LabelQualities


def quality_values(quality: AnyQuality | ClassesQuality) -> dict[str, Any]:
    """Return all figures by name; of several labels a figure is named as `auc/click`, and where not all samples have a
    label, `samples/click` is how many do.

    >>> quality_values(LabelQualities(9, {"stars": RegressionQuality(7, 0.5, 0.4, None)}))
    {'samples': 9, 'samples/stars': 7, 'rmse/stars': 0.5, 'mae/stars': 0.4, 'r2/stars': None}
    """
    if not isinstance(quality, LabelQualities):
        values = asdict(quality)
        return values | values.pop("more")
    found: dict[str, Any] = {"samples": quality.samples}
    with_classes = tuple(f"{label}=" for label, each in quality.of.items() if isinstance(each, ClassesQuality))
    for label, each in quality.of.items():
        own = quality_values(each)
        if each.samples == quality.samples or label.startswith(with_classes):  # a class has the samples of its label
            own.pop("samples")
        found |= {f"{name}/{label}": value for name, value in own.items()}
    return found


def main_values(quality: AnyQuality) -> dict[str, float | None]:
    """Return the one figure by which to judge each label, by name: the AUC, or the RMSE.

    >>> main_values(RegressionQuality(9, 0.5, 0.4, None))
    {'rmse': 0.5}
    """
    if isinstance(quality, LabelQualities):
        return {f"{each.main}/{label}": getattr(each, each.main) for label, each in quality.of.items()}
    return {quality.main: getattr(quality, quality.main)}


#: Figures that every evaluation has, by the task; and those of groups of samples, which are means over the groups.
OF_TASK = {
    "binary": ("auc", "ne", "logloss", "accuracy", "calibration"),
    "regression": ("rmse", "mae", "r2"),
    "multiclass": ("logloss", "accuracy"),
}  # fmt: skip
GROUPED = ("gauc", "ndcg", "precision", "recall")


def metric_names(target: Target, more: Callable[[Task], Sequence[str]] = lambda task: ()) -> list[str]:
    """Return the names of all figures of a model, `samples` left out, as `quality_values` has them.

    Args:
        more: those of each label beside those of the task.

    >>> metric_names(Target(("click", "buy")))[:2]
    ['logloss/click', 'auc/click']
    """
    names = {}
    for label, task in zip(target.labels, target.tasks, strict=True):
        kind = Quality if task == "binary" else RegressionQuality
        own = [each.name for each in fields(kind) if each.name not in ("samples", "more")]
        names[label] = [*own, *(name for name in more(task) if name not in own)]
    if len(names) == 1:
        return names[target.labels[0]]
    names |= {label: [*OF_TASK["multiclass"]] for label in target.classes}
    return [f"{name}/{label}" for label, own in names.items() for name in own]


#: Figures by which evaluations are compared, and whether more is better. (Calibration is best at 1.)
MORE_IS_BETTER = {
    "auc": True, "accuracy": True, "r2": True, "logloss": False, "ne": False, "rmse": False, "mae": False,
    "recalibrated_ne": False, **dict.fromkeys(GROUPED, True),
}  # fmt: skip


def metric_of(name: str) -> str:
    """Return the metric of a figure, by its name.

    >>> metric_of("auc/click"), metric_of("ndcg@10/click")
    ('auc', 'ndcg')
    """
    return name.partition("/")[0].partition("@")[0]


@dataclass(frozen=True)
class Judge:
    """Compares evaluations by one figure; of several labels by that of one, or by the mean over all. A label with
    classes counts once: by its own figure, or else by the mean of its classes', without those that are undefined.

    >>> judge = Judge.of(None, Target(("click", "buy")))
    >>> judge.value({"auc/click": 0.7, "auc/buy": 0.75, "logloss/buy": 0.2}), judge.is_better(0.7, than=0.7)
    (0.725, False)

    Attributes:
        classes: the label of each class, by their names.
    """

    metric: str
    classes: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, metric: str | None, target: Target, more: Callable[[Task], Sequence[str]] = lambda task: ()) -> Judge:
        """Return the judge of `train.metric`; by default of the AUC, or the RMSE.

        Args:
            more: figures beside those of the task.

        Raises:
            ConfigError: no model of this target has such a figure, or it has no direction.
        """
        classes = {each: label for label, own in target.classes.items() for each in own}
        if metric is None:
            return cls("auc" if "binary" in target.tasks else "rmse", classes)
        names = [name for name in metric_names(target, more) if metric_of(name) in MORE_IS_BETTER]
        known = list(dict.fromkeys([name.partition("/")[0] for name in names] + names))
        if metric not in known:
            raise ConfigError(f"train.metric: got {metric!r}, needed one of {', '.join(known)}.")
        return cls(metric, classes)

    def value(self, quality: Mapping[str, Any]) -> float | None:
        """Return the figure among those of `quality_values`; None where it is undefined, or not finite."""
        by_label: dict[str, list[float]] = {}
        for name, value in quality.items():
            metric, _, label = name.partition("/")
            own = self.classes.get(label, label)
            is_told_by_label = own != label and f"{metric}/{own}" in quality
            if name == self.metric or (metric == self.metric and not is_told_by_label):
                values = by_label.setdefault(own, [])
                values += [value] if value is not None and math.isfinite(value) else []
        if not by_label or not all(by_label.values()):
            return None
        return math.fsum(math.fsum(values) / len(values) for values in by_label.values()) / len(by_label)

    def is_better(self, value: float | None, than: float | None) -> bool:
        """Return whether a value is better than another one; an undefined one is not, and is worse than any other."""
        if value is None or than is None:
            return value is not None
        return value > than if MORE_IS_BETTER[metric_of(self.metric)] else value < than
