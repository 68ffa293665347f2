"""Plans on the screen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from embershard.errors import ShardingError
from embershard.launch.plan.what_if import Outcome, efficiency
from embershard.planning.explain import alternatives, sentences
from embershard.sharding.plan import Plan, Prediction, RankPrediction

_MOST_RANKS = 16


@contextmanager
def progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar over the pools that are replayed; on a terminal only."""
    columns = (TextColumn("replaying the trace"), BarColumn(), MofNCompleteColumn(), TextColumn("pools"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("pools", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show(plan: Plan, console: Console, top: int) -> None:
    """The whole plan: what it gives, the ranks, the tables, and what to know about it."""
    prediction = plan.prediction
    assert prediction is not None, "a new plan has a prediction"
    console.print(_headline(plan, prediction), soft_wrap=True, highlight=False)
    slowest = sorted(prediction.ranks, key=lambda rank: -rank.step_seconds)[:_MOST_RANKS]
    shown = sorted(slowest, key=lambda rank: rank.rank)
    console.print(_ranks_table(plan, shown))
    console.print(_seconds_table(shown))
    console.print(_tables_table(plan, prediction, top))
    for note in plan.notes:
        console.print(f"Note: {note}", soft_wrap=True, highlight=False)


def show_explanations(request: Any, plan: Plan, tables: Sequence[str], console: Console) -> None:
    """Why each of these tables is where it is."""
    for name in tables:
        chosen = next((placed for placed in plan.tables if placed.table == name), None)
        if chosen is None:
            raise ShardingError(f"no table {name!r}; tables are {', '.join(t.table for t in plan.tables[:8])}, ...")
        for line in sentences(chosen, alternatives(request, name, chosen)):
            console.print(line, soft_wrap=True, highlight=False)


def show_what_if(outcomes: Sequence[Outcome], console: Console) -> None:
    """One line per case."""
    table = Table(title="What if")
    for name in (
        "ranks",
        "ratio",
        "samples/s",
        "efficiency",
        "step",
        "waits for",
        "device/rank",
        "host/node",
        "fills/step",
    ):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        table.add_row(*_what_if_row(outcome, outcomes))
    console.print(table)
    for outcome in outcomes:
        if outcome.problem:
            console.print(f"{outcome.num_ranks} ranks: {outcome.problem}", soft_wrap=True, highlight=False)
    notes = dict.fromkeys(note for each in outcomes if each.plan is not None for note in each.plan.notes)
    for note in notes:
        console.print(f"Note: {note}", soft_wrap=True, highlight=False)


def _what_if_row(outcome: Outcome, outcomes: Sequence[Outcome]) -> list[str]:
    ratio = "" if outcome.ratio is None else f"{outcome.ratio:g}"
    if outcome.plan is None or outcome.plan.prediction is None:
        return [str(outcome.num_ranks), ratio, "does not fit", *[""] * 6]
    prediction = outcome.plan.prediction
    share = efficiency(outcome, outcomes)
    per_node = outcome.plan.ranks_per_node
    hosts = [sum(rank.host_bytes.values()) for rank in prediction.ranks]
    nodes = [sum(hosts[first : first + per_node]) for first in range(0, len(hosts), per_node)]
    return [
        str(outcome.num_ranks),
        ratio,
        f"{prediction.samples_per_second:,.0f}",
        "" if share is None else f"{share:.0%}",
        f"{prediction.step_seconds * 1e3:.2f} ms",
        prediction.bottleneck,
        size(max(map(device_bytes, prediction.ranks))),
        size(max(nodes)),
        f"{sum(table.fills for table in prediction.tables):,.0f}",
    ]


def _headline(plan: Plan, prediction: Prediction) -> str:
    lookups = sum(table.lookups for table in prediction.tables)
    hits = sum(table.lookups * (table.hit_rate_lookups or 0.0) for table in prediction.tables)
    source = "a replay of the profile's trace" if prediction.method == "replay" else "row counts"
    return (
        f"{len(plan.tables)} tables with {sum(t.rows for t in plan.tables):,} rows on {plan.world_size} ranks: "
        f"{prediction.step_seconds * 1e3:.2f} ms a step, {prediction.samples_per_second:,.0f} samples/s; a step waits "
        f"for {prediction.bottleneck}; {hits / max(lookups, 1e-300):.2%} of lookups hit (from {source})"
    )


def _ranks_table(plan: Plan, shown: Sequence[RankPrediction]) -> Table:
    table = Table(title="Ranks: memory, and what moves in a step")
    names = ["rank", "slots", "device", "budget", "host", "hits", "fills", "to device", "to host", "all-to-all"]
    for name in names:
        table.add_column(name, justify="right")
    for rank in shown:
        table.add_row(*_rank_row(plan, rank))
    if len(shown) < plan.world_size:
        table.caption = f"the {len(shown)} slowest of {plan.world_size} ranks"
    return table


def _rank_row(plan: Plan, rank: RankPrediction) -> list[str]:
    assert plan.prediction is not None, "its rank was predicted"
    own = [table for table in plan.prediction.tables if table.rank == rank.rank]
    lookups = sum(table.lookups for table in own)
    budget = plan.device_memory_bytes
    return [
        str(rank.rank),
        f"{sum(pool.slots for pool in plan.pools if pool.rank == rank.rank):,}",
        size(device_bytes(rank)),
        "" if budget is None else size(budget),
        size(sum(rank.host_bytes.values())),
        _share(sum(table.lookups * (table.hit_rate_lookups or 0.0) for table in own), lookups),
        f"{rank.work['fills']:,.0f}",
        size(rank.work["bytes_to_device"]),
        size(rank.work["bytes_to_host"]),
        size(rank.work["all_to_all_bytes"]),
    ]


def _seconds_table(shown: Sequence[RankPrediction]) -> Table:
    table = Table(title="Ranks: milliseconds of a step")
    parts = [name for name in shown[0].seconds if any(rank.seconds[name] for rank in shown)]
    for name in ("rank", "step", *parts):
        table.add_column(name.replace("_", " "), justify="right")
    for rank in shown:
        seconds = (rank.step_seconds, *(rank.seconds[name] for name in parts))
        table.add_row(str(rank.rank), *(f"{each * 1e3:.2f}" for each in seconds))
    return table


def _tables_table(plan: Plan, prediction: Prediction, top: int) -> Table:
    table = Table(title="Tables")
    for name in ("table", "rows", "sharding", "kernel", "ranks", "lookups/step", "unique/step", "hits", "unique hits"):
        table.add_column(name, justify="left" if name in ("table", "sharding", "kernel", "ranks") else "right")
    by_name: dict[str, list[Any]] = {}
    for each in prediction.tables:
        by_name.setdefault(each.table, []).append(each)
    for placed in sorted(plan.tables, key=lambda each: -each.rows)[:top]:
        parts = by_name.get(placed.table, [])
        ranks = ",".join(map(str, placed.ranks[:6])) + (",..." if len(placed.ranks) > 6 else "")
        lookups, unique = sum(p.lookups for p in parts), sum(p.unique_ids for p in parts)
        table.add_row(
            placed.table,
            f"{placed.rows:,}",
            placed.sharding,
            placed.kernel,
            ranks or "all",
            f"{lookups:,.0f}",
            f"{unique:,.0f}",
            _share(sum(p.lookups * (p.hit_rate_lookups or 0) for p in parts), lookups),
            _share(sum(p.unique_ids * (p.hit_rate_unique or 0) for p in parts), unique),
        )
    if len(plan.tables) > top:
        table.caption = f"the {top} largest of {len(plan.tables)} tables (--top N for more)"
    return table


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.2%}" if whole else ""


def device_bytes(rank: RankPrediction) -> int:
    """Device memory of a rank, all of it."""
    return sum(rank.device_bytes.values())


def size(count: float) -> str:
    """ "1.23 GB"."""
    for unit, unit_size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= unit_size:
            return f"{count / unit_size:.2f} {unit}"
    return f"{count:.0f} B"
