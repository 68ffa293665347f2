"""PlanBench's tasks and its table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.planbench import KINDS, draw, summary, task
from benchmarks.torchrec_plans import by_torchrec
from embershard.planning.make_plan import all_sized
from embershard.planning.request import Budget
from tests.unit.planning.requests import make_request


def test_a_seed_is_a_task():
    for seed, kind in enumerate(KINDS):
        drawn, request = task(seed)
        assert drawn == kind
        again = task(seed)[1]
        assert (again.workload.model, again.budget) == (request.workload.model, request.budget)
        assert 10 <= len(request.sharded) <= 60


@pytest.mark.slow
def test_a_rival_without_a_plan_is_told_and_not_compared(tmp_path):
    steps = [{"embershard": 1.1, "rival": None}, {"embershard": 1.0, "rival": 1.5}]
    found = summary(
        [
            {"steps": each, "bound": 1.0, "without_tables": 0.5, "cpu_seconds": dict.fromkeys(each, 0.1)}
            for each in steps
        ]
    )
    ours, rival = found
    assert ours["gap_percent"] == {"least": 0.0, "median": 5.0, "p90": 10.0, "most": 10.0}
    assert rival["gap_of_tables_percent"]["median"] == 100.0
    assert rival["without_a_plan"] == 1
    assert rival["longer_than_embershard_percent"]["median"] == 50.0
    draw(found, tmp_path / "gaps.png")
    assert (tmp_path / "gaps.png").stat().st_size > 1000


@pytest.mark.slow
def test_torchrecs_planner_places_all_tables_where_they_fit():
    request = make_request(Budget(device_bytes=8_000_000), rows=(9000, 3000, 900, 40))
    found = by_torchrec(request)
    assert all([table.table for table in tables] == ["t0", "t1", "t2", "t3"] for tables in found)
    assert [{table.kernel for table in tables} for tables in found] == 6 * [{"cached"}] + 6 * [{"device"}]
    assert len(all_sized(request, found)) == len(set(found))
    assert not by_torchrec(replace(request, budget=Budget(device_bytes=1)))
