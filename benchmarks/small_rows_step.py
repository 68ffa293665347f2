"""The cost of a step with small rows in the host tier over one with fp32 rows (decision 0099).

    python -m benchmarks.small_rows_step

One process; 26 tables of Criteo-Kaggle's row counts, scaled; row-wise Adagrad. Three models, of fp32, fp16 and int8
host rows, see the same batches, in turn, in the same run; without look-ahead, so that all fills, roundings and
write-backs are inside of the step. Reported per dim: the whole step, and the embeddings alone (with all cache work),
in seconds of the clock and of the processor, medians of the ratios over fp32; and the rows moved per batch.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch

from benchmarks.common import machine, make_parser, median_ms, median_ratio, report, settings_of, single_process
from benchmarks.step_overhead import (
    FUSED_PARAMS,
    build,
    count_profile,
    make_embedding_step,
    make_step,
    make_stream,
    totals,
)
from embershard import CacheConfig, CachedEmbeddingBagCollectionSharder, FrequencyProfile
from embershard.cache.config import HostType
from embershard.data import Batch

PARTS = {"whole_step": make_step, "embeddings_alone": make_embedding_step}
Seconds = dict[str, list[float]]


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--ratio", type=float, default=0.015)
    parser.add_argument("--full-rows", type=float, default=0.01)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--scale", type=float, default=0.3, help="factor on all row counts")
    parser.add_argument("--profile-batches", type=int, default=300)
    parser.add_argument("--warmup-batches", type=int, default=30)
    parser.add_argument("--batches", type=int, default=60, help="measured batches, for each of the figures")
    options = parser.parse_args()
    with single_process() as device:
        found = measure(options, device)
    report({"benchmark": "small_rows_step", "settings": settings_of(options), **found, "machine": machine()},
           options.output)  # fmt: skip


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure all dims."""
    stream = make_stream(options)
    rows = {feature.name: feature.num_rows for feature in stream.schema.sparse}
    profile = count_profile(itertools.islice(stream, options.profile_batches), rows)
    count = options.warmup_batches + 2 * options.batches
    batches = [batch.to(device) for batch in itertools.islice(stream, count)]
    stream.close()
    found = {f"dim_{dim}": of_dim(dim, rows, profile, batches, options, device) for dim in options.dims}
    return {"rows": sum(rows.values()), **found}


def of_dim(
    dim: int,
    rows: dict[str, int],
    profile: FrequencyProfile,
    batches: Sequence[Batch],
    options: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    """Measure the three models of a dim."""
    models = {}
    for host_dtype in get_args(HostType):
        full_rows = options.full_rows if host_dtype == "int8" else None
        cache = CacheConfig(ratio=options.ratio, policy="frequency", host_dtype=host_dtype, full_rows=full_rows)
        sharder = CachedEmbeddingBagCollectionSharder(cache, profile, dict(FUSED_PARAMS), init_seed=1)
        models[host_dtype] = build(rows, dim, sharder, device)
    steps = {part: {kind: make(model) for kind, model in models.items()} for part, make in PARTS.items()}
    start = options.warmup_batches
    for step in steps["embeddings_alone"].values():
        for batch in batches[:start]:
            step(batch)
    before, found = totals(models["int8"]), dict[str, Any]()
    for part, calls in steps.items():
        clock, processor = timed(calls, batches[start : start + options.batches])
        found[part] = {**compared(clock, "_ms"), **compared(processor, "_processor_ms")}
        start += options.batches
    after = totals(models["int8"])
    moved = {key: (after[key] - before[key]) // (2 * options.batches) for key in ("fills", "write_backs", "unique_ids")}
    return {**found, "rows_per_batch": moved}


def timed(calls: dict[str, Callable[[Batch], Any]], batches: Sequence[Batch]) -> tuple[Seconds, Seconds]:
    """Call all with each batch, in alternating order; return seconds of the clock, and of all threads' processors."""
    clock: Seconds = {name: [] for name in calls}
    processor: Seconds = {name: [] for name in calls}
    for turn, batch in enumerate(batches):
        for name in list(calls) if turn % 2 == 0 else list(calls)[::-1]:
            started = time.perf_counter(), time.process_time()
            calls[name](batch)
            clock[name].append(time.perf_counter() - started[0])
            processor[name].append(time.process_time() - started[1])
    return clock, processor


def compared(seconds: Seconds, unit: str) -> dict[str, float]:
    """Return medians, and the medians of the ratios over fp32."""
    found = {f"{kind}{unit}": median_ms(values) for kind, values in seconds.items()}
    small = {kind: values for kind, values in seconds.items() if kind != "fp32"}
    return found | {
        f"{kind}_over_fp32{unit.removesuffix('_ms')}": median_ratio(values, seconds["fp32"])
        for kind, values in small.items()
    }


if __name__ == "__main__":
    main()
