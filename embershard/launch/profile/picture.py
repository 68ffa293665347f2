"""A profile's hit-rate curves as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from embershard.errors import DataError, naming_file
from embershard.frequency import DataStatistics, StackDistances
from embershard.frequency.curves import pooled, static_curve

#: Tables that are drawn alone, too.
_NUM_THIN = 4
_STATIC, _LRU = "tab:blue", "tab:orange"


def draw(statistics: DataStatistics, together: StackDistances | None, path: Path) -> None:
    """Draw hit rates against the share of the rows in the cache, static and LRU; thin: the largest tables alone.

    Raises:
        DataError: the file cannot be written, or its ending names no format of pictures.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    tables = sorted(statistics.tables.values(), key=lambda each: each.num_rows, reverse=True)
    rows = sum(table.num_rows for table in tables)
    all_tables = pooled(table.histogram for table in tables)
    shares = np.geomspace(min(1e-4, 10 / max(rows, 1)), 1.0, 200)
    axes.plot(shares, static_curve(all_tables, shares * rows), color=_STATIC, linewidth=3, label="static, all tables")
    if together is not None:
        axes.plot(shares, together.hit_rate(shares * rows), color=_LRU, linewidth=3, label="LRU, all tables")
    for table, style in zip(tables[:_NUM_THIN], ("-", "--", "-.", ":"), strict=False):
        look: dict[str, Any] = {"linewidth": 1.0, "linestyle": style, "alpha": 0.8}
        slots = shares * table.num_rows
        axes.plot(shares, static_curve(table.histogram, slots), color=_STATIC, label=f"{table.table}, static", **look)
        if table.stack is not None:
            axes.plot(shares, table.stack.hit_rate(slots), color=_LRU, label=f"{table.table}, LRU", **look)
    axes.set(xscale="log", ylim=(0.0, 1.0), xlabel="rows in the cache, as a share of all rows", ylabel="lookups found")
    axes.set_xlim(right=1.0)
    axes.set_title(f"{statistics.num_samples:,} samples, {len(tables)} tables", loc="left")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize="small", loc="lower right")
    try:
        with naming_file(path):
            figure.savefig(path, dpi=120)
    except ValueError as error:
        raise DataError(f"{path}: cannot be drawn ({error}); give a file that ends in .png") from error
