"""A model, its data and its run: placements are judged by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embershard.cache.config import MapKind
from embershard.errors import ShardingError
from embershard.frequency import DataStatistics, SampledTrace
from embershard.frequency.curves import distinct_rows, touched
from embershard.planning.simulate.pool_report import RowRange
from embershard.planning.simulate.replay import ReplaySettings
from embershard.planning.simulate.step_replay import Pipeline
from embershard.sharding import memory_model
from embershard.sharding.config import ExchangeChoice
from embershard.sharding.memory_model import MemorySettings
from embershard.sharding.sizes import ModelSize, PlacedShard, TableSize

#: A replay of fewer batches than this says too little; then counts alone must do.
LEAST_REPLAYED_STEPS = 12
#: A trace of so large a share of the rows is complete: constant rows may be missing from it.
COMPLETE = 0.999
_MOST_REPLAYED_STEPS = 4000  # over all pools of a plan
_NONE = np.empty(0, np.int64)


class PoolKey(NamedTuple):
    """Cached shards with equal keys share a cache."""

    rank: int
    sharding: str
    columns: int
    dtype: str
    exchange: str
    group: str


@dataclass(frozen=True)
class RunShape:
    """A run: the ranks, the batches and the caches' settings.

    Attributes:
        world_size, ranks_per_node: ranks in all, and per node.
        batch_size: samples per rank and step.
        device: "cpu" or "cuda".
        cache: the rows that the caches keep, and how far ahead is looked.
        num_steps: steps of the run, where they are known.
        number_bytes: bytes of one number of an embedding, and of its gradient, between ranks.
        slot_map: kind of the caches' maps; None where each pool's size decides.
        exchange: what travels between ranks; "auto": of each table what takes fewer bytes.
        hot_bytes: memory of each rank for copies of hot rows.
        cores_per_node: that a CPU's ranks share; None: every rank has its own.
    """

    world_size: int
    ranks_per_node: int
    batch_size: int
    device: Literal["cpu", "cuda"]
    cache: ReplaySettings
    num_steps: int | None = None
    number_bytes: tuple[float, float] = (4, 4)
    slot_map: MapKind | None = None
    exchange: ExchangeChoice = "pooled"
    hot_bytes: int = 0
    cores_per_node: int | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples of a step, over all ranks."""
        return self.batch_size * self.world_size

    @property
    def pipeline(self) -> Pipeline:
        """What decides which parts of a step overlap."""
        ahead = (self.cache.lookahead, self.cache.prefetch)
        return Pipeline(self.device, min(self.ranks_per_node, self.world_size), self.cores_per_node, *ahead)

    @property
    def memory(self) -> MemorySettings:
        """The settings that memory depends on."""
        cache = self.cache
        return MemorySettings(
            cache.policy,
            cache.lookahead,
            cache.prefetch,
            self.batch_size,
            self.slot_map,
            self.device,
            self.hot_bytes,
        )


@dataclass(frozen=True, eq=False)
class Workload:
    """A model, its data and its run.

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

    @cached_property
    def num_features(self) -> dict[str, int]:
        """Features that share a table, by its name."""
        return {table.table: table.num_features for table in self.model.tables}

    def distinct_per_rank(self, table: str) -> float:
        """Return the expected distinct rows of a table in one rank's batch."""
        return distinct_rows(self.data.tables[table], self.shape.batch_size, self.data.num_samples)

    def vectors_per_sample(self, table: TableSize) -> float | None:
        """Return the embeddings of a sequence that travel for a sample: one for each lookup; None: a pooled one."""
        return self.lookups_per_sample[table.table] if table.is_sequence else None

    def distinct_variance(self, table: str) -> float:
        """Return the variance of that number, as if rows were looked up independently of each other."""
        histogram = self.data.tables[table].histogram
        found = touched(histogram, self.shape.batch_size / max(1, self.data.num_samples))
        return float((found * (1 - found / np.maximum(histogram.rows, 1e-9))).sum())

    @property
    def is_sample(self) -> bool:
        """True where training sees other samples than those that were counted."""
        return self.data.share_of_samples < 0.999

    def share_of_lookups(self, shard: PlacedShard) -> float:
        """Return the share of a table's lookups that go to a shard's rows, as the data say."""
        if shard.rows == shard.table.rows:
            return 1.0
        rows = RowRange.of(shard)
        if rows not in self._shares:
            self._shares[rows] = self._count_share(rows, shard.table.rows)
        return self._shares[rows]

    @cached_property
    def _shares(self) -> dict[RowRange, float]:
        return {}

    def _count_share(self, part: RowRange, num_rows: int) -> float:
        trace = self.data.trace
        if trace is not None and self.data.tables[part.table].num_lookups:
            rows = trace.tables[part.table].rows
            lookups = trace.constant_lookups.get(part.table, _NONE)
            constant = part.has(trace.constant_rows.get(part.table, _NONE))
            everything = len(rows) / trace.rate + lookups.sum()
            if everything:
                return float((part.has(rows).sum() / trace.rate + lookups[constant].sum()) / everything)
        return part.num_rows / num_rows

    def most_unique_ids(self, shards: Sequence[PlacedShard]) -> int:
        """Return the most distinct rows of a batch, of all rows in these shards together; 0 where the trace does not
        follow all rows."""
        trace = self.data.trace
        if trace is None or trace.rate < COMPLETE or trace.num_samples < self.shape.global_batch_size or not shards:
            return 0
        return int(np.sum([self._unique_ids(shard, trace) for shard in shards], axis=0).max())

    def _unique_ids(self, shard: PlacedShard, trace: SampledTrace) -> NDArray[np.int64]:
        """Return the distinct rows of a shard in each batch of the trace; constant rows are taken to be in all."""
        part = RowRange.of(shard)
        if part not in self._distinct:
            table, batch = trace.tables[part.table], self.shape.global_batch_size
            inside = part.has(table.rows)
            pairs = np.unique(table.samples[inside] // batch * shard.table.rows + table.rows[inside])
            counts = np.bincount(pairs // shard.table.rows, minlength=-(-trace.num_samples // batch))
            self._distinct[part] = counts + int(part.has(trace.constant_rows.get(part.table, _NONE)).sum())
        return self._distinct[part]

    @cached_property
    def _distinct(self) -> dict[RowRange, NDArray[np.int64]]:
        return {}

    def lookups_per_step(self, shard: PlacedShard) -> float:
        """Return the expected ids that arrive at a shard in a step: all lookups of its rows, or each distinct one once
        per rank. A replicated table serves its own rank only."""
        shape = self.shape
        if shard.exchange == "rows":
            return self.distinct_per_rank(shard.table.table) * shape.world_size * self.share_of_lookups(shard)
        samples = shape.batch_size if shard.kernel == "replicated" else shape.global_batch_size
        return self.lookups_per_sample[shard.table.table] * samples * self.share_of_lookups(shard)

    def step_bytes(self, shards: Sequence[PlacedShard]) -> dict[str, int]:
        """Return the device memory of a rank with these shards for its batches: see `memory_model.step_bytes`."""
        return memory_model.step_bytes(
            self.model,
            shards,
            [self.lookups_per_step(shard) for shard in shards],
            self.shape.memory,
            self.shape.world_size,
            sum(self.lookups_per_sample.values()),
        )

    def steps_to_replay(self, num_pools: int) -> int:
        """Return the steps to replay for each pool; 0: the trace has too few batches, counts alone must do."""
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
            table = shard.table
            key = PoolKey(shard.rank, shard.sharding, shard.columns, table.dtype, shard.exchange, table.group)
            found.setdefault(key, []).append(shard)
    return dict(sorted(found.items()))
