"""Which tables in fp16 let all rows be on the devices."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embershard.commands import cli
from embershard.errors import ConfigError
from embershard.extras.what_if.half_rows import fewest_halved
from embershard.frequency.assumed import AssumedTable, assumed_statistics
from embershard.planning.budget import resident_needs
from embershard.planning.request import Budget, PlanRequest
from embershard.sharding.plan import Plan
from tests.covering import matrix
from tests.unit.planning.requests import make_request, make_workload

pytestmark = pytest.mark.extra


def with_types(request: PlanRequest, key: str, types: Mapping[str, Any]) -> PlanRequest:
    """The request with other number types; other settings are not known here."""
    if key != "model.table_dtypes":
        raise ConfigError(f"{key} is not tried")
    model = request.workload.model
    tables = tuple(replace(table, dtype=types[table.table]) for table in model.tables)
    return replace(request, workload=replace(request.workload, model=replace(model, tables=tables)))


def fits(request: PlanRequest, names: tuple[str, ...] = ()) -> bool:
    types = {table.table: "fp16" if table.table in names else "fp32" for table in request.workload.model.tables}
    other = with_types(request, "model.table_dtypes", types)
    return any(need.fits_device(other.budget) for need in resident_needs(other))


def task(seed: int) -> PlanRequest:
    """Five tables of any size on one rank, which has more memory than they take in fp16, and less than in fp32."""
    rng = np.random.default_rng(seed)
    rows = tuple(int(each) for each in 10 ** rng.uniform(4, 6, 5))
    tables = [AssumedTable(f"t{n}", count, 1.0, int(rng.integers(1, 30))) for n, count in enumerate(rows)]
    workload = make_workload(rows, world_size=1, batch_size=64, data=assumed_statistics(tables, 10**6))
    request = make_request(Budget(device_bytes=10**12), workload)
    whole = next(resident_needs(request)).asked(request.budget)
    saved = sum(table.rows * table.weight_bytes() // 2 for table in workload.model.tables)
    request = replace(request, budget=Budget(device_bytes=whole - int(saved * rng.uniform(0.02, 0.98))))
    return replace(request, on_change=lambda key, value: with_types(request, key, value))


@pytest.mark.smoke
@pytest.mark.parametrize("seed", [*range(4), *(matrix(seed) for seed in range(4, 30))])
def test_no_fewer_tables_are_enough_and_the_last_is_looked_up_least(seed):
    """Of all choices of tables."""
    request = task(seed)
    tables = request.workload.model.tables
    assert not fits(request)
    found = fewest_halved(request, tables)
    assert found is not None
    names = tuple(table.table for table in found)
    assert fits(request, names)
    for fewer in itertools.combinations([table.table for table in tables], len(names) - 1):
        assert not fits(request, fewer)
    lookups = request.workload.lookups_per_sample
    others = [table.table for table in tables if table.table not in names]
    for other in others:
        assert not fits(request, (*names[:-1], other)) or lookups[other] >= lookups[names[-1]]


def test_nothing_is_named_where_fp16_is_not_enough():
    request = task(0)
    small = replace(request, budget=Budget(device_bytes=request.workload.model.table_bytes // 3))
    small = replace(small, on_change=lambda key, value: with_types(small, key, value))
    assert fewest_halved(small, small.workload.model.tables) is None
    assert fewest_halved(replace(request, on_change=None), request.workload.model.tables) is None


TABLES = """
samples = 1_000_000
[tables.item]
rows = 4_000_000
dim = 32
[tables.user]
rows = 3_000_000
dim = 32
lookups = 9
[tables.context]
rows = 2000
[model]
embedding_dim = 16
dense_arch_layer_sizes = [32, 16]
over_arch_layer_sizes = [16, 1]
[train]
batch_size = 512
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "named", "option"),
    [("700MB", ["item"], "--explain"), matrix("500MB", ["item", "user"], "--target"), matrix("300MB", [], "--explain")],
)
def test_a_plan_with_caches_says_what_fp16_would_buy(tmp_path: Path, capsys, memory, named, option):
    """The what-if and the explained plan do. The change that they name is made, and no table has a cache."""
    (tmp_path / "tables.toml").write_text(TABLES)
    limits = ("--topology", "h100x8", "--device-memory", memory, "--ranks", "1", "--effort", "0.03")
    command = ["plan", "--tables", str(tmp_path / "tables.toml"), *limits]
    assert cli.main([*command, option, *(["9k/s"] if option == "--target" else [])]) == 0
    said = " ".join(capsys.readouterr().out.split())
    if not named:
        assert "With all weights in fp16 (model.table_dtype) rows would not fit 1 rank either." in said
        return
    found = re.search(
        r"With ([\w, ]+) in fp16 1 rank would hold all rows without a cache: a step of ([\d.]+) ms, with caches "
        r"[\d.]+ \((--set .*?)\)\. fp16 rounds each row after each update: it trains other weights, so no plan",
        said,
    )
    assert found is not None, said
    assert found[1].split(", ") == named
    kernels, seconds = [], []
    for changes in ([], shlex.split(found[3])):
        assert cli.main([*command, *changes, "-o", str(tmp_path / "plan.json")]) == 0
        plan = Plan.load(tmp_path / "plan.json")
        kernels.append({table.kernel for table in plan.tables})
        seconds.append(plan.prediction.step_seconds)
        assert {table.table for table in plan.tables if table.dtype == "fp16"} == (set(named) if changes else set())
    assert "cached" in kernels[0], "fp16 is not chosen by itself"
    assert kernels[1] == {"device"}
    assert f"{1e3 * seconds[1]:.2f}" == found[2]
