"""A prediction is the sum of its parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from embershard.cache.config import CachePolicy
from embershard.cache.next_use import pinned_tables
from embershard.planning.cost import work
from embershard.planning.cost.rates import Rates
from embershard.planning.predict import predict
from embershard.planning.simulate.pool_report import RowRange
from embershard.planning.simulate.replay import replay_pool
from embershard.planning.workload import LEAST_REPLAYED_STEPS, Layout, Workload
from embershard.sharding.memory_model import planned_slots, pool_memory
from embershard.sharding.plan import PoolPlacement, Prediction, TablePlacement, pools_of
from embershard.sharding.run_shape import ReplaySettings
from embershard.sharding.sizes import place_shards
from tests.unit.planning.requests import data_of, make_workload, rates
from tests.unit.planning.traces import counted, skewed
from tests.unit.sharding.plans import ranks_for


def placements(workload: Workload, kinds: list[tuple[str, str]]) -> list[TablePlacement]:
    world, node = workload.shape.world_size, min(workload.shape.ranks_per_node, workload.shape.world_size)
    return [
        TablePlacement(t.table, t.rows, t.dim, t.dtype, kind, kernel, ranks_for(kind, n, world, node, 2))  # type: ignore[arg-type]
        for n, (t, (kind, kernel)) in enumerate(zip(workload.model.tables, kinds, strict=True))
    ]


def slots_of(workload: Workload, tables: list[TablePlacement], share: float = 0.2) -> list[PoolPlacement]:
    node = min(workload.shape.ranks_per_node, workload.shape.world_size)
    return [pool.with_slots(max(1, int(pool.rows * share))) for pool in pools_of(tables, node)]


def predicted(
    workload: Workload, tables: list[TablePlacement], pools: list[PoolPlacement], per_unit: Rates, **options: bool
) -> Prediction:
    layout = Layout(workload, tables)
    return predict(layout, planned_slots(pools, layout.pools), per_unit, **options)


MIXED = [("table_wise", "cached"), ("row_wise", "cached"), ("column_wise", "cached"), ("table_wise", "device")]


def mixed(**changes: Any) -> tuple[Workload, list[TablePlacement], list[PoolPlacement], Prediction]:
    workload = make_workload((5000, 900, 300, 40), (64, 64, 128, 64), **changes)
    tables = placements(workload, MIXED)
    slots = slots_of(workload, tables)
    return workload, tables, slots, predicted(workload, tables, slots, rates())


@pytest.mark.slow
def test_hit_rates_are_those_of_a_replay_of_each_pool():
    workload, tables, slots, found = mixed(cache=ReplaySettings(lookahead=5))
    assert (found.method, found.num_steps) == ("replay", 6000 // 128)
    by_place = {(t.table, t.rank): t for t in found.tables}
    for pool in slots:
        shards = [
            RowRange(s.table.table, s.row_start, s.row_stop)
            for s in place_shards(workload.model, tables, workload.shape)
            if s.rank == pool.rank and s.table.table in pool.tables
        ]
        pinned = [shards[n].table for n in pinned_tables([s.num_rows for s in shards], pool.slots)]
        assert workload.data.trace is not None
        traffic = replay_pool(workload.data.trace, shards, pool.slots, 128, workload.shape.cache, pinned_tables=pinned)
        for each in traffic.shards:
            if each.shard.table == "t2":
                continue  # two column shards of it, one on each rank
            seen = by_place[each.shard.table, pool.rank]
            assert (seen.lookups, seen.fills, seen.write_backs) == (each.lookups, each.fills, each.write_backs)
            assert seen.hit_rate_unique == each.hit_rate_unique
            assert seen.hit_rate_lookups == each.hit_rate_lookups


@pytest.mark.slow
def test_bytes_and_work_add_up():
    workload, tables, _, _ = mixed()
    slots = slots_of(workload, tables, 0.9)  # none grows
    found = predicted(workload, tables, slots, rates())
    shards = place_shards(workload.model, tables, workload.shape)
    for rank in found.ranks:
        own = [t for t in found.tables if t.rank == rank.rank]
        here = [s for s in shards if s.rank == rank.rank]
        pools = [p for p in slots if p.rank == rank.rank]
        expected = sum(
            pool_memory(
                [s for s in here if s.table.table in p.tables and s.kernel == "cached"], workload.shape
            ).device_bytes(p.slots)
            for p in pools
        )
        assert sum(rank.device_bytes[name] for name in ("slots", "maps", "rankings")) == expected
        assert sum(t.host_bytes for t in own) == sum(rank.host_bytes.values())
        assert rank.work["fills"] == pytest.approx(sum(t.fills for t in own))
        assert rank.work["planned_ids"] == pytest.approx(sum(t.lookups for t in own if t.table != "t3"))
        row_bytes = {(s.table.table): s.row_bytes for s in here}
        assert rank.work["bytes_to_device"] == pytest.approx(sum(t.fills * row_bytes[t.table] for t in own))
        assert rank.work["bytes_to_host"] == pytest.approx(sum(t.write_backs * row_bytes[t.table] for t in own))
        assert rank.work["dense_flops"] == workload.model.dense_flops_per_sample * 64
        assert rank.work["num_collectives"] == work.num_collectives(len(work.exchange_groups(here)), 2)
        assert rank.step_seconds >= max(rank.seconds.values()) * (1 - 1e-5)
        assert rank.bottleneck in rank.seconds
    whole = next(t for t in found.tables if t.table == "t3")
    assert (whole.device_bytes, whole.host_bytes, whole.fills) == (40 * 260, 0, 0)
    assert sum(t.lookups for t in found.tables if t.table == "t1") == pytest.approx(128, rel=0.01), "over its blocks"
    assert found.bottleneck == max(found.ranks, key=lambda rank: rank.step_seconds).bottleneck
    assert found.samples_per_second == pytest.approx(128 / found.step_seconds)


@pytest.mark.slow
def test_a_pool_that_will_grow_is_predicted_as_large_as_it_will_be():
    workload, tables, _, _ = mixed()
    slots = [dataclasses.replace(pool, slots=1) for pool in slots_of(workload, tables)]
    found = predicted(workload, tables, slots, rates())
    for rank in found.ranks:
        here = [s for s in place_shards(workload.model, tables, workload.shape) if s.rank == rank.rank]
        cached = [[s for s in here if s.table.table in pool.tables] for pool in slots if pool.rank == rank.rank]
        planned = sum(pool_memory(members, workload.shape).device_bytes(1) for members in cached)
        assert rank.device_bytes["slots"] + rank.device_bytes["maps"] > planned


@pytest.mark.slow
def test_device_bytes_of_the_tables_are_those_of_the_pools():
    """Up to the null slot, and slots that no table holds yet."""
    workload = make_workload((500, 400), world_size=1, cache=ReplaySettings(CachePolicy("lru", by_next_use=False), 0))
    tables = placements(workload, [("table_wise", "cached")] * 2)
    found = predicted(workload, tables, slots_of(workload, tables, 0.3), rates())
    (rank,) = found.ranks
    pool = rank.device_bytes["slots"] + rank.device_bytes["maps"]
    assert 0 <= pool - sum(t.device_bytes for t in found.tables) <= 2 * (64 * 4 + 4 + 12)


@pytest.mark.slow
@pytest.mark.parametrize(("num_steps", "over"), [(None, 46), (20, 20), (90, 90)])
def test_how_long_a_run_is_decides_what_its_first_steps_weigh(num_steps, over):
    """A cache is empty at first: a short run finds less."""
    workload, tables, slots, found = mixed(num_steps=num_steps)
    assert found.num_steps == over
    short = dataclasses.replace(workload, shape=dataclasses.replace(workload.shape, num_steps=12))
    cold = predicted(short, tables, slots, rates())

    def fills(prediction: Prediction) -> float:
        return sum(t.fills for t in prediction.tables)

    assert fills(found) < fills(cold)


def test_too_few_batches_are_not_replayed():
    for samples, method in ((LEAST_REPLAYED_STEPS * 128, "replay"), (LEAST_REPLAYED_STEPS * 128 - 1, "counts")):
        data = counted({"t0": (500, skewed(500, samples))})
        workload = make_workload((500,), data=data)
        tables = placements(workload, [("table_wise", "cached")])
        assert predicted(workload, tables, slots_of(workload, tables), rates()).method == method


@pytest.mark.slow
def test_a_replay_and_counts_alone_agree_about_a_long_run():
    """On independent lookups, where nothing is to be known but how frequent rows are."""
    data = counted({"t0": (1000, skewed(1000, 12_000, power=3)), "t1": (400, skewed(400, 12_000, seed=1, power=2))})
    policy = ReplaySettings(CachePolicy("frequency", by_next_use=False, warmup=True), 0, profile_samples=None)
    workload = make_workload((1000, 400), world_size=1, batch_size=40, cache=policy, data=data)
    tables = placements(workload, [("table_wise", "cached")] * 2)
    slots = slots_of(workload, tables, 0.4)
    exact = predicted(workload, tables, slots, rates())
    counts = predicted(workload, tables, slots, rates(), from_counts=True)
    assert (exact.method, counts.method) == ("replay", "counts")
    for one, other in zip(exact.tables, counts.tables, strict=True):
        assert one.lookups == pytest.approx(other.lookups)
        assert one.unique_ids == pytest.approx(other.unique_ids, rel=0.02)
        assert one.hit_rate_lookups == pytest.approx(other.hit_rate_lookups, abs=0.05)
    both = [np.dot([t.lookups for t in p.tables], [t.hit_rate_lookups for t in p.tables]) / 80 for p in (exact, counts)]
    assert both[0] == pytest.approx(both[1], abs=0.03)


@pytest.mark.slow
def test_a_block_of_hot_rows_makes_its_rank_the_slowest():
    workload = make_workload((50_000,), data=data_of((50_000,), scattered=False))
    tables = placements(workload, [("row_wise", "cached")])
    per_id = Rates(seconds_per_planned_id=1e-6)
    found = predicted(workload, tables, slots_of(workload, tables), per_id)
    first, second = found.ranks
    assert first.step_seconds > 4 * second.step_seconds
    assert found.step_seconds == first.step_seconds
    assert found.bottleneck == "planning"
    other = make_workload((50_000,), data=data_of((50_000,))), tables
    scattered = predicted(*other, slots_of(workload, tables), per_id)
    assert scattered.step_seconds < 0.8 * found.step_seconds


@pytest.mark.slow
def test_every_rank_works_on_its_own_ids_where_rows_are_exchanged():
    workload = make_workload((5000, 900), exchange="rows")
    tables = [
        dataclasses.replace(table, exchange=exchange)
        for table, exchange in zip(
            placements(workload, [("table_wise", "cached")] * 2), ("rows", "pooled"), strict=True
        )
    ]
    found = predicted(workload, tables, slots_of(workload, tables), Rates(seconds_per_row_id=1.0))
    of_a_rank = workload.lookups_per_sample["t0"] * workload.shape.batch_size
    assert of_a_rank > 0
    assert [rank.work["row_ids"] for rank in found.ranks] == [of_a_rank] * 2  # one of them has no row of t0
    assert found.step_seconds == pytest.approx(of_a_rank)
    pooled = [dataclasses.replace(table, exchange="pooled") for table in tables]
    assert predicted(workload, pooled, slots_of(workload, pooled), Rates(seconds_per_row_id=1.0)).step_seconds == 0


@pytest.mark.slow
def test_ranks_that_share_cores_wait_less_for_the_slowest():
    shares = {cores: dataclasses.replace(make_workload().shape, device="cpu", cores_per_node=cores) for cores in (1, 2)}
    per_id = Rates(seconds_per_planned_id=1e-6)
    seconds = {}
    for cores, shape in shares.items():
        workload = dataclasses.replace(make_workload(), shape=shape)
        tables = placements(workload, [("table_wise", "cached")] * 4)
        seconds[cores] = predicted(workload, tables, slots_of(workload, tables), per_id).step_seconds
    assert seconds[1] <= seconds[2]


@pytest.mark.slow
def test_nothing_takes_time_on_a_machine_without_rates():
    workload, tables, slots, _ = mixed()
    found = predicted(workload, tables, slots, Rates())
    assert (found.step_seconds, found.samples_per_second) == (0, 0)


def test_a_short_run_is_predicted_over_its_own_steps():
    workload = make_workload((500,), world_size=1, num_steps=5)
    tables = placements(workload, [("table_wise", "cached")])
    found = predicted(workload, tables, slots_of(workload, tables), rates())
    assert (found.method, found.num_steps) == ("replay", 5)
    assert workload.data.trace is not None
    traffic = replay_pool(workload.data.trace, [RowRange("t0", 0, 500)], 100, 64, workload.shape.cache, num_steps=5)
    assert found.tables[0].fills == traffic.shards[0].fills


@pytest.mark.slow
def test_a_table_that_is_never_looked_up():
    data = counted({"t0": (500, skewed(500, 6000)), "t1": (70, np.empty(0, np.int64))})
    workload = make_workload((500, 70), data=data)
    for kinds in ([("table_wise", "cached")] * 2, [("row_wise", "cached"), ("row_wise", "device")]):
        tables = placements(workload, kinds)
        for from_counts in (False, True):
            found = predicted(workload, tables, slots_of(workload, tables), rates(), from_counts=from_counts)
            for each in (each for each in found.tables if each.table == "t1"):
                assert (each.lookups, each.unique_ids, each.fills) == (0, 0, 0)
                assert each.hit_rate_unique is each.hit_rate_lookups is None


@pytest.mark.slow
def test_a_run_longer_than_its_sample_goes_on_as_the_sample_ends():
    """The first steps, when the cache is empty, weigh less the longer the run is."""
    data = counted({"t0": (500, skewed(500, 3000))}, share_of_samples=0.1)
    fills = {}
    for num_steps in (None, 46, 460):
        workload = make_workload((500,), world_size=1, num_steps=num_steps, data=data)
        tables = placements(workload, [("table_wise", "cached")])
        found = predicted(workload, tables, slots_of(workload, tables), rates())
        fills[num_steps] = found.tables[0].fills
    traffic = replay_pool(data.trace, [RowRange("t0", 0, 500)], 100, 64, workload.shape.cache)
    assert traffic.num_steps == 46
    assert fills[None] == fills[46] == traffic.shards[0].fills
    assert fills[460] == pytest.approx(0.1 * fills[46] + 0.9 * traffic.late[0].fills)
    assert fills[460] < fills[46]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_of_pieces_is_priced_by_the_piece(device):
    """Lookups, exchanges, launches and the host's thread by the piece; dense gradients and the optimizer once."""
    one, four = (make_workload(device=device, exchange="rows", accumulate=pieces) for pieces in (1, 4))
    tables = [one.with_exchange(each) for each in placements(one, [("row_wise", "cached")] * 4)]
    slots = slots_of(one, tables, share=0.3)
    found = []
    for workload in (one, four):
        layout = Layout(workload, tables)
        found.append(predict(layout, planned_slots(slots, layout.pools), rates()).ranks[0])
    alone, cut = (rank.work for rank in found)
    assert (alone["num_collectives"], cut["num_collectives"]) == (2 + 5, 1 + 4 * (1 + 5))
    assert cut["launches"] == 4 * alone["launches"]
    for name in ("planned_ids", "unique_ids", "sent_id_bytes", "sent_embedding_bytes", "sent_gradient_bytes"):
        assert 1.2 * alone[name] < cut[name] < 4 * alone[name] + 4 * 8 * 4, name
    for name in ("all_reduce_bytes", "update_bytes", "input_seconds", "row_ids"):
        assert cut[name] == alone[name], name
    assert cut["fills"] == pytest.approx(alone["fills"], rel=0.05)
    assert found[1].seconds["overhead"] == 4 * found[0].seconds["overhead"]
    assert found[1].step_seconds >= 4 * rates().step_overhead_seconds
