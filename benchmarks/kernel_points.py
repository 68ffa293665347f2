"""Published times of embedding kernels on one H100, beside what a plan's costs say of the same tables.

`python -m benchmarks.simulator_back_test --public` prints them. A step here is the lookup, the backward and the fused
update of ten tables alone: no dense layers, no exchange, no host's thread. Nothing was fitted to these figures.

* **Resident tables are compared**: a plan's costs are those of FBGEMM's kernels.
* **Caches of ours were never measured, and stand beside**: FBGEMM's and dynamicemb's are other kernels and algorithms.
  "device" is finding slots, lookup and update; "link" is rows that come and go: look-ahead copies them beside training,
  and they are added here, where nothing else hides them. Without a cache, ours is one that keeps no row of the batch
  before.
* **FBGEMM by its code** is no cost of a plan: our costs of lookup and update; where FBGEMM has a cache, a model of that
  (benchmarks/fbgemm_cache.py); and what else crosses the host link, both ways at once: without a cache all distinct
  rows, in the forward and in the backward; with both Adam's states, which FBGEMM keeps in unified memory (1.8,
  `construct_split_state` in split_table_batched_embeddings_ops_training.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from benchmarks.fbgemm_cache import drawn_rows, extra_seconds, missed_rows
from embershard.frequency.statistics import CountHistogram, DataStatistics, TableStatistics
from embershard.planning.cost.rates import StepWork, step_parts
from embershard.planning.cost.topology import load_topology
from embershard.planning.simulate.pool_report import ShardReport
from embershard.planning.workload import Workload
from embershard.sharding.run_shape import ReplaySettings, RunShape
from embershard.sharding.sizes import ModelSize, PlacedShard, TableSize

SOURCE = (
    "https://github.com/NVIDIA/recsys-examples corelib/dynamicemb/benchmark/benchmark_results.json at ccbdb10 (26 May "
    "2026), NVIDIA H100 80GB HBM3: trc_train_ms (FBGEMM's table-batched embeddings) and dyn_train_ms (dynamicemb), "
    "means of 100 batches by CUDA events, after a pass over the same batches"
)
SETTINGS = (
    "10 tables x 128 in fp32; 104,857 lookups of each in a batch, one to a bag, not pooled; ids from a power law of "
    "exponent 1.05; LRU. A cache's size is a share of the distinct rows of all 100 batches together"
)
BATCH_SIZE, NUM_BATCHES = 104_857, 100
_TABLES, _DIM, _EXPONENT = 10, 128, 1.05
_STATE_BYTES = {"Adam": 8, "SGD": 0}
HEAD = (
    "| rows | optimizer | FBGEMM | dynamicemb | ours: device | ours: link | ours / FBGEMM | ours / dynamicemb "
    "| FBGEMM by its code | error |"
)


@dataclass(frozen=True)
class KernelPoint:
    """A time that others measured.

    Attributes:
        storage: where rows are.
        num_rows: of each table.
        kept: share of the distinct rows of all batches that a cache has slots for; None: tables are resident.
        distinct: rows of a batch, over all tables.
        fbgemm_ms, dynamicemb_ms: of forward, backward and update.
    """

    storage: str
    optimizer: Literal["Adam", "SGD"]
    num_rows: int
    kept: float | None
    distinct: float
    fbgemm_ms: float
    dynamicemb_ms: float


_TENTH = "no cache (dynamicemb: a tenth of the rows in HBM)"
POINTS = (
    KernelPoint("resident", "Adam", 1_677_721, None, 350_280.02, 1.352, 2.185),
    KernelPoint("resident", "SGD", 1_677_721, None, 350_280.02, 0.959, 1.923),
    KernelPoint("a cache of 0.8", "Adam", 26_843_545, 0.8, 433_722.73, 15.001, 24.333),
    KernelPoint("a cache of 0.8", "SGD", 26_843_545, 0.8, 433_722.73, 4.774, 20.833),
    KernelPoint("a cache of 1.0", "Adam", 26_843_545, 1.0, 433_722.73, 14.370, 12.284),
    KernelPoint("a cache of 1.0", "SGD", 26_843_545, 1.0, 433_722.73, 4.146, 10.873),
    KernelPoint(_TENTH, "Adam", 26_843_545, 0.0, 433_722.73, 24.073, 33.311),
    KernelPoint(_TENTH, "SGD", 26_843_545, 0.0, 433_722.73, 13.560, 27.228),
    KernelPoint("no cache", "Adam", 26_843_545, 0.0, 433_722.73, 24.054, 43.511),
    KernelPoint("no cache", "SGD", 26_843_545, 0.0, 433_722.73, 13.563, 35.463),
)


def kernel_points() -> dict[str, Any]:
    """Return what is told of all points."""
    cases = [kernel_case(point) for point in POINTS]
    resident = [abs(case["error"]) for case, point in zip(cases, POINTS, strict=True) if point.kept is None]
    return {"source": SOURCE, "settings": SETTINGS, "largest_error_of_resident": max(resident), "cases": cases}


def kernel_case(point: KernelPoint) -> dict[str, Any]:
    """Return a point's published milliseconds, and those that are told without them."""
    rates = load_topology("h100x1").rates_for()
    report, work = _step(point)
    parts = step_parts(work, rates)
    device, linked = parts["embedding"] + parts["planning"], parts["fills"] + parts["write_backs"]
    by_code, missed = parts["embedding"], 0.0
    if point.kept is not None:
        link = report.unique_ids * _STATE_BYTES[point.optimizer] * _DIM
        if point.kept:
            drawn = drawn_rows(point.num_rows, NUM_BATCHES, BATCH_SIZE, _EXPONENT)
            slots = point.kept * _counts(point.num_rows, NUM_BATCHES).num_rows
            misses = missed_rows(drawn, round(slots), _TABLES)
            ids, rows = report.lookups, _TABLES * point.num_rows
            by_code += extra_seconds(ids, report.unique_ids, 4 * _DIM, rows, misses, rates)
            missed = misses.rows
        else:
            link += 2 * report.unique_ids * 4 * _DIM
        by_code += link * rates.seconds_per_byte_to_device
    published = {"FBGEMM": point.fbgemm_ms, "dynamicemb": point.dynamicemb_ms}
    return {
        "rows": point.storage,
        "optimizer": point.optimizer,
        "published_ms": published,
        "ours": "FBGEMM's kernels, compared" if point.kept is None else "beside, not compared: never measured",
        "ours_ms": {"device": _ms(device), "link": _ms(linked)},
        "ours_over_published": {name: round(_ms(device + linked) / each, 2) for name, each in published.items()},
        "fbgemm_by_its_code_ms": _ms(by_code),
        "error": round(_ms(by_code) / point.fbgemm_ms - 1, 3),
        "distinct_rows": {"published": round(point.distinct), "drawn": round(report.unique_ids)},
        "fills": round(report.fills),
        "missed_by_fbgemm": round(missed),
    }


def table_row(case: dict[str, Any]) -> str:
    """Return a case as a line of the table under `HEAD`."""
    published, ours, ratios = case["published_ms"], case["ours_ms"], case["ours_over_published"]
    times = [*published.values(), *ours.values(), *ratios.values(), case["fbgemm_by_its_code_ms"]]
    cells = [case["rows"], case["optimizer"], *(f"{each:.2f}" for each in times), f"{case['error']:+.0%}"]
    return f"| {' | '.join(cells)} |"


def _step(point: KernelPoint) -> tuple[ShardReport, StepWork]:
    """Return what a batch does to the rows of all tables, and its work, as a plan counts them: the tables are alike."""
    counts = _counts(point.num_rows, NUM_BATCHES)
    samples, none = NUM_BATCHES * BATCH_SIZE, np.empty(0)
    counted = TableStatistics(
        "t", point.num_rows, samples, counts, np.array([0.0, 1.0]), none.astype(np.int64), window_rows=none
    )
    size = TableSize("t", point.num_rows, _DIM, state_bytes_per_column=_STATE_BYTES[point.optimizer], is_sequence=True)
    workload = Workload(
        ModelSize((size,), 0, 0, 0, 0),
        DataStatistics(samples, 1.0, {"t": counted}),
        RunShape(1, 1, BATCH_SIZE, "cuda", ReplaySettings()),
    )
    kernel: Literal["device", "cached"] = "device" if point.kept is None else "cached"
    shard = PlacedShard(size, 0, 0, point.num_rows, _DIM, "table_wise", kernel)
    if point.kept is None:
        report = workload.resident_report(shard)
    else:
        (report,) = workload.counted_reports([shard], max(1, round(point.kept * counts.num_rows)))
    return report.scaled(_TABLES), workload.shard_work(shard, report).scaled(_TABLES)


@functools.cache
def _counts(num_rows: int, num_batches: int) -> CountHistogram:
    """Return the counts of a table's rows in the lookups of so many batches."""
    return CountHistogram.of_counts(np.bincount(drawn_rows(num_rows, num_batches, BATCH_SIZE, _EXPONENT).ravel()))


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
