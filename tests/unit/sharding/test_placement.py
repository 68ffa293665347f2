"""Plans against TorchRec's own code: the same shards, the same groups, the same plan objects; no process group."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torchrec.distributed.embedding_sharding import group_tables
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from embershard import (
    CacheConfig,
    CachedEmbeddingBagCollectionSharder,
    CachedEmbeddingCollectionSharder,
    IdTable,
    plan_sharding,
)
from embershard.errors import ShardingError
from embershard.sharding.plan import Plan, TablePlacement, pools_of, shards_of
from embershard.sharding.shards import no_rows_problem
from embershard.sharding.torchrec import StockEmbeddingBagCollectionSharder
from embershard.sharding.torchrec.lookups import POOLED_SHARDINGS
from embershard.sharding.torchrec.modules import CachedShardedEmbeddingBagCollection
from embershard.sharding.torchrec.planner.placement import model_groups, model_tables, placements_of, torchrec_plan
from embershard.sharding.torchrec.spec import CACHED_KERNEL, SPEC_KEY, CacheSpec
from tests.unit.sharding.plans import SHARDED, make_plan, plans, ranks_for

META = torch.device("meta")
DTYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16}


def model_of(tables: tuple[TablePlacement, ...]) -> nn.Module:
    configs = [
        EmbeddingBagConfig(
            name=t.table,
            embedding_dim=t.dim,
            num_embeddings=t.rows,
            feature_names=[f"f_{t.table}"],
            data_type=DTYPES[t.dtype],
        )
        for t in tables
    ]
    return nn.ModuleDict({"tables": EmbeddingBagCollection(tables=configs, device=META)})


@pytest.mark.slow
@given(
    st.sampled_from(SHARDED),
    st.integers(1, 300),
    st.sampled_from([8, 16, 48]),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (8, 4)]),
)
@settings(max_examples=100)
def test_shards_are_cut_as_torchrec_cuts_them(sharding, rows, dim, ranks):
    world_size, ranks_per_node = ranks
    placed = ranks_for(sharding, 1, world_size, ranks_per_node, column_shards=2)
    table = TablePlacement("t", rows, dim, "fp32", sharding, "cached", placed)
    sizes, offsets = calculate_shard_sizes_and_offsets(
        torch.empty(rows, dim, device=META), world_size, ranks_per_node, sharding, col_wise_shard_dim=dim // 2
    )
    shards = shards_of(table, ranks_per_node)
    assert [[s.rows, s.columns] for s in shards] == sizes
    assert [[s.first_row, s.first_column] for s in shards] == offsets
    assert tuple(s.rank for s in shards) == placed
    assert sum(s.rows * s.columns for s in shards) == rows * dim


def grouped_by_torchrec(plan: Plan) -> list[tuple[int, str, int, str, tuple[str, ...], int]]:
    """The pools that TorchRec's sharding classes and its grouping make of a plan."""
    model = model_of(plan.tables)
    sharder = CachedEmbeddingBagCollectionSharder(plan=plan)
    params = torchrec_plan(plan, model, [sharder], "cpu").plan["tables"]
    spec = CacheSpec.make(CacheConfig(), None, params, 0, plan)
    infos = CachedShardedEmbeddingBagCollection.create_grouped_sharding_infos(
        model["tables"], params, "embedding_bags.", {SPEC_KEY: spec}
    )
    pools = []
    for sharding, of_type in infos.items():
        if sharding.startswith("data_parallel"):
            continue
        place = SimpleNamespace(
            _world_size=plan.world_size,
            _local_size=plan.ranks_per_node,
            _env=SimpleNamespace(output_dtensor=False),
            _is_2D_parallel=False,
        )
        for rank, groups in enumerate(group_tables(POOLED_SHARDINGS[sharding]._shard(place, of_type))):
            for group in groups:
                tables = group.embedding_tables
                if tables[0].compute_kernel.value == CACHED_KERNEL:
                    dtype = next(ours for ours, theirs in DTYPES.items() if theirs == group.data_type)
                    names = tuple(sorted({table.name for table in tables}))
                    rows = sum(table.local_rows for table in tables)
                    pools.append((rank, sharding, tables[0].local_cols, dtype, names, rows))
    return sorted(pools)


@pytest.mark.slow
@given(plans())
@settings(max_examples=60)
def test_pools_are_those_that_torchrec_groups(plan):
    pools = pools_of(plan.tables, plan.ranks_per_node)
    ours = [(pool.rank, pool.sharding, pool.dim, pool.dtype, pool.tables, pool.rows) for pool in pools]
    assert sorted(ours) == grouped_by_torchrec(plan)


@pytest.mark.slow
@given(plans(world_sizes=(2, 4)))
@settings(max_examples=25)
def test_to_torchrec_and_back(plan):
    assume(not no_rows_problem(plan.tables, plan.ranks_per_node))  # these are refused on a CPU
    model, sharder = model_of(plan.tables), CachedEmbeddingBagCollectionSharder(plan=plan)
    placed = torchrec_plan(plan, model, [sharder], "cpu")
    assert placements_of(placed, model_tables(model, [sharder]), model_groups(model, [sharder])) == plan.tables


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (4, 2)])
def test_the_planner_s_plan_comes_back_as_it_was(device, ranks):
    world_size, ranks_per_node = ranks
    kinds = [*SHARDED, "data_parallel", "row_wise"]
    tables = tuple(
        TablePlacement(f"t{number}", 100 + 7 * number, 16, "fp32", "table_wise", "cached", (0,))
        for number in range(len(kinds))
    )
    model, sharder = model_of(tables), CachedEmbeddingBagCollectionSharder(CacheConfig(device_bytes=10**6))
    constraints = {
        f"t{number}": ParameterConstraints(sharding_types=[kind], min_partition=8) for number, kind in enumerate(kinds)
    }
    constraints[f"t{len(kinds) - 1}"].compute_kernels = ["fused"]
    constraints[f"t{kinds.index('data_parallel')}"].compute_kernels = ["fused"]  # not the dense ones
    planned = plan_sharding(
        model, [sharder], world_size=world_size, local_world_size=ranks_per_node, device=device, constraints=constraints
    )
    placed = placements_of(planned, model_tables(model, [sharder]), model_groups(model, [sharder]))
    assert sorted(t.sharding for t in placed) == sorted(kinds)
    assert {t.kernel for t in placed} == {"cached", "device", "replicated"}
    plan = make_plan(placed, world_size, ranks_per_node)
    again = torchrec_plan(plan, model, [CachedEmbeddingBagCollectionSharder(plan=plan)], device)
    assert again.plan == planned.plan


@pytest.mark.parametrize("rows", [3, 5])
def test_a_rank_without_rows_needs_a_cache(rows):
    """On a CPU; FBGEMM cannot train a group of tables without rows there."""
    tables = [TablePlacement(f"t{n}", rows, 16, "fp32", "row_wise", "cached", (0, 1, 2, 3)) for n in range(2)]
    plan, stock = make_plan(tables, 4, 4), StockEmbeddingBagCollectionSharder()
    model = model_of(plan.tables)
    cached = torchrec_plan(plan, model, [CachedEmbeddingBagCollectionSharder(plan=plan)], "cpu")
    assert placements_of(cached, model_tables(model, [stock]), model_groups(model, [stock])) == plan.tables
    for device, rows_of_another in (("cpu", 300), ("cuda", rows)):
        enough = make_plan([*tables, dataclasses.replace(tables[0], table="t2", rows=rows_of_another)], 4, 4)
        torchrec_plan(enough, model_of(enough.tables), [stock], device, cached=False)
    with pytest.raises(ShardingError, match=rf"row_wise tables on the device: t0 \({rows} rows on 4 ranks\), t1 \("):
        torchrec_plan(plan, model, [stock], "cpu", cached=False)


def test_what_a_plan_cannot_say():
    table = TablePlacement("t0", 10, 16, "fp32", "table_wise", "cached", (0,))
    plan, grid = (
        make_plan([t], 1, 1) for t in (table, TablePlacement("t0", 10, 16, "fp32", "grid_shard", "device", (0,)))
    )
    bags = model_of((table,))
    sequences = nn.ModuleDict(
        {"s": EmbeddingCollection(tables=[EmbeddingConfig(10, 16, name="t0", feature_names=["f"])], device=META)}
    )
    pooled, sequence = CachedEmbeddingBagCollectionSharder(plan=plan), CachedEmbeddingCollectionSharder(plan=plan)
    with pytest.raises(ShardingError, match="needs one of embershard's cached sharders; its sharder is Stock"):
        torchrec_plan(plan, bags, [StockEmbeddingBagCollectionSharder()], "cpu")
    with pytest.raises(ShardingError, match="has no sharding 'grid_shard', only data_parallel, table_wise"):
        torchrec_plan(grid, sequences, [sequence], "cpu")
    with pytest.raises(ShardingError, match="two tables are named 't0'; a plan knows tables by name"):
        torchrec_plan(plan, nn.ModuleDict({"a": bags, "b": sequences}), [pooled, sequence], "cpu")
    with pytest.raises(ShardingError, match="does not place tables of the model: t1"):
        torchrec_plan(plan, model_of((table, TablePlacement("t1", 5, 16, "fp32", *_ANY))), [pooled], "cpu")
    two = make_plan([table, TablePlacement("t1", 10, 16, "fp32", *_ANY)], 1, 1)
    both = nn.ModuleDict({"a": bags, "b": model_of((two.tables[1],))})
    with pytest.raises(ShardingError, match=r"group '', and the model in 'a.tables \(sum\)': tables of two modules"):
        torchrec_plan(two, both, [pooled], "cpu")
    placed = torchrec_plan(plan, bags, [StockEmbeddingBagCollectionSharder()], "cpu", cached=False)
    assert placed.plan["tables"]["t0"].compute_kernel == "fused"
    placed.plan["tables"]["t0"].compute_kernel = "key_value"
    with pytest.raises(ShardingError, match="plans do not know the compute kernel 'key_value'"):
        placements_of(placed, model_tables(bags, [pooled]), {"t0": ""})


def test_a_plan_of_several_modules_and_poolings():
    """Tables that could share a cache do not, where TorchRec gives them kernels of their own."""
    bags = [
        EmbeddingBagConfig(10, 16, name=f"t{number}", feature_names=[f"f{number}"], pooling=pooling)
        for number, pooling in enumerate([PoolingType.SUM, PoolingType.MEAN, PoolingType.SUM])
    ]
    sequence = EmbeddingConfig(10, 16, name="t3", feature_names=["f3"])
    model = nn.ModuleDict(
        {
            "a": EmbeddingBagCollection(tables=bags[:2], device=META),
            "b": EmbeddingBagCollection(tables=bags[2:], device=META),
            "c": EmbeddingCollection(tables=[sequence], device=META),
        }
    )
    groups = {"t0": "a (sum)", "t1": "a (mean)", "t2": "b (sum)", "t3": "c"}
    tables = [
        TablePlacement(name, 10, 16, "fp32", "row_wise", "cached", (0, 1), group=group)
        for name, group in groups.items()
    ]
    plan = make_plan(tables, 2, 2)
    assert [pool.tables for pool in plan.pools] == [(name,) for name in ("t1", "t0", "t2", "t3")] * 2
    sharders = [CachedEmbeddingBagCollectionSharder(plan=plan), CachedEmbeddingCollectionSharder(plan=plan)]
    assert model_groups(model, sharders) == groups
    placed = torchrec_plan(plan, model, sharders, "cpu")
    assert {path: set(part) for path, part in placed.plan.items()} == {"a": {"t0", "t1"}, "b": {"t2"}, "c": {"t3"}}
    assert placements_of(placed, model_tables(model, sharders), groups) == plan.tables


def test_a_group_is_in_a_plan_s_file_only_where_there_are_several(tmp_path):
    table = TablePlacement("t0", 10, 16, "fp32", "table_wise", "cached", (0,))
    for number, group in enumerate(("", "a (sum)")):
        plan = make_plan([replace(table, group=group)], 1, 1)
        plan.save(tmp_path / f"{number}.json")
        assert ("group" in (tmp_path / f"{number}.json").read_text()) == bool(group)
        assert Plan.load(tmp_path / f"{number}.json") == plan


_ANY = ("table_wise", "cached", (0,))


@pytest.mark.parametrize(
    ("place", "is_refused"),
    [
        (("table_wise", "cached", (1,)), False),
        (("row_wise", "cached", (0, 1)), False),
        (("column_wise", "cached", (0, 1)), True),
        (("table_wise", "device", (1,)), True),
        (("data_parallel", "replicated", ()), True),
        (("row_wise", "cached", (0, 1), "rows"), True),
    ],
)
def test_tables_of_ids_are_placed_whole_or_by_rows_in_caches(place, is_refused):
    tables = tuple(
        TablePlacement(name, 240, 16, "fp32", *kind, group=f"tables ({group})")  # type: ignore[arg-type]
        for name, kind, group in (("t0", place, "sum, ids"), ("t1", ("row_wise", "cached", (0, 1)), "sum"))
    )
    plan = make_plan(tables, 2, 2)
    sharder = CachedEmbeddingBagCollectionSharder(plan=plan, init_seed=1, ids={"t0": IdTable()})
    if is_refused:
        with pytest.raises(ShardingError, match=r"table 't0': the plan has it .*; needed table_wise"):
            torchrec_plan(plan, model_of(tables), [sharder], "cpu")
    else:
        placed = torchrec_plan(plan, model_of(tables), [sharder], "cpu").plan["tables"]
        assert placed["t0"].sharding_type == place[0]
    of_rows = CachedEmbeddingBagCollectionSharder(plan=plan, init_seed=1)
    with pytest.raises(ShardingError, match=r"of ids and of rows share no cache"):
        torchrec_plan(plan, model_of(tables), [of_rows], "cpu")
