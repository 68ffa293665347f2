"""What the caches did in whole runs: hit rates per table and rank, memory, and the time of a step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from embershard.launch.report.page.runs import Run
from embershard.launch.report.page.section import Figure, Section, fill, new_figure, text
from embershard.units import size

#: Cells of a heat map with fewer columns show their number.
_COLUMNS_WITH_NUMBERS = 10
_ROW_PIXELS, _LEAST_PIXELS = 20, 200
# Above the heat map: at its right are Plotly's buttons.
_COLOUR_BAR = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "len": 0.4, "thickness": 10}


def caches(runs: Sequence[Run]) -> Section:
    """Return the section of hit rates by table and rank, and of the caches' memory."""
    cached = [run for run in runs if run.cache]
    if not cached:
        return Section("Caches", (), ["No run that ended has a cache."])
    return Section("Caches", [_hit_rates(cached), _memory(cached)])


def _hit_rates(runs: Sequence[Run]) -> Figure:
    """Draw a heat map: a row for each table, a column for each rank of each run."""
    columns = [(_rank_name(run, rank), rank["tables"]) for run in runs for rank in run.cache["ranks"]]
    tables = sorted({table for _, found in columns for table in found}, key=_natural, reverse=True)
    rates = [[found.get(table, {}).get("hit_rate_lookups") for _, found in columns] for table in tables]
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
    note = "Share of the lookups whose row was on the device, over the whole run. Empty: not in a cache of that rank."
    return Figure("Hit rate per table and rank", figure, note)


def _natural(name: str) -> list[tuple[str, int]]:
    """Sort key: numbers in names by their value, so that t10 follows t9."""
    return [(word, int(digits or 0)) for word, digits in re.findall(r"(\D*)(\d*)", name)]


def _memory(runs: Sequence[Run]) -> Figure:
    rows = sum(len(run.cache["ranks"]) for run in runs)
    figure = new_figure("device: slots and maps", "host: rows and scores", height=_LEAST_PIXELS + _ROW_PIXELS * rows)
    for panel, name in enumerate(("device_bytes", "host_bytes"), 1):
        for run in runs:
            bars = go.Bar(
                x=[rank[name] / 2**20 for rank in run.cache["ranks"]],
                y=[_rank_name(run, rank) for rank in run.cache["ranks"]],
                orientation="h",
                showlegend=False,
                marker=fill(run.number),
                customdata=[size(rank[name]) for rank in run.cache["ranks"]],
                hovertemplate="%{y}: %{customdata}<extra></extra>",
            )
            figure.add_trace(bars, row=1, col=panel)
    figure.update_layout(barmode="overlay")  # a row has the bar of one run
    figure.update_xaxes(title="MiB", nticks=6)
    figure.update_yaxes(type="category", autorange="reversed", automargin=True)
    figure.update_yaxes(showticklabels=False, col=2)
    note = "Of the caches, at the end. Not measured: dense layers, activations, input buffers, the programs themselves."
    return Figure("Memory per tier and rank", figure, note)


def _rank_name(run: Run, rank: Mapping[str, Any]) -> str:
    return f"{text(run.name)} · rank {rank['rank']}"


#: What is measured of a step, in milliseconds of a rank.
_TIMES = ("step, median", "step, 95 % take less", "work on caches, mean", "waiting for rows, mean")


def step_time(runs: Sequence[Run]) -> Section:
    """Return the section of what is measured of a step's time."""
    figure = new_figure(height=260 + 22 * len(runs))
    timed = [run for run in runs if run.result and run.result["step_ms"]["p50"] is not None]
    for run in timed:
        ends = [run.result["step_ms"][name] for name in ("p50", "p95")]
        means = [1e3 * run.cache[name] / run.parts if run.cache else None for name in ("seconds", "stall_seconds")]
        bars = go.Bar(
            x=[*ends, *means],
            y=_TIMES,
            orientation="h",
            name=text(run.name),
            marker=fill(run.number),
            hovertemplate="%{y}: %{x:.3~f} ms",
        )
        figure.add_trace(bars)
    figure.update_xaxes(title="ms")
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
    note = "Of a rank, in a step."
    figures = [Figure("Step time", figure, note)] if timed else []
    figures += [_stages(run) for run in runs if run.folder.stages]
    return Section("Where a step's time goes", figures, said)


def _stages(run: Run) -> Figure:
    """Return the stages of a run's traced steps, a bar per rank."""
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
    return Figure(f"Stages of a step: {text(run.name)}", figure, note)
