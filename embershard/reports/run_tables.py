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
from embershard.planning.recalibrate import Recalibration
from embershard.planning.verify.compare import Pair, PlanComparison, PromiseVerdict, Traffic
from embershard.reports.progress import closing_table
from embershard.reports.run_folder import RunFolder
from embershard.run_result import RunResult
from embershard.training.reports import Report
from embershard.units import ShownTable, size

_MOST_RANKS = 16


def show_run(run: RunFolder, result: RunResult, console: Console, top: int) -> None:
    """Print quality, speed, the caches' counts and what a run reported, without looking at a plan."""
    of_kinds = (kind.table_of_runs({"": run.reports(kind.kind)}) for kind in Report.__subclasses__())
    reported = [table._replace(left=(), rows=[row[1:] for row in table.rows]) for table in of_kinds if table]
    tables = [closing_table(result, str(run.path)), *map(table_of, (*result.tables(top), *reported))]
    tables[0].title = "embershard: what the run gave"
    for table in tables:
        console.print(table)


def table_of(shown: ShownTable) -> Table:
    """Return a table of texts for the screen."""
    table = _wide_table(shown.title, shown.left, shown.right)
    for row in shown.rows:
        table.add_row(*row)
    table.caption = shown.caption or None
    return table


def show_comparison(found: PlanComparison, notes: Sequence[str], console: Console, top: int) -> None:
    """Print verdicts, ranks, the `top` tables with the largest errors, and notes."""
    say(console, *map(verdict_line, found.verdicts))
    sent = _wide_table("Sent by a rank in a step, mean of ranks", ("",), ("predicted", "measured"))
    for kind, pair in found.sent_bytes.items():
        sent.add_row(kind.replace("_", " "), *_both(pair, size).split("\n"))
    sent.caption = "other: agreements between ranks, reports, checkpoints, evaluations"
    console.print(sent)
    if found.files:
        files = _wide_table("Between files and memory in a step, all ranks", ("",), ("predicted", "measured"))
        for name, pair in found.files.items():
            files.add_row(name.replace("_", " "), *_both(pair, _count).split("\n"))
        console.print(files)
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


def _count(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _traffic_cells(traffic: Traffic) -> tuple[str, ...]:
    return (
        _both(traffic.hit_rate_lookups, lambda share: f"{share:.2%}"),
        _points(traffic.hit_rate_lookups),
        _both(traffic.hit_rate_unique, lambda share: f"{share:.2%}"),
        _points(traffic.hit_rate_unique),
        *(_both(pair, _count) for pair in (traffic.lookups, traffic.unique_ids, traffic.fills, traffic.write_backs)),
        _both(traffic.bytes_to_device, size),
        _both(traffic.bytes_to_host, size),
    )


def _both(pair: Pair, shown: Callable[[float], str]) -> str:
    return "\n".join("-" if value is None else shown(value) for value in (pair.predicted, pair.measured))


def _points(pair: Pair) -> str:
    return "" if pair.error is None else f"{round(100 * pair.error, 2) + 0.0:+.2f}"  # not -0.00


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
