"""What does not fit is refused with what would fit; and that does."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from embershard.errors import ConfigError, ShardingError
from embershard.frequency import DataStatistics
from embershard.sharding.fitting import least_need
from embershard.sharding.plan import Plan
from embershard.sharding.planner import make_plan
from embershard.sharding.request import Budget, PlanRequest
from tests.unit.sharding.requests import data_of, make_request, make_workload, random_rows


@pytest.fixture(autouse=True)
def _few_ranks(monkeypatch) -> None:
    """Looking for a number of ranks that fits need not go far."""
    monkeypatch.setattr("embershard.sharding.fitting._MOST_RANKS", 16)


CASES: dict[str, dict[str, Any]] = {
    "one rank": {"world_size": 1},
    "two ranks": {},
    "dims": {"dims": (16, 32, 64, 128), "world_size": 4},
    "columns that do not halve": {"dims": (80, 80, 96, 36), "world_size": 4},
    "nodes": {"world_size": 16, "ranks_per_node": 8},
    "replicated": {"replicate_rows": 500},
    "only replicated": {"replicate_rows": 10**6},
    "row_wise only": {"types": ["row_wise"], "world_size": 8},
    "fp16": {"dtype": "fp16", "state_bytes": 0, "state_bytes_per_column": 8},
}


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


@pytest.mark.parametrize("name", CASES)
def test_the_named_need_fits_and_a_byte_less_does_not(name):
    request = make_request(**CASES[name])
    need = least_need(request).asked(request.budget)
    plan = make_plan(with_device(request, need))
    assert plan.prediction is not None
    assert max(sum(rank.device_bytes.values()) for rank in plan.prediction.ranks) <= need
    said = refusal(with_device(request, need - 1))
    assert f"needs at least {need / 1e3:.3f} kB ({need} bytes)" in said or f"({need} bytes)" in said
    assert "1 bytes are missing" in said
    assert f"Smallest change that fits: --device-memory {need}" in said
    assert bytes_in(r"--device-memory (\d+)", said) == need


@pytest.mark.parametrize("name", ["one rank", "two ranks", "dims"])
def test_a_cache_budget_is_for_the_caches_alone(name):
    request = make_request(Budget(cache_bytes=1), **CASES[name])
    need = least_need(request).asked(request.budget)
    plan = make_plan(replace(request, budget=Budget(cache_bytes=need)))
    assert plan.prediction is not None
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
    assert f"largest table is 't1' with {rank.table_bytes['t1'] / 1e3:.3f} kB ({rank.table_bytes['t1']} bytes)" in said
    assert f"({rank.fixed_bytes} bytes)" in said
    assert rank.fixed_bytes + sum(rank.table_bytes.values()) == need.asked(request.budget)


def on_ranks(request: PlanRequest, ranks: int) -> PlanRequest:
    """The same on other ranks, as the command line makes it: with as many per node as the node has devices."""
    per_node = min(ranks, request.most_ranks_per_node or ranks)
    shape = replace(request.workload.shape, world_size=ranks, ranks_per_node=per_node)
    return replace(request, workload=replace(request.workload, shape=shape))


@pytest.mark.parametrize("devices", [None, 2, 8])
@pytest.mark.parametrize(
    ("budget", "fits_from"),
    [
        (Budget(cache_bytes=450_000), 4),
        (Budget(device_bytes=2_000_000), 2),
        (Budget(device_bytes=10**9, host_bytes=60_000_000), None),
    ],
    ids=["caches", "device", "host"],
)
def test_the_number_of_ranks_that_it_names_fits(budget, fits_from, devices):
    """As many ranks as are named fit, half as many do not. More ranks of one node are no more host memory."""
    tables = {"rows": (300_000, 100_000), "data": data_of((300_000, 100_000), 3000)}
    request = make_request(budget, world_size=1, ranks_per_node=1, most_ranks_per_node=devices, **tables)
    if budget.host_bytes is not None:  # all rows would fit the devices
        request = replace(request, budget=replace(budget, device_bytes=3_000_000))
    said = refusal(request)
    named = re.search(r"or --ranks (\d+)", said)
    if budget.host_bytes is not None:
        assert (named is not None) == (devices is not None), said
        assert "node 0 needs 105.600 MB (105600000 bytes) of host memory" in said
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
        refusal(on_ranks(request, int(named[1]) // 2))


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
    assert plan.prediction is not None
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


@pytest.mark.parametrize("budget", [Budget(device_bytes=10**9), Budget(device_bytes=80 * 10**9, host_bytes=10**12)])
def test_nothing_of_a_tables_size_is_made(huge, budget):
    """A table of 10^10 rows, whose slot map alone takes 40 GB: refused before anything is allocated."""
    request = make_request(budget, rows=(10**10, 5000), world_size=2, data=huge)
    with _Largest() as largest:
        said = refusal(request)
    assert "'t0'" in said
    assert largest.num_bytes < 10**6
    fits = Budget(device_bytes=80 * 10**9, host_bytes=10**13)
    plan = make_plan(replace(request, budget=fits))
    assert plan.prediction is not None
    assert sum(rank.host_bytes["rows"] for rank in plan.prediction.ranks) == 10**10 * 260 + 5000 * 260


def test_one_huge_table_needs_to_be_cut(huge):
    """Table-wise its map fits no device; cut by rows it does."""
    request = make_request(Budget(device_bytes=16 * 10**9), rows=(10**10, 5000), world_size=8, data=huge)
    assert "'t0'" in refusal(replace(request, types=["table_wise"]))
    plan = make_plan(request)
    assert {t.table: t.sharding for t in plan.tables}["t0"] == "row_wise"


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
    assert plan.prediction is not None
    assert max(sum(rank.device_bytes.values()) for rank in plan.prediction.ranks) >= needs[0].asked(request.budget)
