"""A picture of a profile: hit rates by the size of a cache, of several policies and of the optimum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embershard.commands.profile.view import expected_in_new_data
from embershard.extras.profile_picture.hit_rate_curve import MOST_STEPS, CurvePoint, hit_rate_curve
from embershard.frequency import DataStatistics, StackDistances, TableStatistics
from embershard.frequency.curves import first_touch_share, pooled, static_curve
from embershard.frequency.downsampling import downsampled
from embershard.sharding.run_shape import ReplaySettings

if TYPE_CHECKING:  # matplotlib takes a moment: only who draws imports it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Tables that are drawn alone, too.
_NUM_ALONE = 4
_LEAST_SHARE = 1e-3
#: Sizes that are replayed, as shares of all rows, on so many lookups and in batches of so many samples.
_REPLAYED_SHARES = (0.005, 0.015, 0.05, 0.15, 0.5)
_REPLAYED_LOOKUPS = 500_000
_BATCH_SIZE = 1024


def make_figure(
    statistics: DataStatistics, together: StackDistances | None, progress: Callable[[int, int], None] | None = None
) -> Figure:
    """Draw hit rates against the size of the cache: at the left all tables in one cache (static, LRU, look-ahead and
    the optimum), at the right the largest tables, each in a cache of its own (static and LRU).

    Args:
        progress: called with the number of sizes replayed, and of all.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    figure = Figure(figsize=(13, 6.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    tables = sorted(statistics.tables.values(), key=lambda each: each.num_rows, reverse=True)
    points: list[CurvePoint] = []
    if statistics.trace is not None and statistics.trace.num_samples >= _BATCH_SIZE:
        rows = {table.table: table.num_rows for table in statistics.tables.values()}
        sizes = [max(1, round(share * sum(rows.values()))) for share in _REPLAYED_SHARES]
        trace = downsampled(statistics.trace, _REPLAYED_LOOKUPS)
        points = hit_rate_curve(trace, rows, sizes, _BATCH_SIZE, progress=progress)
    _draw_together(left, statistics, together, points)
    _draw_alone(right, tables[:_NUM_ALONE])
    for axes in (left, right):
        least = min((np.asarray(line.get_ydata())[0] for line in axes.get_lines()), default=0.0)
        axes.set(xscale="log", xlim=(_LEAST_SHARE, 1.0), ylim=(min(0.9, np.floor(10 * least) / 10), 1.0))
        axes.set(ylabel="hit rate: lookups for which no row is moved")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(True, which="both", alpha=0.25)
    figure.suptitle(_title(statistics), ha="left", x=0.01)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", fontsize="small")
    return figure


def _draw_together(
    axes: Axes, statistics: DataStatistics, together: StackDistances | None, points: Sequence[CurvePoint]
) -> None:
    tables = statistics.tables.values()
    rows, histogram = sum(table.num_rows for table in tables), pooled(table.histogram for table in tables)
    sizes = [point.num_slots / rows for point in points]
    if points:
        settings = ReplaySettings()
        optimum: dict[str, Any] = {"color": "black", "linestyle": "--", "marker": "o", "markersize": 4}
        label = "optimum: the order of all batches is known (Belady); no cache that starts empty moves fewer rows"
        axes.plot(sizes, [point.optimum for point in points], label=label, **optimum)
        label = (
            f"look-ahead (the default): {settings.lookahead} batches of {_BATCH_SIZE:,} samples are known ahead; "
            "replayed by the cache's own rules"
        )
        look_ahead = [point.look_ahead for point in points]
        axes.plot(sizes, look_ahead, color="tab:green", marker="o", linewidth=2.5, label=label)
    shares = np.geomspace(_LEAST_SHARE, 1.0, 200)
    label = "static: the rows that are most frequent in these very data, on the device from the start and never changed"
    axes.plot(shares, static_curve(histogram, shares * rows), color="tab:blue", linewidth=2, label=label)
    if together is not None:
        label = "LRU: the row that was unused for longest leaves"
        axes.plot(shares, together.hit_rate(shares * rows), color="tab:orange", linewidth=2, label=label)
    expected = static_curve(expected_in_new_data(list(tables)), shares * rows)
    label = "new data, in the long run: an estimate, by a power law for rows that were seen rarely or never"
    axes.plot(shares, expected, color="tab:purple", linewidth=2, linestyle="-.", label=label)
    most = 1.0 - first_touch_share(histogram)
    label = f"{most:.1%}: the most of a cache that starts empty, because each row that occurs is moved once"
    axes.axhline(most, color="gray", linewidth=1, linestyle=":", label=label)
    axes.set(xlabel=f"rows in the cache, of all {rows:,} rows (logarithmic)")
    axes.set_title("All tables in one cache", loc="left", fontsize="medium")


def _draw_alone(axes: Axes, tables: Sequence[TableStatistics]) -> None:
    shares: NDArray[np.float64] = np.geomspace(_LEAST_SHARE, 1.0, 200)
    for number, table in enumerate(tables):
        slots, color = shares * table.num_rows, f"C{number}"
        label = f"{table.table} ({table.num_rows:,} rows)"
        axes.plot(shares, static_curve(table.histogram, slots), color=color, linewidth=1.2, label=label)
        if table.stack is not None:
            axes.plot(shares, table.stack.hit_rate(slots), color=color, linewidth=1.2, linestyle="--")
    axes.set(xlabel="rows in the cache, of the table's rows (logarithmic)")
    title = "The largest tables, each in its own cache: static (solid), LRU (dashed)"
    axes.set_title(title, loc="left", fontsize="medium")
    axes.legend(fontsize="small", loc="upper left")


def _title(statistics: DataStatistics) -> str:
    tables, trace = statistics.tables, statistics.trace
    title = f"Hit rate by size of the cache: {statistics.num_samples:,} training samples, {len(tables)} tables"
    estimated = []
    first = first_touch_share(pooled(table.histogram for table in tables.values()))
    title += f"; {first:.1%} of the lookups are first touches of a row"
    if statistics.share_of_samples < 0.999:
        estimated.append(f"{statistics.share_of_samples:.2%} of the samples were read")
    if trace is not None and trace.rate < 0.99:
        estimated.append(f"LRU, look-ahead and optimum follow at most {trace.rate:.1%} of the rows")
    if trace is not None and trace.num_samples > MOST_STEPS * _BATCH_SIZE:
        estimated.append(f"look-ahead and optimum of the first {MOST_STEPS * _BATCH_SIZE:,} samples, where more is new")
    if any(table.undercount for table in tables.values()):
        estimated.append("counts are lower bounds")
    estimated.append("the hit rate on new data")
    return f"{title}\nEstimate: {'; '.join(estimated)}"
