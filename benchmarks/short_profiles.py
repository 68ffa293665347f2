"""What a short profile says of a cache in the long run, against a replay of far more data.

    python -m benchmarks.short_profiles [--path FILE] [--samples 120_000] [--streams FILE...] [--output FILE]

The first samples alone are counted: a tenth of them, or a quarter. From these counts the hits of a cache in the long
run are told, as `embershard plan` tells them: an estimate (`embershard/frequency/new_data.py`), and a range around it
by what such an estimate was off in the profile itself (`embershard/planning/simulate/held_part.py`). Both are compared
with the second half of a replay of all samples, in which few rows are new, for four policies and two sizes. `replayed`
is the hit rate of a replay of the first samples, which says little of sizes: its misses are first touches.

Tables are Criteo's, generated with a hundredth of their rows, without drift and with it; with `--path`, a file of
Criteo's in as many rows; with `--streams`, files of numpy with the ids of one table in the order of time, int64 [N].
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import machine, make_parser, report, settings_of
from embershard.cache.config import CachePolicy
from embershard.cache.statistics import CacheReport
from embershard.commands.profile.data_pass import PartReader, PassOptions, profile_data
from embershard.data.config import CriteoConfig, DataConfig, SyntheticConfig
from embershard.frequency import DataStatistics, SampledTrace
from embershard.frequency.collect import Collector, count_part
from embershard.models.config import ModelConfig
from embershard.planning.simulate.held_part import try_counts
from embershard.planning.simulate.pool_report import RowRange, ShardReport
from embershard.planning.simulate.replay import replay_pool
from embershard.planning.simulate.steady_state import steady_state
from embershard.sharding.run_shape import ReplaySettings

PARTS = (10, 4)
RATIOS = (0.05, 0.2)
DRIFTS = (0.0, 1.0)
POLICIES = {
    "lru": ReplaySettings(CachePolicy("lru", False), 0),
    "lfu": ReplaySettings(CachePolicy("lfu", False), 0),
    "frequency": ReplaySettings(CachePolicy("frequency", False, warmup=True), 0, profile_samples=None),
    "look-ahead": ReplaySettings(),
}
_STEPS_OF_ALL = 1000
_MOST_SAMPLES = 256  # of a batch
_ROWS_OF_A_FILE = 1_000  # per table
_MOST_IDS = 500_000  # of a stream
#: Hits per lookup: so far outside of its range a figure is off.
_OFF = 0.03


def first_samples(trace: SampledTrace, rows: dict[str, int], num_samples: int) -> DataStatistics:
    """Return the statistics of the first samples of a complete trace."""
    tables = [trace.tables[table] for table in rows]
    ends = [int(np.searchsorted(table.samples, num_samples)) for table in tables]
    ids = [table.rows[:end] for table, end in zip(tables, ends, strict=True)]
    bags = [np.bincount(table.samples[:end], minlength=num_samples) for table, end in zip(tables, ends, strict=True)]
    collector = Collector(rows, max_lookups=10**9, memory_bytes=1 << 30)
    collector.add(count_part(list(rows.values()), ids, bags, num_samples))
    return collector.finish(share_of_samples=num_samples / trace.num_samples).statistics


def compare(data: str, found: DataStatistics) -> Iterator[dict[str, Any]]:
    """Yield a line for every policy, size of the cache, and part of the data that was profiled."""
    trace = found.trace
    assert trace is not None, "profiled"
    assert trace.rate == 1.0, "all lookups are kept"
    rows = {name: table.num_rows for name, table in found.tables.items()}
    shards = [RowRange(table, 0, count) for table, count in rows.items()]
    batch = max(1, min(_MOST_SAMPLES, trace.num_samples // _STEPS_OF_ALL))
    for part in PARTS:
        known = first_samples(trace, rows, trace.num_samples // part)
        assert known.trace is not None, "counted"
        for (policy, settings), ratio in ((each, ratio) for each in POLICIES.items() for ratio in RATIOS):
            num_slots = round(ratio * sum(rows.values()))
            if settings.profile_samples is None:
                settings = dataclasses.replace(settings, profile_samples=known.num_samples)
            later = replay_pool(trace, shards, num_slots, batch, settings).late
            replayed = replay_pool(known.trace, shards, num_slots, batch, settings).shards
            sizes = (known.num_samples, num_slots, batch, settings.policy)
            tables, shares = list(known.tables.values()), [1.0] * len(rows)
            told = steady_state(tables, shards, shares, *sizes, is_sample=True, grows=True, ahead=settings.ahead).shards
            held = try_counts(known, list(rows), ratio, batch, settings)
            assert held is not None, "the part has samples in order"
            names = [shard.table for shard in shards]
            pairs = [(hits(a), hits(b)) for a, b in zip(told, replayed, strict=True)]
            ranges = np.array([held.range_of(name, *pair) for name, pair in zip(names, pairs, strict=True)])
            case = {"data": data, "policy": policy, "ratio": ratio, "profiled": f"1/{part}"}
            yield {**case, **summary(later, told, replayed, ranges)}


def hits(found: CacheReport) -> float:
    """Return the hits per lookup, 0 without lookups."""
    return found.hit_rate_lookups or 0.0


def summary(
    later: tuple[ShardReport, ...], told: tuple[ShardReport, ...], replayed: tuple[ShardReport, ...], ranges: Any
) -> dict[str, Any]:
    """Return what was told and what came later: of all tables, and in how many tables it was so.

    Args:
        ranges: [T, 2] of the hits of each table in the long run.
    """
    lookups, came = (np.array([get(each) for each in later]) for get in (lambda each: each.lookups, hits))
    looked_up = lookups > 0
    of_all = (lookups[:, None] * ranges).sum(0) / lookups.sum()
    is_told = looked_up & (ranges[:, 1] - ranges[:, 0] < 1)
    inside = (came >= ranges[:, 0] - _OFF) & (came <= ranges[:, 1] + _OFF)
    long_run = hits(CacheReport.total(later))
    numbers = {
        "replayed": hits(CacheReport.total(replayed)),
        "estimate": hits(CacheReport.total(told)),
        "low": float(of_all[0]),
        "high": float(of_all[1]),
        "long_run": long_run,
    }
    return {
        **{name: round(value, 4) for name, value in numbers.items()},
        "tables": int(looked_up.sum()),
        "told": int(is_told.sum()),
        "right": int((is_told & inside).sum()),
    }


def totals(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return of all tables that were told how many were right, and how wide their ranges are."""
    told = [case for case in cases if case["high"] - case["low"] < 1]
    errors = sorted(abs(case["estimate"] - case["long_run"]) for case in cases)
    tables, right = (sum(case[name] for case in cases) for name in ("told", "right"))
    return {
        "cases": len(cases),
        "tables": sum(case["tables"] for case in cases),
        "tables_told": tables,
        "share_right": round(right / max(1, tables), 4),
        "median_width": round(statistics.median(case["high"] - case["low"] for case in told), 4) if told else None,
        "estimate_off_median": round(statistics.median(errors), 4),
        "estimate_off_most": round(errors[-1], 4),
    }


def profiled(config: DataConfig) -> DataStatistics:
    """Return the statistics of all samples of a data set, with all lookups in order."""
    passed = PassOptions(1, 1.0, 10**8, 1 << 30, False)
    return profile_data(config, passed, None, PartReader(config, ModelConfig())).need_statistics()


def of_stream(path: Path) -> DataStatistics:
    """Return the statistics of a file's ids, numbered without gaps."""
    _, ids = np.unique(np.load(path)[:_MOST_IDS], return_inverse=True)
    collector = Collector({"item": int(ids.max()) + 1}, max_lookups=10**9, memory_bytes=1 << 30)
    collector.add(count_part([int(ids.max()) + 1], [ids.astype(np.int64)], [1], len(ids)))
    return collector.finish().statistics


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--path", help="a file of Criteo's")
    parser.add_argument("--samples", type=int, default=120_000)
    parser.add_argument("--streams", nargs="+", metavar="FILE", help="ids of one table in the order of time")
    options = parser.parse_args()
    config = DataConfig(eval_fraction=0.0, synthetic=SyntheticConfig(num_samples=options.samples, scale=0.01))
    data: dict[str, DataConfig | Path] = {Path(path).stem: Path(path) for path in options.streams or ()}
    if options.path is not None:
        of_file = CriteoConfig(num_rows=_ROWS_OF_A_FILE)
        data[options.path] = dataclasses.replace(config, kind="criteo", path=options.path, criteo=of_file)
    elif not data:
        for drift in DRIFTS:
            data[f"drift {drift:g}"] = dataclasses.replace(
                config, synthetic=dataclasses.replace(config.synthetic, drift=drift)
            )
    cases = []
    for name, source in data.items():
        for case in compare(name, of_stream(source) if isinstance(source, Path) else profiled(source)):
            cases.append(case)
            print(json.dumps(case), flush=True)
    found = {"benchmark": "short_profiles", "machine": machine(), "settings": settings_of(options)}
    report({**found, "cases": cases, "totals": totals(cases)}, options.output)


if __name__ == "__main__":
    main()
