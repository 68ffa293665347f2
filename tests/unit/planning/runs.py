"""Plans with predictions that have a meaning, and results of runs that went as predicted."""

from __future__ import annotations

import copy
from typing import Any

from embershard.planning.cost.rates import StepWork
from embershard.sharding.plan import Plan, Prediction, RankPrediction, TablePlacement, TablePrediction
from tests.unit.sharding.plans import make_plan

STEPS = 100
ROW_BYTES = 68  # 16 columns of 4 bytes, and 4 of optimizer state
_COUNTS = ("lookups", "unique_ids", "fills", "write_backs")


def predicted_plan(*, step_seconds: float = 0.01, world_size: int = 2, device: str = "cpu") -> Plan:
    """Table a (cached) on the first rank, b (cached) over all ranks, c (whole on the device) on the last one."""
    last = world_size - 1
    tables = [
        TablePlacement("a", 1000, 16, "fp32", "table_wise", "cached", (0,)),
        TablePlacement("b", 600 * world_size, 16, "fp32", "row_wise", "cached", tuple(range(world_size))),
        TablePlacement("c", 50, 16, "fp32", "table_wise", "device", (last,)),
    ]
    predictions = [_table("a", 0, 1000, 1000.0, 0.8, 40.0)]
    for rank in range(world_size):
        predictions.append(_table("b", rank, 600, 1000.0 - 200 * (rank == 0), 0.7, 10.0))
    predictions.append(TablePrediction("c", last, 64.0, 30.0, 0.0, 0.0, 1.0, 1.0, 50 * 64, 0))
    ranks = [_rank(rank, predictions, step_seconds) for rank in range(world_size)]
    prediction = Prediction(
        "replay", STEPS, step_seconds, 256 / step_seconds, "dense", tuple(predictions), tuple(ranks)
    )
    made_from = {"config": "run.toml", "topology": "cpu"}
    return make_plan(tables, world_size, world_size, prediction=prediction, device=device, made_from=made_from)


def _table(name: str, rank: int, rows: int, lookups: float, rate: float, fills: float) -> TablePrediction:
    host = rows * (ROW_BYTES + 4)  # with scores
    return TablePrediction(name, rank, lookups, lookups / 2, fills, fills / 2, rate - 0.1, rate, rows * 30, host)


def _rank(rank: int, tables: list[TablePrediction], step_seconds: float) -> RankPrediction:
    own = [table for table in tables if table.rank == rank and table.table != "c"]
    rows = sum(table.host_bytes for table in own) // (ROW_BYTES + 4)
    fills, write_backs = sum(t.fills for t in own), sum(t.write_backs for t in own)
    work = StepWork(
        dense_flops=1e6,
        planned_ids=sum(table.lookups for table in own),
        unique_ids=sum(table.unique_ids for table in own),
        fills=fills,
        write_backs=write_backs,
        bytes_to_device=fills * ROW_BYTES,
        bytes_to_host=write_backs * ROW_BYTES,
        sent_id_bytes=1000,
        sent_embedding_bytes=2000,
        sent_gradient_bytes=2000,
    )
    return RankPrediction(
        rank=rank,
        device_bytes={"slots": rows * 26, "maps": rows * 4, "device_tables": 3200, "dense": 12345},
        host_bytes={"rows": rows * ROW_BYTES, "scores": rows * 4},
        work=work.to_dict(),
        seconds={"dense": step_seconds},
        step_seconds=step_seconds,
        bottleneck="dense",
    )


def result_of(plan: Plan, /, **changes: Any) -> dict[str, Any]:
    """What result.json says of a run in which everything was as predicted."""
    prediction = plan.prediction
    assert prediction is not None
    cached = {table.table for table in plan.tables if table.kernel == "cached"}
    ranks = []
    for rank in prediction.ranks:
        own = [table for table in prediction.tables if table.rank == rank.rank and table.table in cached]
        tables = {table.table: _measured([table]) for table in own}
        ranks.append({"rank": rank.rank, **_measured(own), "tables": tables, "pools": []})
    every = [table for table in prediction.tables if table.table in cached]
    names = sorted({table.table for table in every})
    cache = {
        "ratio": None,
        **_measured(every),
        "tables": {name: _measured([table for table in every if table.table == name]) for name in names},
        "ranks": ranks,
    }
    return {
        "steps": STEPS,
        "measured_steps": STEPS,
        "samples": STEPS * 256,
        "samples_per_second": 25600.0,
        "is_steady": True,
        "step_ms": {"p50": prediction.step_seconds * 1e3, "p95": prediction.step_seconds * 2e3},
        **dict.fromkeys(("loss", "auc", "ne", "logloss", "accuracy", "calibration"), 0.5),
        "eval_samples": 10,
        "world_size": plan.world_size,
        "device": plan.device,
        "cache": cache,
        "look_ahead": None,
        "sent_bytes": sent_bytes(prediction),
        "hot_cold": None,
        "plan": {"path": "plan.json", "digest": plan.digest},
        **changes,
    }


def sent_bytes(prediction: Prediction, factor: float = 1.0) -> dict[str, Any]:
    """What the ranks sent in a run as predicted, all together; with ``factor``, so many times the embeddings' part."""
    work = {name: sum(rank.work[name] for rank in prediction.ranks) * STEPS for name in prediction.ranks[0].work}
    tables = {f"{kind}s": work[f"sent_{kind}_bytes"] * factor for kind in ("id", "embedding", "gradient")}
    return {**tables, "other": 1e9, "dense_all_reduce": work["all_reduce_bytes"], "sync": 0, "ranks": []}


def _measured(tables: list[TablePrediction]) -> dict[str, Any]:
    counts = {name: round(sum(getattr(table, name) for table in tables) * STEPS) for name in _COUNTS}
    hits = {
        "hits_lookups": sum(table.lookups * (table.hit_rate_lookups or 0) for table in tables) * STEPS,
        "hits_unique": sum(table.unique_ids * (table.hit_rate_unique or 0) for table in tables) * STEPS,
    }
    return {
        "rows": sum(table.host_bytes for table in tables) // (ROW_BYTES + 4),
        "slots": sum(table.device_bytes for table in tables) // 100,
        "hit_rate_unique": hits["hits_unique"] / counts["unique_ids"] if counts["unique_ids"] else None,
        "hit_rate_lookups": hits["hits_lookups"] / counts["lookups"] if counts["lookups"] else None,
        "device_bytes": sum(table.device_bytes for table in tables),
        "host_bytes": sum(table.host_bytes for table in tables),
        **counts,
        **{name: round(value) for name, value in hits.items()},
        "bytes_to_device": counts["fills"] * ROW_BYTES,
        "bytes_to_host": counts["write_backs"] * ROW_BYTES,
        "evictions": counts["fills"],
        "overflow_growths": 0,
        "critical_path_fills": 0,
        "seconds": 0.002 * STEPS,
        "stall_seconds": 0.001 * STEPS,
    }


def changed(result: dict[str, Any], rank: int, table: str, **values: Any) -> dict[str, Any]:
    """A copy in which one table's cache counted something else."""
    result = copy.deepcopy(result)
    result["cache"]["ranks"][rank]["tables"][table].update(values)
    return result


def without_cache(result: dict[str, Any]) -> dict[str, Any]:
    """The result of a run with all rows on the device."""
    return {**result, "cache": None}
