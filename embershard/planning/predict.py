"""Predicts hit rates, bytes and seconds per rank of a placement, before anything is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from embershard.cache.statistics import CacheReport
from embershard.planning.cost import work
from embershard.planning.cost.rates import RankRates, Rates, StepWork, of_each, step_parts
from embershard.planning.simulate.file_tier import FileTraffic
from embershard.planning.simulate.pool_report import ShardReport
from embershard.planning.simulate.step_replay import Pipeline, StepReplay, replay_steps
from embershard.planning.workload import Layout, Workload
from embershard.sharding import memory_model
from embershard.sharding.plan import Prediction, RankPrediction, TablePrediction
from embershard.sharding.shards import PoolKey
from embershard.sharding.sizes import PlacedShard


@dataclass(frozen=True)
class _Simulated:
    """A shard, what happens to its rows, the same on new data in the long run, and the bytes that they take."""

    shard: PlacedShard
    report: ShardReport
    long_run: ShardReport | None
    device_bytes: float
    host_bytes: float


def predict(
    layout: Layout,
    slots: Mapping[PoolKey, int],
    rates: RankRates,
    *,
    from_counts: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Prediction:
    """Predict what training with this placement and these pools will do.

    Args:
        layout: all tables of the model.
        slots: of all pools of all ranks.
        rates: seconds per unit of work, of a rank of the machine, or of each rank.
        from_counts: do not replay the trace, and do not estimate the long run.
        progress: called with the number of pools done, and of all pools.
    """
    workload, shape = layout.workload, layout.workload.shape
    steps = 0 if from_counts else workload.steps_to_replay(len(layout.pools))
    simulated, slots, files = _simulate(layout, slots, steps, not from_counts, progress)
    own_ids, num_groups = workload.row_ids(layout.shards), len(work.exchange_groups(layout.shards))
    own_rates = of_each(rates, shape.world_size)
    layers = {each: replace(workload.layers_work(each), row_ids=own_ids) for each in dict.fromkeys(own_rates)}
    works = [
        workload.rank_work(here, [simulated[id(shard)].report for shard in here], num_groups, layers[own])
        for here, own in zip(layout.of_ranks, own_rates, strict=True)
    ]
    works = [replace(own, moved_pages=files.get(rank, FileTraffic()).moved_pages) for rank, own in enumerate(works)]
    replayed = replay_steps(works, rates, Pipeline.of_run(shape))
    table_predictions: list[TablePrediction] = []
    for here in layout.of_ranks:
        of_table: dict[str, list[_Simulated]] = {}
        for shard in here:
            of_table.setdefault(shard.table.table, []).append(simulated[id(shard)])
        table_predictions += [_table(parts) for parts in of_table.values()]
    return Prediction(
        method="replay" if steps else "counts",
        num_steps=shape.num_steps or steps,
        step_seconds=replayed.step_seconds,
        samples_per_second=shape.groups * shape.global_batch_size / (replayed.step_seconds or math.inf),
        bottleneck=replayed.bottleneck(replayed.slowest),
        tables=tuple(table_predictions),
        ranks=tuple(
            _rank(workload, rank, here, slots, works[rank], own_rates[rank], replayed, files.get(rank))
            for rank, here in enumerate(layout.of_ranks)
        ),
    )


def _simulate(
    layout: Layout,
    slots: Mapping[PoolKey, int],
    steps: int,
    with_long_run: bool,
    progress: Callable[[int, int], None] | None,
) -> tuple[dict[int, _Simulated], dict[PoolKey, int], dict[int, FileTraffic]]:
    """Return every shard by its `id`, the slots that every pool has at the end, and what each rank reads from a file
    and writes to it in a step, where rows are in one: not from counts, by which placements are compared."""
    workload, slots = layout.workload, dict(slots)
    score_bytes = workload.shape.cache.policy.score_bytes
    found, files = dict[int, _Simulated](), dict[int, FileTraffic]()
    for done, (key, members) in enumerate(layout.pools.items(), start=1):
        in_memory = layout.places.get(key)
        reports, slots[key], traffic = workload.pool_reports(
            members, slots[key], steps, grows=with_long_run, places=in_memory if with_long_run else None
        )
        if traffic is not None:
            files[key.rank] = files.get(key.rank, FileTraffic()) + traffic
        long_run: Sequence[ShardReport | None] = [None] * len(members)
        if with_long_run:
            long_run = workload.counted_reports(members, slots[key], of_new_data=True)
        memory = memory_model.pool_memory(members, workload.shape)
        for shard, report, later in zip(members, reports, long_run, strict=True):
            part = shard.rows / max(1, memory.rows)
            host = shard.host_bytes if in_memory is None else part * (in_memory + 1) * shard.host_row_bytes
            device = part * memory.map_bytes + report.held_rows * (memory.slot_bytes - memory.ranking_bytes)
            found[id(shard)] = _Simulated(shard, report, later, device, host + score_bytes * shard.rows)
        if progress is not None:
            progress(done, len(layout.pools))
    for shard in layout.shards:
        if shard.kernel != "cached":
            report = workload.resident_report(shard)
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
        files={} if files is None else files.counts,
    )


def _table(parts: Sequence[_Simulated]) -> TablePrediction:
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
