"""What placements are judged by: a model, its data, and how it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from embershard.cache.key_map import MapKind
from embershard.errors import ShardingError
from embershard.frequency import DataStatistics
from embershard.planning.simulate.replay import ReplaySettings
from embershard.sharding import memory_model
from embershard.sharding.memory_model import MemorySettings
from embershard.sharding.shards import TablePlacement, shards_of
from embershard.sharding.sizes import ModelSize, PlacedShard

#: A replay of fewer batches than this says too little; then counts alone must do.
LEAST_REPLAYED_STEPS = 12
#: A trace of so large a share of the rows is complete: constant rows may be missing from it.
COMPLETE = 0.999
_MOST_REPLAYED_STEPS = 4000  # over all pools of a plan
PoolKey = tuple[int, str, int, str]  # rank, sharding, columns, dtype


@dataclass(frozen=True)
class RunShape:
    """How a model is trained.

    Attributes:
        world_size, ranks_per_node: ranks in all, and per node.
        batch_size: samples per rank and step.
        device: "cpu" or "cuda".
        cache: which rows the caches keep, and how far ahead is looked.
        num_steps: of the run, where that is known.
        pooled_number_bytes: of one number of a pooled embedding between ranks, and of its gradient, together.
        slot_map: kind of the caches' maps; None where each pool's size decides.
    """

    world_size: int
    ranks_per_node: int
    batch_size: int
    device: Literal["cpu", "cuda"]
    cache: ReplaySettings
    num_steps: int | None = None
    pooled_number_bytes: float = 8
    slot_map: MapKind | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples of a step, over all ranks."""
        return self.batch_size * self.world_size

    @property
    def memory(self) -> MemorySettings:
        """What of it decides about memory."""
        cache = self.cache
        return MemorySettings(
            cache.policy, cache.lookahead, cache.prefetch, self.batch_size, self.slot_map, self.device
        )


@dataclass(frozen=True, eq=False)
class Workload:
    """A model, its data and how it is trained: what placements are judged by.

    Raises:
        ShardingError: the profile does not know a table, or knows it with another number of rows.
    """

    model: ModelSize
    data: DataStatistics
    shape: RunShape

    def __post_init__(self) -> None:
        for size in self.model.tables:
            known = self.data.tables.get(size.table)
            if known is None or known.num_rows != size.rows:
                has = "does not have it" if known is None else f"has it with {known.num_rows:,} rows"
                raise ShardingError(
                    f"table {size.table!r} has {size.rows:,} rows in the model; the profile {has}. Profile the data "
                    "again with this config (embershard profile --config)."
                )

    @cached_property
    def lookups_per_sample(self) -> dict[str, float]:
        """Mean lookups of a sample, by table."""
        return {name: t.num_lookups / max(1, self.data.num_samples) for name, t in self.data.tables.items()}

    @property
    def is_sample(self) -> bool:
        """Whether training sees other samples than those that were counted."""
        return self.data.share_of_samples < 0.999

    def share_of_lookups(self, shard: PlacedShard) -> float:
        """Which share of its table's lookups go to a shard's rows: all of them, or as the data say for its block."""
        if shard.rows == shard.table.rows:
            return 1.0
        key = (shard.table.table, shard.row_start, shard.row_stop)
        if key not in self._shares:
            self._shares[key] = self._count_share(shard)
        return self._shares[key]

    @cached_property
    def _shares(self) -> dict[tuple[str, int, int], float]:
        return {}

    def _count_share(self, shard: PlacedShard) -> float:
        trace, name = self.data.trace, shard.table.table
        if trace is None or not self.data.tables[name].num_lookups:
            return shard.rows / shard.table.rows
        rows = trace.tables[name].rows
        constant = trace.constant_rows.get(name, np.empty(0, np.int64))
        lookups = trace.constant_lookups.get(name, np.empty(0, np.int64))
        inside = _within(rows, shard).sum() / trace.rate + lookups[_within(constant, shard)].sum()
        everything = len(rows) / trace.rate + lookups.sum()
        return float(inside / everything) if everything else shard.rows / shard.table.rows

    def most_unique_ids(self, shards: Sequence[PlacedShard]) -> int:
        """Distinct rows of the batch that has most of them, of all rows in these shards together; 0 where the trace
        does not tell: it must follow all rows."""
        trace = self.data.trace
        if trace is None or trace.rate < COMPLETE or trace.num_samples < self.shape.global_batch_size or not shards:
            return 0
        return int(np.sum([self._unique_ids(shard) for shard in shards], axis=0).max())

    def _unique_ids(self, shard: PlacedShard) -> NDArray[np.int64]:
        """Distinct rows of a shard in each batch of the trace; constant rows are taken to be in all of them."""
        key = (shard.table.table, shard.row_start, shard.row_stop)
        if key not in self._distinct:
            trace = self.data.trace
            assert trace is not None, "a complete trace"
            table, name = trace.tables[shard.table.table], shard.table.table
            inside = _within(table.rows, shard)
            batches = table.samples[inside] // self.shape.global_batch_size
            pairs = np.unique(batches * shard.table.rows + table.rows[inside])
            count = -(-trace.num_samples // self.shape.global_batch_size)
            constant = _within(trace.constant_rows.get(name, np.empty(0, np.int64)), shard).sum()
            self._distinct[key] = np.bincount(pairs // shard.table.rows, minlength=count) + int(constant)
        return self._distinct[key]

    @cached_property
    def _distinct(self) -> dict[tuple[str, int, int], NDArray[np.int64]]:
        return {}

    def lookups_per_step(self, shard: PlacedShard) -> float:
        """Expected lookups of a shard's rows in a step; a replicated table serves its own rank only."""
        shape = self.shape
        samples = shape.batch_size if shard.kernel == "replicated" else shape.global_batch_size
        return self.lookups_per_sample[shard.table.table] * samples * self.share_of_lookups(shard)

    def step_bytes(self, shards: Sequence[PlacedShard]) -> dict[str, int]:
        """Device memory that a rank with these shards needs for its batches: see :func:`memory_model.step_bytes`."""
        return memory_model.step_bytes(
            self.model,
            shards,
            [self.lookups_per_step(shard) for shard in shards],
            self.shape.memory,
            self.shape.world_size,
            sum(self.lookups_per_sample.values()),
        )

    def steps_to_replay(self, num_pools: int) -> int:
        """Batches of the trace that each pool is replayed over; 0: too few, counts alone must do."""
        trace = self.data.trace
        if trace is None:
            return 0
        available = trace.num_samples // self.shape.global_batch_size
        if available < LEAST_REPLAYED_STEPS:
            return 0
        is_whole_epoch = not self.is_sample and trace.num_samples == self.data.num_samples
        wanted = self.shape.num_steps or available
        possible = wanted if is_whole_epoch else min(wanted, available)
        return min(possible, max(LEAST_REPLAYED_STEPS, _MOST_REPLAYED_STEPS // max(1, num_pools)))


def _within(rows: NDArray[np.int64], shard: PlacedShard) -> NDArray[np.bool_]:
    return (rows >= shard.row_start) & (rows < shard.row_stop)


def place_shards(model: ModelSize, tables: Sequence[TablePlacement], shape: RunShape) -> list[PlacedShard]:
    """All shards on all ranks, in the order of the model's tables; a replicated table has one on every rank."""
    placements = {placement.table: placement for placement in tables}
    found = []
    for size in model.tables:
        placement = placements[size.table]
        if placement.kernel == "replicated":
            found += [
                PlacedShard(size, rank, 0, size.rows, size.dim, placement.sharding, placement.kernel)
                for rank in range(shape.world_size)
            ]
        for shard in shards_of(placement, shape.ranks_per_node):
            stop = shard.first_row + shard.rows
            found.append(
                PlacedShard(
                    size, shard.rank, shard.first_row, stop, shard.columns, placement.sharding, placement.kernel
                )
            )
    return found


def by_rank(shards: Sequence[PlacedShard], world_size: int) -> list[list[PlacedShard]]:
    """Each rank's shards."""
    found: list[list[PlacedShard]] = [[] for _ in range(world_size)]
    for shard in shards:
        found[shard.rank].append(shard)
    return found


def pools(shards: Sequence[PlacedShard]) -> dict[PoolKey, list[PlacedShard]]:
    """The shards that share a cache: see :func:`embershard.sharding.shards.pools_of`."""
    found: dict[PoolKey, list[PlacedShard]] = {}
    for shard in shards:
        if shard.kernel == "cached":
            found.setdefault((shard.rank, shard.sharding, shard.columns, shard.table.dtype), []).append(shard)
    return dict(sorted(found.items()))
