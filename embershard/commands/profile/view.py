"""A profile as tables and as sentences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from rich.table import Table

from embershard.frequency import CountHistogram, DataStatistics, StackDistances, TableStatistics
from embershard.frequency.compare import ProfileComparison
from embershard.frequency.curves import distinct_rows, first_touch_share, pooled, static_curve, unseen_share
from embershard.frequency.new_data import in_new_data
from embershard.launch.screen import make_table

#: Sizes of a cache, as shares of a table's rows, whose hit rates are shown.
SIZES = (0.015, 0.05)
_HEADS = (0.001, 0.01, 0.1)
_WINDOW = 4096
#: Policies whose hit rates differ by less are equally good.
_SAME = 0.005
#: Share of the misses: with more first touches, a hit rate says little of the cache's size.
_MOSTLY = 0.5


def profile_tables(statistics: DataStatistics, together: StackDistances | None, top: int) -> list[Table]:
    """Return what was counted, and hit rates: each a line for each of the `top` tables with most rows, and one for all
    tables together."""
    part = "" if statistics.share_of_samples >= 1 else f" ({statistics.share_of_samples:.2%} of them)"
    title = f"{statistics.num_samples:,} training samples{part}, {len(statistics.tables)} tables"
    columns = ["rows", "occur", "lookups", "per\nsample", "top row", *(f"top\n{share:.1%}" for share in _HEADS)]
    counts = make_table(title, ["table"], [*columns, f"distinct in\n{_WINDOW}"])
    columns = [f"{kind}\n{size:.1%}" for size in SIZES for kind in ("static", "LRU", "new data")]
    title = "Hit rates of caches for a share of all rows"
    rates = make_table(title, ["table"], ["rows", "first\ntouches", *columns])
    ordered = sorted(statistics.tables.values(), key=lambda each: each.num_rows, reverse=True)
    for table, cells in ((counts, partial(_count_cells, num_samples=statistics.num_samples)), (rates, _rate_cells)):
        for each in ordered[:top]:
            table.add_row(each.table, *cells([each], each.stack))
        if len(ordered) > top:
            table.add_row(f"{len(ordered) - top} more", style="dim")
        table.add_section()
        table.add_row("together", *cells(ordered, together), style="bold")
    return [counts, rates]


def sentences(statistics: DataStatistics, together: StackDistances | None) -> list[str]:
    """Return what the numbers mean, in words."""
    lines = [
        "top x %: share of the lookups that go to the x % most frequent of the rows that occur. static, LRU: share of "
        "the lookups that hit in a cache for this share of all rows. new data: an estimate of that share for new "
        "samples after a long training, by a power law for rows that were seen rarely or never.",
        f"First touches: {first_touch_share(_rows_of_all(statistics)):.2%} of the lookups are the first of their row, "
        "which no cache that starts empty finds. A number with a * has more first touches than other misses, or all "
        "rows that occur in the cache: these data are too short for it to say what the size is worth. Look at new "
        "data, or profile more samples.",
        _policy_sentence(statistics) if statistics.preferences else _curves_sentence(statistics, together),
        _drift_sentence(statistics),
        _trust_sentence(statistics),
    ]
    if statistics.read_seconds_per_sample:
        lines.append(
            f"One core reads {1 / statistics.read_seconds_per_sample:,.0f} samples/s on the machine that counted."
        )
    return [*lines, f"Counted: {statistics.origin}."]


def comparison_table(found: Sequence[ProfileComparison], top: int) -> Table:
    """Return a line for each of the `top` tables with most lookups."""
    hits = ("hit rate of\nA's rows", "of B's\nrows", "lookups of rows\nnew in B")
    title = "The most frequent rows of A, on the lookups of B"
    table = make_table(title, ["table"], ["rows\nchosen", "also chosen\nby B", *hits])
    ordered = sorted(found, key=lambda each: each.lookups, reverse=True)
    for each in ordered[:top]:
        shares = (each.overlap, each.hit_rate, each.own_hit_rate, each.unseen)
        table.add_row(each.table, f"{each.num_top:,}", *(f"{share:.1%}" for share in shares))
    if len(ordered) > top:
        table.add_row(f"{len(ordered) - top} more", style="dim")
    return table


def comparison_sentence(found: Sequence[ProfileComparison]) -> str:
    """Return the hit rates over all tables, in words."""
    lookups = [max(each.lookups, 0) for each in found]
    if not sum(lookups):
        return "B has no lookups."
    rates = [(each.hit_rate, each.own_hit_rate, each.unseen) for each in found]
    old, own, new = np.average(rates, axis=0, weights=lookups)
    return (
        f"Together, each table with its own rows: those chosen by A find {old:.1%} of B's lookups, those "
        f"chosen by B itself {own:.1%}; {new:.1%} of B's lookups go to rows that A never saw."
    )


def _rows_of_all(statistics: DataStatistics) -> CountHistogram:
    """Return how often rows of all tables occur, together."""
    return pooled(table.histogram for table in statistics.tables.values())


def expected_in_new_data(tables: Sequence[TableStatistics]) -> CountHistogram:
    """Return the lookups to expect of all these tables' rows in as many new samples."""
    return pooled(in_new_data(table.histogram, table.num_rows) for table in tables)


def _count_cells(tables: Sequence[TableStatistics], stack: StackDistances | None, num_samples: int) -> list[str]:
    histogram = pooled(table.histogram for table in tables)
    rows, lookups = sum(table.num_rows for table in tables), sum(table.num_lookups for table in tables)
    bound = "<= " if any(table.undercount for table in tables) else ""
    return [
        f"{rows:,}",
        f"{bound}{histogram.num_rows:,.0f}",
        f"{lookups:,}",
        f"{lookups / max(num_samples, 1):.1f}",
        *(_static_share(histogram, num_rows) for num_rows in (1.0, *(share * histogram.num_rows for share in _HEADS))),
        f"{sum(distinct_rows(table, _WINDOW, num_samples) for table in tables):,.0f}",
    ]


def _rate_cells(tables: Sequence[TableStatistics], stack: StackDistances | None) -> list[str]:
    histogram, expected = pooled(table.histogram for table in tables), expected_in_new_data(tables)
    rows, first = sum(table.num_rows for table in tables), first_touch_share(histogram)
    cells = [f"{rows:,}", f"{first:.1%}"]
    for size in SIZES:
        slots = max(1.0, size * rows)
        cells.append(_static_share(histogram, slots) + "*" * (slots >= histogram.num_rows))
        found = None if stack is None else float(stack.hit_rate(np.array(slots)))
        cells.append("n/a" if found is None else f"{found:.1%}" + "*" * (first > _MOSTLY * (1.0 - found)))
        cells.append(_static_share(expected, slots))
    return cells


def _static_share(histogram: CountHistogram, num_rows: float) -> str:
    """Return the share of lookups that go to the most frequent rows, at least one of them."""
    return f"{float(static_curve(histogram, np.array(max(1.0, num_rows)))):.1%}"


def _policy_sentence(statistics: DataStatistics) -> str:
    found = statistics.preferences
    named = ", ".join(f"{policy} {misses:.2%}" for policy, misses in sorted(found.items(), key=lambda item: item[1]))
    alone = {policy: misses for policy, misses in found.items() if policy != "lookahead"} or dict(found)
    best = min(alone, key=lambda policy: alone[policy])
    close = [policy for policy in alone if policy != best and alone[policy] - alone[best] < _SAME]
    first = first_touch_share(_rows_of_all(statistics))
    text = f"Policy: in a replay with slots for 5 % of the rows that occur, lookups missed: {named}. Of all lookups "
    text += f"{first:.2%} are first touches, which only a cache that is warm from the start does not miss. "
    text += f"Without looking ahead the data prefer {best}"
    text += f" ({' and '.join(sorted(close))} within {_SAME:.1%})" if close else ""
    text += f", {_reason(best, statistics)}."
    if best == "frequency":
        text += " (It was counted on these very lookups, and knows rows that new data would have to bring.)"
    return text


def _reason(best: str, statistics: DataStatistics) -> str:
    if statistics.drift is None:
        return "by these misses alone"
    reasons = {
        "lru": "what was used last tells more than what was used most",
        "lfu": "counts that go on find what becomes popular",
    }
    moved = f"{1 - statistics.drift.top_rows_kept:.0%} of the most frequent rows are others at the end"
    return f"since {reasons.get(best, 'what is popular stays so')}: {moved}"


def _curves_sentence(statistics: DataStatistics, together: StackDistances | None) -> str:
    if together is None:
        return "Policy: no trace of lookups in their order, so only a static cache can be judged."
    rows = np.array(SIZES[1] * sum(table.num_rows for table in statistics.tables.values()))
    static = float(static_curve(_rows_of_all(statistics), rows))
    expected = expected_in_new_data(list(statistics.tables.values()))
    lru = float(together.hit_rate(rows))
    best = "frequency" if static >= lru else "lru"
    return (
        f"Policy: the data prefer {best}: with slots for {SIZES[1]:.0%} of all rows a static cache finds {static:.1%} "
        f"of the lookups that chose its rows, LRU {lru:.1%} (which has to fetch every row once: "
        f"{first_touch_share(_rows_of_all(statistics)):.1%} of the lookups). On "
        f"new data such a cache finds about {_static_share(expected, float(rows))}."
    )


def _drift_sentence(statistics: DataStatistics) -> str:
    drift = statistics.drift
    if drift is None:
        return "Drift: not measured, the data are too few."
    first, before, own = (float(drift.hit_rates[part, -1]) for part in (0, -2, -1))
    return (
        f"Drift: the {drift.share_of_rows:.0%} most frequent rows of the first of {len(drift.hit_rates)} parts find "
        f"{first:.1%} of the last part's lookups, those of the part before it {before:.1%}, its own {own:.1%}; "
        f"{drift.top_rows_kept:.0%} of them are the same, and {drift.new_rows_share:.1%} of its lookups go to rows "
        "that did not occur in the first half."
    )


def _trust_sentence(statistics: DataStatistics) -> str:
    tables, trace = statistics.tables.values(), statistics.trace
    unseen = unseen_share(pooled(table.histogram for table in tables))
    text = f"Trust: about {unseen:.2%} of further lookups will go to rows that did not occur"
    if trace is not None:
        # Beside constant rows, all but one in a million may be followed.
        constant = sum(len(rows) for rows in trace.constant_rows.values())
        sampled = "all rows are" if trace.rate > 0.99 else f"{trace.rate:.3%} of the rows are"
        beside = f", beside {constant:,} that are in about every batch" if constant else ""
        text += f"; {sampled} followed in order ({trace.num_lookups:,} lookups){beside}"
    forgotten = max((table.undercount for table in tables), default=0)
    if forgotten:
        text += f"; counts are low by up to {forgotten} (memory was bounded: --memory)"
    return text + "."
