"""What was measured in whole runs: curves over the training, quality by slice and as curves, caches, time of a step."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import plotly.graph_objects as go

from embershard.cache.totals import RankCaches
from embershard.distributed.sent_bytes import SentBytes
from embershard.extras.report_page.parts import (
    PageFigure,
    PageTable,
    Section,
    fill,
    heat_map,
    look,
    new_figure,
    text,
    unit_of,
)
from embershard.extras.report_page.runs import HITS_DIFFER, Run
from embershard.metrics.figures import main_names, slice_rows, title_of
from embershard.training.reports import Report
from embershard.units import size

_SAMPLES = "samples trained"
_Reports = Sequence[Mapping[str, Any]]
_ROW_PIXELS, _BAR_PIXELS, _LEAST_PIXELS = 24, 16, 110
#: Hit rates at which the colours of a heat map have a label.
_LEAST_MISSES = 1e-3  # fewer have the same colour
_LABELLED = (0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
_DIAGONAL = {"color": "#888888", "dash": "dot", "width": 1}
#: Panels of a figure: what is drawn, titles of the axes, and the name in the file.
_PANELS = (
    ("ROC", "false positive rate", "true positive rate", "roc"),
    ("precision over recall", "recall", "precision", "precision_recall"),
    ("reliability", "mean prediction", "mean label", "reliability"),
    ("scores", "prediction", "share of the samples", "histogram"),
)
#: What is measured of a step, in milliseconds of a rank.
_TIMES = {
    "step, median": "From one step's end to the next one's: half of the steps take less.",
    "step, 95 %": "95 % of the steps take less.",
    "work on caches": "The host's planning and copies, a mean. With look-ahead it runs beside the training.",
    "waiting for rows": "The training waits for rows that are not on the device, a mean.",
}


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
            diamond = {"color": "#777777", "symbol": "diamond", "size": 8}
            figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", name="held-out samples", marker=diamond))
            figure.update_layout(showlegend=True)
        parts.append(PageFigure(title, figure, note))
    speed = _figure("samples/s", runs=runs)
    for run in runs:
        _draw(speed, run, "train", "samples_per_second")
    speed.update_yaxes(rangemode="tozero")
    parts.append(PageFigure("Throughput", speed, "Of all ranks, since the last report."))
    if dealing := [run for run in runs if _has(run, "max_over_mean_dealt")]:
        parts.append(_dealt(dealing))
    return Section("Training", parts, has_curves=True)


def _dealt(runs: Sequence[Run]) -> PageFigure:
    """Draw how much more than the mean rank the slowest one has to do, as samples were dealt and as they were not."""
    figure = _figure("times the mean rank's cost", runs=runs)
    figure.update_layout(showlegend=True)
    for run in runs:
        _draw(figure, run, "train", "max_over_mean_dealt", suffix=", dealt")
        _draw(figure, run, "train", "max_over_mean_undealt", suffix=", undealt", dash="dash")
    note = (
        "What the samples of the slowest rank cost, over those of the mean rank, since the last report. At 1 all ranks "
        "have equally much to do."
    )
    terms = {
        "dealt": "As the samples of each global batch were dealt to ranks by their cost (data.deal).",
        "undealt": "Had each rank had its slice of the same samples, in their order.",
    }
    return PageFigure("Cost of the slowest rank", figure, note, terms)


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
    note = "Of the held-out samples, at the last evaluation."
    terms = {
        "reliability": "20 parts of the samples, by rising prediction.",
        "scores": "Solid: samples with label 1. Dotted: the others. Of a regression: predictions, and labels.",
    }
    parts = []
    for label in labels:
        own = [(run, of_labels[label]) for run, of_labels in found if label in of_labels]
        title = f"Curves of {label}" if len(labels) > 1 else "Curves"
        parts.append(PageFigure(title, _curves(own, num_runs=len(runs)), note, terms))
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
        note = "Means since the last report. The first one has the warm-up. A checkpoint writes rows back, too."
        parts.append(PageFigure("Rows moved", rows, note))
    else:
        missing.append("No run has a cache: no hit rates, no fills.")
    kinds = [field.name for field in fields(SentBytes)]
    sending = [run for run in runs if any(_has(run, f"sent_bytes_{kind}") for kind in kinds)]
    if not any(_has(run, "sent_bytes_sync") for run in sending):
        kinds.remove("sync")  # of groups alone
    if sending:
        sent = _figure(*(kind.replace("_", " ") for kind in kinds), runs=sending, columns=3, height=250)
        for run in sending:
            for panel, kind in enumerate(kinds, 1):
                _draw(sent, run, "train", f"sent_bytes_{kind}", panel=panel, unit=2**20)
        sent.update_yaxes(rangemode="tozero", ticksuffix=" MiB")
        note = "Sent by a rank in a step, mean of the ranks."
        terms = {
            "ids": "Sent when a batch becomes known: with look-ahead the first report has more, the last one fewer.",
            "other": "Agreements, reports, checkpoints, evaluations.",
        }
        if "sync" in kinds:
            terms["sync"] = "Rows that groups average, and their numbers, in the mean of all steps."
        parts.append(PageFigure("Bytes between ranks", sent, note, terms))
    else:
        missing.append("No run sent bytes between ranks: all have one rank.")
    return Section("Rows and bytes moved", parts, missing, has_curves=True)


def _rates(runs: Sequence[Run], exchange: str, is_one_of_several: bool) -> PageFigure:
    """Draw hit rates of runs with one exchange."""
    rates = _figure("hits per lookup", "hits per distinct id of a batch", runs=runs)
    for run in runs:
        _draw(rates, run, "train", "hit_rate_lookups", panel=1)
        _draw(rates, run, "train", "hit_rate_unique", panel=2)
    rates.update_yaxes(tickformat="~%")  # as many digits as tell the labels apart
    note = "Share of the lookups, and of the distinct ids of a batch, whose rows were on the device, of all ranks."
    title = f'Hit rate, exchange "{exchange}"' if is_one_of_several else "Hit rate"
    return PageFigure(title, rates, f"{note} {HITS_DIFFER}" if is_one_of_several else note)


def _has(run: Run, name: str) -> bool:
    return any(report.get(name) for report in run.folder.reports("train"))


def _figure(*panels: str, runs: Sequence[Run], **options: Any) -> go.Figure:
    """Return a figure over the samples trained, with a dotted line at the newest resume of each run. One run needs no
    legend: the page has its name."""
    figure = new_figure(*(panels if len(panels) > 1 else ()), **options)
    figure.update_layout(showlegend=len(runs) > 1)
    figure.update_xaxes(title=_SAMPLES, tickformat="~s", rangemode="tozero")
    if len(panels) == 1:
        figure.update_yaxes(title=panels[0])
    for run in runs:
        if run.result is not None and (step := run.result.resumed_at):
            reports = run.folder.reports("train")
            at = _samples_at(reports)(step)
            after = [run.minutes(report) for report in reports if report["step"] >= step]
            line = {**look(run.number), "dash": "dot", "width": 1}
            name = json.dumps([step, at, after[0] if after else None])  # of each x axis that a reader may choose
            figure.add_vline(x=at, line=line, name=name, exclude_empty_subplots=False)
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
    dash: str | None = None,
) -> None:
    """Draw one number of a run's reports, in multiples of `unit`; the legend has each run once."""
    samples_at = _samples_at(run.folder.reports("train"))
    reports = [report for report in run.folder.reports(kind) if isinstance(report.get(name), (int, float))]
    columns = figure.layout.meta["columns"]
    figure.add_trace(
        go.Scatter(
            x=[samples_at(report["step"]) for report in reports],
            y=[report[name] / unit for report in reports],
            customdata=[[report["step"], samples_at(report["step"]), run.minutes(report)] for report in reports],
            hovertemplate="%{y:,.5~g} at step %{customdata[0]:,}",
            name=text(run.name + suffix),
            legendgroup=text(run.name),
            showlegend=panel == 1 and mode == "lines",
            mode="lines+markers" if mode == "lines" and len(reports) == 1 else mode,
            line=look(run.number) | ({"dash": dash} if dash else {}),
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
    is_one = len(runs) == 1
    columns = [
        (f"rank {rank.rank}" if is_one else f"{number}:{rank.rank}", rank.tables)
        for number, run in enumerate(runs, 1)
        for rank in _ranks(run)
    ]
    tables = sorted({table for _, found in columns for table in found}, key=_natural)
    rates = [[found[table].hit_rate_lookups if table in found else None for _, found in columns] for table in tables]
    shown = [["" if rate is None else f"{rate:.2%}" for rate in row] for row in rates]
    known = [_shade(rate) for row in rates for rate in row if rate is not None] or [0.0]
    low, high = min(known), max(*known, min(known) + math.log10(2))
    labelled = list[float]()
    for rate in _LABELLED:
        if low <= _shade(rate) <= high and (not labelled or _shade(rate) - _shade(labelled[-1]) > (high - low) / 5):
            labelled.append(rate)
    figure = heat_map(
        tables,
        [name for name, _ in columns],
        [[None if rate is None else _shade(rate) for rate in row] for row in rates],
        shown,
        shown,
        {_shade(rate): f"{100 * rate:g} %" for rate in labelled} or {low: f"{100 * (1 - 10**-low):.3g} %"},
        (low, high),
    )
    note = (
        "Share of the lookups whose row was on the device, over the whole run or since its resume. Equal steps of "
        "colour divide the misses by equal factors. Grey: not in a cache of that rank."
    )
    if not is_one:
        figure.update_xaxes(title="run : rank")
        note += " Runs: " + ", ".join(f"{number} is {run.name}" for number, run in enumerate(runs, 1)) + "."
    if len({run.exchange for run in runs}) > 1:
        note += f" {HITS_DIFFER}"
    return PageFigure("Hit rate per table and rank", figure, note)


def _shade(rate: float) -> float:
    """Return the place of a hit rate on a scale on which 98 and 99 % are as far apart as 96 and 98 %: misses halve."""
    return -math.log10(max(1 - rate, _LEAST_MISSES))


def _natural(name: str) -> list[tuple[str, int]]:
    """Sort key: numbers in names by their value, so that t10 follows t9."""
    return [(word, int(digits or 0)) for word, digits in re.findall(r"(\D*)(\d*)", name)]


def _memory(runs: Sequence[Run]) -> PageFigure:
    ranks = dict.fromkeys(f"rank {rank.rank}" for run in runs for rank in _ranks(run))
    height = _LEAST_PIXELS + len(ranks) * (10 + _BAR_PIXELS * len(runs))
    figure = new_figure("on the device: slots and maps", "on the host: rows and scores", height=height, names_rows=True)
    for panel, name in enumerate(("device_bytes", "host_bytes"), 1):
        unit, unit_bytes = unit_of([getattr(rank, name) for run in runs for rank in _ranks(run)])
        figure.update_xaxes(title=unit, row=1, col=panel)
        for run in runs:
            bars = go.Bar(
                x=[getattr(rank, name) / unit_bytes for rank in _ranks(run)],
                y=[f"rank {rank.rank}" for rank in _ranks(run)],
                orientation="h",
                name=text(run.name),
                marker=fill(run.number),
                hovertext=[size(getattr(rank, name)) for rank in _ranks(run)],
                hovertemplate="%{y}: %{hovertext}",
            )
            figure.add_trace(bars, row=1, col=panel)
    figure.update_layout(barmode="group", showlegend=len(runs) > 1)
    figure.update_xaxes(nticks=6, rangemode="tozero")
    figure.update_yaxes(type="category", autorange="reversed", automargin=True)
    note = "Of the caches alone, at the end."
    terms = {
        "slots": "Rows on the device, with their optimizer states.",
        "maps": "Where a row is.",
        "rows": "All of the rank's, with their optimizer states.",
        "scores": "What the policy keeps of each row.",
        "a plan's device memory": "It adds dense layers, activations and input buffers, which a run does not measure.",
    }
    return PageFigure("Memory per tier and rank", figure, note, terms)


def _ranks(run: Run) -> Sequence[RankCaches]:
    return () if run.cache is None else run.cache.ranks


def step_time(runs: Sequence[Run]) -> Section:
    """Return the section of what is measured of a step's time."""
    figure = new_figure(height=_LEAST_PIXELS + len(_TIMES) * (12 + _BAR_PIXELS * len(runs)))
    timed = [(run, run.result) for run in runs if run.result is not None and run.result.step_ms.p50 is not None]
    for run, result in timed:
        seconds = (None, None) if result.cache is None else (result.cache.seconds, result.cache.stall_seconds)
        means = [None if each is None else 1e3 * each / result.parts for each in seconds]
        bars = go.Bar(
            x=[result.step_ms.p50, result.step_ms.p95, *means],
            y=[*_TIMES],
            orientation="h",
            name=text(run.name),
            marker=fill(run.number),
            texttemplate="%{x:,.3~r} ms",
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y}: %{x:.3~f} ms",
        )
        figure.add_trace(bars)
    figure.update_layout(margin={"r": 80})
    figure.update_xaxes(title="ms")
    figure.update_yaxes(autorange="reversed", automargin=True)
    said = []
    if not any(run.folder.stages for run in runs):
        said.append(
            "Input, exchange of ids, lookup, dense layers and optimizer are not measured apart: train with "
            "--profile-steps A:B."
        )
    note = "Of a rank. The bars do not add up."
    figures = [PageFigure("Step time", figure, note, _TIMES)] if timed else []
    figures += [_stages(run) for run in runs if run.folder.stages]
    return Section("Where a step's time goes", figures, said)


def _stages(run: Run) -> PageFigure:
    ranks = run.folder.stages
    figure = new_figure(
        "in the thread that trains",
        "in threads beside it",
        height=_LEAST_PIXELS + _ROW_PIXELS * len(ranks),
        names_rows=True,
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
        f"Means of {ranks[0]['steps']} traced steps, which the profiler makes longer. No stage counts those in it."
        + (f" Between ranks, from start to end: {collectives}." if collectives else "")
    )
    terms = {
        "forward": "Dense layers, and the wait for embeddings of other ranks.",
        "backward": "With the exchange and the update of rows, and the all-reduce.",
    }
    return PageFigure(f"Stages of a step: {run.name}", figure, note, terms)
