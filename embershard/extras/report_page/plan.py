"""A plan's page: which table is where, and what it predicts of every rank's memory and step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from embershard.extras.report_page.parts import (
    AMOUNTS,
    PageFigure,
    PageTable,
    Section,
    fill,
    heat_map,
    new_figure,
    unit_of,
)
from embershard.sharding.plan import Plan, Prediction, RankPrediction, TablePlacement, pools_of, shards_of
from embershard.units import number, size

_MOST_TABLES, _MOST_RANKS = 200, 64
_NUMBER_BYTES = {"fp32": 4, "fp16": 2}
_ROW_PIXELS, _LEAST_PIXELS = 24, 110
#: Sizes at which the colours of the map have a label.
_LABELLED = tuple(2**power for power in range(0, 60, 5))


def plan_section(path: Path, plan: Plan) -> Section:
    """Return the section of a plan."""
    shown = sorted(plan.tables, key=lambda each: -each.rows * each.dim)[:_MOST_TABLES]
    parts: list[PageFigure | PageTable] = [_map(plan, shown)]
    if plan.prediction is not None:
        ranks = sorted(plan.prediction.ranks, key=lambda rank: -rank.total_device_bytes)[:_MOST_RANKS]
        ranks.sort(key=lambda rank: rank.rank)
        of = f" The {len(ranks)} fullest of {plan.world_size} ranks." if len(ranks) < plan.world_size else ""
        parts += [_memory(plan, ranks, of), _steps(ranks, of)]
    parts += [
        _tables(plan, shown),
        PageTable("Made from", ("", ""), [*plan.made_from.items(), ("digest", plan.digest)]),
    ]
    if plan.notes:
        parts.append(PageTable("Notes", ("",), [(note,) for note in plan.notes]))
    return Section(f"Plan {path}", parts, _said(plan))


def _said(plan: Plan) -> list[str]:
    rows = sum(table.rows for table in plan.tables)
    what = f"{len(plan.tables)} tables with {rows:,} rows on {plan.world_size} ranks, {plan.batch_size:,} samples each."
    prediction = plan.prediction
    if prediction is None:
        return [what, "It predicts nothing: it was edited since it was made."]
    hits = "" if prediction.hit_rate_lookups is None else f" {prediction.hit_rate_lookups:.2%} of the lookups hit."
    predicted = (
        f"Predicted: a step of {prediction.step_seconds * 1e3:.2f} ms, {prediction.samples_per_second:,.0f} samples/s. "
        f"Steps wait for {prediction.bottleneck.replace('_', ' ')}.{hits}"
    )
    return [what, predicted, *([plan.bound.sentence] if plan.bound else [])]


def _bytes_of(plan: Plan, table: TablePlacement) -> dict[int, int]:
    """Return the bytes of a table's weights on each rank that has some."""
    number_bytes = _NUMBER_BYTES[table.dtype]
    if table.kernel == "replicated":
        return dict.fromkeys(range(plan.world_size), table.rows * table.dim * number_bytes)
    found: dict[int, int] = {}
    for shard in shards_of(table, plan.ranks_per_node):
        found[shard.rank] = found.get(shard.rank, 0) + shard.rows * shard.columns * number_bytes
    return found


def _cached_shares(plan: Plan) -> dict[tuple[str, int], float]:
    """Return the share of rows that have a slot, by table and rank: of all tables that share its cache."""
    slots = {(pool.rank, pool.tables, pool.sharding, pool.dim): pool.slots for pool in plan.pools}
    found: dict[tuple[str, int], float] = {}
    for pool in pools_of(plan.tables, plan.ranks_per_node):
        own = slots.get((pool.rank, pool.tables, pool.sharding, pool.dim), 0)
        found |= {(table, pool.rank): min(1.0, own / pool.rows) if pool.rows else 0.0 for table in pool.tables}
    return found


def _map(plan: Plan, tables: Sequence[TablePlacement]) -> PageFigure:
    """Draw a row for each table and a column for each rank."""
    shares, placed = _cached_shares(plan), [_bytes_of(plan, table) for table in tables]
    ranks = range(plan.world_size)
    shades, cells, hover = list[list[float | None]](), list[list[str]](), list[list[str]]()
    for table, of_ranks in zip(tables, placed, strict=True):
        kept = {rank: shares.get((table.table, rank)) for rank in ranks}
        own = [size(of_ranks[rank]) if of_ranks.get(rank) else "" for rank in ranks]
        own = [cell and cell + ("" if kept[rank] is None else f", {kept[rank]:.1%}") for rank, cell in enumerate(own)]
        shades.append([math.log2(of_ranks[rank]) if of_ranks.get(rank) else None for rank in ranks])
        cells.append(own)
        hover.append([f"{cell}{' cached' * (kept[rank] is not None)}" for rank, cell in enumerate(own)])
    known = [shade for row in shades for shade in row if shade is not None] or [0.0]
    low, high = min(known), max(*known, min(known) + 1)
    labels = {
        math.log2(each): f"{size(each).replace('.00', '')}" for each in _LABELLED if low <= math.log2(each) <= high
    }
    figure = heat_map(
        [f"{table.table}, {table.sharding}" for table in tables],
        [f"rank {rank}" if plan.world_size <= 8 else str(rank) for rank in ranks],
        shades,
        cells,
        hover,
        labels or {high: size(2**high)},
        (low, high),
        AMOUNTS,
    )
    if plan.world_size > 8:
        figure.update_xaxes(title="rank")
    note = "Bytes of weights of each table on each rank, and the share of its rows that have a slot on the device."
    if len(tables) < len(plan.tables):
        note += f" The {len(tables)} largest of {len(plan.tables)} tables."
    return PageFigure("Where each table is", figure, note)


def _memory(plan: Plan, ranks: Sequence[RankPrediction], of: str) -> PageFigure:
    figure = new_figure("device", "host", height=_LEAST_PIXELS + _ROW_PIXELS * len(ranks), names_rows=True)
    kinds = dict.fromkeys(
        (panel, use)
        for panel, field in enumerate(("device_bytes", "host_bytes"), 1)
        for rank in ranks
        for use, count in getattr(rank, field).items()
        if count
    )
    units = [unit_of([getattr(rank, f"total_{field}_bytes") for rank in ranks]) for field in ("device", "host")]
    for place, (panel, use) in enumerate(kinds):
        field, (_, unit_bytes) = ("device_bytes", "host_bytes")[panel - 1], units[panel - 1]
        counts = [getattr(rank, field).get(use, 0) for rank in ranks]
        bars = go.Bar(
            x=[count / unit_bytes for count in counts],
            y=[f"rank {rank.rank}" for rank in ranks],
            orientation="h",
            name=f"{use.replace('_', ' ')} ({('device', 'host')[panel - 1]})",
            marker=fill(place),
            hovertext=[size(count) for count in counts],
            hovertemplate="%{y}: %{hovertext}",
        )
        figure.add_trace(bars, row=1, col=panel)
    for panel, (unit, _) in enumerate(units, 1):
        figure.update_xaxes(title=unit, row=1, col=panel)
    figure.update_layout(barmode="stack")
    figure.update_yaxes(type="category", autorange="reversed", automargin=True)
    budgets = [budget for rank in ranks if (budget := plan.memory_bytes_of(rank.rank)) is not None]
    note = "Predicted, by use." + (f" A rank's device may use {size(max(budgets))}." if budgets else "")
    return PageFigure("Memory of each rank", figure, note + of)


def _steps(ranks: Sequence[RankPrediction], of: str) -> PageFigure:
    figure = new_figure(height=_LEAST_PIXELS + _ROW_PIXELS * len(ranks))
    parts = dict.fromkeys(part for rank in ranks for part, seconds in rank.seconds.items() if seconds)
    names = [f"rank {rank.rank}" for rank in ranks]
    for place, part in enumerate(parts):
        bars = go.Bar(
            x=[1e3 * rank.seconds.get(part, 0.0) for rank in ranks],
            y=names,
            orientation="h",
            name=part.replace("_", " "),
            marker=fill(place),
            hovertemplate="%{y}: %{x:.3~f} ms",
        )
        figure.add_trace(bars)
    steps = [1e3 * rank.step_seconds for rank in ranks]
    marker = {"color": "#000000", "symbol": "line-ns-open", "size": 18, "line": {"width": 3}}
    figure.add_trace(go.Scatter(x=steps, y=names, mode="markers", name="step, simulated", marker=marker))
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title="ms")
    figure.update_yaxes(type="category", autorange="reversed", automargin=True)
    note = "Predicted. Parts run beside each other, so a step may be shorter than their sum."
    return PageFigure("A step of each rank", figure, note + of)


def _tables(plan: Plan, tables: Sequence[TablePlacement]) -> PageTable:
    shares = _cached_shares(plan)
    rows = []
    for table in tables:
        of_ranks = _bytes_of(plan, table)
        own = [shares[table.table, rank] for rank in of_ranks if (table.table, rank) in shares]
        cached = f"{min(own):.1%}" if own else ""
        if own and f"{max(own):.1%}" != cached:
            cached += f" to {max(own):.1%}"
        names = [str(rank) for rank in of_ranks]
        ranks = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        cells = (f"{table.rows:,} x {table.dim}", size(sum(of_ranks.values())), table.sharding, table.kernel)
        rows.append((table.table, *cells, ranks, cached, _hits(plan.prediction, table.table)))
    note = "Largest first."
    terms = {
        "weights": "Bytes on all ranks, without optimizer states.",
        "cached": "The share of rows that have a slot on the device, of all tables that share the cache.",
        "hits": "The predicted share of lookups whose row is on the device.",
    }
    header = ("table", "rows x dim", "weights", "sharding", "kernel", "ranks", "cached", "hits")
    return PageTable("Tables", header, rows, note, terms)


def _hits(prediction: Prediction | None, table: str) -> str:
    own = [] if prediction is None else [each for each in prediction.tables if each.table == table]
    lookups = sum(each.lookups for each in own)
    hits = sum(each.lookups * (each.hit_rate_lookups or 0.0) for each in own)
    return number(hits / lookups, ".2%") if lookups else ""
