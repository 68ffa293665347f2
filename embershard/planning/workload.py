"""What is planned: a model, its data and its run, and what each shard of a table gives its rank to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embershard.cache.next_use import pinned_tables
from embershard.errors import ShardingError
from embershard.frequency import DataStatistics, SampledTrace
from embershard.frequency.curves import distinct_rows, touched
from embershard.lazy_names import named
from embershard.planning.cost import work
from embershard.planning.cost.dense import dense_work
from embershard.planning.cost.rates import Rates, StepWork
from embershard.planning.simulate.file_tier import FileTraffic, Levels
from embershard.planning.simulate.pool_report import RowRange, ShardReport
from embershard.planning.simulate.replay import StepCut, replay_pool
from embershard.planning.simulate.steady_state import steady_state
from embershard.sharding.memory_model import RankMemory, rank_memory
from embershard.sharding.run_shape import RunShape
from embershard.sharding.sharding_types import sharding_type
from embershard.sharding.shards import Exchange, PoolKey, TablePlacement, shards_of
from embershard.sharding.sizes import ModelSize, PlacedShard, TableSize, by_pool, by_rank, place_shards

#: A replay of fewer batches than this says too little; then counts alone must do.
LEAST_REPLAYED_STEPS = 12
#: A trace of so large a share of the rows is complete: constant rows may be missing from it.
COMPLETE = 0.999
_MOST_REPLAYED_STEPS = 4000  # over all pools of a plan
_NONE = np.empty(0, np.int64)


class DrawnLayers(NamedTuple):
    """Operations of a sample in the dense layers and bytes that it keeps, by the lengths of the data's histories, of
    the rank that all wait for; and a sentence on it."""

    flops: float
    kept_bytes: float
    note: str


@dataclass(frozen=True, eq=False)
class Workload:
    """A model, its data and its run. `drawn`: times of its dense layers, in place of the model's sizes.

    Raises:
        ShardingError: the profile does not know a table, or knows it with another number of rows.
    """

    model: ModelSize
    data: DataStatistics
    shape: RunShape
    drawn: DrawnLayers | None = None

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
        """Return the expected distinct rows of a table in the pieces of one rank's batch, added up."""
        pieces = self.shape.pieces
        return pieces * distinct_rows(self.data.tables[table], self.shape.batch_size / pieces, self.data.num_samples)

    def vectors_per_sample(self, table: TableSize) -> float | None:
        """Return the embeddings of a sequence that travel for a sample: one for each lookup; None: a pooled one."""
        return self.lookups_per_sample[table.table] if table.is_sequence else None

    def distinct_variance(self, table: str) -> float:
        """Return the variance of the distinct rows of a rank's whole batch, as if rows were looked up independently."""
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
        part, trace = RowRange.of(shard), self.data.trace
        if part not in self._shares:
            self._shares[part] = part.num_rows / shard.table.rows
            if trace is not None and self.data.tables[part.table].num_lookups:
                rows, lookups = trace.tables[part.table].rows, trace.constant_lookups.get(part.table, _NONE)
                constant = part.has(trace.constant_rows.get(part.table, _NONE))
                everything = len(rows) / trace.rate + lookups.sum()
                if everything:
                    found = part.has(rows).sum() / trace.rate + lookups[constant].sum()
                    self._shares[part] = float(found / everything)
        return self._shares[part]

    @cached_property
    def _shares(self) -> dict[RowRange, float]:
        return {}

    def block_shares(self, table: str, bounds: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the shares of a table's lookups that go to its blocks of rows, [N], from their bounds [N + 1]."""
        trace = self.data.trace
        if len(bounds) > 2 and trace is not None and self.data.tables[table].num_lookups:
            constant = trace.constant_rows.get(table, _NONE), trace.constant_lookups.get(table, _NONE)
            found = np.histogram(trace.tables[table].rows, bounds)[0] / trace.rate
            found = found + np.histogram(constant[0], bounds, weights=constant[1])[0]
            if found.sum():
                return np.asarray(found / found.sum(), float)
        return np.diff(bounds) / bounds[-1]

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
            batches, rows = self._looked_up(shard.table, trace)
            num_batches = -(-trace.num_samples // self.shape.global_batch_size)
            counts = np.bincount(batches[part.has(rows)], minlength=num_batches)
            self._distinct[part] = counts + int(part.has(trace.constant_rows.get(part.table, _NONE)).sum())
        return self._distinct[part]

    def _looked_up(self, size: TableSize, trace: SampledTrace) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the batches and the rows of a table that each looks up, once: [N] and [N]."""
        if size.table not in self._pairs:
            table, batch = trace.tables[size.table], self.shape.global_batch_size
            pairs = np.sort(table.samples // batch * size.rows + table.rows)  # `np.unique` takes 3 times as long
            batches, rows = np.divmod(pairs[np.diff(pairs, prepend=-1) > 0], size.rows)
            self._pairs[size.table] = batches, rows
        return self._pairs[size.table]

    @cached_property
    def _pairs(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
        return {}

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

    def memory(self, shards: Sequence[PlacedShard], slots: Mapping[PoolKey, int]) -> RankMemory:
        """Return the memory of a rank with these shards, and caches with so many slots: see `rank_memory`."""
        lookups = [self.lookups_per_step(shard) for shard in shards]
        return rank_memory(self.model, shards, slots, self.shape, lookups, sum(self.lookups_per_sample.values()))

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

    def counted_reports(
        self, shards: Sequence[PlacedShard], num_slots: int, *, of_new_data: bool = False
    ) -> tuple[ShardReport, ...]:
        """Return what a pool does per step in the long run, from counts alone: fast, and for any batch. `of_new_data`:
        training sees other samples than the counted ones, whatever the profile says, and the cache grows until a batch
        of them fits."""
        found = steady_state(
            [self.data.tables[shard.table.table] for shard in shards],
            [RowRange.of(shard) for shard in shards],
            [self.share_of_lookups(shard) for shard in shards],
            self.data.num_samples,
            num_slots,
            self.shape.global_batch_size,
            self.shape.cache.policy,
            is_sample=self.is_sample or of_new_data,
            grows=of_new_data,
            ahead=self.shape.cache.ahead if of_new_data else None,
            pieces=self.shape.pieces,
        )
        return tuple(self.as_exchanged(*each) for each in zip(shards, found.shards, strict=True))

    def as_exchanged(self, shard: PlacedShard, report: ShardReport) -> ShardReport:
        """Return a report of all lookups as one of the lookups that arrive: where distinct rows are exchanged, one per
        row and rank. A row that is missing is taken to be looked up by one rank."""
        if shard.exchange == "pooled":
            return report
        everywhere = self.shape.world_size * self.distinct_per_rank(shard.table.table)
        lookups = everywhere * self.share_of_lookups(shard)
        missed = min(lookups, report.unique_ids - report.hits_unique)
        return replace(report, lookups=lookups, hits_lookups=lookups - missed)

    def resident_report(self, shard: PlacedShard) -> ShardReport:
        """Return the report of a shard that is whole on the device: every id is found. A replicated shard serves its
        own rank only."""
        shape = replace(self.shape, world_size=1) if shard.kernel == "replicated" else self.shape
        (report,) = replace(self, shape=shape).counted_reports([shard], 2 * shard.table.rows)
        return replace(report, hits_unique=report.unique_ids, hits_lookups=report.lookups, fills=0.0, write_backs=0.0)

    def shard_work(self, shard: PlacedShard, report: ShardReport) -> StepWork:
        """Return the work that one shard gives its rank in a step, but for the gradients of replicated ones."""
        shape, size = self.shape, shard.table
        per_sample = self.lookups_per_sample[size.table]
        if shard.kernel == "replicated":
            return StepWork(embedding_bytes=self._embedding_bytes(shard, report))
        cached = shard.kernel == "cached"
        distinct = self.distinct_per_rank(size.table) if shard.exchange == "rows" else None
        every = shape.world_size * (per_sample * shape.batch_size if distinct is None else distinct)
        exchanged = work.exchanged_bytes(
            shard.sharding,
            batch_size=shape.batch_size,
            world_size=shape.world_size,
            ids_per_sample=per_sample,
            columns=shard.columns,
            rank_share=report.lookups / max(every, 1e-300),
            distinct_ids=distinct,
            number_bytes=shape.number_bytes,
            vectors_per_sample=self.vectors_per_sample(size),
            num_features=size.num_features,
            ranks_per_node=shape.ranks_per_node,
            pieces=shape.pieces,
        )
        sent, to_nodes = exchanged.in_node, exchanged.to_nodes
        return StepWork(
            embedding_bytes=self._embedding_bytes(shard, report),
            planned_ids=report.lookups if cached else 0.0,
            unique_ids=report.unique_ids if cached else 0.0,
            fills=report.fills,
            write_backs=report.write_backs,
            bytes_to_device=report.fills * shard.host_row_bytes,
            bytes_to_host=report.write_backs * shard.host_row_bytes,
            sent_id_bytes=sent.ids,
            sent_embedding_bytes=sent.embeddings,
            sent_gradient_bytes=sent.gradients,
            network_id_bytes=to_nodes.ids,
            network_embedding_bytes=to_nodes.embeddings,
            network_gradient_bytes=to_nodes.gradients,
        )

    def _embedding_bytes(self, shard: PlacedShard, report: ShardReport) -> float:
        """Return the bytes of the lookups of a shard, and of its update. That looks the rows of several pieces up once
        more: a third of a step's bytes."""
        shape, size = self.shape, shard.table
        again = 4 / 3 if shape.pieces > 1 else 1.0
        if shard.kernel == "replicated" and shape.world_size > 1:
            of_all = distinct_rows(self.data.tables[size.table], shape.global_batch_size, self.data.num_samples)
            ids, own = (report.lookups, self._own_rows(size.table), of_all), size.num_features * shape.batch_size
            return again * work.copies_embedding_bytes(*ids, own, size, shape.world_size, gpu=shape.device == "cuda")
        if shape.device == "cpu":
            return again * work.embedding_bytes(report.lookups, size, shard.columns)
        vectors: float = size.num_features * shape.global_batch_size
        if shard.exchange == "rows" or size.is_sequence:
            vectors = report.lookups
        return again * work.gpu_embedding_bytes(report.lookups, report.unique_ids, vectors, size, shard.columns)

    def layers_work(self, rates: Rates) -> StepWork:
        """Return the work of a rank's dense layers for its samples."""
        shape, model = self.shape, self.model
        if self.drawn is not None:
            flops, kept_bytes, _ = self.drawn
            model = replace(model, dense_flops_per_sample=flops, activation_bytes_per_sample=kept_bytes)
        if shape.device == "cuda":
            of_piece = dense_work(model, shape.batch_size / shape.pieces, shape.activation_bytes, rates)
            return of_piece.scaled(shape.pieces)
        return StepWork(
            dense_flops=model.dense_flops_per_sample * shape.batch_size,
            activation_bytes=model.activation_bytes_per_sample * shape.batch_size,
        )

    def rank_work(
        self,
        shards: Sequence[PlacedShard],
        reports: Sequence[ShardReport],
        num_groups: int,
        layers: StepWork,
    ) -> StepWork:
        """Return the work of a whole rank's step: its shards, its dense layers, its samples, and its part in the
        exchange of so many groups of tables, wherever these are."""
        shape, model = self.shape, self.model
        copies = [each for each in shards if each.kernel == "replicated"]
        widths = {shard.columns for shard in copies}
        sent = [self.copies_work([each.table.table for each in copies if each.columns == own], own) for own in widths]
        local = min(shape.ranks_per_node, shape.world_size)
        sizes = shape.pieces * work.sizes_bytes(num_groups, shape.world_size)
        sizes_away = sizes * (shape.world_size - local) / max(1, shape.world_size - 1)
        others = StepWork(
            update_bytes=model.dense_parameter_bytes,
            all_reduce_bytes=work.all_reduce_bytes(model.dense_parameter_bytes, shape.all_ranks),
            sent_id_bytes=sizes - sizes_away,
            network_id_bytes=sizes_away,
            num_collectives=work.num_collectives(num_groups, shape.world_size, len(widths), shape.pieces),
            input_seconds=(self.data.read_seconds_per_sample or 0.0) * shape.batch_size,
            more_pieces=shape.pieces - 1,
        )
        of_shards = [self.shard_work(*pair) for pair in zip(shards, reports, strict=True)]
        if shape.groups > 1:
            of_shards.append(named("embershard.extras.groups.predicted:sync_work")(self, shards))
        return StepWork.total([layers, others, *sent, *of_shards])

    def copies_work(self, tables: Sequence[str], columns: int, *, at_least: bool = False) -> StepWork:
        """Return what a rank sends in a step for its copies of tables with so many columns: the gradients of its rows,
        to all others, on several nodes around a ring of all ranks. `at_least`: as if all ranks had as many rows."""
        shape = self.shape
        local = min(shape.ranks_per_node, shape.world_size) * shape.groups_per_node
        num_rows = sum(map(self._own_rows, tables))
        variance = 0.0 if at_least else sum(map(self.distinct_variance, tables))
        sent = work.copies_bytes(num_rows, variance, columns, shape.all_ranks)
        away = sent / local if shape.all_ranks > local else 0.0
        return StepWork(sent_gradient_bytes=sent - away, network_gradient_bytes=away)

    def _own_rows(self, table: str) -> float:
        """Return the expected distinct rows of a table in a rank's whole batch."""
        return distinct_rows(self.data.tables[table], self.shape.batch_size, self.data.num_samples)

    def row_ids(self, shards: Sequence[PlacedShard]) -> float:
        """Return the ids of a rank's samples in the tables that exchange distinct rows, wherever those tables are."""
        tables = {shard.table.table for shard in shards if shard.exchange == "rows"}
        return sum(self.lookups_per_sample[table] for table in tables) * self.shape.batch_size

    def pool_reports(
        self,
        shards: Sequence[PlacedShard],
        num_slots: int,
        replayed_steps: int,
        *,
        grows: bool = False,
        places: int | None = None,
    ) -> tuple[tuple[ShardReport, ...], int, FileTraffic | None]:
        """Return what a pool of `num_slots` does, per step, and its slots at the end: more where a batch did not fit;
        and with rows in a file, of which so many have `places` in memory, what is read from it and written to it.
        With 0 `replayed_steps`, counts alone tell; where the cache may grow (`grows`), it has room for a mean batch."""
        shape = self.shape
        levels = None if places is None else Levels.of(num_slots, places, shards[0].host_row_bytes)
        if not replayed_steps:
            counted = self.counted_reports(shards, num_slots)
            needed = math.ceil(sum(report.step_rows for report in counted))
            if grows and num_slots < needed:
                counted, num_slots = self.counted_reports(shards, needed), needed
            traffic: FileTraffic | None = None
            if levels is not None:
                traffic = levels.in_the_long_run(
                    sum(shard.rows for shard in shards),
                    lambda held: sum(report.fills for report in self.counted_reports(shards, held)),
                )
            return counted, num_slots, traffic
        trace = self.data.trace
        assert trace is not None, "nothing to replay"
        pinned = pinned_tables([shard.rows for shard in shards], num_slots)
        found = replay_pool(
            trace,
            [RowRange.of(shard) for shard in shards],
            num_slots,
            shape.global_batch_size,
            shape.cache_of_pieces,
            pinned_tables=[shards[number].table.table for number in pinned],
            num_steps=replayed_steps,
            levels=levels,
            cut=StepCut(shape.world_size, shape.pieces, is_distinct=shards[0].exchange == "rows"),
        )
        # In a small image of a cache one batch may fit by chance, or not: only a complete trace shows whether it does.
        is_complete = trace.rate >= COMPLETE
        slots = found.num_slots if is_complete else num_slots
        return found.over(shape.num_steps), slots, found.files_over(shape.num_steps)

    def exchange_bytes(self, table: str, sharding: str, columns: int, exchange: Exchange) -> float:
        """Return the bytes that all ranks together send in a step for shards of so many columns and all rows of a
        table: ids, embeddings and gradients."""
        shape = self.shape
        num_shards = sharding_type(sharding).row_blocks(shape.world_size, shape.ranks_per_node)
        of_shard = work.exchanged_bytes(
            sharding,
            batch_size=shape.batch_size,
            world_size=shape.world_size,
            ids_per_sample=self.lookups_per_sample[table],
            columns=columns,
            rank_share=1 / num_shards,
            distinct_ids=self.distinct_per_rank(table) if exchange == "rows" else None,
            number_bytes=shape.number_bytes,
            num_features=self.num_features[table],
            pieces=shape.pieces,
        )
        return num_shards * of_shard.in_all.in_training

    def exchange_of(self, table: str, sharding: str, columns: int) -> Exchange:
        """Return what a table exchanges with this sharding type: what the run's setting says; for "auto" what takes
        fewer bytes."""
        wanted = self.shape.exchange
        if wanted == "pooled" or not sharding_type(sharding).exchanges_rows or self.shape.world_size == 1:
            return "pooled"
        if wanted == "rows":
            return "rows"
        rows = self.exchange_bytes(table, sharding, columns, "rows")
        return "rows" if rows < self.exchange_bytes(table, sharding, columns, "pooled") else "pooled"

    def with_exchange(self, table: TablePlacement) -> TablePlacement:
        """Return the placement with what its table exchanges: with unequal columns pooled embeddings."""
        if table.columns:
            return replace(table, exchange="pooled")
        shards = shards_of(table, self.shape.ranks_per_node)
        columns = shards[0].columns if shards else table.dim
        return replace(table, exchange=self.exchange_of(table.table, table.sharding, columns))

    def fixed_bytes(self, shards: Sequence[PlacedShard]) -> int:
        """Return the device memory of a rank for all but its caches."""
        return sum(self.memory(shards, slots={}).device.values())


@dataclass(frozen=True)
class Layout:
    """Placements of all tables of a workload, in the model's order, and the shards of all ranks that follow."""

    workload: Workload
    tables: Sequence[TablePlacement]

    @cached_property
    def shards(self) -> list[PlacedShard]:
        """Shards of all ranks, in the order of the tables."""
        return place_shards(self.workload.model, self.tables, self.workload.shape)

    @cached_property
    def of_ranks(self) -> list[list[PlacedShard]]:
        """Shards of each rank."""
        return by_rank(self.shards, self.workload.shape.world_size)

    @cached_property
    def pools_of_ranks(self) -> list[dict[PoolKey, list[PlacedShard]]]:
        """Cached shards of each rank by the cache that they share."""
        return [by_pool(here) for here in self.of_ranks]

    @cached_property
    def pools(self) -> dict[PoolKey, list[PlacedShard]]:
        """Cached shards of all ranks by the cache that they share."""
        return {key: members for own in self.pools_of_ranks for key, members in own.items()}

    @cached_property
    def places(self) -> dict[PoolKey, int]:
        """Rows of each pool that are in host memory at a time; empty where all are."""
        return self.workload.shape.home.places(self.pools)

    def busiest_blocks(self) -> dict[str, float]:
        """Return the lookups of the busiest block of each table that is cut by rows, relative to its rows."""
        worst: dict[str, float] = {}
        for shard in self.shards:
            part = shard.rows / shard.table.rows
            if 0 < part < 1:
                times = self.workload.share_of_lookups(shard) / part
                worst[shard.table.table] = max(times, worst.get(shard.table.table, 0.0))
        return worst
