"""Copies of tables as a choice of the search: priced as predicted, bounded, chosen where links are slow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from embershard.errors import ConfigError
from embershard.planning.cost import work
from embershard.planning.cost_arrays import cost_arrays
from embershard.planning.local_search import local_search
from embershard.planning.make_plan import best_candidate, make_plan, sized
from embershard.planning.many_ranks import fastest_candidate
from embershard.planning.request import Budget, PlanRequest
from embershard.sharding.pins import TablePin
from embershard.sharding.plan import Plan
from embershard.sharding.sizes import PlacedShard, TableSize
from tests.covering import keep
from tests.unit.planning.exhaustive import NUM_TASKS, tried, with_copies
from tests.unit.planning.requests import data_of, make_request, rates

ALL = ["table_wise", "row_wise", "column_wise", "data_parallel"]
ROWS = (60_000, 40_000, 300, 40, 9, *(200, 30) * 6)


def on_two_nodes(types: list[str] | None, **changes: object) -> PlanRequest:
    """Large tables and small ones, on two nodes of two GPUs; the host's thread hides nothing."""
    own = replace(rates("h100x2x2", 4), step_overhead_seconds=0.0)
    data = replace(data_of(ROWS), read_seconds_per_sample=None)
    given = {"rows": ROWS, "data": data, "world_size": 4, "ranks_per_node": 2, "batch_size": 4096, "rates": own}
    return make_request(Budget(device_bytes=10**9), types=types, **{**given, **changes})


def copied(plan: Plan) -> list[str]:
    return [table.table for table in plan.tables if table.kernel == "replicated"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", keep((1, 4), range(NUM_TASKS[with_copies])))
def test_the_best_of_all_plans_is_found_and_none_is_faster_than_the_bound(seed):
    found = tried(with_copies(seed))
    assert not found.problem
    assert found.best is None or found.found <= 1.02 * found.best


def test_a_bound_without_the_option_of_a_copy_is_above_a_plan(monkeypatch):
    """A negative control: the bound knows copies."""
    monkeypatch.setattr(PlanRequest, "may_be_copied", lambda self, table: False)
    sharded = best_candidate(on_two_nodes(ALL)).bound
    monkeypatch.undo()
    assert best_candidate(on_two_nodes(ALL)).step_seconds < sharded.step_seconds


def test_small_tables_are_copied_where_links_are_slow(tmp_path):
    room = Budget(device_bytes=105_000_000)  # not for a copy of the largest, and its gradients
    plan, sharded = (make_plan(replace(on_two_nodes(own), budget=room)) for own in (ALL, ALL[:3]))
    assert len(copied(plan)) >= 12
    assert "t0" not in copied(plan)
    assert not copied(sharded)
    assert plan.prediction.step_seconds < 0.95 * sharded.prediction.step_seconds
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert any("host's thread takes longer" in note for note in plan.notes)
    assert not any("host's thread takes longer" in note for note in sharded.notes)


def test_nothing_is_copied_unless_it_is_asked_for():
    assert not copied(make_plan(on_two_nodes(None)))
    assert not copied(make_plan(on_two_nodes(ALL, world_size=1, ranks_per_node=1, rates=rates(num_ranks=1))))


def test_what_cannot_be_copied_is_sharded():
    request = on_two_nodes(ALL)
    request = replace(request, pins={"t3": TablePin(type="row_wise")})
    tables = request.workload.model.tables
    assert [request.may_be_copied(each) for each in tables] == [n != 3 for n in range(len(ROWS))]
    assert not request.may_be_copied(replace(tables[4], is_sequence=True))
    assert not replace(request, only={"t4": ["table_wise"]}).may_be_copied(tables[4])
    forced = replace(request, only={"t0": ["data_parallel"]})
    assert "t0" in copied(make_plan(forced))
    assert "t3" not in copied(make_plan(forced))


def test_copies_that_leave_no_room_are_not_chosen():
    """The fullest rank has room for its share of the large tables, and not for copies of all small ones."""
    roomy = best_candidate(on_two_nodes(ALL))
    limit = roomy.quick.most_device_bytes - 1
    tight = best_candidate(replace(on_two_nodes(ALL), budget=Budget(device_bytes=limit)))
    assert tight.quick.most_device_bytes <= limit
    assert tight.step_seconds >= 0.98 * roomy.step_seconds, "searches differ by chance"


@pytest.mark.parametrize("budget", [Budget(ratio=0.1), Budget(cache_bytes=10**6)])
def test_a_budget_of_caches_has_no_copies(budget):
    with pytest.raises(ConfigError, match="--types data_parallel: copies of whole tables need a limit on all"):
        replace(on_two_nodes(ALL), budget=budget)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_search_tells_what_the_prediction_tells(device):
    """But for messages of ranks with more rows than the mean, which are longer."""
    request = on_two_nodes(ALL, device=device)
    for told in local_search(cost_arrays(request, resident=True, cached=False), 40)[:3]:
        found = sized(request, request.placed(told.tables))
        assert found is not None
        assert told.step_seconds == pytest.approx(found.step_seconds, rel=5e-3)
        assert told.step_seconds <= found.step_seconds * (1 + 1e-9)


def test_the_collectives_of_copies_that_every_plan_has_are_paid_once():
    """Tables of one width send their gradients together, those of `--replicate-rows` as well."""
    request = replace(on_two_nodes(ALL), replicate_rows=10)
    costs = cost_arrays(request, resident=True, cached=False)
    assert {each.group for own in costs.options for each in own if each.kernel == "replicated"} == {""}
    costs = cost_arrays(on_two_nodes(ALL), resident=True, cached=False)
    assert {each.group for own in costs.options for each in own if each.kernel == "replicated"} == {
        "data_parallel of 64"
    }


def test_many_ranks_have_copies():
    own = replace(rates("h100x8x8", 64), step_overhead_seconds=0.0)
    wide = on_two_nodes(ALL, world_size=64, ranks_per_node=8, rates=own)
    found = fastest_candidate(wide)
    assert any(table.kernel == "replicated" for table in found.tables)
    sharded = fastest_candidate(replace(wide, types=ALL[:3]))
    assert found.step_seconds < sharded.step_seconds


def test_a_copy_trains_the_rows_of_all_ranks():
    """By hand, of 4 ranks that look up 100 ids, 60 distinct ones each, 90 together; rows of 128 bytes and a state."""
    table = TableSize("t", 1000, 32, state_bytes=4)
    on_cpu = work.copies_embedding_bytes(100, 60, 90, 50, table, 4, gpu=False)
    assert on_cpu == 2 * 100 * 128 + 4 * 60 * 128 + 90 * (128 + 2 * table.optimizer_bytes())
    on_gpu = work.copies_embedding_bytes(100, 60, 90, 50, table, 4, gpu=True)
    looked_up = 60 * (128 + 128) + 100 * 128 / 3 + 50 * 128
    gradients = 50 * 128 + 50 * 128 / 3 + 3 * 60 * 128
    added_up, updated = 240 * (128 + 144) + 90 * 128, 90 * (144 + 128 + 2 * (128 + 32))
    assert on_gpu == pytest.approx(100 * 144 + looked_up + gradients + added_up + updated)


def test_more_ranks_are_more_work_for_a_copy():
    """All of them have gradients of its rows; what a rank sends grows, too."""
    seconds = []
    for world_size in (2, 4, 8):
        workload = on_two_nodes(ALL, world_size=world_size, ranks_per_node=8).workload
        copy = PlacedShard(workload.model.tables[1], 0, 0, ROWS[1], 64, "data_parallel", "replicated")
        report = workload.resident_report(copy)
        seconds.append(workload.shard_work(copy, report).embedding_bytes)
    assert np.all(np.diff(seconds) > 0)
    assert seconds[-1] > 1.4 * seconds[0]
