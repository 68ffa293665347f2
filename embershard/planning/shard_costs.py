"""What a shard costs its rank, by the data, while ranks are still looked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from embershard.planning.cost.rates import Rates, step_parts
from embershard.planning.exchange import exchange_of
from embershard.planning.predict import as_exchanged, counted_reports, shard_work
from embershard.planning.request import Workload
from embershard.planning.simulate.pool_report import RowRange
from embershard.sharding import memory_model
from embershard.sharding.sharding_types import Sharding
from embershard.sharding.shards import TablePlacement
from embershard.sharding.sizes import PlacedShard, TableSize

#: Slots per distinct row of the mean batch: batches differ, and the one with the most distinct rows must fit, too.
ROOM = 1.1


@dataclass(frozen=True)
class ShardCost:
    """The cost of one shard for its rank.

    Attributes:
        seconds: of a step, by part: "lookup", "communication", "copies".
        device_bytes, host_bytes: the least that it needs.
    """

    seconds: Mapping[str, float]
    device_bytes: int
    host_bytes: int


#: Returns the costs of all shards of a table; their ranks are not known yet (0).
CostOfShards = Callable[[Sequence[PlacedShard]], Sequence[ShardCost]]


def cached(table: TableSize, sharding: str, ranks: Sequence[int]) -> TablePlacement:
    """Return the placement of a cached table; `ranks` are its shards' in TorchRec's order."""
    kind = cast(Sharding, sharding)
    return TablePlacement(
        table.table, table.rows, table.dim, table.dtype, kind, "cached", tuple(ranks), group=table.group
    )


class ShardCosts:
    """Costs of shards while their ranks are not known yet.

    A table's hit rate is taken from a single cache with all ranks' slots together, which balanced ranks come close to.
    The link's and the memory's speed are in the rates, the rows' frequencies in the reports.

    Args:
        num_slots: slots of all ranks together.
        resident: costs of tables that are whole on the device.
    """

    def __init__(self, workload: Workload, rates: Rates, num_slots: int, *, resident: bool = False) -> None:
        self._workload, self._rates, self._resident = workload, rates, resident
        tables = workload.model.tables
        whole = [PlacedShard(t, 0, 0, t.rows, t.dim, "table_wise", "cached") for t in tables]
        reports = counted_reports(workload, whole, max(1, num_slots))
        self._reports = {table.table: report for table, report in zip(tables, reports, strict=True)}

    def __call__(self, shards: Sequence[PlacedShard]) -> list[ShardCost]:
        """Return the cost of each shard of a table."""
        return [self._cost(shard) for shard in shards]

    def _cost(self, shard: PlacedShard) -> ShardCost:
        workload, shape = self._workload, self._workload.shape
        shares = (workload.share_of_lookups(shard), shard.rows / shard.table.rows)
        report = replace(self._reports[shard.table.table].part(*shares), shard=RowRange.of(shard))
        shard = replace(shard, exchange=exchange_of(workload, shard.table.table, shard.sharding, shard.columns))
        report = as_exchanged(workload, shard, report)
        if self._resident:
            shard = replace(shard, kernel="device")
            report = replace(report, fills=0.0, write_backs=0.0)
            row_bytes = shard.rows * shard.row_bytes
        else:
            memory = memory_model.pool_memory([shard], shape)
            least = memory_model.slots_for(shard.rows, math.ceil(ROOM * report.unique_ids))
            row_bytes = memory.map_bytes + least * memory.slot_bytes  # the maps, and the rows of one batch
        parts = step_parts(shard_work(workload, shard, report), self._rates)
        return ShardCost(
            seconds={
                "lookup": parts["embedding"],
                "communication": sum(parts[name] for name in ("all_to_all", "network", "latency")),
                "copies": sum(parts[name] for name in ("planning", "fills", "write_backs")),
            },
            device_bytes=row_bytes
            + round(memory_model.vector_bytes(shard, shape.global_batch_size, workload.lookups_per_step(shard))),
            host_bytes=memory_model.shard_host_bytes(shard, shape),
        )
