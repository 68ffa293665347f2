"""Curves over the training: quality, speed, hit rates, rows and bytes moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import plotly.graph_objects as go

from embershard.distributed.traffic import SentBytes
from embershard.launch.quality_text import main_names, title_of
from embershard.launch.report.page.runs import Run
from embershard.launch.report.page.section import Figure, Section, look, new_figure, text

_SAMPLES = "samples trained"
_Reports = Sequence[Mapping[str, Any]]


def training(runs: Sequence[Run]) -> Section:
    """Return the section of loss, AUC and throughput."""
    parts = []
    judged = main_names(report for run in runs for report in run.folder.reports("train"))
    for title, trained, held_out in (("Loss", "loss", "logloss"), *((title_of(name), name, name) for name in judged)):
        figure = _figure(title)
        for run in runs:
            _draw(figure, run, "train", trained)
            _draw(figure, run, "eval", held_out, mode="markers", symbol="diamond", suffix=", held out")
        note = (
            "Lines: training samples since the last report. Diamonds: held-out samples. Equal lines cover each other."
        )
        if trained != "loss":
            note = "Lines: the newest training samples, at most 16,384 of each rank. Diamonds: held-out samples."
        parts.append(Figure(title, figure, note))
    speed = _figure("samples/s")
    for run in runs:
        _draw(speed, run, "train", "samples_per_second")
    speed.update_yaxes(rangemode="tozero")
    parts.append(Figure("Throughput", speed, "Of all ranks, since the last report."))
    return Section("Training", parts)


def moved(runs: Sequence[Run]) -> Section:
    """Return the section of hit rates, rows moved, and bytes between ranks by kind, over the training."""
    parts, missing = [], []
    cached = [run for run in runs if _has(run, "hit_rate_lookups")]
    if cached:
        rates = _figure("lookups", "unique ids")
        for run in cached:
            _draw(rates, run, "train", "hit_rate_lookups", panel=1)
            _draw(rates, run, "train", "hit_rate_unique", panel=2)
        rates.update_yaxes(tickformat=".0%")
        parts.append(
            Figure(
                "Hit rate",
                rates,
                "Share of the lookups, and of the distinct ids of a batch, whose rows were on the device; all ranks.",
            )
        )
        rows = _figure("fills", "write-backs")
        for run in cached:
            _draw(rows, run, "train", "fills", panel=1)
            _draw(rows, run, "train", "write_backs", panel=2)
        rows.update_yaxes(rangemode="tozero")
        note = "Rows to the device and back to the host, of a rank in a step. The warm-up counts in the first report."
        parts.append(Figure("Rows moved", rows, note))
    else:
        missing.append("No run has a cache: no hit rates, no fills.")
    kinds = [field.name for field in fields(SentBytes)]
    sending = [run for run in runs if any(_has(run, f"sent_bytes_{kind}") for kind in kinds)]
    if sending:
        sent = _figure(*(kind.replace("_", " ") for kind in kinds), columns=3, height=280)
        for run in sending:
            for panel, kind in enumerate(kinds, 1):
                _draw(sent, run, "train", f"sent_bytes_{kind}", panel=panel, unit=2**20)
        sent.update_yaxes(rangemode="tozero", ticksuffix=" MiB")
        note = (
            "Sent by a rank in a step, mean of the ranks. Ids are sent as batches become known: with look-ahead, the "
            "first report has more of them, the last one fewer. other: agreements, reports, checkpoints, evaluations."
        )
        parts.append(Figure("Bytes between ranks", sent, note))
    else:
        missing.append("No run sent bytes between ranks: all have one rank.")
    return Section("Rows and bytes moved", parts, missing)


def _has(run: Run, name: str) -> bool:
    return any(report.get(name) for report in run.folder.reports("train"))


def _figure(*panels: str, **options: int) -> go.Figure:
    figure = new_figure(*(panels if len(panels) > 1 else ()), **options)
    figure.update_xaxes(title=_SAMPLES, tickformat="~s", rangemode="tozero")
    if len(panels) == 1:
        figure.update_yaxes(title=panels[0])
    return figure


def _draw(
    figure: go.Figure,
    run: Run,
    kind: str,
    name: str,
    *,
    panel: int = 1,
    mode: str = "lines",
    symbol: str = "circle",
    suffix: str = "",
    unit: int = 1,
) -> None:
    """Draw one number of a run's reports, in multiples of `unit`; the legend has each run once."""
    samples_at = _samples_at(run.folder.reports("train"))
    reports = [report for report in run.folder.reports(kind) if isinstance(report.get(name), (int, float))]
    columns = len(figure._grid_ref[0])
    figure.add_trace(
        go.Scatter(
            x=[samples_at(report["step"]) for report in reports],
            y=[report[name] / unit for report in reports],
            customdata=[report["step"] for report in reports],
            hovertemplate="%{y:,.5~g} at step %{customdata:,}",
            name=text(run.name + suffix),
            legendgroup=text(run.name),
            showlegend=panel == 1 and mode == "lines",
            mode="lines+markers" if mode == "lines" and len(reports) == 1 else mode,
            line=look(run.number),
            marker={"color": look(run.number)["color"], "symbol": symbol, "size": 8},
        ),
        row=(panel - 1) // columns + 1,
        col=(panel - 1) % columns + 1,
    )


def _samples_at(reports: _Reports) -> Callable[[int], float]:
    """Return the samples trained after a number of steps: between reports, and after the last, in proportion."""
    if not reports:
        return float
    steps, samples = (np.array([0, *(report[name] for report in reports)]) for name in ("step", "samples"))
    last = steps[-1] or 1
    return lambda step: float(np.interp(step, steps, samples) if step <= last else samples[-1] * step / last)
