"""The options of the search: none that another one is as good as, and caches of sizes near each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from embershard.frequency.assumed import AssumedTable, assumed_statistics
from embershard.planning import cost_arrays as module
from embershard.planning.cost_arrays import CostArrays, Option, cost_arrays
from embershard.planning.local_search import Placed
from embershard.planning.make_plan import PlanSearch, _worth_sizing
from embershard.planning.request import LEAST_COLUMNS, Budget, PlanRequest
from embershard.sharding.shards import TablePlacement
from tests.unit.planning.requests import make_request

ROWS = (400_000, 60_000, 900, 40)


def tight_request(share: float = 0.5) -> PlanRequest:
    """The largest table fits no rank whole, and is looked up more evenly than the others."""
    taken = sum(rows * (4 * 64 + 4) for rows in ROWS)
    tables = [AssumedTable(f"t{n}", rows, 0.2 if n == 0 else 1.2, 10) for n, rows in enumerate(ROWS)]
    data = assumed_statistics(tables, 10**8)
    return make_request(Budget(device_bytes=round(share * taken)), rows=ROWS, data=data, batch_size=8)


def option(seconds: float = 1.0, **memory: float) -> Option:
    held = np.array([[memory.get(name, 0.0) for name in module.MEMORY]])
    return Option("table_wise", "cached", "pooled", "t", np.full((1, 7), seconds), held, np.zeros(1), 0.0)


@pytest.mark.parametrize(
    ("first", "second", "is_as_good"),
    [
        (option(), option(), True),
        (option(fixed=5), option(needed=5, held=5), True),  # all rows in place of a cache as large as they are
        (option(fixed=5), option(needed=5, held=4), False),  # beside others that hold more, the cache takes 4
        (option(held=5), option(held=6), True),
        (option(2.0), option(1.0, held=6), False),
        (option(batch=1), option(fixed=5), False),
    ],
)
def test_an_option_is_as_good_where_no_rank_has_more_work_or_memory(first, second, is_as_good):
    assert first.is_as_good_as(second) is is_as_good
    assert not first.is_as_good_as(replace(second, sharding="row_wise"))
    assert not first.is_as_good_as(replace(second, host_bytes=np.array([-1.0])))


def all_options(request: PlanRequest, monkeypatch: pytest.MonkeyPatch) -> CostArrays:
    monkeypatch.setattr(module, "_without_worse", list)
    costs = cost_arrays(request, resident=True, cached=True)
    monkeypatch.undo()
    return costs


@pytest.mark.slow
def test_every_option_that_is_left_out_has_one_that_is_as_good(monkeypatch):
    request = tight_request()
    kept, every = cost_arrays(request, resident=True, cached=True), all_options(request, monkeypatch)
    left_out = 0
    for own, before in zip(kept.options, every.options, strict=True):
        assert all(any(each.is_as_good_as(other) for each in own) for other in before)
        left_out += len(before) - len(own)
    assert left_out
    kernels = [{each.kernel for each in own} for own in kept.options]
    assert kernels[0] == {"device", "cached"}  # the control: caches of the largest table are worth their work
    assert kernels[-1] == {"device"}


@pytest.mark.slow
def test_no_step_between_two_sizes_of_a_cache_is_large(monkeypatch):
    """Sizes between are there where one table loses much of its slots at once."""

    def largest_step() -> float:
        costs = cost_arrays(request, resident=True, cached=True)
        held = [each.memory[0, 2] for each in costs.options[0] if (each.kernel, each.num_shards) == ("cached", 1)]
        return max(-np.diff(held)) / request.budget.device_bytes

    request = tight_request()
    assert largest_step() <= 2 * module._STEP  # not below it: most sizes are larger than a rank here
    monkeypatch.setattr(module, "_MOST_SIZES", 0)
    assert largest_step() > 4 * module._STEP  # the control: as it was


@pytest.mark.slow
def test_a_placement_in_caches_that_are_no_options_is_known_without_them():
    request = tight_request()
    costs, small = cost_arrays(request, resident=True, cached=True), request.sharded[-1]
    placed = TablePlacement(small.table, small.rows, small.dim, small.dtype, "table_wise", "cached", (1,))
    assert [costs.options[-1][number].kernel for number in costs.options_of(placed)] == ["device"]


@pytest.mark.slow
def test_a_table_that_fbgemm_cannot_train_without_a_cache_is_in_one():
    """Three rows by rows on four ranks: one of them would have none."""
    rows = (5000, 4900, 4300, 3)
    request = make_request(
        Budget(device_bytes=1_900_000), rows=rows, world_size=4, types=["table_wise"], only={"t3": ["row_wise"]}
    )
    request = replace(request, rates=replace(request.rates, step_overhead_seconds=0.0))
    assert {each.kernel for each in cost_arrays(request, resident=True, cached=True).options[-1]} == {"cached"}
    assert PlanSearch(request).first()


def test_caches_are_sized_of_placements_that_differ():
    """Costs of two sharding types differ by less than what the sizes of their caches add."""

    def found(seconds: float, sharding: str, kernel: str = "cached", rank: int = 0) -> Placed:
        return Placed((TablePlacement("t", 9, 4, "fp32", sharding, kernel, (rank,)),), seconds)  # type: ignore[arg-type]

    alike = [found(1.0, "table_wise", rank=rank) for rank in range(4)]
    others = [found(1.1, "table_wise"), found(1.2, "table_wise"), found(1.3, "table_wise"), found(1.4, "row_wise")]
    assert _worth_sizing([*alike, *others]) == [alike[0], *others[:2], others[3]]
    as_fast = found(1.0, "row_wise")  # its memory is another
    assert _worth_sizing([*alike, as_fast]) == [alike[0], as_fast]
    whole = [found(1.0 + n / 10, name, "device") for n, name in enumerate(("a", "b", "c", "d"))]
    assert _worth_sizing(whole) == whole[:3]  # their costs are those of the prediction


@pytest.mark.slow
def test_costs_are_worked_out_once(monkeypatch):
    calls = []
    made = cost_arrays

    def counted(request, **kinds):
        calls.append(kinds)
        return made(request, **kinds)

    monkeypatch.setattr("embershard.planning.make_plan.cost_arrays", counted)
    search = PlanSearch(tight_request())
    search.again(search.first())
    search.tighter(search.bound(), 1.0)
    assert calls
    assert len({tuple(sorted(each.items())) for each in calls}) == len(calls)


@pytest.mark.parametrize("dim", [32, 36, 64, 80, 96, 100, 128, 160, 200, 256, 1024])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_columns_are_cut_as_a_plan_can_say(dim, world_size):
    """Shards as alike as multiples of 4 can be, and not narrow, on 2 ranks up to all."""
    request = make_request(rows=(500,), dims=(dim,), world_size=world_size)
    cuts = request.column_cuts(request.sharded[0], "column_wise")
    most = min(world_size, dim // LEAST_COLUMNS)
    equal = [count for count in range(2, most + 1) if dim % (4 * count) == 0]
    assert [len(cut) for cut in cuts] == (equal or list(range(2, most + 1)) or [1])
    assert not equal or all(len({*cut}) == 1 for cut in cuts), "the most even cuts where there are no equal ones"
    for cut in cuts:
        assert sum(cut) == dim
        assert max(cut) - min(cut) <= 4
        assert not any(columns % 4 for columns in cut)
        assert min(cut) >= min(dim, LEAST_COLUMNS)
    evenly = make_request(rows=(500,), dims=(dim,), world_size=world_size, exchange="rows")
    assert evenly.column_cuts(evenly.sharded[0], "column_wise") == ([c for c in cuts if len({*c}) == 1] or [(dim,)])
