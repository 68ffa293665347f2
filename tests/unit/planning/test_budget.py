"""What does not fit is refused with what would fit; and that does."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from embershard.cache.config import MOST_POOL_ROWS
from embershard.errors import ConfigError, ShardingError
from embershard.frequency import DataStatistics
from embershard.planning import budget as budget_module
from embershard.planning import make_plan as make_plan_module
from embershard.planning.budget import all_on_devices, least_need, least_needs, ranks_without_caches
from embershard.planning.cost_arrays import cost_arrays
from embershard.planning.local_search import local_search
from embershard.planning.make_plan import best_candidate, make_plan, sized
from embershard.planning.request import Budget, PlanRequest
from embershard.sharding.plan import Plan, TablePlacement, pools_of
from embershard.sharding.shards import largest_pool_problem
from embershard.units import size
from tests.covering import combinations, covering, keep, matrix
from tests.unit.planning.requests import data_of, make_request, make_workload, random_rows

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _few_ranks(monkeypatch) -> None:
    """Looking for a number of ranks that fits need not go far."""
    monkeypatch.setattr("embershard.planning.budget._MOST_RANKS", 16)


ROWS_OF_TWO_CACHES = data_of((21 * 10**8, 23 * 10**8), 3000)
CASES: dict[str, dict[str, Any]] = {
    "one rank": {"world_size": 1},
    "two ranks": {},
    "dims": {"dims": (16, 32, 64, 128), "world_size": 4},
    "columns that do not halve": {"dims": (80, 80, 96, 36), "world_size": 4},
    "nodes": {"world_size": 16, "ranks_per_node": 8},
    "replicated": {"replicate_rows": 500},
    "only replicated": {"replicate_rows": 10**6},
    "row_wise only": {"types": ["row_wise"], "world_size": 8},
    "rows that one cache cannot number": {"rows": (21 * 10**8, 23 * 10**8), "data": ROWS_OF_TWO_CACHES},
    "fp16": {"dtype": "fp16", "state_bytes": 0, "state_bytes_per_column": 8},
    "a batch of most rows": {"rows": (3000, 2000, 900, 50), "world_size": 4, "batch_size": 8192},
}


def least_device_bytes(request: PlanRequest) -> int:
    """With caches, without them, or with some."""
    return min(need.asked(request.budget) for need in least_needs(request))


def with_device(request: PlanRequest, device_bytes: int) -> PlanRequest:
    return replace(request, budget=Budget(device_bytes=device_bytes, host_bytes=request.budget.host_bytes))


def refusal(request: PlanRequest) -> str:
    with pytest.raises(ShardingError) as error:
        make_plan(request)
    return str(error.value)


def bytes_in(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return int(found[1])


@pytest.mark.parametrize("name", keep(("one rank", "row_wise only"), CASES))
def test_the_named_need_fits_and_a_byte_less_does_not(name):
    request = make_request(**CASES[name])
    said = refusal(with_device(request, 1))
    need = bytes_in(r"--device-memory (\d+)", said)
    assert f"needs at least {size(need)} ({need} bytes)" in said
    assert need <= least_device_bytes(request), "the search may find one that needs less"
    plan = make_plan(with_device(request, need))
    assert max(sum(rank.device_bytes.values()) for rank in plan.prediction.ranks) <= need
    said = refusal(with_device(request, need - 1))
    assert f"needs at least {size(need)} ({need} bytes)" in said
    assert "1 bytes are missing" in said
    assert f"Smallest change that fits: --device-memory {need}" in said


def test_a_plan_without_caches_fits_in_what_it_takes():
    """Where a batch looks up most rows, the maps of caches alone are more than the rows that need no slot."""
    request = make_request(Budget(device_bytes=10**9), **CASES["a batch of most rows"])
    plan = make_plan(request)
    assert {table.kernel for table in plan.tables} == {"device"}
    taken = plan.prediction.most_device_bytes
    assert taken < least_need(request).asked(request.budget)
    assert make_plan(with_device(request, taken)).tables == plan.tables
    _, whole = least_needs(request)
    need = whole.asked(request.budget)
    with pytest.raises(ShardingError, match=r"\(all its rows\); all but these tables takes") as refused:
        whole.check_device(with_device(request, need - 1))
    assert f"Smallest change that fits: --device-memory {need};" in str(refused.value)


@pytest.mark.parametrize("name", keep(("one rank",), ("one rank", "two ranks", "dims")))
def test_a_cache_budget_is_for_the_caches_alone(name):
    request = make_request(Budget(cache_bytes=1), **CASES[name])
    need = bytes_in(r"--set cache\.device_bytes=(\d+)", refusal(request))
    assert need <= least_need(request).asked(request.budget)
    plan = make_plan(replace(request, budget=Budget(cache_bytes=need)))
    caches = [rank.device_bytes["slots"] + rank.device_bytes["maps"] for rank in plan.prediction.ranks]
    assert max(caches) <= need
    said = refusal(replace(request, budget=Budget(cache_bytes=need - 1)))
    assert f"({need} bytes) of device memory" in said
    assert bytes_in(r"--set cache\.device_bytes=(\d+)", said) == need


def test_it_says_which_table_and_rank_and_what_the_rest_takes():
    request = make_request(rows=(50, 200_000, 70), world_size=1)
    said = refusal(with_device(request, 100_000))
    need = least_need(request)
    (rank,) = need.ranks
    assert "rank 0 needs" in said
    assert f"largest table is 't1' with {size(rank.table_bytes['t1'])} ({rank.table_bytes['t1']} bytes)" in said
    assert f"({rank.fixed_bytes} bytes)" in said
    assert rank.fixed_bytes + sum(rank.table_bytes.values()) == need.asked(request.budget)


def on_ranks(request: PlanRequest, ranks: int) -> PlanRequest:
    """The same on other ranks, as the command line makes it: with as many per node as the node has devices."""
    per_node = min(ranks, request.most_ranks_per_node or ranks)
    shape = replace(request.workload.shape, world_size=ranks, ranks_per_node=per_node)
    return replace(request, workload=replace(request.workload, shape=shape))


NAMED = {
    "caches": (Budget(cache_bytes=450_000), 4),
    "device": (Budget(device_bytes=2_000_000), 2),
    "host": (Budget(device_bytes=10**9, host_bytes=60_000_000), None),
}


@pytest.mark.parametrize(
    ("kind", "devices"), combinations([("caches", None), ("device", 2)], tuple(NAMED), (None, 2, 8))
)
def test_the_number_of_ranks_that_it_names_fits(kind, devices):
    """As many ranks as are named fit, fewer do not. More ranks of one node are no more host memory."""
    budget, fits_from = NAMED[kind]
    tables = {"rows": (300_000, 100_000), "data": data_of((300_000, 100_000), 3000)}
    request = make_request(budget, world_size=1, ranks_per_node=1, most_ranks_per_node=devices, **tables)
    if budget.host_bytes is not None:  # all rows would fit the devices
        request = replace(request, budget=replace(budget, device_bytes=3_000_000))
    said = refusal(request)
    named = re.search(r"or --ranks (\d+)", said)
    if budget.host_bytes is not None:
        assert (named is not None) == (devices is not None), said
        assert "node 0 needs 100.71 MiB (105600000 bytes) of host memory" in said
        need = bytes_in(r"--host-memory (\d+)", said)
        assert need == 400_000 * (64 * 4 + 4 + 4)
        enough = replace(request.budget, host_bytes=need)
        make_plan(replace(request, budget=enough))
        refusal(replace(request, budget=replace(enough, host_bytes=need - 1)))
    else:
        assert named is not None, said
        assert int(named[1]) == fits_from
    if named is not None:
        make_plan(on_ranks(request, int(named[1])))
        fewer = [n for n in range(1, int(named[1])) if devices is None or n <= devices or n % devices == 0]
        refusal(on_ranks(request, fewer[-1]))


@pytest.mark.parametrize("limit", [2_000_000, matrix(3_000_000)])
def test_so_many_ranks_hold_all_rows_without_a_cache_and_fewer_do_not(limit):
    tables = {"rows": (30_000, 10_000), "data": data_of((30_000, 10_000), 3000)}
    request = make_request(Budget(device_bytes=limit), world_size=2, **tables)
    assert "cached" in {table.kernel for table in make_plan(request).tables}
    fewest = ranks_without_caches(request)
    assert fewest is not None
    assert ranks_without_caches(request.for_ranks(fewest + 1)) == fewest, "it is no matter of the request's ranks"
    for asked in (all_on_devices(request), request):  # beside the host's thread, a cache gains nothing
        plan = make_plan(asked.for_ranks(fewest))
        assert {table.kernel for table in plan.tables} == {"device"}
        assert plan.prediction.most_device_bytes <= limit
    refusal(all_on_devices(request).for_ranks(fewest - 1))


def test_a_budget_of_caches_says_nothing_of_ranks_without_any():
    assert ranks_without_caches(make_request(Budget(cache_bytes=450_000))) is None
    assert ranks_without_caches(make_request(Budget(device_bytes=10**6, ratio=0.1))) is None
    assert ranks_without_caches(make_request(Budget(device_bytes=1000))) is None, "the dense part is larger"


@pytest.mark.matrix
@pytest.mark.parametrize(("limit", "fewest"), [matrix(4_000_000, 2), (3_750_000, 5)])
def test_the_fewest_ranks_are_named_where_more_need_more(limit, fewest):
    """Cut by rows, or with as many whole tables on each rank, more ranks may need more: 4 do not fit, 5 do."""
    rows = (100_000, 100_000, 1000, 900)
    data, budget = data_of(rows, bag_size=5), Budget(device_bytes=limit)
    request = make_request(budget, rows=rows, dims=(64, 64, 128, 128), batch_size=256, world_size=1, data=data)
    assert refusal(request).endswith(f"; or --ranks {fewest}")
    make_plan(request.for_ranks(fewest))
    for fewer in range(2, fewest):
        assert "does not fit" in refusal(request.for_ranks(fewer))


def test_where_no_number_of_ranks_helps_it_says_what_does():
    request = make_request(Budget(device_bytes=300_000), world_size=1)
    said = refusal(request)
    assert "more ranks do not help, a smaller train.batch_size may" in said
    assert make_plan(make_request(Budget(device_bytes=300_000), world_size=1, batch_size=16)).pools


def test_host_memory_is_not_asked_of_tables_that_are_whole_on_the_device():
    plan = make_plan(make_request(Budget(device_bytes=10**9, host_bytes=1)))
    assert {table.kernel for table in plan.tables} == {"device"}


def test_rows_are_spread_where_a_node_is_too_small_for_a_table():
    """Least device memory is to put either table on a node; one of them is too large for its host memory."""
    rows, dims = (40_000, 40_000), (16, 256)
    budget = Budget(device_bytes=4_000_000, host_bytes=26_000_000)
    plan = make_plan(make_request(budget, rows=rows, dims=dims, world_size=2, ranks_per_node=1))
    assert all(sum(rank.host_bytes.values()) <= 26_000_000 for rank in plan.prediction.ranks)
    said = refusal(make_request(replace(budget, host_bytes=20_000_000), rows=rows, dims=dims, ranks_per_node=1))
    assert "of host memory" in said


def test_a_ratio_that_does_not_fit_the_device_is_refused():
    request = make_request(rows=(300_000, 100_000), data=data_of((300_000, 100_000), 3000), world_size=1)
    small, large = Budget(ratio=0.1, device_bytes=20_000_000), Budget(ratio=0.5, device_bytes=20_000_000)
    assert sum(pool.slots for pool in make_plan(replace(request, budget=small)).pools) == 40_000
    with pytest.raises(ShardingError, match="ratio"):
        make_plan(replace(request, budget=large))


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self.num_bytes = max(self.num_bytes, tensor.numel() * tensor.element_size())
        return found


@pytest.fixture(scope="module")
def huge() -> DataStatistics:
    return data_of((10**10, 5000), 3000)


@pytest.mark.parametrize(
    "budget", [Budget(device_bytes=10**9), matrix(Budget(device_bytes=80 * 10**9, host_bytes=10**12))]
)
def test_nothing_of_a_tables_size_is_made(huge, budget):
    """A table of 10^10 rows, whose slot maps alone take 5 GB a rank: refused before anything is allocated."""
    request = make_request(budget, rows=(10**10, 5000), world_size=8, data=huge)
    with _Largest() as largest:
        said = refusal(request)
    assert "'t0'" in said
    assert largest.num_bytes < 10**6
    fits = Budget(device_bytes=80 * 10**9, host_bytes=10**13)
    plan = make_plan(replace(request, budget=fits))
    cached = sum(table.rows for table in plan.tables if table.kernel == "cached")
    assert sum(rank.host_bytes["rows"] for rank in plan.prediction.ranks) == cached * 260 >= 10**10 * 260


def test_one_huge_table_needs_to_be_cut(huge):
    """Table-wise no cache can number its rows; cut by rows eight can."""
    request = make_request(Budget(device_bytes=16 * 10**9), rows=(10**10, 5000), world_size=8, data=huge)
    said = refusal(replace(request, types=["table_wise"]))
    assert "the table_wise cache of rank 0 would have 10000000000 rows, of 't0' (10000000000), and a cache can" in said
    assert "or allow row_wise sharding for them" in said
    assert "--ranks" not in said  # whole, it fits no rank, however many there are
    plan = make_plan(request)
    assert {t.table: t.sharding for t in plan.tables}["t0"] == "row_wise"


def of_rows(rows: tuple[int, ...], world_size: int, **changes: Any) -> PlanRequest:
    """A little of each row is cached, on devices of any size."""
    return make_request(Budget(ratio=0.001), rows=rows, world_size=world_size, data=data_of(rows, 3000), **changes)


def check_pools(plan: Plan) -> None:
    pools = pools_of(plan.tables, plan.ranks_per_node)
    assert {table for pool in pools for table in pool.tables} == {
        table.table for table in plan.tables if table.kernel == "cached"
    }
    assert max(pool.rows for pool in pools) <= MOST_POOL_ROWS


@pytest.mark.parametrize(
    ("world_size", "types"), [(1, None), matrix(2, ["row_wise"]), (2, ["table_wise"]), matrix(4, None)]
)
def test_a_cache_gets_as_many_rows_as_it_can_number_and_not_one_more(world_size, types):
    most = MOST_POOL_ROWS * (1 if types == ["table_wise"] else world_size)
    plan = make_plan(of_rows((most,), world_size, types=types))
    check_pools(plan)
    assert max(pool.rows for pool in pools_of(plan.tables, plan.ranks_per_node)) == MOST_POOL_ROWS
    said = refusal(of_rows((most + 1,), world_size, types=types))
    assert (
        f"cache of rank 0 would have 2147483648 rows, of 't0' (2147483648), and a cache can number {MOST_POOL_ROWS}."
        in (said)
    )
    assert "Give its tables fewer rows" in said


@pytest.mark.parametrize(
    ("rows", "world_size"),
    [((MOST_POOL_ROWS, 7), 1), matrix((15 * 10**8,) * 4, 2), ((10**9, 10**9, 15 * 10**8, 15 * 10**8, 900), 2)],
)
def test_tables_that_are_too_many_rows_for_one_cache_are_sharded_in_different_ways(rows, world_size):
    """In one way alone, whichever it is, a rank has too many rows for its only cache."""
    for only in ("table_wise", "row_wise"):
        assert "and a cache can number" in refusal(of_rows(rows, world_size, types=[only]))
    plan = make_plan(of_rows(rows, world_size))
    check_pools(plan)
    assert len({table.sharding for table in plan.tables}) > 1


@pytest.mark.matrix
@pytest.mark.parametrize(("world_size", "devices"), covering((2, 4), (None, 4)))
def test_the_number_of_ranks_whose_caches_can_number_the_rows_is_named(huge, world_size, devices):
    request = make_request(
        Budget(device_bytes=80 * 10**9), rows=(10**10, 5000), world_size=world_size, data=huge,
        most_ranks_per_node=devices,
    )  # fmt: skip
    rows = 10**10 // world_size, 5000 // world_size
    assert refusal(request) == (
        f"the plan does not fit: the row_wise cache of rank 0 would have {sum(rows)} rows, of 't0' ({rows[0]}), 't1' "
        f"({rows[1]}), and a cache can number 2147483647. Give its tables fewer rows (hash their ids into fewer); or "
        f"--ranks {8 if devices else 5}"
    )
    check_pools(make_plan(on_ranks(request, 8 if devices else 5)))


@pytest.mark.matrix
def test_where_some_table_cannot_be_cut_no_number_of_ranks_is_named(monkeypatch):
    """However many are tried."""
    monkeypatch.setattr("embershard.planning.budget._MOST_RANKS", 256)
    said = refusal(of_rows((1000, 23 * 10**8), 2, only={"t0": ["row_wise"], "t1": ["table_wise"]}))
    assert "would have 2300000000 rows, of 't1' (2300000000)" in said
    assert said.endswith("(hash their ids into fewer); or allow row_wise sharding for them")


def test_the_search_places_no_more_rows_than_caches_can_number():
    """Of four tables on two ranks, each of which has room for one, two are cut by rows."""
    request = of_rows((15 * 10**8,) * 4, 2)
    costs = cost_arrays(request, resident=False, cached=True)
    found, without = (local_search(replace(costs, most_pool_rows=most), 5) for most in (costs.most_pool_rows, None))
    assert found
    assert not any(largest_pool_problem(each.tables, 2) for each in found)
    assert any(largest_pool_problem(each.tables, 2) for each in without), "the control"


def test_the_fastest_plan_is_looked_for_among_those_whose_caches_can_number_their_rows():
    """Not only among those that need the least memory: a placement that fits is not faster than the plan."""
    rows, dims = (21 * 10**8, 23 * 10**8, 1000, 1000), (64, 64, 128, 128)
    request = of_rows(rows, 2, dims=dims)
    placements = (("table_wise", (1,)), ("row_wise", (0, 1)), ("table_wise", (0,)), ("table_wise", (1,)))
    tables = [
        TablePlacement(f"t{n}", rows[n], dims[n], "fp32", sharding, "cached", ranks)  # type: ignore[arg-type]
        for n, (sharding, ranks) in enumerate(placements)
    ]
    other = sized(request, tables)
    assert best_candidate(request).step_seconds <= other.step_seconds * (1 + 1e-9)


@pytest.mark.matrix
def test_ranks_are_not_named_where_their_host_memory_would_not_do(huge):
    request = make_request(
        Budget(device_bytes=80 * 10**9, host_bytes=10**12), rows=(10**10, 5000), world_size=2, data=huge
    )
    assert "--ranks" not in refusal(request)


def test_rows_that_are_not_cached_need_no_numbers():
    """On a device of 100 GB a table of 20 bytes a row is whole, however many rows it has."""
    rows = (3 * 10**9,)
    budget = Budget(device_bytes=100 * 10**9)
    (table,) = make_plan(make_request(budget, rows=rows, dims=(4,), world_size=1, data=data_of(rows, 3000))).tables
    assert table.kernel == "device"


def test_a_profile_of_other_tables_is_refused():
    data = data_of((5000, 900))
    for rows, said in (
        ((5000, 901), "'t1' has 901 rows in the model; the profile has it with 900"),
        ((5000, 900, 7), "'t2'.*does not have it"),
    ):
        with pytest.raises(ShardingError, match=said):
            make_workload(rows, data=data)


def test_a_budget_says_how_large_caches_are():
    for wrong in ({}, {"host_bytes": 1}, {"cache_bytes": 1, "ratio": 0.5}, {"cache_bytes": 1, "device_bytes": 1}):
        with pytest.raises(ConfigError, match="a budget needs"):
            Budget(**wrong)


def test_least_need_is_the_same_every_time_and_no_less_than_any_plan():
    request = make_request(rows=random_rows(0, 12), world_size=4)
    needs = [least_need(request) for _ in range(2)]
    assert needs[0] == needs[1]
    plan: Plan = make_plan(request)
    assert max(sum(rank.device_bytes.values()) for rank in plan.prediction.ranks) >= needs[0].asked(request.budget)


@pytest.mark.matrix
def test_a_refusal_takes_few_searches(monkeypatch):
    """For what was asked for and as for a plan with a byte less until that finds none, each without caches and with
    them; and for the least memory, twice."""
    searches: list[int] = []
    search = make_plan_module.local_search
    monkeypatch.setattr(make_plan_module, "local_search", lambda *a, **k: (searches.append(1), search(*a, **k))[1])
    request = make_request(rows=random_rows(3, 6), dims=(16, 64, 128) * 2, world_size=2)
    said = refusal(with_device(request, least_device_bytes(request) // 2))
    assert 0 < len(searches) <= 4 + 2 * make_plan_module._MOST_SHRUNK
    make_plan(with_device(request, bytes_in(r"--device-memory (\d+)", said)))


@pytest.mark.parametrize("name", keep(("one rank", "dims", "nodes", "a batch of most rows"), CASES))
def test_what_fits_is_never_ruled_out_without_a_search(name):
    """A device of the least need may hold it; one of a third of that cannot, and no search is needed to say so."""
    request = make_request(**CASES[name])
    least = least_device_bytes(request)
    assert budget_module._may_fit(with_device(request, least))
    assert not budget_module._may_fit(with_device(request, least // 3))


@pytest.mark.matrix
def test_other_numbers_of_ranks_are_searched_only_where_their_memory_could_do(monkeypatch):
    """Twelve numbers are ruled out by arithmetic. The control: where none is, three are searched, to say the same."""
    searched: list[int] = []
    place = budget_module._least_memory
    counted = lambda each, **k: (searched.append(each.workload.shape.world_size), place(each, **k))[1]  # noqa: E731
    monkeypatch.setattr(budget_module, "_least_memory", counted)
    request = make_request(rows=random_rows(3, 6), dims=(16, 64, 128) * 2, world_size=2)
    request = with_device(request, round(0.9 * least_device_bytes(request)))
    said = refusal(request)
    assert set(searched) == {2}
    monkeypatch.setattr(budget_module, "_may_fit", lambda request: True)
    assert refusal(request) == said
    assert len(set(searched)) == 1 + budget_module._MOST_SEARCHED


@pytest.mark.matrix
def test_more_ranks_of_a_node_that_is_too_small_are_not_searched(monkeypatch):
    """Its host memory is the same, however many there are; nor are rows cut for them."""
    tried: list[int] = []
    need_of = budget_module._needs_by_rows
    monkeypatch.setattr(budget_module, "_MOST_RANKS", 1024)
    monkeypatch.setattr(
        budget_module, "_needs_by_rows", lambda each: (tried.append(each.workload.shape.world_size), need_of(each))[1]
    )
    request = make_request(Budget(ratio=0.1, host_bytes=10**6), world_size=2, ranks_per_node=2)
    said = refusal(request)
    assert "of host memory" in said
    assert "--ranks" not in said
    assert not tried
    monkeypatch.setattr(budget_module, "_may_fit", lambda request: True)
    monkeypatch.setattr(budget_module, "_MOST_RANKS", 16)
    assert refusal(request) == said
    assert tried
