"""Blocks of columns may differ: in a plan's file, by a pin, and where a search finds no equal ones."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from embershard.errors import ConfigError, ShardingError
from embershard.planning.cost_arrays import cost_arrays
from embershard.planning.make_plan import best_candidate, make_plan
from embershard.planning.request import Budget
from embershard.sharding.pins import TablePin
from embershard.sharding.plan import Plan, TablePlacement, shards_of
from embershard.sharding.plan_diff import diff_lines, renamed_ranks
from tests.covering import keep
from tests.unit.planning.exhaustive import NUM_TASKS, of_unequal_columns, tried
from tests.unit.planning.requests import data_of, make_request, rates
from tests.unit.sharding.plans import make_plan as plan_of

ROOMY = Budget(device_bytes=10**9)


def placed(columns: tuple[int, ...] = (64, 32), ranks: tuple[int, ...] = (1, 0), **changes: object) -> TablePlacement:
    table = TablePlacement("t0", 101, sum(columns) or 96, "fp32", "column_wise", "cached", ranks, columns=columns)
    return replace(table, **changes)


def test_shards_have_their_columns_in_order():
    found = [(each.rank, each.rows, each.first_column, each.columns) for each in shards_of(placed(), 2)]
    assert found == [(1, 101, 0, 64), (0, 101, 64, 32)]
    grid = placed((32, 64), (2, 3, 0, 1), sharding="grid_shard")
    assert [(each.rank, each.first_row, each.first_column, each.columns) for each in shards_of(grid, 2)] == [
        (2, 0, 0, 32),
        (3, 51, 0, 32),
        (0, 0, 32, 64),
        (1, 51, 32, 64),
    ]


def test_a_file_has_them_where_they_differ(tmp_path):
    plan = plan_of([placed(), placed((), table="t1")], 2, 2)
    path = tmp_path / "plan.json"
    plan.save(path)
    first, second = json.loads(path.read_text())["tables"]
    assert first["columns"] == [64, 32]
    assert "columns" not in second
    assert Plan.load(path) == plan
    assert [(pool.rank, pool.dim) for pool in plan.pools] == [(0, 32), (0, 48), (1, 48), (1, 64)]


BROKEN = {
    "in all": ({"columns": [64, 36]}, r"t0.*columns: got \[64, 36\], 100 in all; needed 96, the columns of the table"),
    "multiple": ({"columns": [62, 34]}, r"columns: got \[62, 34\]; needed multiples of 4 from 32 on"),
    "least": ({"columns": [68, 28]}, r"columns: got \[68, 28\]; needed multiples of 4 from 32 on: FBGEMM is slow"),
    "count": ({"columns": [32, 32, 32]}, "needed 2: one width for each block of columns on its ranks"),
    "equal": ({"columns": [48, 48]}, r"columns: got \[48, 48\], which are equal: ranks alone say that"),
    "rows": ({"exchange": "rows"}, r'exchange "rows"; needed a type that cuts columns, with exchange "pooled"'),
    "row_wise": ({"sharding": "row_wise", "ranks": [0, 1]}, 'with sharding "row_wise", exchange "pooled"; needed a'),
    "text": ({"columns": ["a"]}, r"columns\[0\]"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_with_wrong_ones_is_refused(tmp_path, name):
    change, said = BROKEN[name]
    path = tmp_path / "plan.json"
    plan_of([placed()], 2, 2).save(path)
    values = json.loads(path.read_text())
    values["tables"][0].update(change)
    path.write_text(json.dumps(values))
    with pytest.raises(ShardingError, match=said):
        Plan.load(path)


def test_a_diff_says_them_and_knows_renamed_ranks():
    plan, swapped = (plan_of([placed(columns)], 2, 2) for columns in ((64, 32), (32, 64)))
    assert any("column_wise of 64+32 columns on ranks 1, 0 -> " in line for line in diff_lines(plan, swapped))
    renamed = plan_of([placed(ranks=(0, 1))], 2, 2)
    assert renamed_ranks(plan, renamed) == {0: 1, 1: 0}
    assert renamed_ranks(plan, swapped) == {0: 0, 1: 1}


@pytest.mark.slow
@pytest.mark.parametrize("budget", keep((Budget(ratio=0.2),), (ROOMY, Budget(ratio=0.2))), ids=str)
@pytest.mark.parametrize(
    "pin",
    [
        TablePin(columns=(64, 32), ranks=(2, 0)),
        TablePin(columns=(32, 64)),
        TablePin(type="grid_shard", columns=(36, 60)),
        TablePin(type="table_column_wise", columns=(60, 36), ranks=(3, 2)),
    ],
    ids=str,
)
def test_pinned_columns_are_in_the_plan(pin, budget):
    tables = {"rows": (50_000, 900, 300), "dims": (96, 64, 64), "world_size": 4, "ranks_per_node": 2}
    plan = make_plan(replace(make_request(budget, **tables), pins={"t0": pin}, effort=0.1))
    assert not pin.problem(plan.tables[0])
    assert plan.tables[0].columns == pin.columns
    assert plan.bound is None or plan.bound.is_valid


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ({"columns": (64, 32), "type": "row_wise"}, r"pin.t0.columns: got \[64, 32\]; row_wise cuts no columns"),
        ({"columns": (64, 32), "ranks": (0,), "type": "column_wise"}, "needed 1: one width for each block"),
        ({"columns": (64, 36)}, r"pin.t0.columns: got \[64, 36\], 100 in all; needed 96"),
        ({"columns": (32, 36, 28)}, "needed multiples of 4 from 32 on"),
        ({"columns": (48, 48)}, "which are equal"),
    ],
)
def test_pinned_columns_that_no_plan_can_have_are_refused(pin, said):
    with pytest.raises(ConfigError, match=said):
        make_plan(replace(make_request(ROOMY, rows=(5000, 900), dims=(96, 64)), pins={"t0": TablePin(**pin)}))


@pytest.mark.parametrize("more", [{"exchange": "rows"}, {"is_sequence": True}], ids=str)
def test_sequences_and_exchanged_rows_are_cut_evenly(more):
    pins = {"t0": TablePin(columns=(64, 32))}
    with pytest.raises(ConfigError, match=r"columns: got \[64, 32\], which differ; TorchRec cuts sequences evenly"):
        replace(make_request(ROOMY, rows=(5000, 900), dims=(96, 64), **more), pins=pins)
    plan = make_plan(make_request(ROOMY, rows=(5000, 900), dims=(100, 100), **more))
    assert not any(table.columns for table in plan.tables)


@pytest.mark.slow
def test_a_table_that_no_equal_blocks_can_cut_is_cut_as_evenly_as_it_can_be():
    rows, own = (50_000,), {"dims": (100,), "types": ["table_wise", "column_wise"], "batch_size": 4096}
    data, of_gpus = replace(data_of(rows), read_seconds_per_sample=None), replace(rates(), step_overhead_seconds=0.0)
    request = make_request(ROOMY, rows=rows, data=data, rates=of_gpus, effort=1.0, **own)
    plan, whole = make_plan(request), make_plan(replace(request, types=["table_wise"]))
    assert plan.tables[0].columns == (52, 48)
    assert plan.prediction.step_seconds < whole.prediction.step_seconds
    assert sorted(plan.tables[0].ranks) == [0, 1]
    assert plan.bound.is_valid


def test_an_option_has_the_work_and_memory_of_each_block():
    """Of two blocks the wide one takes more; in the bound each width is as if all blocks had it."""
    request = make_request(ROOMY, rows=(50_000,), dims=(96,), types=["column_wise"])
    request = replace(request, pins={"t0": TablePin(columns=(32, 64))})
    (option,) = cost_arrays(request, resident=True, cached=False).options[0]
    assert option.columns == (32, 64)
    assert option.memory[1, 0] > 1.8 * option.memory[0, 0]
    narrow, wide = cost_arrays(request, resident=True, cached=False, at_best=True).options[0]
    assert (narrow.num_shards, wide.num_shards) == (3, 2)
    np.testing.assert_allclose(wide.total_seconds, 1.5 * wide.most_seconds)
    mixed = narrow.total_seconds * 32 / 96 + wide.total_seconds * 64 / 96
    np.testing.assert_allclose(mixed, option.total_seconds)
    np.testing.assert_allclose(narrow.total_memory / 3 + wide.total_memory * 2 / 3, option.total_memory)


@pytest.mark.slow
@pytest.mark.parametrize("seed", keep((0, 3, 6), range(NUM_TASKS[of_unequal_columns])))
def test_no_plan_is_faster_than_the_bound(seed):
    found = tried(of_unequal_columns(seed), all_columns=True)
    assert not found.problem
    assert found.best is None or found.found <= 1.02 * found.best


@pytest.mark.slow
def test_the_same_request_gives_the_same_plan():
    request = make_request(ROOMY, rows=(5000, 900), dims=(100, 68), effort=0.2)
    assert best_candidate(request).tables == best_candidate(request).tables
