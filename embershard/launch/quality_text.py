"""Figures of runs as text: those of a model's quality with titles, formats and order; and what makes them compare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from embershard.launch.screen import number
from embershard.run_result import RunResult


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
}
_MAIN = ("auc", "rmse")  # by which a label's predictions are judged
_IN_TABLE = ("auc", "rmse", "mae", "r2", "ne", "logloss")


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
    for name, metric in _METRICS.items():
        for key in _of_metric(name, values):
            yield QualityFigure(metric.title, key.partition("/")[2], number(values[key], metric.form), metric.meaning)


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

    >>> quality_rows({"auc/click": 0.75, "accuracy/click": 0.5})
    [('AUC click', '0.7500', 'held-out samples; 0.5 is guessing, 1 is perfect')]
    """
    shown = {key: value for key, value in values.items() if key.partition("/")[0] in _IN_TABLE}
    return [(f"{title} {label}".strip(), value, meaning) for title, label, value, meaning in figures(shown)]


def main_names(results: Iterable[Mapping[str, Any]], *more: str) -> list[str]:
    """Return the names of the figures by which runs are judged, and of `more` metrics: those that any of the results
    has, or "auc".

    >>> main_names([{"auc": 0.7, "ne": 0.9}, {"rmse": 1.0}])
    ['auc', 'rmse']
    """
    found = [key for result in results for name in (*_MAIN, *more) for key in _of_metric(name, result)]
    return list(dict.fromkeys(found)) or ["auc"]


def title_of(name: str) -> str:
    """Return the title of a figure by its name.

    >>> title_of("auc/click")
    'AUC click'
    """
    metric, _, label = name.partition("/")
    return f"{_METRICS[metric].title} {label}".strip()


def form_of(name: str) -> str:
    """Return the format of a figure by its name."""
    return _METRICS[name.partition("/")[0]].form


def held_out_warning(results: Iterable[RunResult]) -> str:
    """Return a sentence, without its full stop, where runs were judged by different samples, as far as their results
    tell; else ""."""
    differ = len({result.held_out for result in results if result.eval_samples}) > 1
    return "The held-out sets differ, so figures of held-out samples do not compare" if differ else ""


def steady_mark(*results: RunResult) -> str:
    """Return what stands beside the speed of runs: a hint where one was too short to have that of a long run."""
    return "" if all(result.is_steady for result in results) else " (not steady yet)"


def _of_metric(metric: str, values: Mapping[str, Any]) -> list[str]:
    return [key for key in values if key.partition("/")[0] == metric]
