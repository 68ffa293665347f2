"""What every way of sharding a table costs, for TorchRec's planner: from the data's own frequencies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from embershard.cache.config import LEAST_SLOTS
from embershard.planning.cost.rates import Rates, step_time
from embershard.planning.predict import counted_reports, shard_work
from embershard.planning.search import ShardCost
from embershard.planning.simulate.replay import Shard, ShardReport
from embershard.planning.workload import Workload
from embershard.sharding import memory_model
from embershard.sharding.sizes import PlacedShard

_COMMUNICATION = ("all_to_all", "latency")
_COPIES = ("planning", "fills", "write_backs")


class ShardCosts:
    """Costs of shards while their ranks are not known yet.

    A table's hit rate is the one it would have in a single cache with all ranks' slots together: what balanced ranks
    come to. The link's and the memory's speed are in the rates, the rows' frequencies in the reports.
    ``resident``: costs of tables that are whole on the device.
    """

    def __init__(self, workload: Workload, rates: Rates, num_slots: int, *, resident: bool = False) -> None:
        self._workload, self._rates, self._resident = workload, rates, resident
        tables = workload.model.tables
        whole = [PlacedShard(t, 0, 0, t.rows, t.dim, "table_wise", "cached") for t in tables]
        reports = counted_reports(workload, whole, max(1, num_slots))
        self._reports: Mapping[str, ShardReport] = {
            table.table: each for table, each in zip(tables, reports, strict=True)
        }

    def __call__(self, shards: Sequence[PlacedShard]) -> list[ShardCost]:
        """The cost of each shard of a table."""
        return [self._cost(shard) for shard in shards]

    def _cost(self, shard: PlacedShard) -> ShardCost:
        report = _part(self._reports[shard.table.table], shard, self._workload.share_of_lookups(shard))
        if self._resident:
            shard = dataclasses.replace(shard, kernel="device")
            report = dataclasses.replace(report, fills=0.0, write_backs=0.0)
        work = shard_work(self._workload, shard, report)
        parts = step_time(work, self._rates, self._workload.shape.device).parts
        pooled = memory_model.pooled_bytes(shard, self._workload.shape.global_batch_size)
        host = memory_model.host_bytes([shard], self._workload.shape.memory)
        return ShardCost(
            seconds={
                "lookup": parts["embedding"],
                "communication": sum(parts[name] for name in _COMMUNICATION),
                "copies": sum(parts[name] for name in _COPIES),
            },
            device_bytes=self._row_bytes(shard, report) + pooled,
            host_bytes=sum(host.values()),
        )

    def _row_bytes(self, shard: PlacedShard, report: ShardReport) -> int:
        """All rows, or a cache's maps and the rows of one batch."""
        if self._resident:
            return shard.rows * shard.row_bytes
        memory = memory_model.pool_memory([shard], self._workload.shape.memory)
        least = min(shard.rows, max(LEAST_SLOTS, math.ceil(1.1 * report.unique_ids)))
        return memory.map_bytes + least * memory.slot_bytes


def _part(report: ShardReport, shard: PlacedShard, share: float) -> ShardReport:
    """A shard's share of its table's report. Its distinct rows are as many as its rows' share of them."""
    rows = shard.rows / shard.table.rows
    scale = dict.fromkeys(("unique_ids", "hits_unique", "fills", "write_backs", "held_rows"), rows)
    scale |= dict.fromkeys(("lookups", "hits_lookups"), share)
    values = {name: getattr(report, name) * by for name, by in scale.items()}
    part = Shard(report.shard.table, shard.row_start, shard.row_stop)
    return dataclasses.replace(report, shard=part, **values)
