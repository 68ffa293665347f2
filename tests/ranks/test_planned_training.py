"""`train --plan` builds exactly what the plan says, and trains bit for bit like stock TorchRec without a cache."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from embershard.sharding.plan import Plan, pools_of
from tests.ranks import planned
from tests.ranks.rounding import loss_rounding
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

CLOSE = loss_rounding(steps=13, samples=2 * 20)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Cached tables of three sharding types, one on the device, one replicated."""
    return planned.mixed_plan(["table_wise", "row_wise", "column_wise"], 2, 2)


@pytest.fixture(scope="module")
def outcomes(two_ranks: RankPool, plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> list[planned.Outcome]:
    """Of a run by that plan."""
    return two_ranks.run(planned.compare, saved(plan, tmp_path_factory.mktemp("plan") / "p.json"))


def saved(plan: Plan, path: Path) -> Path:
    plan.save(path)
    return path


def built_pools(outcomes: list[planned.Outcome]) -> set[tuple[int, tuple[str, ...], int]]:
    """Rank, tables and slots of every pool that was built."""
    return {
        (rank["rank"], tuple(pool["tables"]), pool["slots"])
        for rank in outcomes[0].cache["ranks"]
        for pool in rank["pools"]
    }


def planned_pools(plan: Plan) -> set[tuple[int, tuple[str, ...], int]]:
    return {(pool.rank, pool.tables, pool.slots) for pool in plan.pools}


def check_exact(outcomes: list[planned.Outcome], evictions: int) -> None:
    assert [outcome.different for outcome in outcomes] == [[] for _ in outcomes]
    assert all(outcome.num_compared > 20 for outcome in outcomes)
    assert len(outcomes[0].losses) == 13
    assert outcomes[0].cache["evictions"] >= evictions, "the case proves nothing"
    assert len(outcomes[0].replicated) == 1
    assert all(outcome.replicated == outcomes[0].replicated for outcome in outcomes)


def test_a_planned_run_is_exact_and_built_as_planned(plan: Plan, outcomes: list[planned.Outcome]) -> None:
    check_exact(outcomes, evictions=300)
    assert built_pools(outcomes) == planned_pools(plan)
    assert len(plan.pools) == 6
    for rank in outcomes[0].cache["ranks"]:
        cached = {table for pool in plan.pools if pool.rank == rank["rank"] for table in pool.tables}
        assert set(rank["tables"]) == cached
        for name in ("slots", "fills", "device_bytes", "host_bytes", "lookups", "hits_unique"):
            assert sum(table[name] for table in rank["tables"].values()) == rank[name]
        for name in ("slots", "device_bytes", "host_bytes"):
            assert sum(pool[name] for pool in rank["pools"]) == rank[name]


@pytest.mark.matrix
def test_tables_that_exchange_rows_are_built_as_planned(two_ranks, plan, outcomes, tmp_path) -> None:
    """Beside others of the same sharding types, in pools of their own."""
    with_rows = planned.with_rows(plan)
    assert len(with_rows.pools) == 2 * len(plan.pools)
    found = two_ranks.run(planned.compare, saved(with_rows, tmp_path / "rows.json"))
    assert built_pools(found) == planned_pools(with_rows)
    assert found[0].losses == pytest.approx(outcomes[0].losses, abs=CLOSE, rel=0)


@pytest.mark.matrix
def test_another_valid_placement_trains_the_same(two_ranks: RankPool, plan: Plan, tmp_path: Path) -> None:
    """Tables moved, cut otherwise, and off the device, by an edit of the file; from the same weights."""
    path = saved(plan, tmp_path / "p.json")
    values = json.loads(path.read_text())
    moves: dict[str, dict[str, Any]] = {
        "table_wise": {"sharding": "row_wise", "ranks": [0, 1], "kernel": "cached"},
        "row_wise": {"sharding": "column_wise", "ranks": [1, 0]},
        "column_wise": {"sharding": "table_wise", "ranks": [1]},
        "data_parallel": {"sharding": "table_wise", "ranks": [0], "kernel": "device"},
    }
    for table in values["tables"]:
        table.update(moves[table["sharding"]])
    tables = [planned.TablePlacement(**{**table, "ranks": tuple(table["ranks"])}) for table in values["tables"]]
    values["pools"] = [vars(pool.with_slots(max(1, pool.rows // 2))) for pool in pools_of(tables, 2)]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(values))
    for before, after in two_ranks.run(planned.continue_with, path, other, tmp_path / "checkpoints"):
        assert len(before) == 7
        assert after == pytest.approx(before, abs=CLOSE, rel=0)


def _unknown_key(values: dict[str, Any]) -> None:
    values["tables"][3]["rank"] = 0


def _other_model(values: dict[str, Any]) -> None:
    values["tables"][0]["rows"] += 1


def _more_ranks(values: dict[str, Any]) -> None:
    values["ranks_per_node"] = 1


def _too_many_slots(values: dict[str, Any]) -> None:
    values["pools"][1]["slots"] = 10**6


BROKEN = {
    _unknown_key: "tables[3] ('t_C4'): rank: unknown key. Did you mean ranks?",
    _other_model: "rows x 8 fp32 in the model",
    _more_ranks: "the plan is for 2 ranks, 1 to a node; this run has 2, 2 to a node",
    _too_many_slots: "slots: got 1000000, needed 1 to",
}


def test_a_broken_plan_raises_on_every_rank_and_hangs_nobody(two_ranks: RankPool, plan: Plan, tmp_path: Path) -> None:
    path = saved(plan, tmp_path / "p.json")
    for change, message in BROKEN.items():
        values = json.loads(path.read_text())
        change(values)
        broken = tmp_path / "broken.json"
        broken.write_text(json.dumps(values))
        said = two_ranks.run(planned.refused, broken)
        assert said[0] == said[1]
        assert message in said[0]
    adam = planned.DenseOptimizerConfig(kind="adam", lr=0.1)
    said = two_ranks.run(planned.refused_with_dense, path, adam)
    assert all("trained by the dense optimizer" in text for text in said)
    said = two_ranks.run(planned.refused_with_a_wrong_slot_on_one_rank, path)
    assert said[0] == said[1]
    assert "rank 1 is not built as planned; pools planned and not built: [PoolPlacement(rank=1" in said[0]


def test_a_planned_cache_may_still_grow(two_ranks: RankPool, plan: Plan, tmp_path: Path) -> None:
    small = dataclasses.replace(plan, pools=tuple(dataclasses.replace(pool, slots=2) for pool in plan.pools))
    path = saved(small, tmp_path / "p.json")
    outcomes = two_ranks.run(planned.grown, path)
    check_exact(outcomes, evictions=20)
    assert outcomes[0].cache["overflow_growths"] > 0
    assert built_pools(outcomes) != planned_pools(small)
