"""TorchRec's planner with costs from outside: it gets what it is given, and nothing is left to chance."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType

from embershard.cache.config import MOST_POOL_ROWS
from embershard.planning.request import LEAST_COLUMNS, column_block
from embershard.planning.search import place
from embershard.planning.shard_costs import ShardCost
from embershard.sharding.shards import TablePlacement, shards_of
from embershard.sharding.sizes import PlacedShard, TableSize

TABLES = [TableSize(f"t{n}", rows, 64) for n, rows in enumerate((1000, 1000, 500, 500))]
KINDS = ("table_wise", "row_wise", "column_wise")


def by_size(shards: Sequence[PlacedShard]) -> list[ShardCost]:
    """A byte and a second per element."""
    sizes = [shard.rows * shard.columns for shard in shards]
    return [ShardCost({"lookup": float(size), "communication": 0.0, "copies": 0.0}, size, 2 * size) for size in sizes]


def placed(tables: Sequence[TableSize] = TABLES, costs: Any = by_size, **changes: Any) -> list[TablePlacement] | None:
    arguments: dict[str, Any] = {
        "world_size": 2,
        "ranks_per_node": 2,
        "device_bytes": None,
        "host_bytes": None,
        "allowed": {table.table: ["table_wise"] for table in tables},
    }
    return place(tables, costs, **{**arguments, **changes})


def load(found: Sequence[TablePlacement] | None, world_size: int = 2) -> list[int]:
    """Elements on every rank."""
    assert found is not None
    total = [0] * world_size
    for placement in found:
        for shard in shards_of(placement, world_size):
            total[shard.rank] += shard.rows * shard.columns
    return total


@pytest.mark.parametrize("order", ["seconds", "device_bytes"])
@pytest.mark.parametrize("by_memory", [False, True])
def test_costs_are_balanced(order, by_memory):
    found = placed(sort_by=order, by_memory=by_memory)
    assert load(found) == [1500 * 64] * 2
    assert found == placed(sort_by=order, by_memory=by_memory)
    assert [each.table for each in found or ()] == [table.table for table in TABLES]


def test_the_cheapest_way_is_chosen():
    def costs(wanted: str) -> Any:
        def of(shards: Sequence[PlacedShard]) -> list[ShardCost]:
            cheap = [0.1 if shard.sharding == wanted else 1.0 for shard in shards]
            return [ShardCost({"lookup": cost / len(shards)}, 1, 1) for cost in cheap]

        return of

    for wanted in KINDS:
        found = placed(costs=costs(wanted), allowed={table.table: list(KINDS) for table in TABLES})
        assert {each.sharding for each in found or ()} == {wanted}


@pytest.mark.parametrize("part", ["lookup", "communication", "copies"])
def test_every_part_of_a_cost_counts(part):
    """One table is dear; the three others must be together on the other rank."""

    def costs(shards: Sequence[PlacedShard]) -> list[ShardCost]:
        return [ShardCost({part: 10.0 if shard.table.table == "t2" else 1.0}, 1, 1) for shard in shards]

    found = placed(costs=costs)
    assert found is not None
    ranks = {each.table: each.ranks for each in found}
    assert ranks["t0"] == ranks["t1"] == ranks["t3"] != ranks["t2"]


@pytest.mark.parametrize(("tier", "each"), [("device_bytes", 1), ("host_bytes", 2)])
def test_a_budget_is_kept_or_there_is_no_placement(tier, each):
    half = 1500 * 64 * each
    assert load(placed(**{tier: half})) == [1500 * 64] * 2
    assert placed(**{tier: half - 1}) is None
    assert placed(**{tier: 0}) is None
    assert placed(**{tier: -5}) is None


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a bug"),
        RuntimeError("a bug"),
        RuntimeError("Invalid device string: 'cuda:-128'"),  # on a node with fewer devices
        PlannerError("a bug"),
        PlannerError("a bug", PlannerErrorType.INPUT_VALIDATION),
        KeyError("a bug"),
    ],
    ids=str,
)
def test_an_error_that_does_not_say_that_nothing_fits_is_not_taken_for_that(error):
    def costs(_: Sequence[PlacedShard]) -> list[ShardCost]:
        raise error

    with pytest.raises(type(error)) as raised:
        placed(costs=costs)
    assert raised.value is error


@pytest.mark.parametrize("kind", [PlannerErrorType.INSUFFICIENT_STORAGE, PlannerErrorType.STRICT_CONSTRAINTS])
def test_there_is_no_placement_where_torchrec_says_so(kind):
    def costs(_: Sequence[PlacedShard]) -> list[ShardCost]:
        raise PlannerError("nothing fits", kind)

    assert placed(costs=costs) is None


def test_there_is_no_placement_on_devices_that_torch_cannot_number():
    by_rows = {table.table: ["row_wise"] for table in TABLES}
    assert placed(allowed=by_rows, world_size=128, ranks_per_node=128) is not None
    assert placed(allowed=by_rows, world_size=256, ranks_per_node=256) is None
    assert placed(allowed=by_rows, world_size=256, ranks_per_node=128) is not None


@pytest.mark.parametrize("dim", [32, 36, 64, 80, 96, 100, 128, 160, 200, 256, 1024])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_columns_are_cut_as_a_plan_can_say(dim, world_size):
    """All shards alike and not narrow."""
    block = column_block(dim, world_size)
    assert dim % block == 0
    assert block % 4 == 0
    assert block >= min(dim, LEAST_COLUMNS)
    if block == dim:
        return
    table = TableSize("t0", 1000, dim)
    found = placed([table], allowed={"t0": ["column_wise"]}, world_size=world_size, ranks_per_node=world_size)
    assert found is not None
    ((kind, ranks),) = [(each.sharding, each.ranks) for each in found]
    shards = shards_of(TablePlacement("t0", 1000, dim, "fp32", kind, "cached", ranks), world_size)  # type: ignore[arg-type]
    assert {shard.columns for shard in shards} == {block}
    assert sum(shard.columns for shard in shards) == dim
    assert max(ranks) < world_size


def test_costs_are_asked_for_shards_as_they_are_cut():
    seen: list[PlacedShard] = []

    def costs(shards: Sequence[PlacedShard]) -> list[ShardCost]:
        seen.extend(shards)
        return by_size(shards)

    placed([TableSize("t0", 1001, 64)], costs, allowed={"t0": list(KINDS)})
    cuts = {kind: [(s.row_start, s.row_stop, s.columns) for s in seen if s.sharding == kind] for kind in KINDS}
    assert cuts == {
        "table_wise": [(0, 1001, 64)],
        "row_wise": [(0, 501, 64), (501, 1001, 64)],
        "column_wise": [(0, 1001, 32), (0, 1001, 32)],
    }


def test_torchrec_is_quiet_and_the_log_stays_as_it_was(capfd, caplog):
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            placed()
            placed(device_bytes=0)
        assert logging.root.manager.disable == logging.INFO
    finally:
        logging.disable(logging.NOTSET)
    assert capfd.readouterr().out == ""
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_caches_can_number_their_rows(dtype):
    """Two tables share a rank's cache only if they have the same dim and dtype; those that are not cached need none."""
    rows = MOST_POOL_ROWS - 9
    first, second = (TableSize(name, count, 64) for name, count in (("t0", rows), ("t1", 10)))
    alone = {"world_size": 1, "ranks_per_node": 1}
    assert placed([first, TableSize("t1", 9, 64)], **alone) is not None
    assert placed([first, second], **alone) is None
    assert placed([first, second], **alone, limit_rows=False) is not None
    assert placed([first, TableSize("t1", 10, 32)], **alone) is not None
    assert (placed([first, TableSize("t1", 10, 64, dtype)], **alone) is None) == (dtype == "fp32")
