"""What a placement gives: hit rates, bytes and seconds per rank, before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from embershard.cache.pinned_tables import pinned_tables
from embershard.cache.report import CacheReport
from embershard.planning.cost import work
from embershard.planning.cost.rates import Rates, StepTime, StepWork, step_time
from embershard.planning.simulate.replay import Shard, ShardReport, replay_pool
from embershard.planning.simulate.steady_state import steady_state
from embershard.planning.workload import COMPLETE, PoolKey, RunShape, Workload, by_rank, place_shards, pools
from embershard.sharding import memory_model
from embershard.sharding.memory_model import PoolMemory
from embershard.sharding.plan import PoolPlacement, Prediction, RankPrediction, TablePlacement, TablePrediction
from embershard.sharding.sizes import PlacedShard


def pool_reports(
    workload: Workload, shards: Sequence[PlacedShard], num_slots: int, replayed_steps: int
) -> tuple[tuple[ShardReport, ...], int]:
    """What a pool of ``num_slots`` does, per step, and its slots at the end: more where a batch did not fit. From
    counts alone when ``replayed_steps`` is 0."""
    shape = workload.shape
    if not replayed_steps:
        return counted_reports(workload, shards, num_slots), num_slots
    parts = [Shard(shard.table.table, shard.row_start, shard.row_stop) for shard in shards]
    trace = workload.data.trace
    assert trace is not None, "nothing to replay"
    pinned = pinned_tables([shard.rows for shard in shards], num_slots)
    found = replay_pool(
        trace,
        parts,
        num_slots,
        shape.global_batch_size,
        shape.cache,
        pinned_tables=[parts[number].table for number in pinned],
        num_steps=replayed_steps,
    )
    # In a small image of a cache one batch may fit by chance, or not: only a complete trace tells.
    is_complete = trace.rate >= COMPLETE
    return found.over(shape.num_steps), found.num_slots if is_complete else num_slots


def counted_reports(workload: Workload, shards: Sequence[PlacedShard], num_slots: int) -> tuple[ShardReport, ...]:
    """What a pool does in the long run, per step, from counts alone: fast, and for batches larger than the trace."""
    return steady_state(
        [workload.data.tables[shard.table.table] for shard in shards],
        [Shard(shard.table.table, shard.row_start, shard.row_stop) for shard in shards],
        [workload.share_of_lookups(shard) for shard in shards],
        workload.data.num_samples,
        num_slots,
        workload.shape.global_batch_size,
        workload.shape.cache.policy,
        is_sample=workload.is_sample,
    ).shards


def resident_report(workload: Workload, shard: PlacedShard) -> ShardReport:
    """Of a shard that is whole on the device: everything is found. A replicated one serves its own rank only."""
    if shard.kernel == "replicated":
        workload = replace(workload, shape=replace(workload.shape, world_size=1))
    (report,) = counted_reports(workload, [shard], 2 * shard.table.rows)
    return replace(report, hits_unique=report.unique_ids, hits_lookups=report.lookups, fills=0.0, write_backs=0.0)


def shard_work(workload: Workload, shard: PlacedShard, report: ShardReport) -> StepWork:
    """What one shard makes its rank do in a step."""
    shape, size = workload.shape, shard.table
    per_sample = workload.lookups_per_sample[size.table]
    if shard.kernel == "replicated":
        ids = per_sample * shape.batch_size
        touched = work.embedding_bytes(ids, size.weight_bytes(), size.optimizer_bytes())
        weights = _weights(shard)
        return StepWork(
            update_bytes=weights,
            embedding_bytes=touched,
            all_reduce_bytes=work.all_reduce_bytes(weights, shape.world_size),
        )
    cached = shard.kernel == "cached"
    return StepWork(
        embedding_bytes=work.embedding_bytes(
            report.lookups, size.weight_bytes(shard.columns), size.optimizer_bytes(shard.columns)
        ),
        planned_ids=report.lookups if cached else 0.0,
        unique_ids=report.unique_ids if cached else 0.0,
        fills=report.fills,
        write_backs=report.write_backs,
        bytes_to_device=report.fills * shard.row_bytes,
        bytes_to_host=report.write_backs * shard.row_bytes,
        all_to_all_bytes=work.all_to_all_bytes(
            shard.sharding,
            batch_size=shape.batch_size,
            world_size=shape.world_size,
            ids_per_sample=per_sample,
            columns=shard.columns,
            rank_share=report.lookups / max(per_sample * shape.global_batch_size, 1e-300),
            ranks_per_node=shape.ranks_per_node,
            pooled_number_bytes=shape.pooled_number_bytes,
        ),
    )


def _weights(shard: PlacedShard) -> float:
    return float(shard.rows * shard.table.weight_bytes(shard.columns))


def rank_work(workload: Workload, shards: Sequence[PlacedShard], reports: Sequence[ShardReport]) -> StepWork:
    """A whole rank's step: its shards, its part of the dense model, its samples."""
    shape, model, data = workload.shape, workload.model, workload.data
    parts = [shard_work(workload, *pair) for pair in zip(shards, reports, strict=True)]
    own = StepWork(
        dense_flops=model.dense_flops_per_sample * shape.batch_size,
        activation_bytes=model.activation_bytes_per_sample * shape.batch_size,
        update_bytes=model.dense_parameter_bytes,
        all_reduce_bytes=work.all_reduce_bytes(model.dense_parameter_bytes, shape.world_size),
        num_collectives=work.num_collectives({shard.sharding for shard in shards}, shape.world_size),
        input_seconds=(data.read_seconds_per_sample or 0.0) * shape.batch_size,
    )
    names = StepWork().to_dict()
    return StepWork(**{name: sum(getattr(part, name) for part in (own, *parts)) for name in names})


def predict(
    workload: Workload,
    tables: Sequence[TablePlacement],
    slots: Sequence[PoolPlacement],
    rates: Rates,
    *,
    from_counts: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Prediction:
    """What training with this placement and these pools will do.

    Args:
        workload: model, data and run.
        tables: where they are.
        slots: of every pool.
        rates: seconds per unit of work, of a rank of the machine.
        from_counts: do not replay the trace.
        progress: called with the pools done and their number.
    """
    shape = workload.shape
    shards = place_shards(workload.model, tables, shape)
    grouped = pools(shards)
    num_slots: dict[tuple[object, ...], int] = {(p.rank, p.sharding, p.dim, p.tables): p.slots for p in slots}
    steps = 0 if from_counts else workload.steps_to_replay(len(grouped))
    reports: dict[int, ShardReport] = {}
    memories: dict[PoolKey, tuple[PoolMemory, int]] = {}
    for done, (key, members) in enumerate(grouped.items(), start=1):
        names = tuple(sorted({shard.table.table for shard in members}))
        count = num_slots[key[0], key[1], key[2], names]
        found, count = pool_reports(workload, members, count, steps)
        memories[key] = memory_model.pool_memory(members, shape.memory), count
        reports.update({id(shard): each for shard, each in zip(members, found, strict=True)})
        if progress is not None:
            progress(done, len(grouped))
    for shard in shards:
        if id(shard) not in reports:
            reports[id(shard)] = resident_report(workload, shard)
    return _summary(workload, shards, reports, memories, rates, steps)


def _summary(
    workload: Workload,
    shards: Sequence[PlacedShard],
    reports: Mapping[int, ShardReport],
    memories: Mapping[PoolKey, tuple[PoolMemory, int]],
    rates: Rates,
    steps: int,
) -> Prediction:
    shape = workload.shape
    ranks, tables = [], []
    slowest: StepTime | None = None
    pools_of_rank: dict[int, dict[PoolKey, tuple[PoolMemory, int]]] = {}
    for key, each in memories.items():
        pools_of_rank.setdefault(key[0], {})[key] = each
    for rank, here in enumerate(by_rank(shards, shape.world_size)):
        its_work = rank_work(workload, here, [reports[id(shard)] for shard in here])
        seconds = step_time(its_work, rates, shape.device)
        if slowest is None or seconds.seconds > slowest.seconds:
            slowest = seconds
        pools_here = pools_of_rank.get(rank, {})
        ranks.append(_rank(workload, rank, here, pools_here, its_work, seconds))
        tables += _tables(shape, here, reports, pools_here)
    assert slowest is not None
    return Prediction(
        method="replay" if steps else "counts",
        num_steps=shape.num_steps or steps,
        step_seconds=slowest.seconds,
        samples_per_second=shape.global_batch_size / slowest.seconds if slowest.seconds else 0.0,
        bottleneck=slowest.bottleneck,
        tables=tuple(tables),
        ranks=tuple(ranks),
    )


def _rank(
    workload: Workload,
    rank: int,
    shards: Sequence[PlacedShard],
    memories: Mapping[PoolKey, tuple[PoolMemory, int]],
    its_work: StepWork,
    seconds: StepTime,
) -> RankPrediction:
    shape = workload.shape
    device = {
        "slots": sum(memory.device_bytes(slots) - memory.map_bytes for memory, slots in memories.values()),
        "maps": sum(memory.map_bytes for memory, _ in memories.values()),
        **memory_model.resident_bytes(shards),
        **workload.step_bytes(shards),
    }
    return RankPrediction(
        rank=rank,
        device_bytes=device,
        host_bytes=memory_model.host_bytes(shards, shape.memory),
        work=its_work.to_dict(),
        seconds=dict(seconds.parts),
        step_seconds=seconds.seconds,
        bottleneck=seconds.bottleneck,
    )


def _tables(
    shape: RunShape,
    shards: Sequence[PlacedShard],
    reports: Mapping[int, ShardReport],
    memories: Mapping[PoolKey, tuple[PoolMemory, int]],
) -> list[TablePrediction]:
    """One per table of a rank; of several column shards the sum."""
    by_name: dict[str, list[PlacedShard]] = {}
    for shard in shards:
        by_name.setdefault(shard.table.table, []).append(shard)
    return [_table(shape, members, reports, memories) for members in by_name.values()]


def _table(
    shape: RunShape,
    shards: Sequence[PlacedShard],
    reports: Mapping[int, ShardReport],
    memories: Mapping[PoolKey, tuple[PoolMemory, int]],
) -> TablePrediction:
    own = [reports[id(shard)] for shard in shards]
    total = CacheReport.total(own)
    device = 0.0
    for shard, each in zip(shards, own, strict=True):
        if shard.kernel != "cached":
            device += shard.rows * shard.row_bytes
            continue
        memory, _ = memories[shard.rank, shard.sharding, shard.columns, shard.table.dtype]
        device += shard.rows * memory.map_bytes / max(1, memory.rows) + each.held_rows * memory.slot_bytes
    return TablePrediction(
        table=shards[0].table.table,
        rank=shards[0].rank,
        lookups=total.lookups,
        unique_ids=total.unique_ids,
        fills=total.fills,
        write_backs=total.write_backs,
        hit_rate_unique=total.hit_rate_unique,
        hit_rate_lookups=total.hit_rate_lookups,
        device_bytes=round(device),
        host_bytes=sum(memory_model.host_bytes(shards, shape.memory).values()),
    )
