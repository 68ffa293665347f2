"""What is said of other placements is what they give when they are made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embershard.errors import ConfigError, ShardingError
from embershard.extras.what_if.explain_tables import (
    Alternative,
    alternatives,
    beside,
    change_sentences,
    moved,
    other_kernels,
    own_time,
    sentences,
    table_called,
)
from embershard.planning.make_plan import best_candidate, make_plan, sized
from embershard.planning.request import Budget
from embershard.sharding.pins import TablePin
from embershard.sharding.plan import TablePlacement
from tests.unit.planning.requests import data_of, make_request, round_robin

pytestmark = [pytest.mark.slow, pytest.mark.extra]


@pytest.fixture(autouse=True)
def _few_ranks(monkeypatch) -> None:
    """Looking for a number of ranks that fits need not go far."""
    monkeypatch.setattr("embershard.planning.budget._MOST_RANKS", 16)


REQUEST = {"rows": (20_000, 900, 300), "dims": (128, 64, 64), "world_size": 4}


@pytest.mark.parametrize("budget", [Budget(ratio=0.1), Budget(device_bytes=4_000_000)], ids=["ratio", "device"])
def test_an_alternative_is_the_best_plan_with_it(budget):
    request = make_request(budget, **REQUEST)
    plan = make_plan(request)
    chosen = plan.tables[0]
    found = alternatives(request, "t0", chosen)
    assert sorted(each.sharding for each in found) == ["column_wise", "row_wise", "table_wise"]
    seconds = [each.step_seconds for each in found]
    assert seconds == sorted(seconds)
    for each in found:
        forced = best_candidate(replace(request, only={"t0": [each.sharding]}))
        placed = forced.tables[0]
        assert (placed.sharding, placed.ranks) == (each.sharding, each.ranks)
        assert forced.step_seconds == each.step_seconds
        assert forced.quick.bottleneck == each.bottleneck
        assert max(sum(rank.device_bytes.values()) for rank in forced.quick.ranks) == each.most_device_bytes
    assert chosen.sharding in {each.sharding for each in found}


@pytest.mark.matrix
@pytest.mark.parametrize("table", ["t0", "t1", "t2"])
def test_no_alternative_is_faster_than_the_plan(table):
    """Else the plan would not be the best one that was found."""
    request = make_request(Budget(ratio=0.1), **REQUEST)
    best = best_candidate(request)
    chosen = next(each for each in best.tables if each.table == table)
    for each in alternatives(request, table, chosen):
        assert each.step_seconds >= best.step_seconds * (1 - 1e-9), f"{each.sharding} of {table}"


def test_what_does_not_fit_says_why():
    request = make_request(Budget(cache_bytes=300_000), rows=(100_000, 900), world_size=4)
    plan = make_plan(request)
    assert plan.tables[0].sharding == "row_wise"
    found = {each.sharding: each for each in alternatives(request, "t0", plan.tables[0])}
    assert found["table_wise"].step_seconds is None
    assert "'t0'" in found["table_wise"].problem
    assert "does not fit" in found["table_wise"].problem
    said = sentences(plan.tables[0], list(found.values()))
    assert any(line.startswith("table_wise: the plan does not fit") for line in said)


def test_a_table_that_is_not_sharded_has_no_alternative():
    request = make_request(Budget(ratio=0.1), replicate_rows=300)
    plan = make_plan(request)
    for name in ("t3", "t9"):
        with pytest.raises(ShardingError, match=f"no table '{name}' is sharded in this plan; tables are t0, t1"):
            alternatives(request, name, plan.tables[0])


def test_sentences_compare_with_the_chosen_one():
    chosen = TablePlacement("t0", 5000, 64, "fp32", "row_wise", "cached", (0, 1))
    found = [
        Alternative("row_wise", (0, 1), 0.004, 2 << 30, "dense"),
        Alternative("table_wise", (0,), 0.0055, 3 << 30, "fills"),
        Alternative("column_wise", (0, 1), 0.004, 3 << 30, "fills"),
        Alternative("grid_shard", problem="too large"),
    ]
    assert sentences(chosen, found) == [
        "t0 (5,000 rows) is row_wise on rank 0, 1, cached.",
        "table_wise: 5.500 ms a step, 1.500 ms more than row_wise; then a step waits for fills, and the fullest rank "
        "needs 3.00 GiB",
        "column_wise: 4.000 ms a step, as much as row_wise; then a step waits for fills, and the fullest rank needs "
        "3.00 GiB",
        "grid_shard: too large",
    ]
    many = replace(chosen, ranks=tuple(range(12)))
    assert "on rank 0, 1, 2, 3, 4, 5, 6, 7, ..., cached" in sentences(many, found)[0]


@pytest.mark.parametrize("table", ["t0", "t1", "t3"])
def test_a_move_is_the_plan_with_the_table_there(table):
    """And none is faster: else the search would have found it."""
    request = make_request(Budget(device_bytes=40_000_000), rows=(20_000, 9000, 3000, 300), world_size=4)
    request = replace(request, only={name: ["table_wise"] for name in ("t0", "t1", "t2", "t3")})
    best = best_candidate(own_time(request))
    found = moved(request, best.tables, table)
    (here,) = next(each.ranks for each in best.tables if each.table == table)
    assert sorted(each.what for each in found) == [f"rank {rank}" for rank in range(4) if rank != here]
    for each in found:
        place = (int(each.what.removeprefix("rank ")),)
        there = [replace(own, ranks=place) if own.table == table else own for own in best.tables]
        alone = sized(own_time(request), there)
        assert each.step_seconds == alone.step_seconds
        assert each.more_seconds == alone.step_seconds - best.step_seconds >= -1e-9


def test_what_is_beside_a_table_is_what_its_absence_saves():
    """The heavy neighbour is named, those on other ranks are not."""
    shape = {"dims": (64, 128, 64, 64), "world_size": 2, "batch_size": 4096}
    data = replace(data_of((20_000, 90_000, 3000, 300)), read_seconds_per_sample=None)  # nothing else is slower
    request = make_request(Budget(device_bytes=10**9), rows=(20_000, 90_000, 3000, 300), data=data, **shape)
    ranks = {"t0": 0, "t1": 0, "t2": 0, "t3": 1}
    tables = [replace(each, ranks=(ranks[each.table],), kernel="device") for each in round_robin(request)]
    found = beside(request, tables, "t0")
    assert [each.what for each in found] == ["t1", "t2"]
    model = request.workload.model
    without = replace(model, tables=tuple(table for table in model.tables if table.table != "t1"))
    alone = replace(own_time(request), workload=replace(request.workload, model=without))
    kept = [each for each in tables if each.table != "t1"]
    assert found[0].step_seconds == sized(alone, kept).step_seconds
    assert found[0].more_seconds < found[1].more_seconds <= 0
    said = change_sentences([], found)
    assert said[0].startswith("Of 2 tables beside it, these matter most: ")
    assert "ms less without t1; " in said[0]


def test_the_other_kernel_is_planned_too():
    request = make_request(Budget(device_bytes=40_000_000), **REQUEST)
    plan = make_plan(request)
    chosen = plan.tables[0]
    assert chosen.kernel == "device"
    (other,) = other_kernels(request, "t0", chosen)
    forced = best_candidate(replace(request, pins={"t0": TablePin(kernel="cached")}))
    assert forced.tables[0].kernel == other.sharding == "cached"
    assert other.step_seconds == forced.step_seconds
    said = sentences(chosen, alternatives(request, "t0", chosen), [other])[-1]
    assert said.startswith("cached: ")
    assert " device; then a step waits for " in said
    with_caches = make_request(Budget(ratio=0.1), **REQUEST)
    assert other_kernels(with_caches, "t0", make_plan(with_caches).tables[0]) == [], "a budget of caches"


@pytest.mark.parametrize("name", ["t_C3", "C3", "c3"])
def test_a_table_is_found_by_its_feature(name):
    assert table_called(name, ["t_C3", "t_C30", "t_user"]) == "t_C3"


def test_tables_like_the_name_are_offered():
    with pytest.raises(ConfigError, match=r"no table is called 'usr'. Did you mean t_user\?"):
        table_called("usr", ["t_C3", "t_user"])
    with pytest.raises(ConfigError, match=r"Tables are t_a, t_b\."):
        table_called("zzzzzz", ["t_a", "t_b"])
