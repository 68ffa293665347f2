"""`METRICS`: the figures of a model's quality, a row each: what is summed, the figure of the sums, title and places.

A figure has a name: "auc", "ndcg@10", and of several labels "auc/click"; that of a function of one's own is
"module:function", and needs no row. An evaluation is a dict of figures by name,
with "samples" among them; one that is undefined for its samples is None. With weights of samples, every figure but
`samples` is a mean or a sum in which a sample counts by its weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from embershard.data.schema import Target, Task
from embershard.errors import ConfigError
from embershard.settings.own_code import names_function
from embershard.units import ShownTable, number

if TYPE_CHECKING:  # settings know the names of figures, and load neither numpy nor torch
    from embershard.metrics.ranking import Floats, GroupFigures

Figures = dict[str, float | None]
#: Figures of slices, by column, value and name; "samples" is one of them.
Slices = dict[str, dict[str, Figures]]
#: Least distance of a prediction from 0 and 1 in logarithms, as in TorchRec's metrics.
ETA = 1e-12


class OfSums(NamedTuple):
    """A figure of sums over samples.

    Attributes:
        columns: what is summed, each [N], of outputs, labels and weights [N] of double precision. Outputs are
            probabilities of a binary label, and numbers of a regression; of classes, they are logits [N, C], and labels
            [N, C], too. Rows with the same function share the sums.
        figure: of the sums, each [R] of R draws of samples, or [1].
        is_defined: whether the sums have one.
    """

    columns: Callable[[Floats, Floats, Floats], Sequence[Floats]]
    figure: Callable[..., Floats]
    is_defined: Callable[..., Any] = lambda *sums: sums[-1] > 0


class OfPairs(NamedTuple):
    """The area under the ROC curve: the share of pairs of a positive and another sample that are in order."""


class OfGroups(NamedTuple):
    """The mean of a figure of each group of samples: by the groups' weights, or of the first k places of each group.

    Attributes:
        of_each: its values [G], of the groups' figures and of the place's number among those that are asked for.
        has_place: its name ends with the number of places, as "ndcg@10", and each group counts once.
    """

    of_each: Callable[[GroupFigures, int], Floats]
    has_place: bool = True


class OfOwn(NamedTuple):
    """What a function of one's own gives of all samples, or the mean of what it gives of each (`own_metric`)."""


#: Where readers find a figure without asking: of slices, in the table at a run's end, in tables of sweeps, of pages,
#: and in curves over the windows of time.
Place = Literal["slices", "closing", "sweeps", "page", "windows"]
_EVERYWHERE: tuple[Place, ...] = ("slices", "closing", "sweeps", "page", "windows")


@dataclass(frozen=True)
class Metric:
    """A row of `METRICS`.

    Attributes:
        form: format of its values.
        meaning: for a newcomer.
        of: how it is made, of labels with each task that has it.
        more_is_better: None: nobody can say.
        given: by every evaluation, by those with groups (`metrics.group`), or where `metrics.names` asks for it.
        main_of: tasks whose labels are judged by it.
        places: where it stands; one that a run asked for stands everywhere.
        is_recalibrated: of predictions whose odds are multiplied by `metrics.recalibration`.
    """

    title: str
    form: str
    meaning: str
    of: Mapping[Task, OfSums | OfPairs | OfGroups | OfOwn]
    more_is_better: bool | None
    given: Literal["always", "with groups", "on request"] = "always"
    main_of: tuple[Task, ...] = ()
    places: tuple[Place, ...] = ()
    is_recalibrated: bool = False

    def is_in(self, place: Place) -> bool:
        """Return whether it stands at a place."""
        return place in self.places or self.given != "always"

    @property
    def is_of_groups(self) -> bool:
        """True if it needs groups of samples."""
        return any(isinstance(how, OfGroups) for how in self.of.values())

    @property
    def has_place(self) -> bool:
        """True if its name ends with a number of places."""
        return any(isinstance(how, OfGroups) and how.has_place for how in self.of.values())


def total(values: Floats) -> Floats:
    """Return the sum of values [N], [1]: torch's, whose bits all figures have had."""
    import torch

    return torch.from_numpy(values).sum().numpy().reshape(1)


def _log2(values: Floats) -> Floats:
    import torch

    return torch.from_numpy(values).log2().numpy()


def _entropies(p: Floats, y: Floats, w: Floats) -> Sequence[Floats]:
    p, positive = p.clip(ETA, 1 - ETA), w * y
    return -positive * _log2(p) - w * (1 - y) * _log2(1 - p), positive, w


def _normalized(bits: Floats, positive: Floats, count: Floats) -> Floats:
    mean = (positive / count.clip(ETA)).clip(ETA, 1 - ETA)
    return bits / (-positive * _log2(mean) - (count - positive) * _log2(1 - mean))


def _of_classes(logits: Floats, y: Floats, w: Floats) -> Sequence[Floats]:
    import torch

    bits = torch.nn.functional.softplus(torch.from_numpy(-logits))  # the logits are of probabilities, whose sum is 1
    return w * (torch.from_numpy(y) * bits).sum(dim=1).numpy(), w


def _variances(p: Floats, y: Floats, w: Floats) -> Sequence[Floats]:
    distance = y - total(w * y) / total(w)  # of the labels' mean: squares of labels far from 0 would lose digits
    return w * (p - y) ** 2, w * distance, w * distance**2, w


def _r2(squared: Floats, distance: Floats, squares: Floats, count: Floats) -> Floats:
    return 1 - squared / count / (squares / count - (distance / count) ** 2)


def _differ(squared: Floats, distance: Floats, squares: Floats, count: Floats) -> Any:
    return (count > 0) & (squares != distance**2 / count)


def _root(total: Floats, count: Floats) -> Floats:
    found: Floats = (total / count) ** 0.5  # numpy's `sqrt`, rounded as it should be: torch's may be a bit off
    return found


def _ratio(total: Floats, count: Floats) -> Floats:
    return total / count


_NE = OfSums(_entropies, _normalized, lambda bits, positive, count: (positive != 0) & (positive != count))

#: By name, in the order of a reader's interest. A row is all that a figure needs, from the evaluation to the page.
METRICS: dict[str, Metric] = {
    "auc": Metric(
        "AUC", ".4f", "held-out samples; 0.5 is guessing, 1 is perfect",
        {"binary": OfPairs()}, more_is_better=True, main_of=("binary",), places=_EVERYWHERE,
    ),
    "rmse": Metric(
        "RMSE", ".5g", "held-out samples; root of the mean squared distance from the labels",
        {"regression": OfSums(lambda p, y, w: (w * (p - y) ** 2, w), _root)},
        more_is_better=False, main_of=("regression",), places=_EVERYWHERE,
    ),
    "mae": Metric(
        "MAE", ".5g", "held-out samples; mean distance from the labels",
        {"regression": OfSums(lambda p, y, w: (w * abs(p - y), w), _ratio)},
        more_is_better=False, places=("slices", "closing", "page"),
    ),
    "r2": Metric(
        "R2", ".4f", "0 is always predicting the mean label, 1 is perfect",
        {"regression": OfSums(_variances, _r2, _differ)},
        more_is_better=True, places=("closing", "page"),
    ),
    "ne": Metric(
        "NE", ".4f", "normalized entropy; below 1 beats the average click rate",
        {"binary": _NE}, more_is_better=False, places=_EVERYWHERE,
    ),
    "logloss": Metric(
        "logloss", ".4f", "held-out samples",
        {
            "binary": OfSums(_entropies, lambda bits, positive, count: bits * math.log(2) / count),
            "multiclass": OfSums(_of_classes, _ratio),
        },
        more_is_better=False, places=("closing",),
    ),
    "accuracy": Metric(
        "accuracy", ".1%", "how often the most probable class is right",
        {
            "binary": OfSums(lambda p, y, w: (w * ((p > 0.5) == (y > 0.5)), w), _ratio),
            "multiclass": OfSums(lambda p, y, w: (w * (p.argmax(axis=1) == y.argmax(axis=1)), w), _ratio),
        },
        more_is_better=True, main_of=("multiclass",),
    ),
    "calibration": Metric(
        "calibration", ".3f", "predicted over real clicks: 1 is perfect",
        # The same as torchrec.metrics' `compute_calibration`, but undefined where that gives 0: without clicks.
        {"binary": OfSums(lambda p, y, w: (w * p, w * y), _ratio)},
        more_is_better=None, places=("slices", "windows"),
    ),
    "recalibrated_ne": Metric(
        "recalibrated NE", ".4f", "NE of the odds times metrics.recalibration",
        {"binary": _NE}, more_is_better=False, given="on request", is_recalibrated=True,
    ),
    "gauc": Metric(
        "GAUC", ".4f", "mean AUC of the groups, by their samples",
        {"binary": OfGroups(lambda groups, place: groups.auc, has_place=False)},
        more_is_better=True, given="with groups",
    ),
    "ndcg": Metric(
        "NDCG", ".4f", "mean over the groups; 1 ranks all clicks first",
        {"binary": OfGroups(lambda groups, place: groups.ndcg[place])}, more_is_better=True, given="on request",
    ),
    "precision": Metric(
        "precision", ".4f", "mean over the groups: clicks among the first k, over k",
        {"binary": OfGroups(lambda groups, place: groups.precision[place])}, more_is_better=True, given="on request",
    ),
    "recall": Metric(
        "recall", ".4f", "mean over the groups: clicks among the first k, of all clicks",
        {"binary": OfGroups(lambda groups, place: groups.recall[place])}, more_is_better=True, given="on request",
    ),
}  # fmt: skip


def row_of(name: str) -> Metric | None:
    """Return the row of a figure, by its name; None where there is no such figure.

    >>> row_of("ndcg@10/click").title, row_of("my_metrics:profit").title, row_of("samples")
    ('NDCG', 'profit', None)
    """
    metric = metric_of(name)
    if not names_function(metric):
        return METRICS.get(metric)
    title, how = metric.partition(":")[2], OfOwn()
    meaning = f"held-out samples; {metric}, of which more is better"
    return Metric(title, ".5g", meaning, {"binary": how, "regression": how}, more_is_better=True, given="on request")


def known_row(name: str) -> Metric:
    """Return the row of a figure that there is."""
    row = row_of(name)
    assert row is not None, name
    return row


def metric_of(name: str) -> str:
    """Return the metric of a figure, by its name.

    >>> metric_of("auc/click"), metric_of("ndcg@10/click")
    ('auc', 'ndcg')
    """
    return name.partition("/")[0].partition("@")[0]


def more_is_better(name: str) -> bool | None:
    """Return which values of a figure are better, by its name; None where nobody can say.

    >>> more_is_better("auc/click"), more_is_better("logloss"), more_is_better("calibration"), more_is_better("samples")
    (True, False, None, None)
    """
    metric = row_of(name)
    return None if metric is None else metric.more_is_better


def names_of(task: Task, *, with_groups: bool = False) -> tuple[str, ...]:
    """Return the names of the figures that each evaluation has of a label with a task.

    >>> names_of("regression"), names_of("multiclass")
    (('rmse', 'mae', 'r2'), ('logloss', 'accuracy'))
    """
    given = ("always", "with groups") if with_groups else ("always",)
    return tuple(name for name, metric in METRICS.items() if task in metric.of and metric.given in given)


def check_name(name: str, what: str) -> None:
    """Raise `ConfigError` unless a name is that of a figure, without a label.

    Args:
        what: got it, for the message.
    """
    if names_function(name):
        return
    metric, at, place = name.partition("@")
    has_place = at == "@" and place.isascii() and place.isdigit() and place == str(int(place)) and int(place) > 0
    if metric not in METRICS or (not has_place if METRICS[metric].has_place else at):
        known = ", ".join(f"{name}@10" if each.has_place else name for name, each in METRICS.items())
        raise ConfigError(
            f"{what}: got {name!r}, needed some of {known} (of the last ones with any number of places), or "
            '"module:function" for one of your own.'
        )


def metric_names(target: Target, more: Callable[[Task], Sequence[str]] = lambda task: ()) -> list[str]:
    """Return the names of all figures of a model, `samples` left out, as an evaluation has them.

    Args:
        more: those of each label beside those of the task.

    >>> metric_names(Target(("click", "buy")))[:2]
    ['auc/click', 'ne/click']
    """
    names = {
        label: [*dict.fromkeys((*names_of(task), *more(task)))]
        for label, task in zip(target.labels, target.tasks, strict=True)
    }
    if len(names) == 1:
        return names[target.labels[0]]
    names |= {label: [*names_of("multiclass")] for label in target.classes}
    return [f"{name}/{label}" for label, own in names.items() for name in own]


def main_values(values: Mapping[str, Any]) -> Figures:
    """Return, of the figures of an evaluation, the one by which to judge each label: the AUC, or the RMSE.

    >>> main_values({"samples": 9, "rmse": 0.5, "mae": 0.4, "r2": None})
    {'rmse': 0.5}
    """
    return {name: value for name, value in values.items() if _is_main(name, values)}


def _is_main(name: str, values: Mapping[str, Any]) -> bool:
    metric = row_of(name)
    return metric is not None and bool({*metric.main_of} & {*_tasks_of(name.partition("/")[2], values)})


def _tasks_of(label: str, values: Mapping[str, Any]) -> tuple[Task, ...]:
    """Return which task a label may have: one with classes has an accuracy, and no AUC of its own."""
    has_classes = f"accuracy/{label}" in values and f"auc/{label}" not in values
    return ("multiclass",) if has_classes else ("binary", "regression")


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
        names = [name for name in metric_names(target, more) if more_is_better(name) is not None]
        known = list(dict.fromkeys([name.partition("/")[0] for name in names] + names))
        if metric not in known:
            raise ConfigError(f"train.metric: got {metric!r}, needed one of {', '.join(known)}.")
        return cls(metric, classes)

    def value(self, quality: Mapping[str, Any]) -> float | None:
        """Return the figure among those of an evaluation; None where it is undefined, or not finite."""
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
        return value > than if more_is_better(self.metric) else value < than


class QualityFigure(NamedTuple):
    """A figure as text.

    Attributes:
        label: of which label; "" where there is one.
    """

    title: str
    label: str
    value: str
    meaning: str


def figures(values: Mapping[str, Any]) -> Iterator[QualityFigure]:
    """Yield the figures among `values`, by name, in the order of a reader's interest.

    >>> [figure.value for figure in figures({"samples": 9, "ne/buy": None, "auc/buy": 0.71234})]
    ['0.7123', 'n/a']
    """
    for name in _in_order(values):
        metric = known_row(name)
        label = name.partition("/")[2]
        yield QualityFigure(title_of(name.partition("/")[0]), label, number(values[name], metric.form), metric.meaning)


def quality_line(values: Mapping[str, Any]) -> str:
    """Return figures in one line; of several labels, one label after the other.

    >>> quality_line({"samples": 9, "rmse": 1.25, "mae": None})
    'RMSE 1.25  MAE n/a'
    """
    by_label: dict[str, list[str]] = {}
    for title, label, value, _ in figures(values):
        by_label.setdefault(label, []).append(f"{title} {value}")
    return "; ".join(f"{label}: {'  '.join(each)}".removeprefix(": ") for label, each in by_label.items())


def quality_rows(values: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return rows of a table for a newcomer: title, value, meaning.

    >>> [title for title, *_ in quality_rows({"auc/click": 0.75, "accuracy/click": 0.5, "accuracy/stars": 0.4})]
    ['AUC click', 'accuracy stars']
    """
    places = {name: known_row(name).is_in("closing") for name in _in_order(values)}
    shown = {name: values[name] for name, is_shown in places.items() if is_shown or _is_main(name, values)}
    return [(f"{title} {label}".strip(), value, meaning) for title, label, value, meaning in figures(shown)]


def slice_rows(values: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows of a table of samples, given by name with "samples" and their figures. Of several labels,
    each has a row, with the number of its own samples where there is one.

    >>> slice_rows({"DE": {"samples": 1200, "auc": 0.75}, "FR": {"samples": 9, "auc": None}})
    (['samples', 'AUC'], [['DE', '1,200', '0.7500'], ['FR', '9', 'n/a']])
    """
    parts = [key.partition("/") for key in _in_order(key for of in values.values() for key in of)]
    names, labels = (list(dict.fromkeys(part[place] for part in parts)) for place in (0, 2))
    rows = []
    for value, of in values.items():
        for label in labels:
            keys = [f"{name}/{label}" if label else name for name in names]
            cells = [number(of[key], form_of(key)) if key in of else "" for key in keys]
            names_of_count = (f"samples/{label}", f"samples/{label.rpartition('=')[0]}", "samples")
            count = number(next(of[name] for name in names_of_count if name in of), ",.0f")
            rows.append([value, *([label] if len(labels) > 1 else []), count, *cells])
    return [*(["label"] if len(labels) > 1 else []), "samples", *map(title_of, names)], rows


def slice_tables(slices: Slices) -> Iterator[ShownTable]:
    """Yield a table for each column of slices."""
    for column, values in slices.items():
        titles, rows = slice_rows(values)
        yield ShownTable(f"Held-out samples by {column}", (column,), titles, rows)


def main_names(results: Iterable[Mapping[str, Any]], place: Place | None = None) -> list[str]:
    """Return the names of the figures by which runs are judged, of those that stand at a place, and of those that
    `metrics.names` asked for: those that any of the results has, or "auc". A label with classes has its own figures,
    not theirs.

    >>> main_names([{"auc": 0.7, "ne": 0.9}, {"rmse": 1.0}])
    ['auc', 'rmse']
    >>> main_names([{"auc/stars=1": 0.7, "auc/stars=2": 0.6, "accuracy/stars": 0.4, "logloss/stars": 1.2}])
    ['accuracy/stars', 'logloss/stars']
    """
    found, of_classes = [], []
    for result in results:
        for name in _in_order(result):
            metric, label = known_row(name), name.partition("/")[2]
            if _tasks_of(label, result) == ("multiclass",):
                of_classes.append(name)
            elif _tasks_of(label.rpartition("=")[0], result) != ("multiclass",) and (
                _is_main(name, result) or metric.given != "always" or place in metric.places
            ):
                found.append(name)
        of_classes.sort(key=lambda name: "multiclass" not in known_row(name).main_of)
    return list(dict.fromkeys(found + of_classes)) or ["auc"]


def title_of(name: str) -> str:
    """Return the title of a figure by its name.

    >>> title_of("auc/click"), title_of("ndcg@10")
    ('AUC click', 'NDCG@10')
    """
    metric, _, label = name.partition("/")
    _, at, place = metric.partition("@")
    return f"{known_row(metric).title}{at}{place} {label}".strip()


def form_of(name: str) -> str:
    """Return the format of a figure by its name."""
    return known_row(name).form


def _in_order(names: Iterable[str]) -> list[str]:
    """Return those of the names that are figures, in the order of a reader's interest; one's own at the end."""
    order = {metric: place for place, metric in enumerate(METRICS)}
    known = dict.fromkeys(name for name in names if row_of(name) is not None)
    return sorted(known, key=lambda name: order.get(metric_of(name), len(order)))
