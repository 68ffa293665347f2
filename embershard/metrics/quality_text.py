"""Figures of runs as text: those of a model's quality with titles, formats and order; and what makes them compare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from embershard.metrics.figures import GROUPED, metric_of
from embershard.run_result import RunResult
from embershard.units import number


class _Metric(NamedTuple):
    title: str
    form: str
    meaning: str


_METRICS = {
    "auc": _Metric("AUC", ".4f", "held-out samples; 0.5 is guessing, 1 is perfect"),
    "rmse": _Metric("RMSE", ".5g", "held-out samples; root of the mean squared distance from the labels"),
    "mae": _Metric("MAE", ".5g", "held-out samples; mean distance from the labels"),
    "r2": _Metric("R2", ".4f", "0 is always predicting the mean label, 1 is perfect"),
    "ne": _Metric("NE", ".4f", "normalized entropy; below 1 beats the average click rate"),
    "logloss": _Metric("logloss", ".4f", "held-out samples"),
    "accuracy": _Metric("accuracy", ".1%", "predictions on the label's side of 0.5"),
    "calibration": _Metric("calibration", ".3f", "predicted over real clicks: 1 is perfect"),
    "recalibrated_ne": _Metric("recalibrated NE", ".4f", "NE of the odds times metrics.recalibration"),
    "gauc": _Metric("GAUC", ".4f", "mean AUC of the groups, by their samples"),
    "ndcg": _Metric("NDCG", ".4f", "mean over the groups; 1 ranks all clicks first"),
    "precision": _Metric("precision", ".4f", "mean over the groups: clicks among the first k, over k"),
    "recall": _Metric("recall", ".4f", "mean over the groups: clicks among the first k, of all clicks"),
}
_OF_CLASSES = "how often the most probable class is right"
_MAIN = ("auc", "rmse")  # by which a label's predictions are judged
_CHOSEN = ("recalibrated_ne", *GROUPED)  # a run has them where metrics.names asks for them
_IN_TABLE = ("auc", "rmse", "mae", "r2", "ne", "logloss", *_CHOSEN)


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
    """Yield the figures among `values`, whose names are as in `quality_values`, in the order of a reader's interest.

    >>> [figure.value for figure in figures({"samples": 9, "ne/buy": None, "auc/buy": 0.71234})]
    ['0.7123', 'n/a']
    """
    for metric_name, metric in _METRICS.items():
        for key in _of_metric(metric_name, values):
            name, _, label = key.partition("/")
            yield QualityFigure(title_of(name), label, number(values[key], metric.form), metric.meaning)


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
    whole = {f"accuracy/{label}" for label in _with_classes(values)}
    shown = {key: value for key, value in values.items() if metric_of(key) in _IN_TABLE or key in whole}
    return [
        (f"{title} {label}".strip(), value, _OF_CLASSES if title == "accuracy" else meaning)
        for title, label, value, meaning in figures(shown)
    ]


def slice_rows(values: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows of a table of samples, given by name with "samples" and their figures. Of several labels,
    each has a row, with the number of its own samples where there is one.

    >>> slice_rows({"DE": {"samples": 1200, "auc": 0.75}, "FR": {"samples": 9, "auc": None}})
    (['samples', 'AUC'], [['DE', '1,200', '0.7500'], ['FR', '9', 'n/a']])
    """
    known = dict.fromkeys(key for of in values.values() for key in of)
    parts = [key.partition("/") for metric in _METRICS for key in _of_metric(metric, known)]
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


def main_names(results: Iterable[Mapping[str, Any]], *more: str) -> list[str]:
    """Return the names of the figures by which runs are judged, of `more` metrics, and of those that `metrics.names`
    asked for: those that any of the results has, or "auc". A label with classes has its own figures, not theirs.

    >>> main_names([{"auc": 0.7, "ne": 0.9}, {"rmse": 1.0}])
    ['auc', 'rmse']
    >>> main_names([{"auc/stars=1": 0.7, "auc/stars=2": 0.6, "accuracy/stars": 0.4, "logloss/stars": 1.2}])
    ['accuracy/stars', 'logloss/stars']
    """
    found = []
    for result in results:
        whole = _with_classes(result)
        classes = tuple(f"{label}=" for label in whole)
        keys = [key for name in (*_MAIN, *more, *_CHOSEN) for key in _of_metric(name, result)]
        found += [key for key in keys if not key.partition("/")[2].startswith(classes)]
        found += [f"{name}/{label}" for label in whole for name in ("accuracy", "logloss")]
    return list(dict.fromkeys(found)) or ["auc"]


def title_of(name: str) -> str:
    """Return the title of a figure by its name.

    >>> title_of("auc/click"), title_of("ndcg@10")
    ('AUC click', 'NDCG@10')
    """
    metric, _, label = name.partition("/")
    metric, at, place = metric.partition("@")
    return f"{_METRICS[metric].title}{at}{place} {label}".strip()


def form_of(name: str) -> str:
    """Return the format of a figure by its name."""
    return _METRICS[metric_of(name)].form


def held_out_warning(results: Iterable[RunResult]) -> str:
    """Return a sentence, without its full stop, where runs were judged by different samples, as far as their results
    tell; else ""."""
    differ = len({result.held_out for result in results if result.eval_samples}) > 1
    return "The held-out sets differ, so figures of held-out samples do not compare" if differ else ""


def steady_mark(*results: RunResult) -> str:
    """Return what stands beside the speed of runs: a hint where one was too short to have that of a long run."""
    return "" if all(result.is_steady for result in results) else " (not steady yet)"


def _with_classes(values: Mapping[str, Any]) -> list[str]:
    """Return the labels with classes: they have an accuracy, and no AUC of their own."""
    labels = [name.partition("/")[2] for name in values if name.startswith("accuracy/")]
    return [label for label in labels if f"auc/{label}" not in values]


def _of_metric(metric: str, values: Mapping[str, Any]) -> list[str]:
    return [key for key in values if metric_of(key) == metric]
