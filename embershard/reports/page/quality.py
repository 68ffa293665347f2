"""How good the predictions of held-out samples are: by slices, and as curves of each label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from embershard.metrics.figures import slice_rows
from embershard.reports.page.runs import PageFigure, PageTable, Run, Section, look, new_figure, text

_DIAGONAL = {"color": "#888888", "dash": "dot", "width": 1}
#: Panels of a figure: what is drawn, titles of the axes, and the name in the file.
_PANELS = (
    ("ROC", "false positive rate", "true positive rate", "roc"),
    ("precision over recall", "recall", "precision", "precision_recall"),
    ("reliability", "mean prediction", "mean label", "reliability"),
    ("scores", "prediction", "share of the samples", "histogram"),
)


def by_slice(runs: Sequence[Run]) -> Section:
    """Return the section of figures of slices, a table for each column."""
    found = [(run, run.result.slices) for run in runs if run.result is not None]
    parts = []
    for column in dict.fromkeys(column for _, slices in found for column in slices):
        own = [(run, slices[column]) for run, slices in found if column in slices]
        values = dict.fromkeys(value for _, slices in own for value in slices)
        named = {
            f"{value} · {run.name}" if len(own) > 1 else value: slices[value]
            for value in values
            for run, slices in own
            if value in slices
        }
        titles, rows = slice_rows(named)
        parts.append(PageTable(f"By {column}", [column, *titles], rows, "Of the held-out samples, at the last step."))
    return Section("Slices", parts)


def curves(runs: Sequence[Run]) -> Section:
    """Return the section of the curves of the last evaluation, a figure for each label."""
    found = [(run, run.folder.curves) for run in runs]
    labels = dict.fromkeys(label for _, of_labels in found for label in of_labels)
    note = (
        "Of the held-out samples, at the last evaluation. reliability: 20 parts of the samples by rising prediction; "
        "scores: solid lines are the samples with label 1, dotted ones the others; of a regression, predictions and "
        "labels."
    )
    parts = []
    for label in labels:
        own = [(run, of_labels[label]) for run, of_labels in found if label in of_labels]
        title = f"Curves of {text(label)}" if len(labels) > 1 else "Curves"
        parts.append(PageFigure(title, _figure(own, num_runs=len(runs)), note))
    return Section("Curves of predictions", parts)


def _figure(runs: Sequence[tuple[Run, dict[str, Any]]], num_runs: int) -> go.Figure:
    panels = [panel for panel in _PANELS if any(of_run[panel[-1]] for _, of_run in runs)]
    figure = new_figure(*(panel[0] for panel in panels), columns=2)
    figure.update_layout(showlegend=num_runs > 1)
    for number, (_, x_title, y_title, name) in enumerate(panels):
        place = {"row": number // 2 + 1, "col": number % 2 + 1}
        figure.update_xaxes(title=x_title, **place).update_yaxes(title=y_title, rangemode="tozero", **place)
        for run, of_run in runs:
            if not of_run[name]:
                continue
            x, *lines = of_run[name]
            for line, y in enumerate(lines):
                style = {**look(run.number), **({"dash": "dot"} if line else {})}
                mode = "lines+markers" if name == "reliability" or len(x) == 1 else "lines"
                group = {"legendgroup": text(run.name), "showlegend": not number and not line, "name": text(run.name)}
                figure.add_trace(go.Scatter(x=x, y=y, mode=mode, line=style, **group), **place)
        if name in ("roc", "reliability"):
            ends = [0.0, 1.0]
            if name == "reliability":
                both = [value for _, of_run in runs for values in of_run[name] for value in values]
                ends = [min(both), max(both)]
            figure.add_trace(go.Scatter(x=ends, y=ends, mode="lines", line=_DIAGONAL, showlegend=False), **place)
    return figure
