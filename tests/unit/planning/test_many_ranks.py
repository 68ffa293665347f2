"""Plans of more ranks than the search looks at."""

from __future__ import annotations

import dataclasses

import pytest

from embershard.errors import ShardingError
from embershard.planning import many_ranks
from embershard.planning.cost.topology import Topology, load_topology
from embershard.planning.make_plan import best_candidate
from embershard.planning.many_ranks import plan_quickly, plan_with_care, wide_candidate
from embershard.planning.request import Budget, PlanRequest
from embershard.sharding.shards import shards_of
from tests.unit.planning.requests import LFU, make_request

pytestmark = pytest.mark.slow

ROWS = (40_000, 9000, 5000, 900, 300, 40)


def request_on(num_ranks: int, name: str = "h100", **changes) -> tuple[PlanRequest, Topology]:
    per_node = min(8, num_ranks)
    topology = load_topology(name).shaped(per_node, num_ranks // per_node)
    none = {"step_overhead_seconds": 0.0, "collective_host_seconds": 0.0}  # they would hide the rest
    assumptions = dataclasses.replace(topology.assumptions, **none)
    topology = dataclasses.replace(topology, assumptions=assumptions)
    asked = make_request(
        changes.pop("budget", Budget(device_bytes=12_000_000)),
        rows=ROWS,
        world_size=num_ranks,
        ranks_per_node=per_node,
        rates=topology.rates_for(num_ranks),
        cache=dataclasses.replace(LFU, lookahead=8),
        **changes,
    )
    return asked, topology


@pytest.mark.parametrize("types", [["table_wise"], ["row_wise"], ["table_wise", "row_wise"]])
def test_where_the_search_finds_none_simple_placements_are_tried(types, monkeypatch) -> None:
    monkeypatch.setattr(many_ranks, "_searched", lambda request: [])
    asked, _ = request_on(16, dims=(128,) * len(ROWS), types=types)
    for table in wide_candidate(asked).tables:
        assert sum(shard.rows for shard in shards_of(table, ranks_per_node=8)) == table.rows
        assert table.sharding in types


@pytest.mark.parametrize("kind", ["row_wise", "grid_shard"])
def test_many_ranks_may_have_one_sharding_type(kind) -> None:
    """Of the types that the search begins with, tables may have none."""
    asked, _ = request_on(64, dims=(128,) * len(ROWS), types=[kind], budget=Budget(device_bytes=100_000_000))
    assert {table.sharding for table in wide_candidate(asked).tables} == {kind}


@pytest.mark.matrix
@pytest.mark.parametrize("num_ranks", [16, 64])
def test_the_search_on_busy_nodes_is_near_that_on_all(num_ranks) -> None:
    """And the same twice."""
    asked, _ = request_on(num_ranks, dims=(128,) * len(ROWS))
    found = wide_candidate(asked)
    assert found.step_seconds <= 1.1 * best_candidate(asked).step_seconds
    assert found.tables == wide_candidate(asked).tables


def test_a_plan_of_many_ranks_is_the_same_twice_byte_for_byte() -> None:
    asked, _ = request_on(64, dims=(128,) * len(ROWS))
    plan = plan_quickly(asked)
    assert plan.to_text() == plan_quickly(asked).to_text()
    assert plan.to_text() != plan_quickly(dataclasses.replace(asked, types=["table_wise"])).to_text()
    with_care = plan_with_care(asked)
    assert with_care.prediction.step_seconds <= plan.prediction.step_seconds
    assert with_care.bound is not None


@pytest.mark.matrix
def test_4096_ranks_are_placed_where_bytes_are_least() -> None:
    """Tables cut over nodes, whose ranks send an embedding once to each other node; each rank of another node is sent
    one by a table on one rank."""
    asked, _ = request_on(4096, dims=(128,) * len(ROWS), budget=Budget(device_bytes=80 * 10**9), batch_size=1024)
    found, table_wise = wide_candidate(asked), dataclasses.replace(asked, types=["table_wise"])
    assert {"grid_shard", "table_row_wise"} & {table.sharding for table in found.tables}
    assert found.step_seconds < 0.5 * wide_candidate(table_wise).step_seconds


def test_tables_too_large_for_any_placement_are_refused() -> None:
    asked, _ = request_on(64, budget=Budget(device_bytes=1000))
    with pytest.raises(ShardingError, match="no plain placement of 6 tables on 64 ranks fits"):
        wide_candidate(asked)


def test_replicated_tables_stay_replicated() -> None:
    asked, _ = request_on(64, replicate_rows=300)
    kernels = {table.table: table.kernel for table in wide_candidate(asked).tables}
    assert (kernels["t4"], kernels["t5"]) == ("replicated", "replicated")
