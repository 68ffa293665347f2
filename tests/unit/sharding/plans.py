"""Plans to test with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from embershard.sharding.plan import Plan, Prediction, RankPrediction, TablePlacement, TablePrediction, pools_of

SHARDED = ("table_wise", "row_wise", "column_wise", "table_column_wise", "table_row_wise", "grid_shard")


def ranks_for(sharding: str, number: int, world_size: int, ranks_per_node: int, column_shards: int) -> tuple[int, ...]:
    """Ranks for a table, starting with rank or node ``number`` (modulo how many there are)."""
    node = number % (world_size // ranks_per_node) * ranks_per_node
    of_node = tuple(range(node, node + ranks_per_node))
    return {
        "table_wise": (number % world_size,),
        "row_wise": tuple(range(world_size)),
        "column_wise": tuple((number + shard) % world_size for shard in range(column_shards)),
        "table_column_wise": tuple(node + shard % ranks_per_node for shard in range(column_shards)),
        "table_row_wise": of_node,
        "grid_shard": of_node * column_shards,
        "data_parallel": (),
    }[sharding]


def make_plan(tables: Sequence[TablePlacement], world_size: int, ranks_per_node: int, **changes: Any) -> Plan:
    """A plan with about a third of the rows in slots."""
    pools = tuple(pool.with_slots(max(1, pool.rows // 3)) for pool in pools_of(tables, ranks_per_node))
    given: dict[str, Any] = {
        "world_size": world_size,
        "ranks_per_node": ranks_per_node,
        "batch_size": 128,
        "device": "cpu",
        "device_memory_bytes": None,
        "host_memory_bytes": 2**40,
        "settings": {"cache.policy": "lfu", "model.over_arch_layer_sizes": [8, 1], "cache.decay": None},
        "tables": tuple(tables),
        "pools": pools,
        "notes": ("Table 't0' is small.",),
        "made_from": {"config": "run.toml"},
    }
    return Plan(**{**given, **changes})


def small_plan(**changes: Any) -> Plan:
    """Five tables on two ranks, one of each kernel among them, with a prediction."""
    tables = [
        TablePlacement("t0", 100, 16, "fp32", "table_wise", "cached", (0,)),
        TablePlacement("t1", 101, 16, "fp32", "row_wise", "cached", (0, 1)),
        TablePlacement("t2", 102, 16, "fp32", "table_wise", "cached", (0,)),
        TablePlacement("t3", 50, 16, "fp32", "table_wise", "device", (1,)),
        TablePlacement("t4", 10, 16, "fp32", "data_parallel", "replicated", ()),
    ]
    return make_plan(tables, 2, 2, **{"prediction": make_prediction(), **changes})


def make_prediction(step_seconds: float = 0.01) -> Prediction:
    """Numbers without a meaning."""
    table = TablePrediction("t0", 0, 128.0, 60.5, 12.25, 3.0, 0.8, None, 4000, 9000, long_run_range=(0.2, 0.6))
    rank = RankPrediction(0, {"slots": 2**20}, {"rows": 2**21}, {"fills": 1.5}, {"copies": 0.1}, 0.1, "copies")
    return Prediction("replay", 100, step_seconds, 128 / step_seconds, "copies", (table,), (rank,))


@st.composite
def plans(draw: st.DrawFn, world_sizes: Sequence[int] = (1, 2, 4, 8), with_fp16: bool = True) -> Plan:
    """Plans of every sharding type, kernel, dim and dtype."""
    world_size = draw(st.sampled_from(world_sizes))
    ranks_per_node = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= world_size]))
    tables = []
    for number in range(draw(st.integers(1, 8))):
        sharding = draw(st.sampled_from([*SHARDED, "data_parallel"]))
        dim = draw(st.sampled_from([8, 16, 48]))
        column_shards = draw(st.sampled_from([n for n in (1, 2, 4) if dim % (4 * n) == 0]))
        kernel = "replicated" if sharding == "data_parallel" else draw(st.sampled_from(["cached", "cached", "device"]))
        ranks = ranks_for(sharding, draw(st.integers(0, 7)), world_size, ranks_per_node, column_shards)
        dtype = draw(st.sampled_from(["fp32", "fp16"] if with_fp16 else ["fp32"]))
        rows = draw(st.integers(1, 60))
        tables.append(TablePlacement(f"t{number}", rows, dim, dtype, sharding, kernel, ranks))  # type: ignore[arg-type]
    return make_plan(tables, world_size, ranks_per_node)
