"""What a batch costs the cache: becoming known, being planned with its row copies, being released.

    python -m benchmarks.plan_cost

One pool with all of Criteo Kaggle's tables, on one thread, without a model: `RowCache.know`, `prepare` and `release`,
as the look-ahead pipeline calls them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import generated_stream, machine, make_parser, median_ms, report, settings_of
from embershard.cache import MemoryRows, RowCache
from embershard.cache.config import CachePolicy
from embershard.cache.homes.shape import PoolShape
from embershard.cache.next_use import pinned_tables
from embershard.data import BatchStream


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all row counts")
    parser.add_argument("--ratio", type=float, default=0.015)
    parser.add_argument("--lookahead", type=int, default=64)
    parser.add_argument("--warmup-samples", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=200, help="measured batches of each size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [measure(options, batch_size) for batch_size in options.batch_sizes]
    result = {"benchmark": "plan_cost", "settings": settings_of(options), "sizes": sizes, "machine": machine()}
    report(result, options.output)


def measure(options: argparse.Namespace, batch_size: int) -> dict[str, Any]:
    """Time the calls for batches of one size."""
    warmup_steps = options.warmup_samples // batch_size
    seconds: dict[str, list[float]] = {"know": [], "prepare": [], "release": []}
    num_batches = warmup_steps + options.steps + options.lookahead
    with generated_stream(options.scale, batch_size) as stream:
        cache = make_cache([feature.num_rows for feature in stream.schema.sparse], options)
        # Read before: the threads that parse would take turns with what is timed.
        batches = list(itertools.islice(keys_of(stream, cache.host.row_offsets), num_batches))
    before = totals(cache)
    for number, call_seconds in enumerate(steps(cache, batches, options.lookahead)):
        if number == warmup_steps - 1:
            before = totals(cache)
        if number >= warmup_steps:
            for name, value in call_seconds.items():
                seconds[name].append(value)
    counted = {name: round((total - before[name]) / options.steps) for name, total in totals(cache).items()}
    each = [sum(values) for values in zip(*seconds.values(), strict=True)]
    medians = {f"{name}_ms": median_ms(values) for name, values in seconds.items()}
    per_lookup_ns = round(median_ms(each) * 1e6 / counted["lookups"], 1)
    return {"batch_size": batch_size, **counted, **medians, "all_ms": median_ms(each), "per_lookup_ns": per_lookup_ns}


def make_cache(rows: list[int], options: argparse.Namespace) -> RowCache:
    """Make a cache of one pool with tables of `rows` rows."""
    host = MemoryRows(PoolShape(rows, options.dim, torch.float32, [("momentum", torch.Size([]), torch.float32)]))
    num_slots = int(host.num_rows * options.ratio)
    pinned = [torch.arange(count) + host.row_offsets[t] for t, (_, count) in pinned_tables(rows, num_slots).items()]
    return RowCache(
        [str(table) for table in range(len(rows))],
        host,
        lambda count: [torch.zeros(count + 1, options.dim), torch.zeros(count + 1)],
        num_slots,
        list(range(len(rows))),
        CachePolicy("lfu"),
        torch.device("cpu"),
        pinned_keys=torch.cat(pinned) if pinned else None,
    )


def keys_of(stream: BatchStream, row_offsets: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each batch's keys and its ids per feature."""
    offsets = torch.tensor(row_offsets)
    for batch in stream:
        ids = batch.sparse_features.values().view(offsets.numel(), -1)
        yield (ids + offsets[:, None]).view(-1), torch.full((offsets.numel(),), ids.shape[1])


def steps(cache: RowCache, batches: Iterator[tuple[Tensor, Tensor]], lookahead: int) -> Iterator[dict[str, float]]:
    """Yield the seconds of each call for one batch after the other; one batch more than the one in training is held."""
    known: deque[tuple[Tensor, Tensor, Any]] = deque()
    held: deque[Any] = deque()
    for keys, lengths in batches:
        started = time.perf_counter()
        known.append((keys, lengths, cache.know(keys, lengths)))
        seconds = {"know": time.perf_counter() - started}
        if len(known) <= lookahead:
            continue
        keys, lengths, announced = known.popleft()
        started = time.perf_counter()
        ticket = cache.prepare(keys, lengths, critical_path=False, known=announced)
        seconds["prepare"] = time.perf_counter() - started
        assert ticket is not None
        held.append(ticket)
        started = time.perf_counter()
        if len(held) > 1:
            cache.release(held.popleft())
        yield {**seconds, "release": time.perf_counter() - started}


def totals(cache: RowCache) -> dict[str, int]:
    """Return what the cache counted so far, over all tables."""
    names = ("lookups", "unique_ids", "fills", "evictions", "write_backs")
    return {name: sum(getattr(table, name) for table in cache.stats()) for name in names}


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
