"""Tables of which some are fp16 by the settings: on the device and in caches, beside others of fp32."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from embershard.sharding.plan import Plan, TablePlacement, pools_of
from embershard.training.fit.model_size import tables_of_run
from embershard.training.optimizers import EmbeddingOptimizerConfig
from tests.covering import matrix
from tests.ranks import planned
from tests.ranks.workers import RankPool
from tests.small_runs import small_model
from tests.unit.sharding.plans import make_plan, ranks_for

pytestmark = pytest.mark.ranks

#: The two largest tables are on the device, the second one as fp32; the third one is in a cache, as fp16.
ON_DEVICE, WHOLE, CACHED = "t_C3", "t_C12", "t_C21"
HALF = {ON_DEVICE: "fp16", CACHED: "fp16"}


def settings(half: dict[str, str], optimizer: str = "rowwise_adagrad") -> dict[str, Any]:
    """Changes of a run."""
    model = dataclasses.replace(small_model(planned.DIM), table_dtypes=half)
    return {"model": model, "embedding_optimizer": EmbeddingOptimizerConfig(kind=optimizer, lr=0.1)}  # type: ignore[arg-type]


def plan_of(half: dict[str, str], world_size: int, sharding: str = "table_wise") -> Plan:
    """Slots are for the lookups of one batch of all ranks."""
    tables = []
    for number, table in enumerate(tables_of_run(planned.make_config(None, **settings(half)))):
        ranks = ranks_for(sharding, number, world_size, world_size, column_shards=2)
        kernel = "device" if table.name in (ON_DEVICE, WHOLE) else "cached"
        place: Any = (table.name, table.num_rows, table.dim, table.dtype, sharding, kernel, ranks)
        tables.append(TablePlacement(*place))
    rows = {table.table: table.rows for table in tables}
    pools = [
        pool.with_slots(max(1, min(pool.rows, sum(min(rows[name], 20 * world_size) for name in pool.tables))))
        for pool in pools_of(tables, world_size)
    ]
    return dataclasses.replace(make_plan(tables, world_size, world_size, batch_size=20), pools=tuple(pools))


def is_weight(name: str, table: str) -> bool:
    """Whether a snapshot's tensor is a part of the table's weights."""
    return name.startswith("weight/") and f".{table}.weight/" in name


def saved(path: Path, plan: Plan) -> Path:
    plan.save(path)
    return path


def compare(plan: Path, half: dict[str, str], optimizer: str) -> planned.Outcome:
    """The planned run, and stock TorchRec with the same tables at the same places."""
    return planned.compare(plan, **settings(half, optimizer))


def refused(plan: Path, half: dict[str, str]) -> str:
    """What a run with this plan says instead of training."""
    return planned.refused(plan, **settings(half))


def one_number_off(plan: Path, half: dict[str, str]) -> tuple[list[str], str, str]:
    """What differs if a number of the table on the device is the next one of its type after the cached run; its type,
    and that of the table in a cache."""
    right, taken, types = planned.snapshot, [], {}

    def wrong(model: nn.Module) -> dict[str, Tensor]:
        found = right(model)
        taken.append(found)
        for name, tensor in found.items():
            types.update({table: str(tensor.dtype) for table in HALF if is_weight(name, table)})
            if len(taken) == 4 and is_weight(name, ON_DEVICE):  # behind the cached run
                tensor[3, 1] = torch.nextafter(tensor[3, 1], torch.tensor(9.0, dtype=tensor.dtype))
        return found

    with mock.patch.object(planned, "snapshot", wrong):
        outcome = planned.compare(plan, **settings(half))
    return outcome.different, types.get(ON_DEVICE, ""), types.get(CACHED, "")


@pytest.mark.parametrize(
    ("world_size", "sharding", "optimizer"),
    [
        (1, "table_wise", "rowwise_adagrad"),
        (2, "table_wise", "rowwise_adagrad"),
        matrix(2, "column_wise", "adagrad"),
        matrix(1, "table_wise", "sgd"),
    ],
)
def test_some_tables_in_fp16_train_as_in_stock_torchrec(
    one_rank: RankPool, two_ranks: RankPool, tmp_path: Path, world_size: int, sharding: str, optimizer: str
) -> None:
    """Bit for bit, at the same places: one on the device and one in a cache that evicts, beside fp32 of both."""
    pool = {1: one_rank, 2: two_ranks}[world_size]
    plan = plan_of(HALF, world_size, sharding)
    assert {table.table for table in plan.tables if table.dtype == "fp16"} == set(HALF)
    outcomes = pool.run(compare, saved(tmp_path / "half.json", plan), HALF, optimizer)
    assert [outcome.different for outcome in outcomes] == [[]] * world_size
    assert all(outcome.num_compared > 20 for outcome in outcomes)
    tables = {name: each for rank in outcomes[0].cache["ranks"] for name, each in rank["tables"].items()}
    assert tables[CACHED]["evictions"] > 50
    assert ON_DEVICE not in tables
    assert outcomes[0].cache["evictions"] > tables[CACHED]["evictions"], "fp32 rows are evicted, too"
    full = pool.run(compare, saved(tmp_path / "full.json", plan_of({}, world_size, sharding)), {}, optimizer)
    assert full[0].losses != outcomes[0].losses, "fp16 rounds what is trained"


@pytest.mark.matrix
def test_the_last_bit_of_a_half_table_on_the_device_is_compared(two_ranks: RankPool, tmp_path: Path) -> None:
    """The control of the test above."""
    found = two_ranks.run(one_number_off, saved(tmp_path / "half.json", plan_of(HALF, 2)), HALF)
    owner = next(table.ranks[0] for table in plan_of(HALF, 2).tables if table.table == ON_DEVICE)
    assert [len(different) for different, *_ in found] == [int(rank == owner) for rank in range(2)]
    assert is_weight(found[owner][0][0], ON_DEVICE)
    assert found[owner][1] == "torch.float16"
    assert "torch.float16" in [of_cached for *_, of_cached in found]


def test_a_plan_for_other_number_types_is_refused(one_rank: RankPool, tmp_path: Path) -> None:
    path = saved(tmp_path / "half.json", plan_of(HALF, 1))
    (said,) = one_rank.run(refused, path, {CACHED: "fp16"})
    assert f"table '{ON_DEVICE}' has" in said
    assert "fp16 in the plan and" in said
