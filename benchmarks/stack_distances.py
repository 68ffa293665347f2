"""Error of the LRU curve from 1 % of the rows, against the exact curve.

    python -m benchmarks.stack_distances [--lookups 10_000_000] [--rate 0.01] [--samples 10] [--output FILE]

Streams: `zipf` (1M rows, lookups independent of each other), `zipf moving` (in each twentieth of the stream, one row in
20 has swapped its popularity with others), `bursts` (half of the lookups come in bursts of a row), and `criteo`, the
largest table of the generator, without and with drift.

Errors are differences of hit rate in points (of 100), over sizes from 0.1 % to 100 % of the stream's distinct rows,
evenly spread by logarithm. The table's number decides which rows are sampled, so every estimate is made for several
numbers. `shards` is the package's default, `plain` the same sample without the counts of the rows, `counts` the counts
without a sample.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import machine, make_parser, report
from embershard.data import SyntheticConfig
from embershard.data.sources.synthetic import CRITEO_KAGGLE, SyntheticTable
from embershard.frequency import CountHistogram, StackDistances, is_sampled, row_hashes
from embershard.frequency.stack_distances import exact, from_sampled

Rows = NDArray[np.int64]

TARGET_POINTS = 1.0
NUM_SIZES = 60
_LARGEST = max(range(len(CRITEO_KAGGLE)), key=lambda table: CRITEO_KAGGLE[table].num_rows)
_CHUNK = 1_000_000


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--lookups", type=int, default=10_000_000)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--samples", type=int, default=10, help="estimates per stream")
    options = parser.parse_args()
    points = [
        measure(name, make(options.lookups), options.rate, options.samples) for name, make in streams(1_000_000).items()
    ]
    result: dict[str, Any] = {
        "machine": machine(),
        "rate": options.rate,
        "samples": options.samples,
        "target_points": TARGET_POINTS,
        "streams": [asdict(point) for point in points],
    }
    report(result, options.output)


@dataclass(frozen=True)
class Errors:
    """Errors in points of hit rate: the mean over sizes and samples, the mean over sizes of the worst sample, and the
    worst size of any sample."""

    mean: float
    worst_sample: float
    worst_size: float


@dataclass(frozen=True)
class Point:
    """One stream."""

    stream: str
    lookups: int
    distinct_rows: int
    followed_lookups: int
    hit_rates: dict[str, float]
    exact_seconds: float
    exact_peak_mb: float
    shards_seconds: float
    bins: int
    shards: Errors
    plain: Errors
    counts: Errors
    reached: bool


def measure(name: str, rows: Rows, rate: float, num_samples: int) -> Point:
    """Compute the exact curve and the estimates of one stream."""
    counts = CountHistogram.of_counts(np.unique(rows, return_counts=True)[1])
    shares = np.geomspace(0.001, 1.0, NUM_SIZES)
    sizes = np.unique((counts.num_rows * shares).round().clip(1))
    distances, exact_seconds = _timed(partial(exact, rows))
    truth = distances.hit_rate(sizes)
    by_shards, plain, seconds, sampled = [], [], [], []
    for number in range(num_samples):
        estimate, taken = _timed(partial(shards, number, rows, rate))
        seconds.append(taken)
        by_shards.append(estimate.hit_rate(sizes) - truth)
        sample = rows[is_sampled(row_hashes(number, rows), rate)]
        sampled.append(len(sample))
        plain.append(from_sampled(sample, rate, len(rows)).hit_rate(sizes) - truth)
    none_sampled = from_sampled(rows[:0], rate, len(rows), counts)
    errors = _errors(by_shards)
    return Point(
        stream=name,
        lookups=len(rows),
        distinct_rows=int(counts.num_rows),
        followed_lookups=int(np.median(sampled)),
        hit_rates={
            f"{share:.1%}": round(float(distances.hit_rate(np.array(counts.num_rows * share))), 4)
            for share in (0.001, 0.01, 0.1, 1.0)
        },
        exact_seconds=round(exact_seconds, 2),
        exact_peak_mb=_peak_mb(rows),
        shards_seconds=round(float(np.median(seconds)), 3),
        bins=len(distances.distances),
        shards=errors,
        plain=_errors(plain),
        counts=_errors([none_sampled.hit_rate(sizes) - truth]),
        reached=errors.mean <= TARGET_POINTS,
    )


def shards(table_number: int, rows: Rows, rate: float) -> StackDistances:
    """Estimate from the share `rate` of the rows, of all lookups of a table, `rows` [M] in order. The lookups of every
    row are counted, also of those that are not sampled."""
    sampled = rows[is_sampled(row_hashes(table_number, rows), rate)]
    counts = CountHistogram.of_counts(np.unique(rows, return_counts=True)[1])
    return from_sampled(sampled, rate, len(rows), counts)


def _errors(differences: list[NDArray[np.float64]]) -> Errors:
    points = np.abs(np.array(differences)) * 100
    return Errors(round(float(points.mean()), 3), round(float(points.mean(1).max()), 3), round(float(points.max()), 3))


def _timed(call: Callable[[], StackDistances]) -> tuple[StackDistances, float]:
    started = time.perf_counter()
    return call(), time.perf_counter() - started


def _peak_mb(rows: Rows) -> float:
    tracemalloc.start()
    exact(rows)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return round(peak_bytes / 1e6, 1)


# -- streams


def streams(num_rows: int) -> dict[str, Callable[[int], Rows]]:
    """Return functions from a number of lookups to a stream of rows."""
    return {
        "zipf 0.8": lambda num: zipf(0.8, num_rows, num),
        "zipf 1.0": lambda num: zipf(1.0, num_rows, num),
        "zipf 1.2": lambda num: zipf(1.2, num_rows, num),
        "zipf moving": lambda num: zipf(1.0, num_rows, num, num_parts=20),
        "bursts": lambda num: bursts(num_rows, num),
        "criteo": lambda num: generated(num_rows, num, 0.0),
        "criteo drift": lambda num: generated(num_rows, num, 0.5),
    }


def zipf(exponent: float, num_rows: int, num_lookups: int, num_parts: int = 1) -> Rows:
    """Draw rows whose lookups are proportional to rank ** -exponent; between parts, one row in 20 gets another rank."""
    random = np.random.default_rng(0)
    shares = np.cumsum(np.arange(1, num_rows + 1) ** -exponent)
    ranks = np.searchsorted(shares / shares[-1], random.random(num_lookups))
    row_of_rank = random.permutation(num_rows)
    parts = []
    for part in np.array_split(ranks, num_parts):
        parts.append(row_of_rank[part])
        moving = np.flatnonzero(random.random(num_rows) < 0.05)
        row_of_rank[moving] = row_of_rank[random.permutation(moving)]
    return np.concatenate(parts)


def bursts(num_rows: int, num_lookups: int) -> Rows:
    """Draw half of the lookups in bursts of a uniformly drawn row: 5 lookups, each on average a 2000th of the stream
    after a common start. The other half is Zipf."""
    random = np.random.default_rng(0)
    num_bursts = num_lookups // 10
    starts = np.repeat(random.random(num_bursts), 5)
    moments = starts + random.exponential(0.0005, len(starts))
    burst_rows = np.repeat(random.integers(0, num_rows, num_bursts), 5)
    others = zipf(1.0, num_rows, num_lookups - len(burst_rows))
    order = np.argsort(np.concatenate([moments, random.random(len(others))]))
    return np.concatenate([burst_rows, others])[order]


def generated(num_rows: int, num_lookups: int, drift: float) -> Rows:
    """Draw from the generator's largest table, at its full size when `num_rows` is a million."""
    settings = SyntheticConfig(num_samples=num_lookups, scale=num_rows / 1_000_000, drift=drift)
    table = SyntheticTable(0, _LARGEST, CRITEO_KAGGLE[_LARGEST], settings)
    starts = range(0, num_lookups, _CHUNK)
    return np.concatenate([table.draw(np.arange(start, min(start + _CHUNK, num_lookups))) for start in starts])


if __name__ == "__main__":
    main()
