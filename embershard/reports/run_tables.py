"""Reports of runs on the screen, and as plain values for JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from embershard.launch.screen import make_table, say
from embershard.metrics.figures import figures, slice_rows
from embershard.planning.recalibrate import Recalibration
from embershard.planning.verify.compare import Pair, PlanComparison, PromiseVerdict, Traffic
from embershard.reports import publications
from embershard.reports.progress import closing_table
from embershard.run_result import CacheTotals, IdTotals, RunResult, Slices, WindowResult
from embershard.units import number, size

_MOST_RANKS = 16


def show_run(
    folder: Path, result: RunResult, published: Sequence[Mapping[str, Any]], console: Console, top: int
) -> None:
    """Print quality, speed, publications and the caches' counts of a run, without looking at a plan.

    Args:
        published: lines of the record.
    """
    tables = [closing_table(result, str(folder))]
    tables += slice_tables(result.slices)
    if result.windows:
        tables.append(_window_table(result.windows, top))
    if result.ids:
        tables.append(_id_table(result.ids, top))
    if published:
        table = _wide_table("Publications", (), publications.TITLES)
        table.add_row(*publications.publication_cells(published))
        table.caption = publications.NOTE
        tables.append(table)
    if (cache := result.cache) is not None:
        ranks = [(str(caches.rank), caches) for caches in cache.ranks[:_MOST_RANKS]]
        by_misses = sorted(cache.tables.items(), key=lambda item: item[1].hits_lookups - item[1].lookups)
        title = "Tables, most misses first"
        if len(by_misses) > top:
            title = f"The {top} of {len(by_misses)} tables with most misses"
        tables += [
            _cache_table("Ranks", "rank", ranks, result.measured_steps),
            _cache_table(title, "table", by_misses[:top], result.measured_steps),
        ]
    tables[0].title = "embershard: what the run gave"
    for table in tables:
        console.print(table)


def _id_table(ids: Mapping[str, IdTotals], top: int) -> Table:
    """Return what became of the ids of the tables with most evictions."""
    shown = sorted(ids.items(), key=lambda item: -item[1].evicted)[:top]
    title = "Ids, most evictions first"
    if len(ids) > top:
        title = f"Ids of the {top} of {len(ids)} tables with most evictions"
    table = _wide_table(title, ("table",), ("live", "admitted", "evicted", "refused", "age"))
    for name, found in shown:
        counts = (found.live, found.admitted, found.evicted, found.refused)
        table.add_row(name, *(f"{count:,}" for count in counts), number(found.evicted_age, ",.1f"))
    table.caption = (
        "live: ids with a row at the end; refused: times that no row was free; age: batches between the last use of an "
        "id and its eviction, on average"
    )
    return table


def _window_table(windows: Sequence[WindowResult], top: int) -> Table:
    """Return the newest windows of time."""
    shown = windows[-top:]
    title = "Windows" if len(shown) == len(windows) else f"The newest {len(shown)} of {len(windows)} windows"
    names = [f"{each.title} {each.label}".strip() for each in figures(shown[0].quality)]
    table = _wide_table(title, ("from (UTC)",), ("step", "samples", "late", *names))
    for window in shown:
        counts = (f"{window.step:,}", f"{window.samples:,}", f"{window.late:,}")
        table.add_row(window.start, *counts, *(each.value for each in figures(window.quality)))
    table.caption = (
        "quality on all samples of a window before any of them trained; step: those trained by then; late: samples of "
        "earlier windows that came with this one"
    )
    return table


def _cache_table(title: str, what: str, rows: Sequence[tuple[str, CacheTotals]], steps: int) -> Table:
    counts = ("misses", "fills", "write-backs", "to device", "to host")
    table = _wide_table(title, (what,), ("rows", "slots", "hits", "unique hits", *counts, "caches", "host"))
    table.caption = (
        "rows, slots, caches (device memory of slots and maps) and host (rows and scores): at the end; the rest: means "
        "per step"
    )
    steps = max(1, steps)
    for name, caches in rows:
        table.add_row(
            name,
            f"{caches.rows:,}",
            f"{caches.slots:,}",
            number(caches.hit_rate_lookups, ".2%"),
            number(caches.hit_rate_unique, ".2%"),
            *(f"{n / steps:,.0f}" for n in (caches.lookups - caches.hits_lookups, caches.fills, caches.write_backs)),
            *(size(n / steps) for n in (caches.bytes_to_device, caches.bytes_to_host)),
            size(caches.device_bytes),
            size(caches.host_bytes),
        )
    return table


def show_comparison(found: PlanComparison, notes: Sequence[str], console: Console, top: int) -> None:
    """Print verdicts, ranks, the `top` tables with the largest errors, and notes."""
    say(console, *map(verdict_line, found.verdicts))
    console.print(_sent_table(found))
    console.print(_ranks_table(found))
    cached = [table for table in found.tables if table.kernel == "cached"]
    if cached:
        table = _wide_table("Tables, per step", ("table", "rank", ""), (*_TRAFFIC, "cache", "host"))
        for each in cached[:top]:
            cells = (*_traffic_cells(each.traffic), _both(each.device_bytes, size), _both(each.host_bytes, size))
            table.add_row(each.table, str(each.rank), "predicted\nmeasured", *cells)
        shown = "largest error first"
        if len(cached) > top:
            shown = f"the {top} of {len(cached)} with the largest errors (--top N for more)"
        table.caption = f"{shown}; off: predicted minus measured hit rate, in points"
        console.print(table)
    say(console, *(f"Note: {note}" for note in notes))


def verdict_line(verdict: PromiseVerdict) -> str:
    """Return one promise and its outcome as a sentence."""
    if verdict.error is None:
        return f"{verdict.what}: not measured ({verdict.detail})"
    unit = " points" if verdict.unit == "points" else " %"
    outcome = "kept" if verdict.kept else "NOT kept"
    return (
        f"{verdict.what}: off by {verdict.error:.2f}{unit}, promised at most {verdict.promised:g}{unit}: {outcome} "
        f"({verdict.detail})"
    )


_TRAFFIC = ("hits", "off", "unique\nhits", "off", "lookups", "unique", "fills", "write-backs", "to device", "to host")


def _sent_table(found: PlanComparison) -> Table:
    table = _wide_table("Sent by a rank in a step, mean of ranks", ("",), ("predicted", "measured"))
    for kind, pair in found.sent_bytes.items():
        table.add_row(kind.replace("_", " "), *_both(pair, size).split("\n"))
    table.caption = "other: agreements between ranks, reports, checkpoints, evaluations"
    return table


def _ranks_table(found: PlanComparison) -> Table:
    table = _wide_table("Ranks, per step", ("rank", ""), (*_TRAFFIC, "caches", "host", "all-to-all", "step ms"))
    by_error = sorted(found.ranks, key=lambda rank: -(rank.traffic.worst_points or 0.0))
    for rank in by_error[:_MOST_RANKS]:
        table.add_row(
            str(rank.rank),
            "predicted\nmeasured",
            *_traffic_cells(rank.traffic),
            _both(rank.cache_device_bytes, size),
            _both(rank.host_bytes, size),
            _both(rank.all_to_all_bytes, size),
            _both(rank.step_seconds, lambda seconds: f"{seconds * 1e3:.2f}"),
        )
    caption = (
        "caches: device bytes of slots and maps; all-to-all: on the rank's link, measured for all together; step: one "
        "median"
    )
    if len(found.ranks) > _MOST_RANKS:
        caption = f"the {_MOST_RANKS} of {len(found.ranks)} ranks with the largest errors; {caption}"
    table.caption = caption
    return table


def _traffic_cells(traffic: Traffic) -> tuple[str, ...]:
    def count(value: float) -> str:
        return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"

    return (
        _both(traffic.hit_rate_lookups, lambda share: f"{share:.2%}"),
        _points(traffic.hit_rate_lookups),
        _both(traffic.hit_rate_unique, lambda share: f"{share:.2%}"),
        _points(traffic.hit_rate_unique),
        *(_both(pair, count) for pair in (traffic.lookups, traffic.unique_ids, traffic.fills, traffic.write_backs)),
        _both(traffic.bytes_to_device, size),
        _both(traffic.bytes_to_host, size),
    )


def _both(pair: Pair, shown: Callable[[float], str]) -> str:
    return "\n".join("-" if value is None else shown(value) for value in (pair.predicted, pair.measured))


def _points(pair: Pair) -> str:
    return "" if pair.error is None else f"{round(100 * pair.error, 2) + 0.0:+.2f}"  # not -0.00


def show_advice(run: Path, console: Console) -> None:
    """Print the remedy for a step time that was not as promised."""
    command = f"embershard report {run} --recalibrate machine.toml"
    say(console, f"Advice: correct the machine's rates by this run:  {command}")


def show_recalibration(found: Recalibration, output: Path, console: Console) -> None:
    """Print what changed, and how to plan with it."""
    ranks = "1 rank" if found.num_ranks == 1 else f"{found.num_ranks} ranks"
    rates = "The estimated rates" if found.from_estimate else "The rates"
    who_can = " (embershard plan --calibrate can)" if found.topology.device == "cpu" else ""
    say(
        console,
        f"{rates} give {found.before_seconds * 1e3:.2f} ms for the work that was measured; the run's "
        f"median step was {found.measured_seconds * 1e3:.2f} ms. All rates for {ranks} were multiplied by "
        f"{found.factor:.4g}: one step time cannot tell which of them is wrong{who_can}.",
        f"Written to {output}. Plan with it:  embershard plan --topology {output} --ranks {found.num_ranks} ...",
    )


def recalibration_values(found: Recalibration, output: Path) -> dict[str, Any]:
    """Return plain values for JSON."""
    names = ("num_ranks", "factor", "measured_seconds", "before_seconds", "from_estimate")
    return {"file": str(output), "source": found.topology.source, **{name: getattr(found, name) for name in names}}


def comparison_values(found: PlanComparison, notes: Sequence[str]) -> dict[str, Any]:
    """Return plain values for JSON: pairs with their error, verdicts with their outcome."""
    verdicts = [{**_plain(verdict), "kept": verdict.kept} for verdict in found.verdicts]
    return {**_plain(found), "verdicts": verdicts, "notes": list(notes)}


def _plain(value: Any) -> Any:
    if isinstance(value, Pair):
        return {"predicted": value.predicted, "measured": value.measured, "error": value.error}
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _wide_table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = make_table(title, left, right, caption_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in table.columns[: len(left)]:
        column.no_wrap = True
    return table


def slice_tables(slices: Slices) -> list[Table]:
    """Return a table for each column of slices."""
    tables = []
    for column, values in slices.items():
        titles, rows = slice_rows(values)
        table = make_table(f"Held-out samples by {column}", [column], titles)
        for row in rows:
            table.add_row(*row)
        tables.append(table)
    return tables
