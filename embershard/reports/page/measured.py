"""What was measured in whole runs: curves over the training, quality by slice and as curves, caches, time of a step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import plotly.graph_objects as go

from embershard.cache.totals import RankCaches
from embershard.distributed.sent_bytes import SentBytes
from embershard.metrics.figures import main_names, slice_rows, title_of
from embershard.reports.page.runs import (
    HITS_DIFFER,
    PageFigure,
    PageTable,
    Run,
    Section,
    fill,
    look,
    new_figure,
    text,
)
from embershard.training.reports import Report
from embershard.units import size

_SAMPLES = "samples trained"
_Reports = Sequence[Mapping[str, Any]]
#: Cells of a heat map with fewer columns show their number.
_COLUMNS_WITH_NUMBERS = 10
_ROW_PIXELS, _LEAST_PIXELS = 20, 200
# Above the heat map: at its right are Plotly's buttons.
_COLOUR_BAR = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "len": 0.4, "thickness": 10}
_DIAGONAL = {"color": "#888888", "dash": "dot", "width": 1}
#: Panels of a figure: what is drawn, titles of the axes, and the name in the file.
_PANELS = (
    ("ROC", "false positive rate", "true positive rate", "roc"),
    ("precision over recall", "recall", "precision", "precision_recall"),
    ("reliability", "mean prediction", "mean label", "reliability"),
    ("scores", "prediction", "share of the samples", "histogram"),
)
#: What is measured of a step, in milliseconds of a rank.
_TIMES = (
    "whole step: half of the steps take less",
    "whole step: 95 % of the steps take less",
    "host's work on caches (planning, copies): mean",
    "training waits for rows: mean",
)


def training(runs: Sequence[Run]) -> Section:
    """Return the section of loss, AUC and throughput."""
    parts = []
    reports = [report for kind in ("train", "eval") for run in runs for report in run.folder.reports(kind)]
    losses = dict.fromkeys(name for report in reports for name in report if name.startswith("logloss/"))
    judged = [*main_names(reports), *losses]
    for title, trained, held_out in (("Loss", "loss", "logloss"), *((title_of(name), name, name) for name in judged)):
        figure = _figure(title, runs=runs)
        for run in runs:
            _draw(figure, run, "train", trained)
            _draw(figure, run, "eval", held_out, mode="markers", symbol="diamond", suffix=", held out")
        note = "Lines: a sample of the newest training batches, at most 4,096 of all ranks."
        if not any(len(trace.y) for trace in figure.data if trace.mode != "markers"):
            if max(len(trace.y) for trace in figure.data) == 1:
                continue  # a point: the table of results has it
            note = "No training reports have it."
        if trained == "loss":
            note = "Lines: training samples since the last report. Equal lines cover each other."
        if any(len(trace.y) for trace in figure.data if trace.mode == "markers"):
            note += " Diamonds: held-out samples."
            diamond = {"color": "#555555", "symbol": "diamond", "size": 8}
            figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", name="held-out samples", marker=diamond))
            figure.update_layout(showlegend=True)
        parts.append(PageFigure(title, figure, note))
    speed = _figure("samples/s", runs=runs)
    for run in runs:
        _draw(speed, run, "train", "samples_per_second")
    speed.update_yaxes(rangemode="tozero")
    parts.append(PageFigure("Throughput", speed, "Of all ranks, since the last report."))
    return Section("Training", parts)


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
        parts.append(PageFigure(title, _curves(own, num_runs=len(runs)), note))
    return Section("Curves of predictions", parts)


def _curves(runs: Sequence[tuple[Run, dict[str, Any]]], num_runs: int) -> go.Figure:
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


def windows(runs: Sequence[Run]) -> Section:
    """Return the section of runs in time order: the quality of each window before it trained."""
    ordered = [run for run in runs if run.folder.reports("window")]
    reports = [report for run in ordered for report in run.folder.reports("window")]
    parts = []
    for name in main_names(reports, "windows") if reports else ():
        figure = new_figure()
        figure.update_layout(showlegend=len(runs) > 1)
        figure.update_xaxes(title="window, UTC").update_yaxes(title=title_of(name))
        for run in ordered:
            of_run = run.folder.reports("window")
            line = go.Scatter(
                x=[report["start"] for report in of_run],
                y=[report.get(name) for report in of_run],
                customdata=[[report["step"], report["samples"], report["late"]] for report in of_run],
                hovertemplate="%{y:.5~g}; %{customdata[1]:,} samples, %{customdata[2]:,} late; step %{customdata[0]:,}",
                name=text(run.name),
                mode="lines+markers",
                line=look(run.number),
            )
            figure.add_trace(line)
        parts.append(
            PageFigure(f"{title_of(name)} by window", figure, "Of all samples of a window, before they train.")
        )
    return Section("Windows of time", parts)


def reported(runs: Sequence[Run]) -> Section:
    """Return the section of what sums up the reports of a kind."""
    found = (
        kind.table_of_runs({run.name: run.folder.reports(kind.kind) for run in runs})
        for kind in Report.__subclasses__()
    )
    tables = [PageTable(each.title, (*each.left, *each.right), each.rows, each.caption) for each in found if each]
    return Section("Reported while they trained", tables)


def moved(runs: Sequence[Run]) -> Section:
    """Return the section of hit rates, rows moved, and bytes between ranks by kind, over the training."""
    parts, missing = [], []
    cached = [run for run in runs if _has(run, "hit_rate_lookups")]
    if cached:
        exchanges = list(dict.fromkeys(run.exchange for run in cached))
        for exchange in exchanges:
            parts.append(_rates([run for run in cached if run.exchange == exchange], exchange, len(exchanges) > 1))
        rows = _figure("fills: rows to the device", "write-backs: rows to the host", runs=cached)
        for run in cached:
            _draw(rows, run, "train", "fills", panel=1)
            _draw(rows, run, "train", "write_backs", panel=2)
        rows.update_yaxes(rangemode="tozero", title="rows a step, of a rank")
        note = (
            "Means since the last report. The warm-up counts in the first report; a checkpoint writes rows back, too."
        )
        parts.append(PageFigure("Rows moved", rows, note))
    else:
        missing.append("No run has a cache: no hit rates, no fills.")
    kinds = [field.name for field in fields(SentBytes)]
    sending = [run for run in runs if any(_has(run, f"sent_bytes_{kind}") for kind in kinds)]
    if sending:
        sent = _figure(*(kind.replace("_", " ") for kind in kinds), runs=sending, columns=3, height=280)
        for run in sending:
            for panel, kind in enumerate(kinds, 1):
                _draw(sent, run, "train", f"sent_bytes_{kind}", panel=panel, unit=2**20)
        sent.update_yaxes(rangemode="tozero", ticksuffix=" MiB")
        note = (
            "Sent by a rank in a step, mean of the ranks. Ids are sent as batches become known: with look-ahead, the "
            "first report has more of them, the last one fewer. other: agreements, reports, checkpoints, evaluations."
        )
        parts.append(PageFigure("Bytes between ranks", sent, note))
    else:
        missing.append("No run sent bytes between ranks: all have one rank.")
    return Section("Rows and bytes moved", parts, missing)


def _rates(runs: Sequence[Run], exchange: str, is_one_of_several: bool) -> PageFigure:
    """Draw hit rates of runs with one exchange."""
    rates = _figure("hits per lookup", "hits per distinct id of a batch", runs=runs)
    for run in runs:
        _draw(rates, run, "train", "hit_rate_lookups", panel=1)
        _draw(rates, run, "train", "hit_rate_unique", panel=2)
    rates.update_yaxes(tickformat="~%")  # as many digits as tell the labels apart
    note = "Share of the lookups, and of the distinct ids of a batch, whose rows were on the device; all ranks."
    title = f'Hit rate, exchange "{exchange}"' if is_one_of_several else "Hit rate"
    return PageFigure(title, rates, f"{note} {HITS_DIFFER}" if is_one_of_several else note)


def _has(run: Run, name: str) -> bool:
    return any(report.get(name) for report in run.folder.reports("train"))


def _figure(*panels: str, runs: Sequence[Run], **options: int) -> go.Figure:
    """Return a figure over the samples trained, with a dotted line at the newest resume of each run. One run needs no
    legend: the page has its name."""
    figure = new_figure(*(panels if len(panels) > 1 else ()), **options)
    figure.update_layout(showlegend=len(runs) > 1)
    figure.update_xaxes(title=_SAMPLES, tickformat="~s", rangemode="tozero")
    if len(panels) == 1:
        figure.update_yaxes(title=panels[0])
    for run in runs:
        if run.result is not None and (step := run.result.resumed_at):
            at = _samples_at(run.folder.reports("train"))(step)
            line = {**look(run.number), "dash": "dot", "width": 1}
            figure.add_vline(x=at, line=line, exclude_empty_subplots=False)
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
    columns = figure.layout.meta["columns"]
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
    counted = [report for report in reports if isinstance(report.get("samples"), int)]
    if not counted:
        return float
    steps, samples = (np.array([0, *(report[name] for report in counted)]) for name in ("step", "samples"))
    last = steps[-1] or 1
    return lambda step: float(np.interp(step, steps, samples) if step <= last else samples[-1] * step / last)


def caches(runs: Sequence[Run]) -> Section:
    """Return the section of hit rates by table and rank, and of the caches' memory."""
    cached = [run for run in runs if run.cache]
    if not cached:
        return Section("Caches", (), ["No run that ended has a cache."])
    return Section("Caches", [_hit_rates(cached), _memory(cached)])


def _hit_rates(runs: Sequence[Run]) -> PageFigure:
    """Draw a heat map: a row for each table, a column for each rank of each run."""
    columns = [(_rank_name(run, rank, runs), rank.tables) for run in runs for rank in _ranks(run)]
    tables = sorted({table for _, found in columns for table in found}, key=_natural, reverse=True)
    rates = [[found[table].hit_rate_lookups if table in found else None for _, found in columns] for table in tables]
    drawn = go.Heatmap(
        z=rates,
        x=[name for name, _ in columns],
        y=[text(table) for table in tables],
        zmin=0,
        zmax=1,
        colorscale="Blues",
        colorbar={**_COLOUR_BAR, "tickformat": ".0%"},
        xgap=2,
        ygap=1,
        texttemplate="%{z:.1%}" if len(columns) <= _COLUMNS_WITH_NUMBERS else None,
        hovertemplate="%{y}<br>%{x}: %{z:.2%}<extra></extra>",
        hoverongaps=False,
    )
    figure = new_figure(height=_LEAST_PIXELS + _ROW_PIXELS * len(tables))
    figure.add_trace(drawn)
    figure.update_yaxes(type="category", automargin=True, showgrid=False, dtick=1)
    figure.update_xaxes(type="category", automargin=True, showgrid=False)
    note = (
        "Share of the lookups whose row was on the device, over the whole run, or since its resume. Empty: not in a "
        "cache of that rank."
    )
    if len({run.exchange for run in runs}) > 1:
        note += f" {HITS_DIFFER}"
    return PageFigure("Hit rate per table and rank", figure, note)


def _natural(name: str) -> list[tuple[str, int]]:
    """Sort key: numbers in names by their value, so that t10 follows t9."""
    return [(word, int(digits or 0)) for word, digits in re.findall(r"(\D*)(\d*)", name)]


def _memory(runs: Sequence[Run]) -> PageFigure:
    rows = sum(len(_ranks(run)) for run in runs)
    figure = new_figure(
        "on the device: slots and maps", "on the host: rows and scores", height=_LEAST_PIXELS + _ROW_PIXELS * rows
    )
    for panel, name in enumerate(("device_bytes", "host_bytes"), 1):
        for run in runs:
            bars = go.Bar(
                x=[getattr(rank, name) / 2**20 for rank in _ranks(run)],
                y=[_rank_name(run, rank, runs) for rank in _ranks(run)],
                orientation="h",
                showlegend=False,
                marker=fill(run.number),
                text=[size(getattr(rank, name)) for rank in _ranks(run)],
                hovertemplate="%{y}: %{text}<extra></extra>",
            )
            figure.add_trace(bars, row=1, col=panel)
    figure.update_layout(barmode="overlay")  # a row has the bar of one run
    figure.update_xaxes(title="MiB", nticks=6, rangemode="tozero")
    figure.update_yaxes(type="category", autorange="reversed", automargin=True)
    figure.update_yaxes(showticklabels=False, col=2)
    note = (
        "Measured, of the caches alone, at the end. slots: rows on the device with their optimizer states; maps: where "
        "a row is; rows: all of the rank's, with their states; scores: what the policy keeps of each. A plan's device "
        "memory is more: it adds dense layers, activations and input buffers, which a run does not measure."
    )
    return PageFigure("Memory per tier and rank", figure, note)


def _ranks(run: Run) -> Sequence[RankCaches]:
    return () if run.cache is None else run.cache.ranks


def _rank_name(run: Run, rank: RankCaches, runs: Sequence[Run]) -> str:
    """Return the name of a rank of one of `runs`: the run is named where there are several."""
    return f"{text(run.name)} · rank {rank.rank}" if len(runs) > 1 else f"rank {rank.rank}"


def step_time(runs: Sequence[Run]) -> Section:
    """Return the section of what is measured of a step's time."""
    figure = new_figure(height=260 + 22 * len(runs))
    timed = [(run, run.result) for run in runs if run.result is not None and run.result.step_ms.p50 is not None]
    for run, result in timed:
        seconds = (None, None) if result.cache is None else (result.cache.seconds, result.cache.stall_seconds)
        means = [None if each is None else 1e3 * each / result.parts for each in seconds]
        bars = go.Bar(
            x=[result.step_ms.p50, result.step_ms.p95, *means],
            y=_TIMES,
            orientation="h",
            name=text(run.name),
            marker=fill(run.number),
            texttemplate="%{x:,.3~r} ms",
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y}: %{x:.3~f} ms",
        )
        figure.add_trace(bars)
    figure.update_layout(margin={"r": 90})
    figure.update_xaxes(title="ms of a step, of a rank")
    figure.update_yaxes(autorange="reversed", automargin=True)
    said = [
        "Measured are the whole step, the host's time for planning and copies of the caches, and the part of a step in "
        "which training waited for rows. The bars do not add up: with look-ahead, work on caches may run beside the "
        "training, and the means are of all steps, while the first and the last ones do not count for the step.",
    ]
    if not any(run.folder.stages for run in runs):
        said.append(
            "Not measured apart: input, exchange of ids, lookup, dense layers, and optimizer. Train with "
            "--profile-steps A:B to measure them. Where a run had a plan, its prediction has such parts, below."
        )
    note = (
        "whole step: from one step's end to the next one's. Work on caches and waiting: totals of all ranks, divided "
        "by steps and ranks."
    )
    figures = [PageFigure("Step time", figure, note)] if timed else []
    figures += [_stages(run) for run in runs if run.folder.stages]
    return Section("Where a step's time goes", figures, said)


def _stages(run: Run) -> PageFigure:
    ranks = run.folder.stages
    figure = new_figure(
        "in the thread that trains", "in threads beside it", height=_LEAST_PIXELS + _ROW_PIXELS * len(ranks)
    )
    names = list(dict.fromkeys(name for rank in ranks for kind in ("training", "beside") for name in rank[kind]))
    for number, name in enumerate(names):
        for panel, kind in enumerate(("training", "beside"), 1):
            bars = go.Bar(
                x=[rank[kind].get(name, 0.0) for rank in ranks],
                y=[f"rank {rank['rank']}" for rank in ranks],
                orientation="h",
                name=name,
                legendgroup=name,
                showlegend=panel == 1,
                marker=fill(number),
                hovertemplate=f"{name}: %{{x:.3~f}} ms",
            )
            figure.add_trace(bars, row=1, col=panel)
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title="ms")
    figure.update_yaxes(type="category", autorange="reversed", automargin=True)
    collectives = ", ".join(
        f"{name} {sum(rank['between_ranks'].get(name, 0.0) for rank in ranks) / len(ranks):.2f} ms"
        for name in sorted({name for rank in ranks for name in rank["between_ranks"]})
    )
    note = (
        f"Of a step, mean of {ranks[0]['steps']} traced ones; the profiler makes steps longer. A stage is "
        "counted without the stages inside it: forward is the dense layers and the wait for embeddings of other ranks, "
        "backward has the exchange and the update of rows and the all-reduce in it."
        + (f" Between ranks, from start to end: {collectives}." if collectives else "")
    )
    return PageFigure(f"Stages of a step: {text(run.name)}", figure, note)
