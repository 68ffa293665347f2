"""Six published speeds of HSTU's training on 16 H100, beside what a plan's costs say of the same job.

`python -m benchmarks.simulator_back_test --public` prints them. NVIDIA adds one thing to each step; ours stands beside
the four of which a plan knows a difference, as speed relative to its own first step. Nothing was fitted to these
figures, and **none is compared**: their attention is one Triton or CUTLASS kernel without padding, ours is torch's in
groups of like lengths, and their first step has no cache, ours one that keeps no row.

* **Dealt**: each rank trains samples of about equal work (`data.deal = "cost"`); theirs are moved between GPUs.
* **Cache**: a tenth of the rows in HBM, by frequency (theirs: LRU).
* **Prefetch**: rows come two batches ahead, beside training.
* **Not told**: another kernel, and ids dealt by hash: a plan's rows are cut evenly, and popular ones taken to be
  anywhere.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from embershard.cache.config import CachePolicy
from embershard.data import DataConfig
from embershard.data.config import ParquetConfig
from embershard.frequency.assumed import AssumedTable, assumed_statistics
from embershard.frequency.statistics import DataStatistics
from embershard.lazy_names import named
from embershard.models import ModelConfig
from embershard.models.hstu_config import HstuConfig
from embershard.planning.cost.topology import load_topology
from embershard.planning.predict import predict
from embershard.planning.workload import Layout, Workload
from embershard.sharding.run_shape import ReplaySettings, RunShape
from embershard.sharding.shards import TablePlacement
from embershard.sharding.sizes import ModelSize, TableSize
from embershard.training.config import RunConfig

SOURCE = (
    "https://github.com/NVIDIA/recsys-examples examples/hstu/training/benchmark/E2E_BENCHMARK.md at a84ae588 (1 June "
    "2026), two nodes of 8 H100-SXM5-80GB: mean TFLOPS of a GPU, steps 199 to 999"
)
SETTINGS = (
    "8 layers, 4 heads of 256, width 1024, bf16, Adam; 32 samples a GPU; lengths by Zipf 1.2 from 1 to 4096, an item "
    "and an action of each event; 50M items x 128, ids by Zipf 1.05"
)
RANKS, BATCH_SIZE, MOST_EVENTS, NUM_ROWS = 16, 32, 4096, 50_000_000
_WIDTH, _DIM, _LENGTHS, _IDS = 1024, 128, 1.2, 1.05
_SAMPLES = 1_000_000
HEAD = "| step | TFLOPS a GPU | speed | over the step before | ours: ms | ours: speed | ours: over the step before |"


@dataclass(frozen=True)
class Step:
    """A speed that NVIDIA measured, and what ours beside it has.

    Attributes:
        tflops: of a GPU.
        cached: share of the rows in HBM; None: ours has no such step.
    """

    name: str
    tflops: float
    is_dealt: bool = True
    cached: float | None = None
    lookahead: int = 0


STEPS = (
    Step("Triton attention, no cache", 75.6, is_dealt=False, cached=0.0),
    Step("+ samples dealt by work", 115.8, cached=0.0),
    Step("+ CUTLASS attention", 302.6),
    Step("+ a cache of a tenth", 296.8, cached=0.1),
    Step("+ ids dealt by hash", 308.6),
    Step("+ prefetch", 310.6, cached=0.1, lookahead=2),
)


def hstu_steps() -> dict[str, Any]:
    """Return what is told of all steps."""
    cases: list[dict[str, Any]] = []
    before: float | None = None
    for number, step in enumerate(STEPS):
        case: dict[str, Any] = {
            "step": step.name,
            "published_tflops": step.tflops,
            "speed": round(step.tflops / STEPS[0].tflops, 2),
            "of_the_step_before": round(step.tflops / STEPS[max(0, number - 1)].tflops, 2),
            "ours": "not told" if step.cached is None else "beside, not compared: other kernels",
        }
        if step.cached is not None:
            seconds = step_seconds(step)
            case |= {"ours_ms": round(seconds * 1e3, 1), "ours_before": round((before or seconds) / seconds, 2)}
            before = seconds
            case["ours_speed"] = round(cases[0]["ours_ms"] / case["ours_ms"], 2) if cases else 1.0
        cases.append(case)
    return {"source": SOURCE, "settings": SETTINGS, "ours_says": _drawn(False).note, "cases": cases}


def step_seconds(step: Step) -> float:
    """Return the seconds of ours, as a plan counts them."""
    topology = load_topology("h100x8x2").at("bf16")
    size = TableSize("t_item", NUM_ROWS, _DIM, state_bytes_per_column=8, is_sequence=True)
    cache = ReplaySettings(CachePolicy("lfu", by_next_use=False), lookahead=step.lookahead, prefetch=step.lookahead)
    shape = replace(_shape(), cache=cache)
    parameters = 4 * _config(False).model.hstu.num_parameters(1, _WIDTH)
    model = ModelSize((size,), 0, parameters, 2 * parameters, 0)
    workload = Workload(model, _data(), shape, _drawn(step.is_dealt))
    placed = TablePlacement("t_item", NUM_ROWS, _DIM, "fp32", "row_wise", "cached", tuple(range(RANKS)))
    layout = Layout(workload, [placed])
    slots = {key: max(1024, round((step.cached or 0) * NUM_ROWS / RANKS)) for key in layout.pools}
    return predict(layout, slots, topology.rates_for(RANKS), from_counts=True).step_seconds


def table_row(case: dict[str, Any]) -> str:
    """Return a case as a line of the table under `HEAD`."""
    ours = [f"{case[name]:{form}}" if name in case else "-" for name, form in
            (("ours_ms", ".1f"), ("ours_speed", ".2f"), ("ours_before", ".2f"))]  # fmt: skip
    published = f"{case['published_tflops']:.1f}", f"{case['speed']:.2f}", f"{case['of_the_step_before']:.2f}"
    return f"| {' | '.join([case['step'], *published, *ours])} |"


def _config(is_dealt: bool) -> RunConfig:
    """Of a run of ours. An item and an action are two tokens there, one event here: as many events as tokens."""
    hstu = HstuConfig(num_layers=8, num_heads=4, head_dim=256, max_events=2 * MOST_EVENTS)
    model = ModelConfig("hstu", target=("item",), history=("past",), embedding_dim=_WIDTH, hstu=hstu,
                        dense_arch_layer_sizes=(_WIDTH,))  # fmt: skip
    columns = ParquetConfig(sparse=("item", "past"), num_rows=(NUM_ROWS, NUM_ROWS))
    data = DataConfig(kind="parquet", path="none", parquet=columns, deal="cost" if is_dealt else "order")
    return RunConfig(data=data, model=model)


def _shape() -> RunShape:
    return RunShape(RANKS, 8, BATCH_SIZE, "cuda", ReplaySettings(), number_bytes=(2, 2), activation_bytes=2)


@functools.cache
def _drawn(is_dealt: bool) -> Any:
    """Return the layers' work, of lengths in tokens."""
    data = _data()
    bags = np.zeros(2 * MOST_EVENTS + 2)
    bags[3::2] = _length_shares()
    table = replace(data.tables["t_item"], bag_sizes=bags)
    drawn_layers = named("embershard.extras.length_groups.drawn:drawn_layers")
    return drawn_layers(_config(is_dealt), replace(data, tables={"t_item": table}), _shape())


def _length_shares() -> Any:
    shares = np.arange(1, MOST_EVENTS + 1) ** -_LENGTHS
    return shares / shares.sum()


@functools.cache
def _data() -> DataStatistics:
    """Return the frequencies of items: each lookup is drawn by itself."""
    mean = float((_length_shares() * np.arange(1, MOST_EVENTS + 1)).sum())
    lookups = round(_SAMPLES * mean)
    found = assumed_statistics([AssumedTable("t_item", NUM_ROWS, _IDS)], lookups)
    none = np.empty(0)
    table = replace(found.tables["t_item"], window_samples=none.astype(np.int64), window_rows=none)
    return replace(found, num_samples=_SAMPLES, tables={"t_item": table})
