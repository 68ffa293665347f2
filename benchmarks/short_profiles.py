"""What a short profile says of a cache in the long run, against a replay of far more data.

    python -m benchmarks.short_profiles [--path FILE] [--samples 120_000] [--output FILE]

The first samples alone are counted, a fortieth or a tenth of them. From these counts the hit rate of a cache in the
long run is estimated, as `embershard plan` and `profile show` do it (`embershard/frequency/new_data.py`). It is
compared with the second half of a replay of all samples, in which few rows are new. `replayed` is the hit rate of a
replay of the first samples, which says little of sizes: its misses are first touches.

Tables are Criteo's, generated with a hundredth of their rows; with `--path`, a file of Criteo's in as many rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from benchmarks.common import machine, make_parser, report
from embershard.cache.statistics import CacheReport
from embershard.commands.profile.data_pass import PartReader, PassOptions, profile_data
from embershard.data.config import CriteoConfig, DataConfig, SyntheticConfig
from embershard.frequency import DataStatistics, SampledTrace
from embershard.frequency.collect import Collector, count_part
from embershard.models.config import ModelConfig
from embershard.planning.simulate.pool_report import PoolReport, RowRange
from embershard.planning.simulate.replay import replay_pool
from embershard.planning.simulate.steady_state import steady_state
from embershard.sharding.run_shape import ReplaySettings

PARTS = (40, 10)
RATIOS = (0.05, 0.2)
_STEPS_OF_ALL = 1000
_ROWS_OF_A_FILE = 1_000  # per table


def first_samples(trace: SampledTrace, rows: dict[str, int], num_samples: int) -> DataStatistics:
    """Return the statistics of the first samples of a complete trace."""
    tables = [trace.tables[table] for table in rows]
    ends = [int(np.searchsorted(table.samples, num_samples)) for table in tables]
    ids = [table.rows[:end] for table, end in zip(tables, ends, strict=True)]
    bags = [np.bincount(table.samples[:end], minlength=num_samples) for table, end in zip(tables, ends, strict=True)]
    collector = Collector(rows, max_lookups=10**9, memory_bytes=1 << 30)
    collector.add(count_part(list(rows.values()), ids, bags, num_samples))
    return collector.finish(share_of_samples=num_samples / trace.num_samples).statistics


def hit_rate(found: PoolReport, *, is_late: bool) -> float:
    """Return the hits per lookup of all tables."""
    return CacheReport.total(found.late if is_late else found.shards).hit_rate_lookups or 0.0


def compare(statistics: DataStatistics) -> list[dict[str, Any]]:
    """Return a line for every size of the cache, and every part of the data that was profiled."""
    trace = statistics.trace
    assert trace is not None, "profiled"
    assert trace.rate == 1.0, "all lookups are kept"
    rows = {name: table.num_rows for name, table in statistics.tables.items()}
    shards = [RowRange(table, 0, count) for table, count in rows.items()]
    batch, settings, found = trace.num_samples // _STEPS_OF_ALL, ReplaySettings(), []
    for ratio in RATIOS:
        num_slots = round(ratio * sum(rows.values()))
        long_run = hit_rate(replay_pool(trace, shards, num_slots, batch, settings), is_late=True)
        for part in PARTS:
            known = first_samples(trace, rows, trace.num_samples // part)
            sizes = (known.num_samples, num_slots, batch, settings.policy)
            expected = steady_state(list(known.tables.values()), shards, [1.0] * len(rows), *sizes, is_sample=True)
            assert known.trace is not None
            replayed = replay_pool(known.trace, shards, num_slots, batch, settings)
            total = CacheReport.total(replayed.shards)
            case = {
                "ratio": ratio,
                "profiled": f"1/{part}",
                "replayed": hit_rate(replayed, is_late=False),
                "first_touch_share": sum(s.first_touches for s in replayed.shards)
                / max(total.unique_ids - total.hits_unique, 1e-300),
                "expected": hit_rate(expected, is_late=False),
                "long_run": long_run,
            }
            case = {name: round(value, 4) if isinstance(value, float) else value for name, value in case.items()}
            found.append({**case, "error_points": round(100 * (case["expected"] - long_run), 2)})
            print(found[-1], flush=True)
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--path", help="a file of Criteo's")
    parser.add_argument("--samples", type=int, default=120_000)
    options = parser.parse_args()
    config = DataConfig(eval_fraction=0.0, synthetic=SyntheticConfig(num_samples=options.samples, scale=0.01))
    if options.path is not None:
        of_file = CriteoConfig(num_rows=_ROWS_OF_A_FILE)
        config = dataclasses.replace(config, kind="criteo", path=options.path, criteo=of_file)
    passed = PassOptions(1, 1.0, 10**8, 1 << 30, False)
    profile = profile_data(config, passed, None, PartReader(config, ModelConfig()))
    cases = compare(profile.need_statistics())
    report({"benchmark": "short_profiles", "machine": machine(), "cases": cases}, options.output)


if __name__ == "__main__":
    main()
