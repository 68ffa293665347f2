"""Small requests to plan for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from embershard.cache.config import CachePolicy, MapKind
from embershard.extras.hot_cold.memory import HotRowsMemory
from embershard.frequency import DataStatistics
from embershard.frequency.assumed import AssumedTable, assumed_statistics
from embershard.planning.cost.rates import Rates
from embershard.planning.cost.topology import load_topology
from embershard.planning.request import Budget, PlanRequest
from embershard.planning.workload import Workload
from embershard.sharding.config import ExchangeChoice
from embershard.sharding.plan import TablePlacement
from embershard.sharding.run_shape import ReplaySettings, RunShape
from embershard.sharding.sizes import ModelSize, TableSize
from tests.unit.planning.traces import counted, skewed

LFU = ReplaySettings(CachePolicy("lfu", by_next_use=False), 0)


@functools.lru_cache(maxsize=8)
def data_of(
    rows: tuple[int, ...], num_samples: int = 6000, seed: int = 0, scattered: bool = True, bag_size: int = 1
) -> DataStatistics:
    """Tables t0, t1, ... with skewed lookups. Of a huge table only the first million rows occur."""
    return counted(
        {
            f"t{number}": (count, skewed(min(count, 10**6), num_samples * bag_size, seed + number, scattered=scattered))
            for number, count in enumerate(rows)
        },
        bag_size,
    )


def model_of(rows: Sequence[int], dims: Sequence[int] = (), **table: Any) -> ModelSize:
    """Tables t0, t1, ... with row-wise Adagrad, and a small dense part."""
    dims = dims or (64,) * len(rows)
    table = {"state_bytes": 4, **table}
    tables = tuple(
        TableSize(f"t{number}", count, dim, **table) for number, (count, dim) in enumerate(zip(rows, dims, strict=True))
    )
    return ModelSize(tables, 1e5, 40_000, 80_000, 2000.0)


def make_workload(
    rows: Sequence[int] = (5000, 900, 300, 40),
    dims: Sequence[int] = (),
    *,
    world_size: int = 2,
    ranks_per_node: int = 8,
    batch_size: int = 64,
    device: Literal["cpu", "cuda"] = "cuda",
    cache: ReplaySettings = LFU,
    num_steps: int | None = None,
    data: DataStatistics | None = None,
    slot_map: MapKind | None = "array",
    exchange: ExchangeChoice = "pooled",
    hot_bytes: int = 0,
    cores_per_node: int | None = None,
    accumulate: int = 1,
    **table: Any,
) -> Workload:
    """A model, its data and how it is trained; by default the maps of all pools are arrays, the largest ones' too."""
    shape = RunShape(
        world_size,
        ranks_per_node,
        batch_size,
        device,
        cache,
        num_steps,
        slot_map=slot_map,
        exchange=exchange,
        mode_memory=HotRowsMemory(hot_bytes) if hot_bytes else None,
        cores_per_node=cores_per_node,
        accumulate=accumulate,
    )
    return Workload(model_of(rows, dims, **table), data or data_of(tuple(rows)), shape)


@functools.lru_cache(maxsize=8)
def rates(name: str = "h100x8x4", num_ranks: int = 2) -> Rates:
    """Of a machine of the catalogue, without the overhead that hides everything small."""
    return load_topology(name).rates_for(num_ranks)


def make_request(budget: Budget | None = None, workload: Workload | None = None, **changes: Any) -> PlanRequest:
    """With a device budget that holds a third of the rows or so, and a short search, unless others are given. Arguments
    of :func:`make_workload` go there."""
    own = {name: changes.pop(name) for name in list(changes) if name in _OF_REQUEST}
    workload = workload or make_workload(**changes)
    budget = budget or Budget(device_bytes=8_000_000)
    own.setdefault("effort", 0.03)
    return PlanRequest(workload, own.pop("rates", None) or rates(num_ranks=workload.shape.world_size), budget, **own)


_OF_REQUEST = (
    "rates", "types", "only", "replicate_rows", "most_ranks_per_node", "settings", "made_from", "notes", "topology",
    "effort",
)  # fmt: skip


def tight_task(seed: int) -> PlanRequest:
    """Eight tables on four GPUs that have a quarter more memory than all rows take."""
    rng = np.random.default_rng(seed)
    rows = tuple(int(count) for count in 10 ** rng.uniform(3, 6, 8))
    dims = tuple(int(dim) for dim in rng.choice([16, 32, 64, 128], len(rows)))
    tables = [AssumedTable(f"t{n}", count, 1.0, int(rng.integers(1, 40))) for n, count in enumerate(rows)]
    data = assumed_statistics(tables, 10**7)
    request = make_request(Budget(device_bytes=10**10), rows=rows, dims=dims, data=data, world_size=4, batch_size=2048)
    without_tables = sum(request.workload.memory([], {}).device.values())
    each = round(1.25 * request.workload.model.table_bytes / 4 + 1.3 * without_tables) + 2**24
    return replace(request, budget=Budget(each), rates=replace(request.rates, step_overhead_seconds=0.0))


def round_robin(request: PlanRequest) -> list[TablePlacement]:
    """All tables table-wise, one after another."""
    return [
        TablePlacement(
            t.table, t.rows, t.dim, t.dtype, "table_wise", "cached", (n % request.workload.shape.world_size,)
        )
        for n, t in enumerate(request.workload.model.tables)
    ]


def random_rows(seed: int, count: int, most: float = 5.0) -> tuple[int, ...]:
    """Numbers of rows from 10 to 10**most."""
    return tuple(int(rows) for rows in 10 ** np.random.default_rng(seed).uniform(1, most, count))
