"""A profile's hit-rate curves as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter
from numpy.typing import NDArray

from embershard.errors import DataError, naming_file
from embershard.frequency import DataStatistics, StackDistances, TableStatistics
from embershard.frequency.curves import pooled, static_curve
from embershard.frequency.downsampling import downsampled
from embershard.planning.simulate.hit_rate_curve import MOST_STEPS, CurvePoint, hit_rate_curve
from embershard.sharding.run_shape import ReplaySettings

#: Tables that are drawn alone, too.
_NUM_ALONE = 4
_LEAST_SHARE = 1e-3
#: Sizes that are replayed, as shares of all rows, on so many lookups and in batches of so many samples.
_REPLAYED_SHARES = (0.005, 0.015, 0.05, 0.15, 0.5)
_REPLAYED_LOOKUPS = 1_000_000
_BATCH_SIZE = 1024


def draw(
    statistics: DataStatistics,
    together: StackDistances | None,
    path: Path,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the picture of `make_figure`.

    Raises:
        DataError: the file cannot be written, or its ending names no format of pictures.
    """
    figure = make_figure(statistics, together, progress)
    try:
        with naming_file(path):
            figure.savefig(path, dpi=110)
    except ValueError as error:
        raise DataError(f"{path}: cannot be drawn ({error}); give a file that ends in .png") from error


def make_figure(
    statistics: DataStatistics, together: StackDistances | None, progress: Callable[[int, int], None] | None = None
) -> Figure:
    """Draw hit rates against the size of the cache: at the left all tables in one cache (static, LRU, look-ahead and
    the optimum), at the right the largest tables, each in a cache of its own (static and LRU).

    Args:
        progress: called with the number of sizes replayed, and of all.
    """
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    tables = sorted(statistics.tables.values(), key=lambda each: each.num_rows, reverse=True)
    _draw_together(left, statistics, together, _replayed_points(statistics, progress))
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


def _replayed_points(
    statistics: DataStatistics, progress: Callable[[int, int], None] | None = None
) -> list[CurvePoint]:
    """Return the replayed hit rates of all tables in one cache; none where no batch can be replayed."""
    if statistics.trace is None or statistics.trace.num_samples < _BATCH_SIZE:
        return []
    trace = downsampled(statistics.trace, _REPLAYED_LOOKUPS)
    rows = {table.table: table.num_rows for table in statistics.tables.values()}
    sizes = [max(1, round(share * sum(rows.values()))) for share in _REPLAYED_SHARES]
    return hit_rate_curve(trace, rows, sizes, _BATCH_SIZE, progress=progress)


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
    most = 1.0 - histogram.num_rows / max(histogram.num_lookups, 1.0)
    label = f"{most:.1%}: the most of a cache that starts empty, because each row that occurs is moved once"
    axes.axhline(most, color="gray", linewidth=1, linestyle=":", label=label)
    axes.set(xlabel=f"rows in the cache, of all {rows:,} rows")
    axes.set_title("All tables in one cache", loc="left", fontsize="medium")


def _draw_alone(axes: Axes, tables: Sequence[TableStatistics]) -> None:
    shares: NDArray[np.float64] = np.geomspace(_LEAST_SHARE, 1.0, 200)
    for number, table in enumerate(tables):
        slots, color = shares * table.num_rows, f"C{number}"
        label = f"{table.table} ({table.num_rows:,} rows)"
        axes.plot(shares, static_curve(table.histogram, slots), color=color, linewidth=1.2, label=label)
        if table.stack is not None:
            axes.plot(shares, table.stack.hit_rate(slots), color=color, linewidth=1.2, linestyle="--")
    axes.set(xlabel="rows in the cache, of the table's rows")
    title = "The largest tables, each in its own cache: static (solid), LRU (dashed)"
    axes.set_title(title, loc="left", fontsize="medium")
    axes.legend(fontsize="small", loc="upper left")


def _title(statistics: DataStatistics) -> str:
    tables, trace = statistics.tables, statistics.trace
    title = f"Hit rate by size of the cache: {statistics.num_samples:,} training samples, {len(tables)} tables"
    estimated = []
    if statistics.share_of_samples < 0.999:
        estimated.append(f"{statistics.share_of_samples:.2%} of the samples were read")
    if trace is not None and trace.rate < 0.99:
        estimated.append(f"LRU, look-ahead and optimum follow at most {trace.rate:.1%} of the rows")
    if trace is not None and trace.num_samples > MOST_STEPS * _BATCH_SIZE:
        estimated.append(f"look-ahead and optimum of the first {MOST_STEPS * _BATCH_SIZE:,} samples, where more is new")
    if any(table.undercount for table in tables.values()):
        estimated.append("counts are lower bounds")
    return title + (f"\nEstimate: {'; '.join(estimated)}" if estimated else "")
