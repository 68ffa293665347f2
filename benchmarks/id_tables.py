"""What tables of ids cost, beside tables of row numbers (docs/ids.md).

    python -m benchmarks.id_tables

Step: three models see the same batches, in turn, each under a look-ahead pipeline with as many slots: 26 tables of row
numbers; tables of ids with as many rows, which nobody loses; and tables of ids with at most --few-rows rows, out of
which ids are evicted all the time. Map: one table's, full, and with the sizes of --map-rows; ids that are new, live, or
both. Bytes are those of its arrays; resident memory is what the process gained; and how long it takes to copy a map for
a state dict, and to load it. Checkpoint: the models of row numbers and of ids, with their optimizer states, are saved
and loaded by torch.distributed.checkpoint, in turn; the first load and save make rows, and do not count.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import torch
from torch.distributed import checkpoint
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.common import (
    generated_stream,
    interleaved,
    machine,
    make_parser,
    median_ms,
    median_ratio,
    report,
    settings_of,
    single_process,
)
from benchmarks.step_overhead import FUSED_PARAMS, LookAhead, add_step_options, build, totals
from embershard import CacheConfig, CachedEmbeddingBagCollectionSharder, IdTable, id_counts
from embershard.cache.ids.id_map import IdMap, mixed
from embershard.data import Batch

_SPREAD = -7046029254386353131  # odd: consecutive numbers become ids of 64 bits
_LEAST_ROWS, _MORE_ROWS = 480, 1.25  # than ids: buckets are not equally full
_TARGETS = {"whole_step": 1.10, "bytes_per_row": 48}


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    add_step_options(parser)
    parser.set_defaults(scale=0.3)
    parser.add_argument("--few-rows", type=int, default=24_000, help="capacity of tables out of which ids are evicted")
    parser.add_argument("--admit-after", type=int, default=1)
    parser.add_argument("--map-rows", type=int, nargs="*", default=[1_000_000, 100_000_000])
    parser.add_argument("--parts", nargs="+", choices=["step", "map"], default=["step", "map"])
    parser.add_argument("--saves", type=int, default=3, help="checkpoints that are timed; 0: none")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to save to")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if "step" in options.parts:
        with single_process() as device:
            found |= step_time(options, device)
    if "map" in options.parts:
        map_time(24_000, options)  # compiles
        found["maps"] = [map_time(rows, options) for rows in options.map_rows]
    settings = {
        name: value for name, value in settings_of(options).items() if name not in ("inline", "folder", "saves")
    }
    load = {"load_average": psutil.getloadavg()[1]}
    result = {"benchmark": "id_tables", "settings": settings, "targets": _TARGETS, **found}
    report({**result, "machine": machine() | load}, options.output)


# -- steps


def step_time(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Time whole steps, and state dicts behind them."""
    options.inline = False
    stream = generated_stream(options.scale, options.batch_size)
    rows = {each.name: _rows_for(each.num_rows) for each in stream.schema.sparse}
    count = options.warmup_batches + options.batches + 5
    with_rows = [batch.to(device) for batch in itertools.islice(stream, count + options.lookahead + 2)]
    stream.close()
    with_ids = [_spread(batch) for batch in with_rows]
    slots = options.ratio * sum(rows.values())
    few = {name: min(number, options.few_rows) for name, number in rows.items()}
    variants = {"rows": (rows, with_rows, False), "ids": (rows, with_ids, True), "few_ids": (few, with_ids, True)}
    models, steps = {}, {}
    for name, (tables, batches, has_ids) in variants.items():
        rules = {f"t_{table}": IdTable(admit_after=options.admit_after) for table in tables} if has_ids else {}
        config = CacheConfig(ratio=min(1.0, slots / sum(tables.values())), policy="lookahead")
        sharder = CachedEmbeddingBagCollectionSharder(config, None, dict(FUSED_PARAMS), init_seed=1, ids=rules)
        models[name] = build(tables, options.dim, sharder, device)
        steps[name] = LookAhead(models[name], batches, options, device).step
    interleaved(steps, range(options.warmup_batches), device)
    before = {name: totals(model) for name, model in models.items()}
    ids_before = {name: _ids_of(models[name]) for name in ("ids", "few_ids")}
    seconds = interleaved(steps, range(options.batches), device)
    num = options.batches
    cache = {
        name: {key: (value - before[name][key]) // num for key, value in totals(model).items()}
        for name, model in models.items()
    }
    ids = {
        name: {key: (value - past[key]) // num for key, value in _ids_of(models[name]).items() if key != "live"}
        for name, past in ids_before.items()
    }
    return {
        "rows": sum(rows.values()),
        "few_rows": sum(few.values()),
        "whole_step": {
            **{f"{name}_ms": median_ms(values) for name, values in seconds.items()},
            **{f"{name}_over_rows": median_ratio(seconds[name], seconds["rows"]) for name in ("ids", "few_ids")},
        },
        "per_batch": cache,
        "ids_per_batch": ids,
        "live_ids": {name: _ids_of(models[name])["live"] for name in ids_before},
        "checkpoint": {} if options.saves == 0 else checkpoint_time(models, sum(rows.values()), options),
    }


def checkpoint_time(models: dict[str, Any], num_rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Save and load the models with as many rows in turn."""
    models = {name: models[name] for name in ("rows", "ids")}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:

        def save(name: str) -> None:
            checkpoint.save(_state_of(models[name]), checkpoint_id=f"{folder}/{name}")

        def load(name: str) -> None:
            values = _state_of(models[name])
            checkpoint.load(values, checkpoint_id=f"{folder}/{name}")
            models[name].load_state_dict(values["model"])
            models[name].fused_optimizer.load_state_dict(values["optimizer"])

        found: dict[str, Any] = {}
        for part, call in (("save", save), ("load", load)):
            calls = {name: lambda _, name=name, call=call: call(name) for name in models}
            timed = interleaved(calls, range(options.saves + 1), torch.device("cpu"))
            seconds = {name: values[1:] for name, values in timed.items()}
            found |= {f"{part}_{name}_ms": median_ms(values) for name, values in seconds.items()}
            found[f"{part}_ids_over_rows"] = median_ratio(seconds["ids"], seconds["rows"])
            more = statistics.median(map(float.__sub__, seconds["ids"], seconds["rows"]))
            found[f"{part}_more_ns_per_row"] = round(more / num_rows * 1e9, 1)
        return found


def _state_of(model: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


def _rows_for(ids: int) -> int:
    """Return a number of rows that any number of buckets divides."""
    return max(_LEAST_ROWS, -(-ids // 240) * 240, int(ids * _MORE_ROWS) // 240 * 240)


def _spread(batch: Batch) -> Batch:
    features = batch.sparse_features
    tables = torch.arange(len(features.keys())).repeat_interleave(torch.tensor(features.length_per_key()))
    ids = (features.values() + 1 + (tables << 40)) * _SPREAD
    given = KeyedJaggedTensor(features.keys(), ids, lengths=features.lengths())
    return Batch(batch.dense_features, given, batch.labels)


def _ids_of(model: Any) -> dict[str, int]:
    counts = id_counts(model).values()
    return {name: sum(getattr(each, name) for each in counts) for name in ("live", "admitted", "evicted", "refused")}


# -- maps


def map_time(rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Fill a map of `rows` rows, and time what batches, state dicts and starts cost."""
    gc.collect()
    before, config = _resident(), IdTable(admit_after=options.admit_after)
    capacity = -(-rows // 240) * 240
    started = time.perf_counter()
    ids = IdMap("ids", config, config.buckets_of("ids", capacity), 1)
    found: dict[str, Any] = {"rows": capacity, "empty_map_s": _seconds(started)}
    started = time.perf_counter()
    live = _fill(ids, capacity)
    found |= {"live": ids.counts.live, "filled_s": _seconds(started)}
    found |= {"bytes_per_row": round(ids.num_bytes / capacity, 2)}
    found["resident_bytes_per_row"] = round((_resident() - before) / capacity, 2)
    found["resolve_ns_per_distinct_id"] = {
        name: _resolve_ns(ids, batches) for name, batches in _streams(live, options.batch_size * 26).items()
    }
    started = time.perf_counter()
    state = ids.tensors()
    found["copy_ns_per_row"] = round((time.perf_counter() - started) / capacity * 1e9, 2)
    started = time.perf_counter()
    ids.load(state)
    found["load_ns_per_row"] = round((time.perf_counter() - started) / capacity * 1e9, 2)
    found["load_s"] = _seconds(started)
    return found


def _fill(ids: IdMap, capacity: int) -> int:
    """Give nine tenths of the rows to the ids 0, 1, ...; return how many."""
    live, step = capacity * 9 // 10, 1 << 20
    for start in range(0, live, step):
        batch = mixed(np.arange(start, min(start + step, live)))
        for _ in range(ids.config.admit_after):
            ids.resolve(batch)
            ids.commit()
    return live


def _streams(live: int, size: int) -> dict[str, Iterator[Any]]:
    """Batches of live ids, drawn with and without popular ones; and with a twentieth of new ones, which evict others.
    Each batch is of 26 times as many ids as it has samples."""
    random = np.random.default_rng(0)

    def uniform() -> Iterator[Any]:
        while True:
            yield random.integers(0, live, size)

    def popular() -> Iterator[Any]:
        while True:
            yield (random.zipf(1.1, size) % live).astype(np.int64)

    def with_new() -> Iterator[Any]:
        newest = live
        while True:
            batch = random.integers(0, live, size)
            batch[: size // 20] = np.arange(newest, newest + size // 20)
            newest += size // 20
            yield batch

    return {"uniform": uniform(), "popular": popular(), "a_twentieth_new": with_new()}


def _resolve_ns(ids: IdMap, batches: Iterator[Any], repeats: int = 15) -> float:
    times = []
    for batch in itertools.islice(batches, repeats + 2):
        found = mixed(batch)
        distinct = len(np.unique(found))
        started = time.perf_counter()
        ids.resolve(found)
        times.append((time.perf_counter() - started) / distinct * 1e9)
        ids.commit()
    return round(float(np.median(times[2:])), 1)


def _seconds(started: float) -> float:
    return round(time.perf_counter() - started, 2)


def _resident() -> int:
    """Return the resident memory of this process, in bytes."""
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()
