"""What a run published: counts, bytes, and for how long training and rows waited, from the lines of its record."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from embershard.units import size

TITLES = ("bases", "deltas", "rows", "bytes", "training waited", "at most", "delay", "at most", "failed")
NOTE = (
    "rows and bytes: of all deltas; training waited: for a delta, median; delay: from the oldest update in a delta "
    "until it was there, median; replicas look for it every second"
)


def publication_cells(lines: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return a cell for each of `TITLES`, of the lines of kind "publication".

    >>> line = {"name": "delta_1", "rows": 10, "num_bytes": 1024, "stall_seconds": 0.02, "delay_seconds": 1.5}
    >>> publication_cells([{"name": "base_0"}, line, {"name": "", "problem": "no space"}])
    ('1', '1', '10', '1.00 KiB', '20 ms', '20 ms', '1.5 s', '1.5 s', '1')
    """
    deltas = [line for line in lines if str(line.get("name", "")).startswith("delta")]
    stalls, delays = (
        [each for line in deltas if isinstance(each := line.get(name), (int, float))]
        for name in ("stall_seconds", "delay_seconds")
    )
    return (
        str(sum(str(line.get("name", "")).startswith("base") for line in lines)),
        str(len(deltas)),
        f"{sum(line.get('rows', 0) for line in deltas):,}",
        size(sum(line.get("num_bytes", 0) for line in deltas)),
        *(f"{1e3 * each:,.0f} ms" for each in _median_and_most(stalls)),
        *(f"{each:,.1f} s" for each in _median_and_most(delays)),
        str(sum(not line.get("name") for line in lines)),
    )


def _median_and_most(values: Sequence[float]) -> tuple[float, float]:
    return (statistics.median(values), max(values)) if values else (0.0, 0.0)
