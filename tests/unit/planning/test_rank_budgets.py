"""Ranks may have other amounts of memory: no rank of a plan takes more than its own."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from embershard.errors import ConfigError, ShardingError
from embershard.planning.make_plan import PlanSearch, best_candidate, make_plan
from embershard.planning.request import Budget, PlanRequest
from embershard.sharding.plan import Plan
from embershard.sharding.plan_diff import diff_lines
from tests.covering import matrix
from tests.unit.planning.exhaustive import every_plan, on_two_nodes
from tests.unit.planning.requests import make_request

TABLES = {"rows": (50_000, 9000, 9000, 300), "dims": (64, 64, 64, 64), "world_size": 4}
LIMITS = (8_000_000, 8_000_000, 2_000_000, 3_000_000)


def limited(limits: tuple[int, ...], **of_budget: float) -> Budget:
    return Budget(device_bytes=max(limits), less_bytes=tuple(max(limits) - each for each in limits), **of_budget)


def request_for(limits: tuple[int, ...] = LIMITS, **of_budget: float) -> PlanRequest:
    return make_request(limited(limits, **of_budget), **TABLES)


def taken(plan: Plan) -> list[int]:
    return [rank.total_device_bytes for rank in plan.prediction.ranks]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "of_budget"),
    [
        matrix(LIMITS, {}),
        matrix((2_000_000, 3_000_000, 8_000_000, 8_000_000), {}),
        ((30_000_000, 2_000_000, 2_000_000, 2_000_000), {}),
        (LIMITS, {"ratio": 0.1}),
    ],
)
def test_no_rank_takes_more_than_its_own(limits, of_budget):
    plan = make_plan(request_for(limits, **of_budget))
    assert all(bytes_ <= limit for bytes_, limit in zip(taken(plan), limits, strict=True))
    assert plan.bound is None or plan.bound.is_valid


@pytest.mark.slow
def test_the_control_takes_more():
    """With the most for all, some rank takes what the small ones may not: the test above can fail."""
    plan = make_plan(replace(request_for(), budget=Budget(device_bytes=max(LIMITS))))
    assert any(bytes_ > limit for bytes_, limit in zip(taken(plan), LIMITS, strict=True))


@pytest.mark.slow
def test_memory_of_the_larger_rank_is_used():
    plan = make_plan(request_for((4_000_000, 600_000, 600_000, 600_000)))
    assert taken(plan)[0] > 600_000
    with pytest.raises(ShardingError, match="the plan does not fit"):
        make_plan(replace(request_for(), budget=Budget(device_bytes=600_000)))


@pytest.mark.slow
def test_limits_that_are_all_alike_change_nothing():
    alike = make_plan(replace(request_for(), budget=Budget(device_bytes=8_000_000, less_bytes=(0,) * 4)))
    plain = make_plan(replace(request_for(), budget=Budget(device_bytes=8_000_000)))
    assert (alike.tables, alike.pools) == (plain.tables, plain.pools)
    assert diff_lines(plain, replace(alike, memory_bytes_by_rank=())) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "of_budget"),
    [((400_000, 8_000_000, 8_000_000, 300_000), {}), ((900_000, 8_000_000, 8_000_000, 900_000), {"ratio": 0.9})],
)
def test_a_refusal_names_limits_that_fit(limits, of_budget):
    with pytest.raises(ShardingError, match="rank ") as error:
        make_plan(request_for(limits, **of_budget))
    wanted = re.search(r"--device-memory ([\d,]+)", str(error.value))
    assert wanted is not None, error.value
    limits = tuple(map(int, wanted[1].split(",")))
    assert len(limits) == 4
    assert "-" not in re.findall(r"[^:]*are missing", str(error.value))[0]
    plan = make_plan(request_for(limits, **of_budget))
    assert all(bytes_ <= limit for bytes_, limit in zip(taken(plan), limits, strict=True))


@pytest.mark.matrix
@pytest.mark.parametrize("seed", [4, 10])
def test_no_plan_is_faster_than_the_bound(seed):
    """Of all plans, each predicted as a whole; some that fit where all ranks have the most do not fit."""
    request = on_two_nodes(seed)
    most = request.budget.device_bytes
    less = (0, *[most * 36 // 100] * 3)
    anywhere, request = list(every_plan(request)), replace(request, budget=Budget(device_bytes=most, less_bytes=less))
    plans, found = list(every_plan(request)), best_candidate(request).step_seconds
    assert len(plans) < len(anywhere)
    assert min(plans) > min(anywhere)
    assert PlanSearch(request).bound().step_seconds <= min(plans) * (1 + 1e-9) <= found * (1 + 2e-9)
    assert found <= 1.02 * min(plans)


@pytest.mark.slow
def test_a_file_has_the_limits(tmp_path):
    plan = make_plan(request_for())
    assert plan.memory_bytes_by_rank == LIMITS
    assert [plan.memory_bytes_of(rank) for rank in range(4)] == list(LIMITS)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    fields = json.loads((tmp_path / "plan.json").read_text())
    fields["memory_bytes_by_rank"] = [1, 2]
    (tmp_path / "plan.json").write_text(json.dumps(fields))
    with pytest.raises(ShardingError, match=r"memory_bytes_by_rank: got \[1, 2\]"):
        Plan.load(tmp_path / "plan.json")


def test_other_limits_are_refused():
    with pytest.raises(ConfigError, match="a budget for 4 ranks, 2 ranks"):
        replace(make_request(limited(LIMITS), **{**TABLES, "world_size": 2}))
    with pytest.raises(ConfigError, match="less_bytes: got"):
        Budget(ratio=0.1, less_bytes=(0, 1))
    with pytest.raises(ConfigError, match="less_bytes: got"):
        Budget(device_bytes=10, less_bytes=(1, 2))
