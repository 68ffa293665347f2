"""What a plan is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from embershard.errors import ConfigError
from embershard.sharding.cost import Rates
from embershard.sharding.shards import TablePlacement
from embershard.sharding.sizes import TableSize
from embershard.sharding.workload import Workload

#: On one node the other types do the same as these.
ONE_NODE_TYPES = ("table_wise", "row_wise", "column_wise")
NODES_TYPES = (*ONE_NODE_TYPES, "table_row_wise", "table_column_wise")
#: Of a column shard: FBGEMM is slow on narrow rows.
LEAST_COLUMNS = 32


@dataclass(frozen=True)
class Budget:
    """Memory that may be used. One of the first three says how large the caches are.

    Attributes:
        device_bytes: of one rank, for everything: slots, states, maps, resident tables, dense model, activations,
            buffers.
        cache_bytes: of one rank, for slots, states and maps alone.
        ratio: slots as a share of a pool's rows.
        host_bytes: of one node, for the rows in host memory; None: not limited.
    """

    device_bytes: int | None = None
    cache_bytes: int | None = None
    ratio: float | None = None
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("device_bytes", "cache_bytes", "ratio") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"a budget needs one of device_bytes, cache_bytes and ratio; got {given or 'none'}")


@dataclass(frozen=True)
class PlanRequest:
    """What to plan for.

    Attributes:
        workload: model, data and run.
        rates: of a rank of the machine.
        budget: bytes per rank and node.
        types: sharding types that may be used; None: all that make sense on so many nodes.
        only: sharding types of single tables, instead of ``types``.
        replicate_rows: tables with at most so many rows are replicated.
        settings, made_from, notes: for the plan's file.
    """

    workload: Workload
    rates: Rates
    budget: Budget
    types: Sequence[str] | None = None
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    replicate_rows: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    made_from: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def sharded(self) -> list[TableSize]:
        """Tables that are placed on ranks, not replicated."""
        return [table for table in self.workload.model.tables if table.rows > self.replicate_rows]

    @property
    def allowed(self) -> dict[str, list[str]]:
        """Sharding types of those."""
        shape = self.workload.shape
        types = list(self.types or (ONE_NODE_TYPES if shape.world_size <= shape.ranks_per_node else NODES_TYPES))
        found = {}
        for table in self.sharded:
            cut = table.dim >= 2 * LEAST_COLUMNS  # else it would be table-wise by another name
            own = [name for name in types if cut or name not in ("column_wise", "table_column_wise")]
            found[table.table] = list(self.only.get(table.table, own or types))
        return found

    @property
    def replicated(self) -> list[TablePlacement]:
        """Tables that every rank has a copy of."""
        return [
            TablePlacement(table.table, table.rows, table.dim, table.dtype, "data_parallel", "replicated", ())
            for table in self.workload.model.tables
            if table.rows <= self.replicate_rows
        ]
