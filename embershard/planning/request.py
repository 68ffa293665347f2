"""The request for a plan: workload, machine, budget, and limits on the placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from embershard.errors import ConfigError
from embershard.planning.cost.rates import Rates
from embershard.planning.workload import Workload
from embershard.sharding.sharding_types import SHARDING_TYPES, sharding_type
from embershard.sharding.shards import TablePlacement
from embershard.sharding.sizes import TableSize

#: Of sequences, where none of the types that were asked for can shard them.
_OF_SEQUENCES = ("table_wise", "row_wise")
#: Of a column shard: FBGEMM is slow on narrow rows.
LEAST_COLUMNS = 32


def column_block(dim: int, world_size: int) -> int:
    """Return the columns of a column shard: the fewest that are not narrow, a multiple of 4, and cut `dim` evenly.

    >>> column_block(dim=128, world_size=2), column_block(dim=16, world_size=2)
    (64, 16)
    """
    least = max(LEAST_COLUMNS, dim // world_size)
    return next((size for size in range(least + -least % 4, dim, 4) if dim % size == 0), dim)


@dataclass(frozen=True)
class Budget:
    """Memory that may be used. The caches' size follows from `ratio`, or from `cache_bytes`, or is the rest of
    `device_bytes`.

    >>> Budget(device_bytes=80 * 10**9).rank_bytes
    80000000000

    Attributes:
        device_bytes: of one rank, for everything: slots, states, maps, resident tables, dense model, activations,
            buffers. A hard limit.
        cache_bytes: of one rank, for slots, states and maps alone; excludes the two others.
        ratio: slots as a share of a pool's rows.
        host_bytes: of one node, for the rows in host memory; None: not limited.
    """

    device_bytes: int | None = None
    cache_bytes: int | None = None
    ratio: float | None = None
    host_bytes: int | None = None

    @property
    def rank_bytes(self) -> int | None:
        """Device memory that one rank may use, for everything or for its caches alone; None: not limited."""
        return self.cache_bytes if self.device_bytes is None else self.device_bytes

    def __post_init__(self) -> None:
        given = [name for name in ("device_bytes", "cache_bytes", "ratio") if getattr(self, name) is not None]
        if not given or (self.cache_bytes is not None and len(given) > 1):
            raise ConfigError(
                f"a budget needs device_bytes, ratio, both, or cache_bytes alone; got {' and '.join(given) or 'none'}"
            )


@dataclass(frozen=True)
class PlanRequest:
    """Everything that a plan depends on.

    Attributes:
        workload: model, data and run.
        rates: of a rank of the machine.
        budget: bytes per rank and node.
        types: sharding types that may be used; None: all that make sense on so many nodes.
        only: sharding types of single tables; overrides `types`.
        replicate_rows: tables with at most so many rows are replicated.
        most_ranks_per_node: devices of a node; None: not limited.
        settings, made_from, notes: for the plan's file.
    """

    workload: Workload
    rates: Rates
    budget: Budget
    types: Sequence[str] | None = None
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    replicate_rows: int = 0
    most_ranks_per_node: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    made_from: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def sharded(self) -> list[TableSize]:
        """Tables that are placed on ranks, not replicated."""
        return [table for table in self.workload.model.tables if not self._is_replicated(table)]

    def _is_replicated(self, table: TableSize) -> bool:
        return table.rows <= self.replicate_rows and not table.is_sequence

    @property
    def allowed(self) -> dict[str, list[str]]:
        """Sharding types that each sharded table may have."""
        shape = self.workload.shape
        is_one_node = shape.world_size <= shape.ranks_per_node
        tried = [each.name for each in SHARDING_TYPES.values() if each.tried in ("any", "" if is_one_node else "nodes")]
        types = [sharding_type(name) for name in self.types or tried]
        found = {}
        for table in self.sharded:
            is_cut = column_block(table.dim, shape.world_size) < table.dim  # else it is table-wise by another name
            own = [each for each in types if is_cut or not each.is_whole_or_columns]
            if table.is_sequence:
                own = [each for each in own if each.has_sequences] or [SHARDING_TYPES[name] for name in _OF_SEQUENCES]
            if shape.exchange == "rows" and self.types is None:
                own = [each for each in own if each.exchanges_rows]
            found[table.table] = list(self.only.get(table.table, [each.name for each in own or types]))
        return found

    @property
    def replicated(self) -> list[TablePlacement]:
        """Placements of the tables that every rank has a copy of."""
        return [
            TablePlacement(
                table.table, table.rows, table.dim, table.dtype, "data_parallel", "replicated", (), group=table.group
            )
            for table in self.workload.model.tables
            if self._is_replicated(table)
        ]
