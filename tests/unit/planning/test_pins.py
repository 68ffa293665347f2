"""What is pinned of a table's place is in the plan; the planner decides the rest."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from embershard.errors import ConfigError, ShardingError
from embershard.planning.make_plan import best_candidate, make_plan
from embershard.planning.many_ranks import wide_candidate
from embershard.planning.request import Budget, PlanRequest
from embershard.sharding.pins import TablePin
from embershard.sharding.plan import Plan
from tests.covering import keep
from tests.unit.planning.requests import make_request

TABLES = {"rows": (50_000, 9000, 300, 40), "dims": (128, 64, 64, 64), "world_size": 4, "ranks_per_node": 2}
TIGHT, ROOMY = Budget(device_bytes=12_000_000), Budget(device_bytes=10**9)


def planned(budget: Budget = TIGHT, **pins: TablePin) -> Plan:
    return make_plan(request_for(budget, **pins))


def request_for(budget: Budget = TIGHT, **pins: TablePin) -> PlanRequest:
    return replace(make_request(budget, **TABLES), pins=pins, effort=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("budget", keep((TIGHT,), (TIGHT, ROOMY, Budget(ratio=0.2))), ids=str)
@pytest.mark.parametrize(
    "pin",
    [
        TablePin(ranks=(3,)),
        TablePin(type="table_wise", ranks=(1,)),
        TablePin(type="row_wise"),
        TablePin(type="column_wise", ranks=(2, 0)),
        TablePin(type="table_row_wise", ranks=(2, 3)),
        TablePin(type="grid_shard", ranks=(0, 1, 2, 3)),
        TablePin(kernel="cached"),
        TablePin(slots=7000),
    ],
    ids=lambda pin: ",".join(f"{name}={value}" for name, value in vars(pin).items() if value),
)
def test_plans_obey(pin, budget):
    plan = planned(budget, t0=pin)
    placed = plan.tables[0]
    assert not pin.problem(placed)
    if pin.slots is not None:
        pools = [pool for pool in plan.pools if "t0" in pool.tables]
        assert pools
        assert all(pool.slots == 7000 for pool in pools)
    if plan.bound is not None:
        assert plan.bound.is_valid


@pytest.mark.slow
def test_a_table_that_would_be_in_a_cache_can_be_whole_on_the_device():
    budget = Budget(device_bytes=7_500_000)  # not enough for all rows
    cached = next(table for table in planned(budget).tables if table.kernel == "cached")
    pinned = planned(budget, **{cached.table: TablePin(kernel="device")})
    assert next(table for table in pinned.tables if table.table == cached.table).kernel == "device"


@pytest.mark.matrix
def test_the_control_plans_otherwise():
    """Pins that contradict each other are both obeyed: the tests above can fail."""
    one, other = (planned(ROOMY, t0=TablePin(ranks=(rank,))).tables[0].ranks for rank in (3, 1))
    assert (one, other) == ((3,), (1,))


@pytest.mark.slow
def test_a_pinned_table_keeps_its_place_beside_all_others():
    """The others are planned around it: a rank with a pinned giant gets fewer others."""
    request = replace(make_request(ROOMY, rows=(500_000, 9000, 9000, 9000), world_size=2), effort=0.2)
    plan = make_plan(replace(request, pins={"t0": TablePin(type="table_wise", ranks=(1,))}))
    assert plan.tables[0].ranks == (1,)
    anywhere = best_candidate(replace(request, only={"t0": ["table_wise"]}))
    assert plan.prediction.step_seconds <= 1.01 * anywhere.step_seconds


@pytest.mark.slow
def test_many_ranks_obey():
    tables = {"rows": (50_000, 9000, 300), "world_size": 64, "ranks_per_node": 8}
    request = make_request(ROOMY, **tables)
    for pin in (TablePin(type="table_wise", ranks=(61,)), TablePin(type="table_row_wise", ranks=tuple(range(40, 48)))):
        found = wide_candidate(replace(request, pins={"t1": pin}))
        assert not pin.problem(found.tables[1])


@pytest.mark.slow
def test_pins_that_no_plan_can_have_are_refused():
    def refused(**pins: TablePin) -> str:
        with pytest.raises((ConfigError, ShardingError)) as error:
            make_plan(request_for(Budget(ratio=0.2), **pins))
        return str(error.value)

    assert "sharding.pin.ids: the model has no such table. Tables are t0" in refused(ids=TablePin(type="row_wise"))
    assert "sharding.pin.t0.ranks: got rank 4, needed ranks from 0 to 3" in refused(t0=TablePin(ranks=(4,)))
    assert "sharding.pin.t0.ranks: got [1, 2]" in refused(t0=TablePin(type="table_row_wise", ranks=(1, 2)))
    assert 'kernel "device" needs a limit' in refused(t0=TablePin(kernel="device"))
    two = {"t1": TablePin("table_wise", (0,), slots=100), "t2": TablePin("table_wise", (0,), slots=200)}
    assert "are asked of one cache" in refused(**two)


@pytest.mark.slow
def test_a_pin_that_does_not_fit_says_what_is_missing():
    with pytest.raises(ShardingError, match=r"rank 2 needs at least .* Its largest table is 't0'"):
        planned(Budget(device_bytes=3_000_000), t0=TablePin(type="table_wise", ranks=(2,), kernel="device"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"type": "data_parallel"}, "type: got 'data_parallel'"),
        ({"kernel": "replicated"}, "kernel: got 'replicated'"),
        ({"ranks": (0, 0)}, "ranks: got \\[0, 0\\]"),
        ({"slots": 0}, "slots: got 0"),
        ({"slots": 5, "kernel": "device"}, "of a cache"),
        ({}, "got nothing"),
    ],
)
def test_a_pin_says_what_is_wrong_with_it(values, said):
    with pytest.raises(ConfigError, match=said):
        TablePin(**values)


@pytest.mark.slow
def test_every_field_of_a_pin_is_compared_with_a_plan_but_for_slots():
    assert {field.name for field in dataclasses.fields(TablePin)} == {"type", "ranks", "kernel", "columns", "slots"}
    table = planned(ROOMY).tables[0]
    assert TablePin(kernel="cached").problem(table) == "its kernel is 'device' and pinned to 'cached'"
    assert "its type is" in TablePin(type="grid_shard").problem(table)
    assert "its ranks is" in TablePin(ranks=(9,)).problem(table)
    assert TablePin(columns=(64, 32)).problem(table) == "its columns is () and pinned to (64, 32)"
