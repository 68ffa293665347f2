"""Sizes of a model, as planning needs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from embershard.cache.homes.small_sizes import MARK_BYTES, SmallType, small_row_bytes
from embershard.sharding.sharding_types import Sharding
from embershard.sharding.shards import Exchange, Kernel, PoolKey, TablePlacement, shards_of

_ITEM_BYTES = {"fp32": 4, "fp16": 2}


@dataclass(frozen=True)
class TableSize:
    """One embedding table, and its optimizer's state per row.

    Attributes:
        state_bytes: optimizer state of a row that does not depend on its columns (row-wise Adagrad: 4).
        state_bytes_per_column: optimizer state per column (Adagrad: 4, Adam: 8).
        group: tables of different groups share no cache: see `groups_of`.
        is_sequence: of an EmbeddingCollection: every lookup's row travels, and fewer sharding types can hold it.
        num_features: that share the table: each has its own bags.
        buckets: of a table that takes any id, of which a shard has whole ones; 0: of rows.
        id_map_bytes: host memory of the map from ids to rows, per row.
        host_dtype: of cached rows in host memory; None: as `dtype`, which slots have.
        full_share: share of int8 rows that are float32 there.
    """

    table: str
    rows: int
    dim: int
    dtype: Literal["fp32", "fp16"] = "fp32"
    state_bytes: int = 0
    state_bytes_per_column: int = 0
    group: str = ""
    is_sequence: bool = False
    num_features: int = 1
    buckets: int = 0
    id_map_bytes: int = 0
    host_dtype: SmallType | None = None
    full_share: float = 0.0

    def weight_bytes(self, columns: int | None = None) -> int:
        """Return the bytes of a row's weights, with so many columns (default: all)."""
        return _ITEM_BYTES[self.dtype] * (self.dim if columns is None else columns)

    def optimizer_bytes(self, columns: int | None = None) -> int:
        """Return the bytes of a row's optimizer state."""
        return self.state_bytes + self.state_bytes_per_column * (self.dim if columns is None else columns)

    def row_bytes(self, columns: int | None = None) -> int:
        """Return the bytes of a row's payload: weights and optimizer state."""
        return self.weight_bytes(columns) + self.optimizer_bytes(columns)

    def host_weight_bytes(self, columns: int | None = None) -> int:
        """Return the bytes of a row's weights in host memory, and over the link to it, of a cached table; full rows of
        int8 tables as the others.

        >>> TableSize("t0", rows=100, dim=16, host_dtype="int8").host_weight_bytes()
        18
        """
        if self.host_dtype is None:
            return self.weight_bytes(columns)
        return small_row_bytes(self.host_dtype, self.dim if columns is None else columns)

    def full_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes that the full ones of so many rows take in host memory besides."""
        return 4 * columns * round(self.full_share * rows) if self.host_dtype == "int8" else 0


@dataclass(frozen=True)
class ModelSize:
    """Tables of a model, and sizes of its dense part.

    >>> ModelSize((TableSize("t0", rows=100, dim=16, state_bytes=4),), 0, 0, 0, 0).table_bytes
    6800

    Attributes:
        tables: in the model's order.
        dense_flops_per_sample: floating-point operations of forward and backward.
        dense_state_bytes: gradients and optimizer states of the dense parameters.
        activation_bytes_per_sample: kept by the dense forward for the backward.
        input_bytes_per_sample: of dense features and labels.
        products: input and output width of each layer that multiplies by a matrix; none: not known one by one.
        passes: numbers of a sample that each kernel over activations reads and writes, forward and backward.
    """

    tables: tuple[TableSize, ...]
    dense_flops_per_sample: float
    dense_parameter_bytes: int
    dense_state_bytes: int
    activation_bytes_per_sample: float
    input_bytes_per_sample: float = 0.0
    products: tuple[tuple[int, int], ...] = ()
    passes: tuple[float, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return sum(table.rows for table in self.tables)

    @property
    def table_bytes(self) -> int:
        """Weights and optimizer states of all tables."""
        return sum(table.rows * table.row_bytes() for table in self.tables)


@dataclass(frozen=True)
class PlacedShard:
    """One shard of a table on one rank.

    Attributes:
        row_start, row_stop: its rows.
        columns: number of its columns.
        sharding: TorchRec's sharding type.
        kernel: "cached", "device" or "replicated".
        exchange: "pooled" or "rows".
    """

    table: TableSize
    rank: int
    row_start: int
    row_stop: int
    columns: int
    sharding: Sharding
    kernel: Kernel
    exchange: Exchange = "pooled"

    @property
    def rows(self) -> int:
        """Rows of the shard."""
        return self.row_stop - self.row_start

    @property
    def row_bytes(self) -> int:
        """Row payload of the shard's columns, in bytes."""
        return self.table.row_bytes(self.columns)

    @property
    def slot_row_bytes(self) -> int:
        """The same in a slot of a cached shard, with what a slot has beside its row."""
        return self.row_bytes + (0 if self.table.host_dtype is None else MARK_BYTES)

    @property
    def host_row_bytes(self) -> int:
        """The same in host memory, where a cached row is moved to and from."""
        return self.table.host_weight_bytes(self.columns) + self.table.optimizer_bytes(self.columns)

    @property
    def host_bytes(self) -> int:
        """Host memory of the rows of a cached shard, in bytes."""
        return self.rows * self.host_row_bytes + self.table.full_bytes(self.rows, self.columns)

    @property
    def pool(self) -> PoolKey:
        """Key of the cache that a cached shard shares with others."""
        table = self.table
        return PoolKey(self.rank, self.sharding, self.columns, table.dtype, self.exchange, table.group)


class RankLayout(Protocol):
    """Ranks in all, and per node: of a `Plan`, or of a `RunShape`, whichever the caller has."""

    @property
    def world_size(self) -> int: ...

    @property
    def ranks_per_node(self) -> int: ...


def place_shards(model: ModelSize, tables: Sequence[TablePlacement], ranks: RankLayout) -> list[PlacedShard]:
    """Return all shards of all ranks, in the order of the model's tables; a replicated table has one on every rank."""
    placements = {placement.table: placement for placement in tables}
    found = []
    for size in model.tables:
        placement = placements[size.table]
        kind = (placement.sharding, placement.kernel, placement.exchange)
        if placement.kernel == "replicated":
            found += [PlacedShard(size, rank, 0, size.rows, size.dim, *kind) for rank in range(ranks.world_size)]
        found += [
            PlacedShard(size, shard.rank, shard.first_row, shard.first_row + shard.rows, shard.columns, *kind)
            for shard in shards_of(placement, ranks.ranks_per_node)
        ]
    return found


def by_rank(shards: Sequence[PlacedShard], world_size: int) -> list[list[PlacedShard]]:
    """Group shards by rank."""
    found: list[list[PlacedShard]] = [[] for _ in range(world_size)]
    for shard in shards:
        found[shard.rank].append(shard)
    return found


def by_pool(shards: Sequence[PlacedShard]) -> dict[PoolKey, list[PlacedShard]]:
    """Group cached shards by the cache that they share: see `embershard.sharding.shards.pools_of`."""
    found: dict[PoolKey, list[PlacedShard]] = {}
    for shard in shards:
        if shard.kernel == "cached":
            found.setdefault(shard.pool, []).append(shard)
    return dict(sorted(found.items()))


def names_in_pool(members: Iterable[PlacedShard]) -> tuple[str, ...]:
    """Return the tables of the shards that share a cache, as a plan's pool names them."""
    return tuple(sorted({shard.table.table for shard in members}))


class ModeMemory(Protocol):
    """Device memory of each rank that a mode takes beside caches and tables."""

    def device_bytes(self, model: ModelSize, device: str) -> dict[str, int]:
        """Return the bytes on "cpu" or "cuda", by what for; no name of `RankMemory`'s is among them."""
