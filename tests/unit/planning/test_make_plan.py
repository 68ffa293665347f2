"""Plans that are made: complete, deterministic, within the budget, and no slower than simple ones."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.cache.config import CachePolicy
from embershard.errors import ShardingError
from embershard.planning.budget import least_needs
from embershard.planning.cost.rates import Rates
from embershard.planning.make_plan import best_candidate, make_plan, sized
from embershard.planning.request import Budget, PlanRequest
from embershard.sharding.plan import Plan, check_plan, pools_of
from embershard.sharding.run_shape import ReplaySettings
from tests.covering import covering, examples, matrix
from tests.unit.planning.requests import data_of, make_request, make_workload, random_rows, rates, round_robin

pytestmark = pytest.mark.slow

TIGHT = Budget(device_bytes=2_500_000)


def check(plan: Plan, request: PlanRequest) -> None:
    """Every table once, in the model's order, as it is; pools and bytes as they must be."""
    check_plan(plan)
    shape, model = request.workload.shape, request.workload.model
    assert [(t.table, t.rows, t.dim, t.dtype) for t in plan.tables] == [
        (t.table, t.rows, t.dim, t.dtype) for t in model.tables
    ]
    assert (plan.world_size, plan.batch_size) == (shape.world_size, shape.batch_size)
    assert [rank.rank for rank in plan.prediction.ranks] == list(range(shape.world_size))
    limit = request.budget.device_bytes
    assert limit is None or max(sum(rank.device_bytes.values()) for rank in plan.prediction.ranks) <= limit
    hosts = [sum(rank.host_bytes.values()) for rank in plan.prediction.ranks]
    per_node = plan.ranks_per_node
    most = max(sum(hosts[first : first + per_node]) for first in range(0, len(hosts), per_node))
    assert request.budget.host_bytes is None or most <= request.budget.host_bytes
    for table in plan.prediction.tables:
        assert table.hit_rate_lookups is None or 0 <= table.hit_rate_lookups <= 1
    assert plan.prediction.step_seconds == max(rank.step_seconds for rank in plan.prediction.ranks)
    assert plan.prediction.samples_per_second * plan.prediction.step_seconds == pytest.approx(shape.global_batch_size)


SHAPES = {"1": (1, 8), "2": (2, 8), "4": (4, 8), "8": (8, 8), "16, two nodes": (16, 8), "4, two nodes": (4, 2)}


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        matrix("1", TIGHT),
        ("2", Budget(cache_bytes=900_000)),
        matrix("4", TIGHT),
        matrix("8", TIGHT),
        ("16, two nodes", Budget(ratio=0.1, device_bytes=10**7)),
        ("4, two nodes", TIGHT),
    ],
)
def test_a_plan_is_complete_and_reads_back(tmp_path, name, budget):
    world_size, per_node = SHAPES[name]
    rows = (20_000, 9000, 5000, 900, 300, 40)
    request = make_request(
        budget,
        rows=rows,
        dims=(64, 128, 64, 32, 64, 16),
        world_size=world_size,
        ranks_per_node=per_node,
        settings={"cache.policy": "lfu", "sizes": [8, 1]},
        made_from={"config": "run.toml"},
        notes=("One.",),
    )
    plan = make_plan(request)
    check(plan, request)
    assert plan.notes[0] == "One."
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert {t.kernel for t in plan.tables} <= {"cached", "device"}
    assert budget.device_bytes or {t.kernel for t in plan.tables} == {"cached"}
    assert [dataclasses.replace(p, slots=0) for p in plan.pools] == [
        p.with_slots(0) for p in pools_of(plan.tables, plan.ranks_per_node)
    ]


@pytest.mark.matrix
@given(
    st.lists(st.tuples(st.integers(1, 2000), st.sampled_from([4, 16, 64, 80, 96, 128])), min_size=1, max_size=4),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 4), (6, 3)]),
    st.integers(0, 3_000_000),
    st.integers(0, 600),
    st.sampled_from([ReplaySettings(lookahead=3), ReplaySettings(CachePolicy("lru", by_next_use=False), 0)]),
    st.sampled_from(["fp32", "fp16"]),
)
@examples(10)
def test_any_model_is_planned_or_refused(tables, ranks, device_bytes, replicate_rows, policy, dtype):
    rows, dims = zip(*tables, strict=True)
    request = make_request(
        Budget(device_bytes=device_bytes),
        rows=rows,
        dims=dims,
        world_size=ranks[0],
        ranks_per_node=ranks[1],
        cache=policy,
        replicate_rows=replicate_rows,
        most_ranks_per_node=ranks[1],
        data=data_of(rows, 800),
        batch_size=16,
        dtype=dtype,
    )
    needs = least_needs(request)
    try:
        plan, refusal = make_plan(request), ""
    except ShardingError as error:
        refusal = str(error)
    if refusal:
        found = re.search(r"does not fit.* Smallest change that fits: --device-memory (\d+)", refusal)
        assert found is not None, refusal
        least = min(need.asked(request.budget) for need in needs)
        assert device_bytes < int(found[1]) <= least
        request = dataclasses.replace(request, budget=Budget(device_bytes=int(found[1])))
        plan = make_plan(request)
    check(plan, request)
    replicated = {t.table for t in plan.tables if t.kernel == "replicated"}
    assert replicated == {f"t{n}" for n, count in enumerate(rows) if count <= replicate_rows}


CASES: dict[str, dict[str, Any]] = {
    "many small": {"rows": random_rows(0, 12, 3.5), "world_size": 4},
    "one large": {"rows": (90_000, 50, 60, 70), "world_size": 4},
    "nodes": {"rows": random_rows(1, 8, 4.5), "world_size": 4, "ranks_per_node": 2},
    "odd": {"rows": random_rows(2, 7, 4.5), "world_size": 3},
    "hot block": {"rows": (50_000, 300), "world_size": 2, "data": data_of((50_000, 300), scattered=False)},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "machine"),
    covering(tuple(CASES), (("h100x8x4", Budget(ratio=0.2)), ("cpux4", Budget(device_bytes=6_000_000)))),
)
def test_no_slower_than_round_robin(name, machine):
    kind, budget = machine
    request = make_request(budget, rates=rates(kind, CASES[name]["world_size"]), **CASES[name])
    chosen = best_candidate(request)
    simple = sized(request, round_robin(request))
    assert simple is None or chosen.step_seconds <= simple.step_seconds * (1 + 1e-9)


def test_all_that_fits_the_devices_is_there():
    plan = make_plan(make_request(Budget(device_bytes=20_000_000), rows=(20_000, 9000, 300), world_size=2))
    assert Counter(t.kernel for t in plan.tables) == {"device": 3}
    assert plan.pools == ()
    assert "All rows fit the devices: no table is cached." in plan.notes
    assert all(t.fills == 0 and t.hit_rate_unique == t.hit_rate_lookups == 1 for t in plan.prediction.tables)
    assert all(sum(rank.host_bytes.values()) == 0 for rank in plan.prediction.ranks)


def test_tables_on_the_device_leave_no_rank_without_rows():
    """FBGEMM could not train them on a CPU. Of 3 and 5 rows, the fourth rank would have none."""
    free = make_request(Budget(device_bytes=20_000_000), rows=(3, 5), world_size=4)
    assert {(t.kernel, t.sharding == "row_wise") for t in make_plan(free).tables} == {("device", False)}
    by_rows = dataclasses.replace(free, types=("row_wise",))
    assert {t.kernel for t in make_plan(by_rows).tables} == {"cached"}
    larger = make_request(Budget(device_bytes=20_000_000), rows=(3, 500), world_size=4, types=("row_wise",))
    assert {t.kernel for t in make_plan(larger).tables} == {"device"}


def without_host(request):
    """A GPU's host takes no time: placements differ in nothing while it launches kernels."""
    return dataclasses.replace(request, rates=dataclasses.replace(request.rates, step_overhead_seconds=0))


def test_of_placements_that_are_as_fast_the_one_with_more_room_is_taken(monkeypatch):
    """On a machine where nothing takes time, all that differs is memory."""
    request = make_request(Budget(device_bytes=40_000_000), rates=Rates(), rows=(20_000,) * 6, world_size=4)
    chosen = best_candidate(request)
    assert {table.kernel for table in chosen.tables} == {"device"}
    used = [rank.total_device_bytes for rank in chosen.quick.ranks]
    assert max(used) < 1.2 * min(used), used
    whole = least_needs(request)[1]
    assert chosen.quick.most_device_bytes <= sized(request, whole.tables).quick.most_device_bytes
    timed = without_host(make_request(Budget(device_bytes=10_000_000), rows=(20_000,) * 5, world_size=2))
    fastest = best_candidate(timed)
    monkeypatch.setattr("embershard.planning.make_plan._AS_FAST", 10.0)
    roomy = best_candidate(timed)
    assert fastest.step_seconds < roomy.step_seconds, "room does not cost time unless it may"
    assert roomy.quick.most_device_bytes < fastest.quick.most_device_bytes


def test_the_reserve_is_left_free_on_every_rank():
    """What is reserved is missing to the caches, and to nothing else."""
    workload = make_workload((20_000, 900, 300, 40), world_size=2)
    reserved = dataclasses.replace(workload, shape=dataclasses.replace(workload.shape, reserve_bytes=1_000_000))
    budget = Budget(device_bytes=2_500_000)
    free, kept = (make_plan(make_request(budget, each)) for each in (workload, reserved))
    assert free.prediction is not None
    assert kept.prediction is not None
    for rank in kept.prediction.ranks:
        assert rank.device_bytes["reserve"] == 1_000_000
        assert rank.total_device_bytes <= 2_500_000
        assert rank.cache_device_bytes < rank.total_device_bytes - 1_000_000
    less, more = (
        sum(rank.device_bytes["slots"] + rank.device_bytes["device_tables"] for rank in plan.prediction.ranks)
        for plan in (kept, free)
    )
    assert less < more
    assert all("reserve" not in rank.device_bytes for rank in free.prediction.ranks)


def test_data_that_are_too_short_for_a_size_say_so():
    """Caches of other sizes hit alike, since all that misses is new; their estimates for new data differ."""
    short = data_of((500_000, 300_000), num_samples=1800)
    plans = [make_plan(make_request(Budget(ratio=r), rows=(500_000, 300_000), data=short)) for r in (0.02, 0.3)]
    found = [plan.prediction for plan in plans]
    for plan, prediction in zip(plans, found, strict=True):
        assert prediction.method == "replay"
        assert prediction.first_touch_share == pytest.approx(1.0)
        assert any("too short to tell sizes of caches apart: 100% of the misses" in note for note in plan.notes)
    rates_of = [[table.hit_rate_lookups for table in prediction.tables] for prediction in found]
    assert rates_of[0] == rates_of[1]
    later = [[table.long_run_hit_rate for table in prediction.tables] for prediction in found]
    assert all(small < large - 0.1 for small, large in zip(*later, strict=True)), later
    long = make_plan(make_request(Budget(ratio=0.05), rows=(500, 300), data=data_of((500, 300), num_samples=6000)))
    assert long.prediction.first_touch_share < 0.5
    assert not any("too short" in note for note in long.notes)


def test_a_cache_that_grows_hits_in_the_long_run():
    """A batch has more rows than the cache has slots: it has as many slots as a batch takes from then on."""
    data = data_of((5000, 300), num_samples=6000)
    plan = make_plan(make_request(Budget(ratio=0.002), rows=(5000, 300), data=data))
    assert any("grow" in note for note in plan.notes)
    assert min(table.long_run_hit_rate for table in plan.prediction.tables) > 0.1


def test_replicated_tables_are_on_every_rank():
    request = make_request(Budget(ratio=0.1), world_size=4, replicate_rows=300)
    plan = make_plan(request)
    check(plan, request)
    kernels = {t.table: (t.kernel, t.sharding, t.ranks) for t in plan.tables}
    assert kernels["t2"] == kernels["t3"] == ("replicated", "data_parallel", ())
    assert kernels["t0"][0] == "cached"
    assert all(rank.device_bytes["replicated"] == 340 * (64 * 4 * 2 + 4) for rank in plan.prediction.ranks)
    copies = [t for t in plan.prediction.tables if t.table == "t2"]
    assert [t.rank for t in copies] == [0, 1, 2, 3]
    assert all(t.hit_rate_lookups == 1 and t.fills == 0 for t in copies)
    assert sum(t.lookups for t in copies) == pytest.approx(4 * 64), "each rank looks up its own samples only"


def test_a_block_of_hot_rows_is_named():
    """Of a table that is cut by rows; not when they are scattered, nor when it is whole."""

    def notes(scattered: bool, kind: str) -> str:
        data = data_of((50_000, 300), scattered=scattered)
        request = make_request(Budget(ratio=0.1), rows=(50_000, 300), types=[kind], world_size=2, data=data)
        return " ".join(make_plan(request).notes)

    said = notes(False, "row_wise")
    assert "Table t0: hot rows lie together, its busiest block of rows gets 1.7 times its share of lookups." in said
    assert 'id_mapping = "hash"' in said
    assert "hot rows" not in notes(True, "row_wise")
    assert "hot rows" not in notes(False, "table_wise")


def test_a_slot_for_every_row_is_said():
    plan = make_plan(make_request(Budget(ratio=1.0)))
    assert "Every row has a slot: nothing is ever evicted." in plan.notes
    assert plan.prediction is not None
    assert sum(p.slots for p in plan.pools) == 6240
    assert not any("evicted" in note for note in make_plan(make_request(Budget(ratio=0.5))).notes)


def test_a_short_trace_is_said():
    request = make_request(Budget(ratio=0.1), batch_size=1000)
    plan = make_plan(request)
    assert plan.prediction.method == "counts"
    assert any("Hit rates are from counts alone" in note and "2,000 samples" in note for note in plan.notes)
    assert make_plan(make_request(Budget(ratio=0.1))).prediction.method == "replay"


def test_progress_counts_the_pools():
    seen = []
    plan = make_plan(make_request(Budget(ratio=0.1), world_size=4), lambda done, total: seen.append((done, total)))
    assert seen == [(n + 1, len(plan.pools)) for n in range(len(plan.pools))]


def test_types_that_are_asked_for():
    for kind in ("column_wise", "table_row_wise", "grid_shard"):
        request = make_request(
            Budget(ratio=0.1), rows=(5000, 900), dims=(128, 64), world_size=4, ranks_per_node=2, types=[kind]
        )
        plan = make_plan(request)
        check(plan, request)
        assert {t.sharding for t in plan.tables} == {kind}
    only = make_plan(make_request(Budget(ratio=0.1), only={"t1": ["row_wise"]}))
    assert {t.table: t.sharding for t in only.tables}["t1"] == "row_wise"


@pytest.mark.parametrize(
    ("world_size", "changes", "kinds"),
    [
        (1, {}, {"table_wise", "row_wise"}),
        (2, {}, {"table_wise", "row_wise"}),
        (2, {"types": ["column_wise", "row_wise"]}, {"row_wise"}),
        (2, {"types": ["column_wise"]}, {"table_wise", "row_wise"}),
        (5, {"types": ["row_wise"]}, {"table_wise"}),  # 24 buckets
    ],
)
def test_tables_of_any_id_have_a_cache_and_whole_buckets(world_size, changes, kinds):
    """A budget that holds all rows, and copies of small tables, are for tables of rows; maps are in host memory."""
    request = make_request(
        Budget(device_bytes=8_000_000),
        rows=(4800, 2400, 900),
        world_size=world_size,
        replicate_rows=2400,
        **{"rates": rates("cpu", world_size), "device": "cpu", **changes},
    )
    rows = make_plan(request).tables
    assert {table.kernel for table in rows} == {"device", "replicated"}
    model = request.workload.model
    sizes = [dataclasses.replace(t, buckets=24, id_map_bytes=28, group="ids") for t in model.tables[:2]]
    model = dataclasses.replace(model, tables=(*sizes, model.tables[2]))
    request = dataclasses.replace(request, workload=dataclasses.replace(request.workload, model=model))
    plan = make_plan(request)
    check(plan, request)
    for table in plan.tables[:2]:
        assert (table.kernel, table.exchange) == ("cached", "pooled")
        assert table.sharding in kinds
        assert 24 % len(table.ranks) == 0
    assert plan.tables[2].kernel == "replicated"
    assert sum(rank.host_bytes.get("id_maps", 0) for rank in plan.prediction.ranks) == 28 * 7200
    assert any("Hit rates of t0, t1 are an estimate" in note for note in plan.notes)
    per_table = sum(table.host_bytes for table in plan.prediction.tables)  # compared with what caches measure
    assert per_table == sum(rank.host_bytes["rows"] + rank.host_bytes["scores"] for rank in plan.prediction.ranks)
