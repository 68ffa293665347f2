"""Predicts hit rates, bytes and seconds per rank of a placement, before anything is built."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from embershard.cache.file.file_counts import FILE_COUNTS
from embershard.cache.file.places import leaving_together
from embershard.cache.file.sizes import page_bytes_for
from embershard.cache.next_use import pinned_tables
from embershard.cache.statistics import CacheReport
from embershard.planning.cost import work
from embershard.planning.cost.dense import dense_work
from embershard.planning.cost.rates import Rates, StepWork, step_parts
from embershard.planning.request import COMPLETE, Workload
from embershard.planning.simulate.file_tier import FileTraffic, Levels, expected_pages
from embershard.planning.simulate.pool_report import RowRange, ShardReport
from embershard.planning.simulate.replay import replay_pool
from embershard.planning.simulate.steady_state import steady_state
from embershard.planning.simulate.step_replay import Pipeline, StepReplay, replay_steps
from embershard.sharding import memory_model
from embershard.sharding.plan import PoolPlacement, Prediction, RankPrediction, TablePlacement, TablePrediction
from embershard.sharding.shards import PoolKey
from embershard.sharding.sizes import PlacedShard, by_pool, by_rank, place_shards


def pool_reports(
    workload: Workload,
    shards: Sequence[PlacedShard],
    num_slots: int,
    replayed_steps: int,
    *,
    grows: bool = False,
    places: int | None = None,
) -> tuple[tuple[ShardReport, ...], int, FileTraffic | None]:
    """Return what a pool of `num_slots` does, per step, and its slots at the end: more where a batch did not fit; and
    with rows in a file, of which so many have `places` in memory, what is read from it and written to it.
    With 0 `replayed_steps`, counts alone tell; where the cache may grow (`grows`), it has room for a mean batch."""
    shape = workload.shape
    rows_per_page = 1 if places is None else page_bytes_for(row := shards[0].host_row_bytes) // row
    if not replayed_steps:
        counted = counted_reports(workload, shards, num_slots)
        needed = math.ceil(sum(report.unique_ids for report in counted))
        if grows and num_slots < needed:
            counted, num_slots = counted_reports(workload, shards, needed), needed
        return counted, num_slots, None if places is None else _counted_traffic(workload, shards, places, rows_per_page)
    trace = workload.data.trace
    assert trace is not None, "nothing to replay"
    pinned = pinned_tables([shard.rows for shard in shards], num_slots)
    found = replay_pool(
        trace,
        [RowRange.of(shard) for shard in shards],
        num_slots,
        shape.global_batch_size,
        shape.cache,
        pinned_tables=[shards[number].table.table for number in pinned],
        num_steps=replayed_steps,
        rank_batch_size=shape.batch_size if shards[0].exchange == "rows" else None,
        levels=None if places is None else Levels(num_slots, places, rows_per_page),
    )
    # In a small image of a cache one batch may fit by chance, or not: only a complete trace shows whether it does.
    is_complete = trace.rate >= COMPLETE
    slots = found.num_slots if is_complete else num_slots
    return found.over(shape.num_steps), slots, found.files_over(shape.num_steps)


def _counted_traffic(workload: Workload, shards: Sequence[PlacedShard], places: int, rows_per_page: int) -> FileTraffic:
    """Return what is read from a file and written to it per step, in the long run, from counts alone: what a cache with
    a slot for each place would fill. As many rows leave memory, a sixteenth of it together."""
    num_rows = sum(shard.rows for shard in shards)
    if places >= num_rows:
        return FileTraffic(steps=1.0)
    num_pages, together = num_rows / rows_per_page, leaving_together(places)
    held = max(1, places - together // 2)  # on the mean: as many places are free after rows have left
    rows = sum(report.fills for report in counted_reports(workload, shards, held))
    written = rows / together * expected_pages(together, num_pages)
    patched = written if rows_per_page > 1 else 0.0
    return FileTraffic(1.0, 0.0, rows, expected_pages(rows, num_pages), rows, written, patched)


def counted_reports(
    workload: Workload, shards: Sequence[PlacedShard], num_slots: int, *, of_new_data: bool = False
) -> tuple[ShardReport, ...]:
    """Return what a pool does per step in the long run, from counts alone: fast, and for any batch. `of_new_data`:
    training sees other samples than the counted ones, whatever the profile says, and the cache grows until a batch of
    them fits."""
    in_slots = functools.partial(
        steady_state,
        [workload.data.tables[shard.table.table] for shard in shards],
        [RowRange.of(shard) for shard in shards],
        [workload.share_of_lookups(shard) for shard in shards],
        workload.data.num_samples,
        global_batch_size=workload.shape.global_batch_size,
        policy=workload.shape.cache.policy,
        is_sample=workload.is_sample or of_new_data,
    )
    found = in_slots(num_slots)
    if of_new_data and found.grew:
        found = in_slots(math.ceil(sum(shard.unique_ids for shard in found.shards)))
    return tuple(as_exchanged(workload, *each) for each in zip(shards, found.shards, strict=True))


def as_exchanged(workload: Workload, shard: PlacedShard, report: ShardReport) -> ShardReport:
    """Return a report of all lookups as one of the lookups that arrive: where distinct rows are exchanged, one per row
    and rank. A row that is missing is taken to be looked up by one rank."""
    if shard.exchange == "pooled":
        return report
    everywhere = workload.shape.world_size * workload.distinct_per_rank(shard.table.table)
    lookups = everywhere * workload.share_of_lookups(shard)
    missed = min(lookups, report.unique_ids - report.hits_unique)
    return replace(report, lookups=lookups, hits_lookups=lookups - missed)


def resident_report(workload: Workload, shard: PlacedShard) -> ShardReport:
    """Return the report of a shard that is whole on the device: every id is found. A replicated shard serves its own
    rank only."""
    if shard.kernel == "replicated":
        workload = replace(workload, shape=replace(workload.shape, world_size=1))
    (report,) = counted_reports(workload, [shard], 2 * shard.table.rows)
    return replace(report, hits_unique=report.unique_ids, hits_lookups=report.lookups, fills=0.0, write_backs=0.0)


def shard_work(workload: Workload, shard: PlacedShard, report: ShardReport) -> StepWork:
    """Return the work that one shard gives its rank in a step, but for the gradients of replicated ones."""
    shape, size = workload.shape, shard.table
    per_sample = workload.lookups_per_sample[size.table]
    if shard.kernel == "replicated":
        return StepWork(embedding_bytes=_embedding_bytes(workload, shard, report))
    cached = shard.kernel == "cached"
    distinct = workload.distinct_per_rank(size.table) if shard.exchange == "rows" else None
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
        vectors_per_sample=workload.vectors_per_sample(size),
        num_features=size.num_features,
        ranks_per_node=shape.ranks_per_node,
    )
    sent, to_nodes = exchanged.in_node, exchanged.to_nodes
    return StepWork(
        embedding_bytes=_embedding_bytes(workload, shard, report),
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


def _embedding_bytes(workload: Workload, shard: PlacedShard, report: ShardReport) -> float:
    """Return the bytes of the lookups of a shard, and of its update."""
    shape, size = workload.shape, shard.table
    if shape.device == "cpu":
        return work.embedding_bytes(report.lookups, size, shard.columns)
    vectors: float = size.num_features * (shape.batch_size if shard.kernel == "replicated" else shape.global_batch_size)
    if shard.exchange == "rows" or size.is_sequence:
        vectors = report.lookups
    return work.gpu_embedding_bytes(report.lookups, report.unique_ids, vectors, size, shard.columns)


def layers_work(workload: Workload, rates: Rates) -> StepWork:
    """Return the work of a rank's dense layers for its samples."""
    shape, model = workload.shape, workload.model
    if shape.device == "cuda":
        return dense_work(model, shape.batch_size, shape.activation_bytes, rates)
    return StepWork(
        dense_flops=model.dense_flops_per_sample * shape.batch_size,
        activation_bytes=model.activation_bytes_per_sample * shape.batch_size,
    )


def rank_work(
    workload: Workload,
    shards: Sequence[PlacedShard],
    reports: Sequence[ShardReport],
    num_groups: int,
    layers: StepWork,
) -> StepWork:
    """Return the work of a whole rank's step: its shards, its dense layers, its samples, and its part in the exchange
    of so many groups of tables, wherever these are."""
    shape, model = workload.shape, workload.model
    copies = work.copies_groups(shards)
    local = min(shape.ranks_per_node, shape.world_size)
    sizes = work.sizes_bytes(num_groups, shape.world_size)
    sizes_away = sizes * (shape.world_size - local) / max(1, shape.world_size - 1)
    of_copies = 0.0
    for columns in copies:
        tables = [shard.table.table for shard in shards if shard.kernel == "replicated" and shard.columns == columns]
        num_rows, variance = sum(map(workload.distinct_per_rank, tables)), sum(map(workload.distinct_variance, tables))
        of_copies += work.copies_bytes(num_rows, variance, columns, shape.world_size)
    copies_away = of_copies / local if shape.world_size > local else 0.0  # around a ring
    others = StepWork(
        update_bytes=model.dense_parameter_bytes,
        all_reduce_bytes=work.all_reduce_bytes(model.dense_parameter_bytes, shape.world_size),
        sent_id_bytes=sizes - sizes_away,
        network_id_bytes=sizes_away,
        sent_gradient_bytes=of_copies - copies_away,
        network_gradient_bytes=copies_away,
        num_collectives=work.num_collectives(num_groups, shape.world_size, len(copies)),
        input_seconds=(workload.data.read_seconds_per_sample or 0.0) * shape.batch_size,
    )
    return StepWork.total(
        [layers, others, *(shard_work(workload, *pair) for pair in zip(shards, reports, strict=True))]
    )


def _row_ids(workload: Workload, shards: Sequence[PlacedShard]) -> float:
    """Return the ids of a rank's samples in the tables that exchange distinct rows, wherever those tables are."""
    tables = {shard.table.table for shard in shards if shard.exchange == "rows"}
    return sum(workload.lookups_per_sample[table] for table in tables) * workload.shape.batch_size


@dataclass(frozen=True)
class _Simulated:
    """A shard, what happens to its rows, the same on new data in the long run, and the bytes that they take."""

    shard: PlacedShard
    report: ShardReport
    long_run: ShardReport | None
    device_bytes: float
    host_bytes: float


def predict(
    workload: Workload,
    tables: Sequence[TablePlacement],
    pools: Sequence[PoolPlacement],
    rates: Rates,
    *,
    from_counts: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Prediction:
    """Predict what training with this placement and these pools will do.

    Args:
        workload: model, data and run.
        tables: all tables of the model.
        pools: all pools of all ranks.
        rates: seconds per unit of work, of a rank of the machine.
        from_counts: do not replay the trace, and do not estimate the long run.
        progress: called with the number of pools done, and of all pools.
    """
    shape = workload.shape
    shards = place_shards(workload.model, tables, shape)
    steps = 0 if from_counts else workload.steps_to_replay(len(pools))
    simulated, slots, files = _simulate(workload, shards, pools, steps, not from_counts, progress)
    of_ranks = by_rank(shards, shape.world_size)
    own_ids, num_groups = _row_ids(workload, shards), len(work.exchange_groups(shards))
    layers = replace(layers_work(workload, rates), row_ids=own_ids)
    works = [
        rank_work(workload, here, [simulated[id(shard)].report for shard in here], num_groups, layers)
        for here in of_ranks
    ]
    works = [replace(own, moved_pages=files.get(rank, FileTraffic()).moved_pages) for rank, own in enumerate(works)]
    replayed = replay_steps(works, rates, Pipeline.of_run(shape))
    table_predictions: list[TablePrediction] = []
    for here in of_ranks:
        of_table: dict[str, list[_Simulated]] = {}
        for shard in here:
            of_table.setdefault(shard.table.table, []).append(simulated[id(shard)])
        table_predictions += [_table(workload, parts) for parts in of_table.values()]
    return Prediction(
        method="replay" if steps else "counts",
        num_steps=shape.num_steps or steps,
        step_seconds=replayed.step_seconds,
        samples_per_second=shape.global_batch_size / replayed.step_seconds if replayed.step_seconds else 0.0,
        bottleneck=replayed.bottleneck(replayed.slowest),
        tables=tuple(table_predictions),
        ranks=tuple(
            _rank(workload, rank, here, slots, works[rank], rates, replayed, files.get(rank))
            for rank, here in enumerate(of_ranks)
        ),
    )


def _simulate(
    workload: Workload,
    shards: Sequence[PlacedShard],
    pools: Sequence[PoolPlacement],
    steps: int,
    with_long_run: bool,
    progress: Callable[[int, int], None] | None,
) -> tuple[dict[int, _Simulated], dict[PoolKey, int], dict[int, FileTraffic]]:
    """Return every shard by its `id`, the slots that every pool has at the end, and what each rank reads from a file
    and writes to it in a step, where rows are in one: not from counts, by which placements are compared."""
    slots, places = memory_model.planned_slots(pools, shards), dict[PoolKey, int]()
    for here in by_rank(shards, workload.shape.world_size):
        places |= memory_model.pool_places(here, workload.shape)
    members_of, score_bytes = by_pool(shards), workload.shape.cache.policy.score_bytes
    found, files = dict[int, _Simulated](), dict[int, FileTraffic]()
    for done, (key, members) in enumerate(members_of.items(), start=1):
        in_memory = places.get(key)
        reports, slots[key], traffic = pool_reports(
            workload, members, slots[key], steps, grows=with_long_run, places=in_memory if with_long_run else None
        )
        if traffic is not None:
            files[key.rank] = files.get(key.rank, FileTraffic()) + traffic
        long_run: Sequence[ShardReport | None] = [None] * len(members)
        if with_long_run:
            long_run = counted_reports(workload, members, slots[key], of_new_data=True)
        memory = memory_model.pool_memory(members, workload.shape)
        for shard, report, later in zip(members, reports, long_run, strict=True):
            part = shard.rows / max(1, memory.rows)
            host = shard.host_bytes if in_memory is None else part * (in_memory + 1) * shard.host_row_bytes
            device = part * memory.map_bytes + report.held_rows * (memory.slot_bytes - memory.ranking_bytes)
            found[id(shard)] = _Simulated(shard, report, later, device, host + score_bytes * shard.rows)
        if progress is not None:
            progress(done, len(members_of))
    for shard in shards:
        if shard.kernel != "cached":
            report = resident_report(workload, shard)
            found[id(shard)] = _Simulated(shard, report, report, shard.rows * shard.row_bytes, 0)
    return found, slots, files


def _rank(
    workload: Workload,
    rank: int,
    shards: Sequence[PlacedShard],
    slots: Mapping[PoolKey, int],
    its_work: StepWork,
    rates: Rates,
    replayed: StepReplay,
    files: FileTraffic | None,
) -> RankPrediction:
    memory = workload.memory(shards, slots)
    return RankPrediction(
        rank=rank,
        device_bytes=memory.device,
        host_bytes=memory.host,
        work=its_work.to_dict(),
        seconds=step_parts(its_work, rates),
        step_seconds=float(replayed.own_seconds[rank]),
        bottleneck=replayed.bottleneck(rank),
        files={} if files is None else {name: getattr(files, name) for name in FILE_COUNTS},
    )


def _table(workload: Workload, parts: Sequence[_Simulated]) -> TablePrediction:
    """One table on one rank: of several column shards the sum."""
    total, shard = CacheReport.total(part.report for part in parts), parts[0].shard
    long_run = [part.long_run for part in parts if part.long_run is not None]
    moved = sum(part.shard.rows * part.shard.host_row_bytes for part in parts)
    return TablePrediction(
        table=shard.table.table,
        rank=shard.rank,
        lookups=total.lookups,
        unique_ids=total.unique_ids,
        fills=total.fills,
        write_backs=total.write_backs,
        hit_rate_unique=total.hit_rate_unique,
        hit_rate_lookups=total.hit_rate_lookups,
        device_bytes=round(sum(part.device_bytes for part in parts)),
        host_bytes=round(sum(part.host_bytes for part in parts)),
        first_touches=sum(part.report.first_touches for part in parts),
        long_run_hit_rate=CacheReport.total(long_run).hit_rate_lookups,
        moved_row_bytes=moved / max(1, sum(part.shard.rows for part in parts)),
    )
