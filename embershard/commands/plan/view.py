"""A plan on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from embershard.cache.file.file_counts import FILE_COUNTS
from embershard.launch.screen import make_table, say
from embershard.planning.cost.rates import StepWork
from embershard.planning.uncertainty import PlannedCase, Uncertainty
from embershard.settings.decoding import decode
from embershard.sharding.plan import Plan, Prediction, RankPrediction, TablePrediction, long_run_range
from embershard.sharding.shards import shards_of
from embershard.units import size

_MOST_RANKS = 16
_MOST_EFFECTS = 8
_CALIBRATED = "from, to: the largest error that steps predicted for calibrated machines had."
_INTERVAL = (
    "from, to: in nine of ten cases the step lies between them, if each constant of the machine may be as far off as "
    "docs/planning.md says. Errors of the model come on top."
)
#: Hits in the long run: a range that is wider says nothing; one that is narrower is a number.
_MOST_TOLD, _SAME = 0.25, 0.01
NOT_TOLD = "not told"
HITS = ("hits", "first\ntouches", "long run")
HITS_LEGEND = (
    "hits: lookups whose row is on the device, over the predicted steps. first touches: share of the misses that are "
    "of rows which the cache never had before; no size avoids them, and a longer run has fewer. long run: hits on new "
    "data after a long training, estimated: a range, or not told, where counts of the first part were off for the rest "
    "(docs/planning.md)."
)


def show(plan: Plan, console: Console, top: int, without_caches: int | None = None) -> None:
    """Print a whole plan: how many ranks need no cache, its prediction, the ranks, its `top` largest tables, notes."""
    prediction = plan.prediction
    assert prediction is not None, "a new plan has a prediction"
    say(console, *_what_fits(plan, without_caches), _headline(plan, prediction))
    slowest = sorted(prediction.ranks, key=lambda rank: -rank.step_seconds)[:_MOST_RANKS]
    shown = sorted(slowest, key=lambda rank: rank.rank)
    for table in (
        _ranks_table(plan, prediction, shown),
        _memory_table(plan, shown),
        _seconds_table(shown),
        *([_files_table(shown)] if any(rank.files for rank in shown) else []),
        _tables_table(plan, prediction, top),
    ):
        console.print(table)
    say(console, HITS_LEGEND, *_state(plan, prediction), *_bound(plan), *(f"Note: {note}" for note in plan.notes))


def _what_fits(plan: Plan, without_caches: int | None) -> list[str]:
    if all(table.kernel != "cached" for table in plan.tables):
        return ["All rows fit the devices of these ranks: no table needs a cache."]
    if without_caches is None:
        return []
    faster = ", and is faster with caches" if without_caches <= plan.world_size else ""
    return [f"{without_caches} ranks would hold all rows without a cache; this plan has {plan.world_size}{faster}."]


def _headline(plan: Plan, prediction: Prediction) -> str:
    source = "a replay of the profile's trace" if prediction.method == "replay" else "row counts"
    hits, first_touches, long_run = hits_cells(prediction.tables)
    return (
        f"{len(plan.tables)} tables with {sum(t.rows for t in plan.tables):,} rows on {plan.world_size} ranks: "
        f"{prediction.step_seconds * 1e3:.2f} ms a step, {prediction.samples_per_second:,.0f} samples/s; a step waits "
        f"for {prediction.bottleneck}; {hits or '0.00%'} of lookups hit (from {source}"
        + (f"; first touches are {first_touches} of the misses" if first_touches else "")
        + {"": ")", NOT_TOLD: "; in the long run not told)"}.get(long_run, f"; in the long run {long_run}, estimated)")
    )


def _ranks_table(plan: Plan, prediction: Prediction, shown: Sequence[RankPrediction]) -> Table:
    names = ("rank", "slots", *HITS, "fills", "to device", "to host", "all-to-all")
    table = make_table("Ranks: what moves in a step", (), names)
    for rank in shown:
        table.add_row(
            str(rank.rank),
            f"{sum(pool.slots for pool in plan.pools if pool.rank == rank.rank):,}",
            *hits_cells([table for table in prediction.tables if table.rank == rank.rank]),
            f"{rank.work['fills']:,.0f}",
            *(size(rank.work[name]) for name in ("bytes_to_device", "bytes_to_host")),
            size(decode(StepWork, rank.work).all_to_all_bytes),
        )
    if len(shown) < plan.world_size:
        table.caption = f"the {len(shown)} slowest of {plan.world_size} ranks"
    return table


def _memory_table(plan: Plan, shown: Sequence[RankPrediction]) -> Table:
    """Return the memory of each rank by use. The uses of a device add up to `all`."""
    of_caches, every = ("slots", "maps", "hot_rows"), dict.fromkeys(use for rank in shown for use in rank.device_bytes)
    uses = [use for use in every if use not in of_caches and any(rank.device_bytes.get(use) for rank in shown)]
    names = ("rank", "caches", *(use.replace("_", " ") for use in uses), "all", "budget", "host: rows")
    table = make_table("Ranks: device memory by use", (), names)
    for rank in shown:
        table.add_row(
            str(rank.rank),
            size(rank.cache_device_bytes),
            *(size(rank.device_bytes.get(use, 0)) for use in uses),
            size(rank.total_device_bytes),
            "" if (budget := plan.memory_bytes_of(rank.rank)) is None else size(budget),
            size(rank.total_host_bytes),
        )
    table.caption = "caches: slots and maps, as result.json and the report count them; all: with everything else"
    return table


def _state(plan: Plan, prediction: Prediction) -> list[str]:
    """Return what a cached row takes beside its weights and optimizer states, as a sentence, if there is one."""
    cached = [table for table in plan.tables if table.kernel == "cached"]
    rows = sum(shard.rows for table in cached for shard in shards_of(table, plan.ranks_per_node))
    if not rows:
        return []
    if any("file_maps" in rank.host_bytes for rank in prediction.ranks):
        in_memory, beside = (sum(rank.host_bytes[name] for rank in prediction.ranks) for name in ("rows", "file_maps"))
        return [
            f"{rows:,} cached rows are in files, and those that are used next in {size(in_memory)} of host memory. "
            f"Beside them host memory has {size(beside)} for all rows: where they are, and those on their way."
        ]
    payload, scores = (sum(rank.host_bytes[name] for rank in prediction.ranks) / rows for name in ("rows", "scores"))
    maps = sum(rank.device_bytes["maps"] for rank in prediction.ranks) / rows
    return [
        f"Host memory has {rows:,} cached rows of {payload:.1f} bytes (weights and optimizer states). A row's state "
        f"beside them takes {maps + scores:.1f} bytes: {maps:.1f} in the map to slots (device), {scores:.1f} for its "
        "score (host)."
    ]


def _bound(plan: Plan) -> list[str]:
    """Return how far the plan can be from the best, what its steps wait for, and what would help, as a sentence."""
    if plan.bound is None:
        return []
    binds = f" Steps wait for rank {plan.bound.rank}, most of all for {plan.bound.stage}."
    change = f" The smallest change that makes a step 5 % shorter: {plan.bound.change}." if plan.bound.change else ""
    return [plan.bound.sentence + binds + change]


def _seconds_table(shown: Sequence[RankPrediction]) -> Table:
    parts = [name for name in shown[0].seconds if any(rank.seconds[name] for rank in shown)]
    names = ("rank", "step", *(name.replace("_", " ") for name in parts))
    table = make_table("Ranks: milliseconds of a step", (), names)
    for rank in shown:
        seconds = (rank.step_seconds, *(rank.seconds[name] for name in parts))
        table.add_row(str(rank.rank), *(f"{each * 1e3:.2f}" for each in seconds))
    return table


def _files_table(shown: Sequence[RankPrediction]) -> Table:
    names = ("rank", "rows in memory", *(name.replace("_", " ") for name in FILE_COUNTS))
    table = make_table("Ranks: rows between file and memory in a step", (), names)
    for rank in shown:
        table.add_row(
            str(rank.rank), size(rank.host_bytes["rows"]), *(f"{rank.files.get(name, 0):,.1f}" for name in FILE_COUNTS)
        )
    return table


def _tables_table(plan: Plan, prediction: Prediction, top: int) -> Table:
    table = Table(title="Tables", title_justify="left", pad_edge=False)
    texts = ("sharding", "kernel", "exchange", "ranks")
    for name in ("table", "rows", *texts, "lookups/step", "unique/step", *HITS, "unique hits"):
        table.add_column(name, justify="left" if name in ("table", *texts) else "right")
    for placed in sorted(plan.tables, key=lambda each: -each.rows)[:top]:
        parts = [each for each in prediction.tables if each.table == placed.table]
        ranks = ",".join(map(str, placed.ranks[:6])) + (",..." if len(placed.ranks) > 6 else "")
        unique_ids = sum(part.unique_ids for part in parts)
        unique_hits = sum(part.unique_ids * (part.hit_rate_unique or 0.0) for part in parts)
        table.add_row(
            placed.table,
            f"{placed.rows:,}",
            placed.sharding,
            placed.kernel,
            placed.exchange if placed.kernel != "replicated" else "",
            ranks or "all",
            f"{sum(part.lookups for part in parts):,.0f}",
            f"{unique_ids:,.0f}",
            *hits_cells(parts),
            f"{unique_hits / unique_ids:.2%}" if unique_ids else "",
        )
    if len(plan.tables) > top:
        table.caption = f"the {top} largest of {len(plan.tables)} tables (--top N for more)"
    return table


def hits_cells(tables: Sequence[TablePrediction]) -> tuple[str, str, str]:
    """Return the cells of `HITS` over all of these: share of lookups that hit, share of first touches among the
    misses, and hits in the long run. Empty where there are no lookups, no misses, or no estimate."""
    lookups, misses = sum(table.lookups for table in tables), sum(table.misses for table in tables)
    if not lookups:
        return "", "", ""
    hits = sum(table.lookups * (table.hit_rate_lookups or 0.0) for table in tables) / lookups
    first = min(1.0, sum(table.first_touches for table in tables) / misses) if misses > 1e-9 * lookups else None
    return f"{hits:.2%}", "" if first is None else f"{first:.0%}", _range_cell(long_run_range(tables))


def _range_cell(found: tuple[float, float] | None) -> str:
    if found is None:
        return ""
    low, high = found
    if high - low > _MOST_TOLD:
        return NOT_TOLD
    return f"{high:.1%}" if high - low < _SAME else f"{100 * low:.0f}-{high:.0%}"


def show_certainty(case: PlannedCase, console: Console) -> None:
    """Print the interval of a case's step time, and a tornado: what it depends on most."""
    certainty, prediction = case.certainty, case.prediction
    if certainty is None or prediction is None:
        return
    low, high = case.range_per_second
    if certainty.effects:
        table = make_table(
            f"What the step of {case.name} depends on ({prediction.step_seconds * 1e3:.2f} ms)",
            ("constant",),
            ("from", "to", "ms at from", "ms at to", "apart"),
        )
        for each in certainty.effects[:_MOST_EFFECTS]:
            seconds = (each.low_seconds, each.high_seconds)
            table.add_row(
                each.constant.name,
                f"{each.low:g}",
                f"{each.high:g}",
                *(f"{1e3 * value:.2f}" for value in seconds),
                f"{each.seconds / prediction.step_seconds:.0%}",
            )
        table.caption = "one at a time, others as assumed"
        console.print(table)
    money = case.samples_per_money
    price = "" if money is None else f", {count(money)} samples for 1 of the price's currency"
    say(
        console,
        f"A step of {case.name}: {prediction.step_seconds * 1e3:.2f} ms (from {certainty.low_seconds * 1e3:.2f} to "
        f"{certainty.high_seconds * 1e3:.2f}), {case.samples_per_second:,.0f} samples/s (from {low:,.0f} to "
        f"{high:,.0f}), {case.samples_per_second / case.num_ranks:,.0f} per rank{price}. {interval(certainty)}",
    )


def interval(certainty: Uncertainty) -> str:
    """Return what the ends of the interval are."""
    return _INTERVAL if certainty.effects else _CALIBRATED


def count(value: float) -> str:
    """Format a large number.

    >>> count(1_620_000_000), count(950)
    ('1.62 G', '950')
    """
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f}"
