"""Plans without a process group: cached where the sharder caches, the same in every process."""

from __future__ import annotations

import random
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology, enumerators
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from embershard import (
    CacheConfig,
    CachedEmbeddingBagCollectionSharder,
    CachedEmbeddingCollectionSharder,
    FrequencyProfile,
    plan_sharding,
)
from embershard.cache.config import MOST_POOL_ROWS
from embershard.errors import ConfigError, ShardingError
from embershard.machine import HostMemory
from embershard.sharding.torchrec import StockEmbeddingBagCollectionSharder, StockEmbeddingCollectionSharder
from embershard.sharding.torchrec.planner import torchrec_planner
from embershard.sharding.torchrec.planner.torchrec_planner import PoolRowsPartitioner, distinct_types
from embershard.sharding.torchrec.spec import CACHED_KERNEL

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:torchrec")
devices = pytest.mark.parametrize("device", ["cpu", "cuda"])
META = torch.device("meta")


class Model(nn.Module):
    """Four tables pooled, and with ``sequence`` one that is not."""

    def __init__(self, sequence: bool = False, sequence_name: str = "s0") -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t{i}", embedding_dim=16, num_embeddings=1000 * (i + 1), feature_names=[f"f{i}"])
            for i in range(4)
        ]
        self.pooled = EmbeddingBagCollection(tables=tables, device=META)
        if sequence:
            table = EmbeddingConfig(name=sequence_name, embedding_dim=16, num_embeddings=500, feature_names=["g"])
            self.sequences = EmbeddingCollection(tables=[table], device=META)


def plan(sharders=None, model=None, *, device="cpu", world_size=2, local_world_size=None, **constraints):
    found = plan_sharding(
        model or Model(),
        sharders or [CachedEmbeddingBagCollectionSharder(CacheConfig(ratio=0.1))],
        world_size=world_size,
        local_world_size=local_world_size or world_size,
        device=device,
        constraints={name: ParameterConstraints(**given) for name, given in constraints.items()} or None,
    )
    return {name: param for module in found.plan.values() for name, param in module.items()}


def kernels(params) -> dict[str, str]:
    return {name: param.compute_kernel for name, param in sorted(params.items())}


@devices
def test_all_tables_of_a_cached_sharder_are_cached_and_sharded(device):
    params = plan(device=device)
    assert kernels(params) == dict.fromkeys(["t0", "t1", "t2", "t3"], CACHED_KERNEL)
    assert "data_parallel" not in {p.sharding_type for p in params.values()}


@devices
def test_a_stock_sharder_s_are_not(device):
    params = plan([StockEmbeddingBagCollectionSharder()], device=device)
    assert set(kernels(params).values()) == {"fused"}
    assert "data_parallel" not in {p.sharding_type for p in params.values()}


@devices
def test_a_table_can_stay_on_the_device_and_be_replicated_only_when_asked(device):
    params = plan(device=device, t0={"compute_kernels": ["fused"]}, t1={"sharding_types": ["data_parallel"]})
    assert kernels(params) == {"t0": "fused", "t1": "dense", "t2": CACHED_KERNEL, "t3": CACHED_KERNEL}
    assert params["t1"].sharding_type == "data_parallel"


@devices
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", "table_column_wise", "table_row_wise"])
def test_every_sharding_type_can_be_asked_for(device, kind):
    given = {"sharding_types": [kind], "min_partition": 4}
    params = plan(device=device, world_size=4, local_world_size=2, t0=given, t3=given)
    assert {params[t].sharding_type for t in ("t0", "t3")} == {kind}
    assert {params[t].compute_kernel for t in ("t0", "t3")} == {CACHED_KERNEL}
    ranks = {shard.placement.rank() for shard in params["t0"].sharding_spec.shards}
    assert ranks <= set(range(4))


@devices
def test_a_table_s_own_share_of_slots_reaches_the_plan(device):
    params = plan(device=device, t0={"cache_params": CacheParams(load_factor=0.5)})
    assert params["t0"].cache_params.load_factor == 0.5
    assert {params[t].cache_params and params[t].cache_params.load_factor for t in ("t1", "t2")} <= {None, 0.1}


@devices
def test_pooled_and_sequence_embeddings_in_one_model(device):
    sharders = [StockEmbeddingBagCollectionSharder(), CachedEmbeddingCollectionSharder(CacheConfig(ratio=0.1))]
    found = kernels(plan(sharders, Model(sequence=True), device=device))
    assert found == {"s0": CACHED_KERNEL, **dict.fromkeys(["t0", "t1", "t2", "t3"], "fused")}


@pytest.mark.slow
@devices
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_plans_depend_neither_on_the_call_nor_on_the_order_of_a_set(device, world_size, monkeypatch):
    """TorchRec's enumerator goes through sets of strings: their order differs from process to process."""
    original = enumerators.EmbeddingEnumerator._filter_sharding_types
    orders = [random.Random(seed) for seed in range(3)]

    def shuffled(self, *args, **kwargs):
        types = original(self, *args, **kwargs)
        orders[0].shuffle(types)
        return types

    def layout():
        return {
            name: (
                p.sharding_type,
                p.compute_kernel,
                [(s.shard_offsets, str(s.placement)) for s in p.sharding_spec.shards],
            )
            for name, p in plan(device=device, world_size=world_size).items()
        }

    plain = layout()
    assert layout() == plain
    monkeypatch.setattr(enumerators.EmbeddingEnumerator, "_filter_sharding_types", shuffled)
    for _ in range(3):
        assert layout() == plain
        orders.append(orders.pop(0))


def test_neither_the_model_nor_the_constraints_are_changed():
    model, given = Model(), ParameterConstraints()
    plan_sharding(
        model,
        [CachedEmbeddingBagCollectionSharder()],
        world_size=2,
        local_world_size=2,
        device="cpu",
        constraints={"t0": given},
    )
    assert given == ParameterConstraints()
    assert type(model.pooled) is EmbeddingBagCollection


@devices
def test_an_unknown_table_is_named(device):
    with pytest.raises(
        ShardingError, match=r"constraints name tables \['t9', 'x'\].*tables are \['t0', 't1', 't2', 't3'\]"
    ):
        plan(device=device, x={}, t9={}, t0={})


@devices
@pytest.mark.parametrize(
    "given",
    [
        {"sharding_types": ["bogus"]},
        {"compute_kernels": ["bogus"]},
        {"sharding_types": ["data_parallel"], "compute_kernels": [CACHED_KERNEL]},
    ],
)
def test_constraints_that_no_plan_fits(device, given):
    with pytest.raises(ShardingError):
        plan(device=device, t0=given)


def test_a_choice_of_kernels_on_cpu():
    found = plan(t0={"compute_kernels": ["fused", CACHED_KERNEL]})
    assert found["t0"].compute_kernel in ("fused", CACHED_KERNEL)


def test_two_collections_with_a_table_of_the_same_name():
    sharders = [StockEmbeddingBagCollectionSharder(), CachedEmbeddingCollectionSharder(CacheConfig(ratio=0.1))]
    found = plan_sharding(
        Model(sequence=True, sequence_name="t0"), sharders, world_size=2, local_world_size=2, device="cpu"
    )
    assert found.plan["pooled"]["t0"].compute_kernel == "fused"
    assert found.plan["sequences"]["t0"].compute_kernel == CACHED_KERNEL


@pytest.mark.parametrize("sharder", [CachedEmbeddingBagCollectionSharder, CachedEmbeddingCollectionSharder])
def test_sharders_check_their_settings_when_they_are_made(sharder):
    profile = FrequencyProfile({"t0": torch.zeros(1000, dtype=torch.int64)}, 1)
    assert sharder().cache == CacheConfig()
    assert sharder(cache=CacheConfig(ratio=0.5)).cache.ratio == 0.5
    with pytest.raises(ConfigError, match="cache must be a CacheConfig, got dict"):
        sharder(cache={"ratio": 0.5})
    with pytest.raises(ConfigError, match="needs a FrequencyProfile"):
        sharder(cache=CacheConfig(policy="frequency"))
    with pytest.raises(ConfigError, match="no effect"):
        sharder(cache=CacheConfig(policy="lru", warmup=False), profile=profile)


def of_rows(*rows: int, pooling: PoolingType = PoolingType.SUM) -> nn.Module:
    """A model of tables without memory; ``pooling`` is the last one's."""
    model = nn.Module()
    model.pooled = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{i}",
                embedding_dim=16,
                num_embeddings=count,
                feature_names=[f"f{i}"],
                pooling=pooling if i == len(rows) - 1 else PoolingType.SUM,
            )
            for i, count in enumerate(rows)
        ],
        device=META,
    )
    return model


@pytest.fixture
def large_memory(monkeypatch) -> None:
    """TorchRec assumes 128 GB of a host."""
    capacities = {"hbm_cap": 2**62, "ddr_cap": 2**62}
    monkeypatch.setattr(
        "embershard.sharding.torchrec.planner.torchrec_planner._capacities", lambda device_type: capacities
    )


TABLE_WISE = {"sharding_types": ["table_wise"]}


@devices
def test_a_cache_that_could_not_number_its_rows_is_not_planned(device, large_memory):
    whole = {"device": device, "world_size": 1}
    plan(model=of_rows(MOST_POOL_ROWS - 5, 5), **whole, t0=TABLE_WISE, t1=TABLE_WISE)
    with pytest.raises(ShardingError) as error:
        plan(model=of_rows(MOST_POOL_ROWS - 5, 6), **whole, t0=TABLE_WISE, t1=TABLE_WISE)
    assert str(error.value) == (
        "no sharding plan for 2 tables on 1 ranks: the table_wise cache of rank 0 would have 2147483648 rows, of 't0' "
        "(2147483642), 't1' (6), and a cache can number 2147483647. Use more ranks, let tables be cut by rows "
        "(row_wise), or give them fewer rows (hash their ids into fewer)"
    )
    model = of_rows(MOST_POOL_ROWS - 5, 6, pooling=PoolingType.MEAN)  # which TorchRec gives a cache of its own
    plan(model=model, **whole, t0=TABLE_WISE, t1=TABLE_WISE)
    stock = [StockEmbeddingBagCollectionSharder()]
    plan(stock, of_rows(MOST_POOL_ROWS - 5, 6), **whole, t0=TABLE_WISE, t1=TABLE_WISE)
    fused = {**TABLE_WISE, "compute_kernels": ["fused"]}
    if device == "cuda":  # on a CPU TorchRec plans both as fused, and one kind of a table is chosen
        plan(model=of_rows(MOST_POOL_ROWS - 5, 6), **whole, t0=fused, t1=TABLE_WISE)


def test_a_table_that_is_whole_on_the_gpu_shares_no_cache(large_memory):
    """Though it might have been cached; on a CPU it is."""
    either = {**TABLE_WISE, "compute_kernels": ["fused", CACHED_KERNEL]}
    given = {"model": of_rows(MOST_POOL_ROWS - 5, 6), "world_size": 1, "t0": either, "t1": TABLE_WISE}
    assert kernels(plan(device="cuda", **given)) == {"t0": "fused", "t1": CACHED_KERNEL}
    with pytest.raises(ShardingError, match="and a cache can number"):
        plan(device="cpu", **given)


@devices
def test_a_table_that_one_rank_cannot_number_is_cut_by_rows(device, large_memory):
    params = plan(model=of_rows(4 * 10**9, 100), device=device)
    assert params["t0"].sharding_type == "row_wise"
    with pytest.raises(ShardingError, match=r"would have 2500000000 rows, of 't0' \(2500000000\), and a cache can"):
        plan(model=of_rows(5 * 10**9), device=device)


@devices
def test_tables_share_a_cache_on_one_rank_unless_it_could_not_number_their_rows(device, large_memory):
    """There, all types hold a table whole; different ones have caches of their own."""
    kinds = {param.sharding_type for param in plan(world_size=1, device=device).values()}
    assert kinds == {"table_wise"}
    found = plan(model=of_rows(MOST_POOL_ROWS - 5, 6), world_size=1, device=device)
    assert len({param.sharding_type for param in found.values()}) == 2


@pytest.mark.slow
def test_the_search_of_a_plan_is_bounded(monkeypatch):
    """Neither the proposals nor the questions for a table's pooling grow with the square of the tables."""
    proposals, asked = [], []
    partition, configs = PoolRowsPartitioner.partition, EmbeddingBagCollection.embedding_bag_configs
    monkeypatch.setattr(
        PoolRowsPartitioner, "partition", lambda *given, **named: proposals.append(1) or partition(*given, **named)
    )
    monkeypatch.setattr(EmbeddingBagCollection, "embedding_bag_configs", lambda self: asked.append(1) or configs(self))
    monkeypatch.setattr("embershard.sharding.torchrec.planner.torchrec_planner._MOST_PLACED_SHARDS", 2000)
    plan(model=of_rows(*range(100, 160)), world_size=2)
    assert 16 <= len(proposals) <= 2 * (2000 // (60 * 2)) + 2, "two greedy proposers, and one plan per type"
    assert len(asked) <= 4 * 60, "TorchRec's own questions: one or two per table, and since 1.9 one per sharding type"


@pytest.mark.parametrize(
    ("dim", "world_size", "ranks_per_node", "types"),
    [
        (16, 1, 1, ["table_wise"]),
        (512, 1, 1, ["table_wise"]),
        (16, 2, 2, ["table_wise", "row_wise"]),
        (512, 2, 2, ["table_wise", "row_wise", "column_wise"]),
        (16, 4, 2, ["table_wise", "row_wise", "table_row_wise"]),
        (512, 4, 2, ["table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise"]),
    ],
)
def test_types_that_place_a_table_in_the_same_way_are_tried_once(dim, world_size, ranks_per_node, types):
    topology = Topology(world_size=world_size, local_world_size=ranks_per_node, compute_device="cpu")
    every = ["table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise"]
    assert distinct_types(ParameterConstraints(sharding_types=every), 100, dim, topology).sharding_types == types
    for only in (every[1:2], every[2:3], every[3:4], every[4:]):
        assert distinct_types(ParameterConstraints(sharding_types=only), 100, dim, topology).sharding_types == only


def test_tables_with_fewer_rows_than_ranks_are_not_cut_by_rows():
    """Nor those whose last blocks are empty: 5 rows in blocks of two leave none for the fourth rank."""
    topology = Topology(world_size=4, local_world_size=2, compute_device="cpu")
    every = ParameterConstraints(sharding_types=["table_wise", "row_wise", "table_row_wise"])
    found = [distinct_types(every, rows, 16, topology).sharding_types for rows in (1, 3, 5, 7)]
    whole, by_node = ["table_wise"], ["table_wise", "table_row_wise"]
    assert found == [whole, by_node, by_node, every.sharding_types]
    only = ParameterConstraints(sharding_types=["row_wise"])
    assert distinct_types(only, 3, 16, topology).sharding_types == ["row_wise"], "a user's own choice"


def tiny(*rows: int, sequence: bool = False) -> nn.ModuleDict:
    """A module of tables t0, t1, ... of so many rows."""
    given = [
        {"name": f"t{n}", "embedding_dim": 16, "num_embeddings": count, "feature_names": [f"f{n}"]}
        for n, count in enumerate(rows)
    ]
    if sequence:
        return nn.ModuleDict({"m": EmbeddingCollection([EmbeddingConfig(**table) for table in given], device=META)})
    return nn.ModuleDict({"m": EmbeddingBagCollection([EmbeddingBagConfig(**table) for table in given], device=META)})


@pytest.mark.parametrize(
    ("rows", "kind", "says"),
    [
        ((3,), "row_wise", "rank 3 has no row of its row_wise tables on the device: t0 (3 rows on 4 ranks)"),
        (
            (5, 3),
            "row_wise",
            "row_wise tables on the device: t0 (5 rows on 4 ranks), t1 (3 rows on 4 ranks), and FBGEMM",
        ),
        ((1,), "table_row_wise", "has no row of its table_row_wise tables on the device: t0 (1 row on 2 ranks)"),
        ((1,), "grid_shard", "has no row of its grid_shard tables on the device: t0 (1 row on 2 ranks)"),
        ((5, 400), "row_wise", ""),
        ((3, 4), "row_wise", ""),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_a_rank_without_a_row_on_a_cpu_is_refused_by_name(rows, kind, says, cached):
    """FBGEMM ends the process there. A sharder also refuses a plan that was made elsewhere."""
    sharder = CachedEmbeddingBagCollectionSharder() if cached else StockEmbeddingBagCollectionSharder()
    given = {f"t{n}": {"sharding_types": [kind], "min_partition": 8} for n in range(len(rows))}
    on_device = {name: {**constraint, "compute_kernels": ["fused"]} for name, constraint in given.items()}
    sizes = {"world_size": 4, "local_world_size": 2}
    params = plan([sharder], tiny(*rows), **sizes, device="cuda", **on_device)
    if not says:
        assert kernels(plan([sharder], tiny(*rows), **sizes, **on_device)) == dict.fromkeys(on_device, "fused")
        return
    with pytest.raises(ShardingError, match=re.escape(says)):
        plan([sharder], tiny(*rows), **sizes, **on_device)
    with pytest.raises(ShardingError, match=re.escape(says)):
        sharder.shard(tiny(*rows)["m"], params, SimpleNamespace(rank=0, world_size=4), torch.device("cpu"))
    if cached:
        assert kernels(plan([sharder], tiny(*rows), **sizes, **given)) == dict.fromkeys(given, CACHED_KERNEL)


def test_sequences_that_leave_a_rank_without_a_row_are_refused():
    with pytest.raises(ShardingError, match=r"rank 3 has no row of its row_wise tables on the device: t0 \(3 rows"):
        plan(
            [StockEmbeddingCollectionSharder()],
            tiny(3, sequence=True),
            world_size=4,
            t0={"sharding_types": ["row_wise"]},
        )


def large(rows: int = 10**9) -> nn.ModuleDict:
    table = EmbeddingBagConfig(name="t", embedding_dim=256, num_embeddings=rows, feature_names=["f"])
    return nn.ModuleDict({"bags": EmbeddingBagCollection([table], device=META)})


def test_rows_in_files_may_take_more_than_128_gb_per_rank():
    sharder = CachedEmbeddingBagCollectionSharder(CacheConfig(ratio=0.1, host="mmap", host_dir="rows"))
    assert plan([sharder], large(), world_size=1)["t"].compute_kernel == CACHED_KERNEL


@pytest.mark.parametrize(
    ("sharder", "num_nodes", "warns"),
    [
        (CachedEmbeddingBagCollectionSharder(CacheConfig(ratio=0.1)), 1, True),
        (CachedEmbeddingBagCollectionSharder(CacheConfig(ratio=0.1)), 2, False),
        (CachedEmbeddingBagCollectionSharder(CacheConfig(ratio=0.1), init_seed=7), 1, False),
        (CachedEmbeddingBagCollectionSharder(CacheConfig(ratio=0.1, host="mmap", host_dir="rows")), 1, False),
        (StockEmbeddingBagCollectionSharder(), 1, True),
    ],
)
def test_weights_beyond_the_machine_are_a_warning(sharder, num_nodes, warns, monkeypatch):
    monkeypatch.setattr(torchrec_planner, "host_memory", lambda: HostMemory(10**9, 600 << 20))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan([sharder], large(10**6), world_size=2, local_world_size=2 // num_nodes)
    said = [str(warning.message) for warning in caught if "weights alone" in str(warning.message)]
    assert len(said) == warns
    figures = "take 976.56 MiB on this machine, and 600.00 MiB are available (this machine); the"
    assert all(figures in text for text in said)


def test_zero_collision_hashing_is_refused():
    around = ManagedCollisionEmbeddingBagCollectionSharder(CachedEmbeddingBagCollectionSharder())
    with pytest.raises(ShardingError, match=r"gives rows to other ids.*Give it TorchRec's own sharder"):
        plan([around])
