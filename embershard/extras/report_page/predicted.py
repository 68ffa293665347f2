"""What the runs' plans predicted, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from embershard.errors import ConfigError, ShardingError
from embershard.extras.report_page.parts import (
    PageFigure,
    PageTable,
    Section,
    colour,
    fill,
    lines_of,
    name_beside,
    new_figure,
    text,
)
from embershard.extras.report_page.runs import Run
from embershard.planning.verify.compare import Pair, PlanComparison, compare, notes
from embershard.sharding.plan import Prediction
from embershard.units import size

_COUNTS = {"unique_ids": "unique ids", "fills": "fills", "write_backs": "write-backs"}


@dataclass(frozen=True)
class _Compared:
    """A run that had a plan with a prediction."""

    run: Run
    prediction: Prediction
    found: PlanComparison


def predicted(runs: Sequence[Run]) -> Section:
    """Return the section of predictions; of runs without a plan it says so."""
    compared, said = [], []
    for run in runs:
        if run.result is not None and run.folder.has_plan:
            try:
                plan = run.folder.plan(None)
                found = compare(plan, run.result)
                assert plan.prediction is not None, "it was compared"
                compared.append(_Compared(run, plan.prediction, found))
                others = run.folder.other_settings(plan)
                checkpoints = run.folder.num_checkpoints(run.result)
                said += [f"{run.name}: {note}" for note in notes(plan, run.result, others, checkpoints)]
            except (ConfigError, ShardingError) as error:
                said.append(f"{run.name}: {error}")
    if not compared:
        return Section("Predicted beside measured", (), said or ["No run that ended had a plan."])
    rows = []
    for each in compared:
        for verdict in each.found.verdicts:
            unit = " points" if verdict.unit == "points" else " %"
            off_by = "not measured" if verdict.error is None else f"{verdict.error:.2f}{unit}"
            outcome = {None: "", True: "kept", False: "NOT kept"}[verdict.kept]
            rows.append((each.run.name, verdict.what, off_by, f"{verdict.promised:g}{unit}", outcome, verdict.detail))
    parts: list[PageFigure | PageTable] = [
        PageTable("Promises", ("run", "of", "off by", "promised at most", "outcome", "detail"), rows),
        _ratios(compared),
        _hit_rates(compared),
        _step_parts(compared),
        _memory(compared),
    ]
    return Section("Predicted beside measured", parts, said)


def _ratios(compared: Sequence[_Compared]) -> PageFigure:
    figure = new_figure(height=420)
    for each in compared:
        pairs = [(what, pair) for what, pair in _pairs(each.found) if pair.predicted is not None and pair.measured]
        dots = go.Scatter(
            x=[(pair.predicted or 0) / (pair.measured or 1) for _, pair in pairs],
            y=[what for what, _ in pairs],
            customdata=[(pair.predicted, pair.measured) for _, pair in pairs],
            hovertemplate="%{y}: %{x:.3f}<br>predicted %{customdata[0]:,.4~g}, measured %{customdata[1]:,.4~g}",
            mode="markers",
            name=text(each.run.name),
            marker={"color": colour(each.run.number), "size": 10},
            showlegend=True,
        )
        figure.add_trace(dots)
    figure.add_vline(x=1, line={"color": "#888888", "dash": "dot"})
    figure.update_xaxes(title="predicted / measured")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return PageFigure(
        "Predicted over measured", figure, "1: as predicted. Means over steps of all ranks, and memory at the end."
    )


def _pairs(found: PlanComparison) -> Iterator[tuple[str, Pair]]:
    yield "step time", found.step_seconds
    for kind, pair in found.sent_bytes.items():
        yield f"bytes sent: {kind.replace('_', ' ')}", pair
    for name, pair in found.files.items():
        yield name.replace("_", " "), pair
    for name in _COUNTS:
        yield _COUNTS[name], _sum([getattr(rank.traffic, name) for rank in found.ranks])
    yield "device bytes of caches", _sum([rank.cache_device_bytes for rank in found.ranks])
    yield "host bytes", _sum([rank.host_bytes for rank in found.ranks])


def _sum(pairs: Sequence[Pair]) -> Pair:
    """Return the sums; None where one is not known."""
    sums = []
    for values in ([pair.predicted for pair in pairs], [pair.measured for pair in pairs]):
        known = [value for value in values if value is not None]
        sums.append(sum(known) if len(known) == len(values) else None)
    return Pair(*sums)


def _hit_rates(compared: Sequence[_Compared]) -> PageFigure:
    figure = new_figure("hits per lookup", "hits per distinct id of a batch", height=400)
    for panel, name in enumerate(("hit_rate_lookups", "hit_rate_unique"), 1):
        line = {"color": "#888888", "dash": "dot"}
        pairs = [getattr(table.traffic, name) for each in compared for table in each.found.tables]
        found = [value for pair in pairs for value in (pair.predicted, pair.measured) if value is not None]
        ends = [min(found, default=0.0), max(found, default=1.0)]
        diagonal = go.Scatter(x=ends, y=ends, mode="lines", line=line, showlegend=False, hoverinfo="skip")
        figure.add_trace(diagonal, row=1, col=panel)
        for each in compared:
            tables = [table for table in each.found.tables if getattr(table.traffic, name).error is not None]
            dots = go.Scatter(
                x=[getattr(table.traffic, name).predicted for table in tables],
                y=[getattr(table.traffic, name).measured for table in tables],
                text=[f"{text(table.table)}, rank {table.rank}" for table in tables],
                hovertemplate="%{text}: predicted %{x:.2%}, measured %{y:.2%}",
                mode="markers",
                name=text(each.run.name),
                legendgroup=text(each.run.name),
                showlegend=panel == 1,
                marker={"color": colour(each.run.number), "size": 8, "opacity": 0.7},
            )
            figure.add_trace(dots, row=1, col=panel)
    figure.update_xaxes(title="predicted", tickformat="~%")
    figure.update_yaxes(title="measured", tickformat="~%")
    return PageFigure("Hit rates of tables", figure, "A dot for each cached table of each rank.")


def _step_parts(compared: Sequence[_Compared]) -> PageFigure:
    """Draw the predicted parts of a step, which are not measured, the simulated whole and the measured one."""
    names = [
        (f"{name_beside(each.run.name)}<br>" if len(compared) > 1 else "") + f"rank {rank.rank}"
        for each in compared
        for rank in each.prediction.ranks
    ]
    figure = new_figure(height=110 + 24 * lines_of(names))
    ranks = [rank for each in compared for rank in each.prediction.ranks]
    for number, part in enumerate(dict.fromkeys(part for rank in ranks for part in rank.seconds)):
        parts = [1e3 * rank.seconds.get(part, 0.0) for rank in ranks]
        label = part.replace("_", " ")
        figure.add_trace(
            go.Bar(
                x=parts,
                y=names,
                name=label,
                orientation="h",
                marker=fill(number),
                hovertemplate=f"{label}: %{{x:.3~f}} ms",
            )
        )
    steps: dict[tuple[str, str], list[float | None]] = {
        ("simulated step of the plan", "#696969"): [each.prediction.step_seconds for each in compared],
        ("measured median of the run", "#000000"): [each.found.step_seconds.measured for each in compared],
    }
    for (name, shade), of_runs in steps.items():
        of_ranks = [step for step, each in zip(of_runs, compared, strict=True) for _ in each.prediction.ranks]
        x = [None if step is None else 1e3 * step for step in of_ranks]
        marker = {"color": shade, "symbol": "line-ns-open", "size": 18, "line": {"width": 3}}
        figure.add_trace(go.Scatter(x=x, y=names, mode="markers", name=name, marker=marker))
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title="ms")
    figure.update_yaxes(autorange="reversed", automargin=True)
    note = "The parts are predicted, none of them is measured."
    terms = {
        "simulated step": "A replay of all ranks. It is shorter than the sum of a rank's parts where these run beside "
        "each other, and longer where ranks wait."
    }
    return PageFigure("Predicted parts of a step", figure, note, terms)


def _memory(compared: Sequence[_Compared]) -> PageTable:
    rows = []
    for each in compared:
        for rank, found in zip(each.prediction.ranks, each.found.ranks, strict=True):
            parts = [f"{use.replace('_', ' ')} {size(count)}" for use, count in rank.device_bytes.items() if count]
            cache, host = found.cache_device_bytes.measured, found.host_bytes.measured
            rows.append(
                (
                    each.run.name,
                    str(rank.rank),
                    size(rank.total_device_bytes),
                    ", ".join(parts),
                    "" if cache is None else size(cache),
                    size(rank.total_host_bytes),
                    "" if host is None else size(host),
                )
            )
    header = ("run", "rank", "device, predicted", "of it", "caches, measured", "host, predicted", "host, measured")
    return PageTable(
        "Predicted memory", header, rows, "Measured are the slots and maps of caches, and their rows on the host."
    )
