"""Cached tables are trained as uncached ones, or the model is not built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    CowClipDefinition,
    EmainplaceModeDefinition,
    EnsembleModeDefinition,
    GlobalWeightDecayDefinition,
    UserEnabledConfigDefinition,
    WeightDecayMode,
)
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import BoundsCheckMode, CacheAlgorithm, CacheParams, ShardingEnv
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, data_type_to_dtype
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from embershard import (
    CacheConfig,
    CachedEmbeddingBagCollectionSharder,
    CachedEmbeddingCollectionSharder,
    IdTable,
    plan_sharding,
)
from embershard.errors import ConfigError
from embershard.sharding.torchrec import table_arguments
from tests.ranks.parity import OPTIMIZERS
from tests.unit.planning.test_built import CPU, playing
from tests.unit.sharding.plans import make_plan
from tests.unit.sharding.pools import make_pool
from tests.unit.sharding.test_embeddings import batch, make_stock, step

ALLOWED = "EXACT_SGD, EXACT_ROWWISE_ADAGRAD, EXACT_ADAGRAD, ADAM, PARTIAL_ROWWISE_ADAM, LAMB, PARTIAL_ROWWISE_LAMB"


def unsharded(sequence: bool = False) -> nn.Module:
    """Three tables."""
    common: list[dict[str, Any]] = [
        {"name": f"t{t}", "embedding_dim": 8, "num_embeddings": 40, "feature_names": [f"f{t}"]} for t in range(3)
    ]
    meta = torch.device("meta")
    if sequence:
        return nn.Sequential(EmbeddingCollection(tables=[EmbeddingConfig(**c) for c in common], device=meta))
    return nn.Sequential(EmbeddingBagCollection(tables=[EmbeddingBagConfig(**c) for c in common], device=meta))


def shard(
    monkeypatch: pytest.MonkeyPatch,
    fused_params: dict[str, Any],
    model: nn.Module | None = None,
    rank: int = 0,
    constraints: dict[str, ParameterConstraints] | None = None,
    use_index_dedup: bool = False,
    world_size: int = 2,
) -> DistributedModelParallel:
    """The model, all tables cached and on rank 0."""
    model = model or unsharded()
    settings: Any = {"cache": CacheConfig(ratio=0.5), "fused_params": fused_params}
    sequences = CachedEmbeddingCollectionSharder(**settings, use_index_dedup=use_index_dedup)
    sharders: Any = [CachedEmbeddingBagCollectionSharder(**settings), sequences]
    given = {t: ParameterConstraints(sharding_types=["table_wise"]) for t in ("t0", "t1", "t2")} | (constraints or {})
    plan = plan_sharding(
        model, sharders, world_size=world_size, local_world_size=world_size, device="cpu", constraints=given
    )
    for tables in plan.plan.values():
        for placed in tables.values():  # type: ignore[attr-defined]
            for piece in placed.sharding_spec.shards:
                piece.placement = torch.distributed._remote_device("rank:0/cpu")
            placed.ranks = [0]
    with playing(rank, make_plan([], world_size, world_size), monkeypatch):
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        return DistributedModelParallel(
            model, env=env, device=CPU, plan=plan, sharders=sharders, init_data_parallel=False
        )


REFUSED = {
    "ensemble_mode": EnsembleModeDefinition(),
    "emainplace_mode": EmainplaceModeDefinition(),
    "counter_based_regularization": CounterBasedRegularizationDefinition(),
    "cowclip_regularization": CowClipDefinition(),
    "global_weight_decay": GlobalWeightDecayDefinition(),
    "extra_optimizer_config": UserEnabledConfigDefinition(use_rowwise_bias_correction=True),
    "enable_raw_embedding_streaming": True,
    "use_experimental_tbe": True,
    "uvm_non_rowwise_momentum": True,
    "embedding_shard_info": ((40, 8, 0, 0),),
    "is_qr_tbe": True,
    "betas": (0.9, 0.99),  # torch's name: FBGEMM has beta1 and beta2
}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("optimizer", [each for each in EmbOptimType if each not in OPTIMIZERS.values()])
def test_an_optimizer_that_works_on_whole_tables_is_refused(optimizer, sequence, monkeypatch):
    said = rf"\['t0', 't1', 't2'\]: got the optimizer {optimizer.name}, .* only by {ALLOWED}: .*Take one of those"
    with pytest.raises(ConfigError, match=said):
        shard(monkeypatch, {"optimizer": optimizer}, unsharded(sequence))


@pytest.mark.parametrize("mode", ["COUNTER", "COWCLIP", "DECOUPLE_GLOBAL"])
def test_a_weight_decay_with_a_state_of_the_whole_table_is_refused(mode, monkeypatch):
    arguments = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "weight_decay_mode": WeightDecayMode[mode]}
    with pytest.raises(ConfigError, match=f"got weight_decay_mode {mode}, but only NONE, L2, DECOUPLE work on slots"):
        shard(monkeypatch, arguments)


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_is_not_known_to_work_on_slots_is_refused(name, monkeypatch):
    said = rf"'t2'\]: got {name}=.* in fused_params, which is not known .*Known to work are .*beta1, .*Leave it out"
    with pytest.raises(ConfigError, match=said):
        shard(monkeypatch, {name: REFUSED[name]})


def test_a_rank_without_a_table_refuses_the_optimizer_too(monkeypatch):
    with pytest.raises(ConfigError, match="EMAINPLACE_ROWWISE_ADAGRAD"):
        shard(monkeypatch, {"optimizer": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD}, rank=1)


def test_only_the_tables_with_the_refused_argument_are_named(monkeypatch):
    model = unsharded()
    weight = model[0].embedding_bags["t1"].weight  # type: ignore[index]
    apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.1, "dampening": 0.5})
    with pytest.raises(ConfigError, match=r"cached tables \['t1'\]: got dampening=0.5 in fused_params"):
        shard(monkeypatch, {}, model)


#: Arguments of the cached sharder, whether it is that of sequences, and how tables are placed.
ENTRIES: dict[str, tuple[dict[str, Any], bool, str]] = {
    "bags": ({}, False, "table_wise"),
    "sequences": ({}, True, "table_wise"),
    "seed": ({"init_seed": 1}, False, "row_wise"),
    "rows": ({"exchange": "rows"}, False, "row_wise"),
    "data_parallel": ({"mode": "data_parallel"}, False, "row_wise"),
    "hot rows": ({"hot_rows": {"t": torch.arange(9)}}, False, "table_wise"),
    "ids": ({"init_seed": 1, "ids": {"t": IdTable()}}, False, "table_wise"),
    "ids in sequences": ({"init_seed": 1, "ids": {"t": IdTable()}}, True, "row_wise"),
    "copies": ({}, False, "data_parallel"),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("data_type", [DataType.BF16, DataType.INT8, DataType.INT32, DataType.INT4, DataType.NFP8])
@pytest.mark.parametrize("planned", [True, False], ids=["plan", "another's plan"])
def test_rows_of_types_that_no_slot_trains_are_refused(entry, data_type, planned, monkeypatch):
    arguments, sequence, sharding = ENTRIES[entry]
    cls = CachedEmbeddingCollectionSharder if sequence else CachedEmbeddingBagCollectionSharder
    sharders: Any = [cls(**arguments)]

    def model_of(its_type: DataType) -> nn.Module:
        common: list[Any] = [
            {"name": name, "embedding_dim": 8, "num_embeddings": 240, "feature_names": [name], "data_type": type_of}
            for name, type_of in (("t", its_type), ("cached", DataType.FP32))
        ]
        meta = torch.device("meta")
        if sequence:
            return nn.Sequential(EmbeddingCollection([EmbeddingConfig(**c) for c in common], device=meta))
        return nn.Sequential(EmbeddingBagCollection([EmbeddingBagConfig(**c) for c in common], device=meta))

    kernels = ["fused"] if sharding == "data_parallel" else None
    placed = {"t": ParameterConstraints(sharding_types=[sharding], compute_kernels=kernels)}
    refused, dtype = model_of(data_type), str(data_type_to_dtype(data_type)).removeprefix("torch.")

    def plan_and_shard() -> None:
        planned_model = refused if planned else model_of(DataType.FP32)
        plan = plan_sharding(
            planned_model, sharders, world_size=2, local_world_size=2, device="cpu", constraints=placed
        )
        with playing(0, make_plan([], 2, 2), monkeypatch):
            env = ShardingEnv.from_process_group(dist.group.WORLD)
            DistributedModelParallel(refused, env=env, device=CPU, plan=plan, sharders=sharders)

    with pytest.raises(ConfigError, match=rf"cached tables \['t'\]: got rows of {dtype}, needed float32 or float16"):
        plan_and_shard()


def test_an_uncached_table_is_not_asked(monkeypatch):
    fused = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=[EmbeddingComputeKernel.FUSED.value])
    arguments = {"optimizer": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD}
    with pytest.warns(UserWarning, match="caches none of the tables"):
        shard(monkeypatch, arguments, constraints={f"t{t}": fused for t in range(3)})


def test_arguments_at_their_defaults_and_those_of_fbgemm_s_cache_are_taken(monkeypatch):
    """As TorchRec and its planner add them."""
    cache = CacheParams(algorithm=CacheAlgorithm.LFU, load_factor=0.5, reserved_memory=1.0, precision=DataType.FP16)
    constraints = ParameterConstraints(
        sharding_types=["table_wise"],
        cache_params=cache,
        enforce_hbm=True,
        stochastic_rounding=False,
        bounds_check_mode=BoundsCheckMode.FATAL,
        output_dtype=DataType.FP16,
    )
    defaults = {name: table_arguments._DEFAULTS[name] for name in REFUSED if name in table_arguments._DEFAULTS}
    arguments = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "use_one_tbe_per_table": True, "cache_sets": 3, **defaults}
    shard(monkeypatch, arguments, constraints={f"t{t}": constraints for t in range(3)})


@pytest.mark.parametrize(
    "arguments",
    [
        {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2},
        {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.DECOUPLE},
        {"max_norm": 0.5, "eps": 0.1},
        {"gradient_clipping": True, "max_gradient": 0.5},
        {"embedding_table_index_type": torch.int32, "embedding_table_offset_type": torch.int32},
        {"momentum": 0.5, "eta": 0.1, "beta1": 0.3, "beta2": 0.4},
    ],
)
def test_what_is_known_to_work_trains_as_fbgemm_does(arguments):
    pool = make_pool(fused_params=arguments)
    stock = make_stock(pool, "rowwise_adagrad", fused_params=arguments)
    for seed in range(20):
        assert torch.equal(step(pool, *batch(seed)), step(stock, *batch(seed)))
    assert pool.slots.tbe.pooling_mode == PoolingMode.SUM
    pool.flush()
    for own, theirs in zip(pool.split_embedding_weights(), stock.split_embedding_weights(), strict=True):
        assert torch.equal(own, theirs)


def test_index_dedup_on_a_cpu_is_refused_before_the_first_forward(monkeypatch):
    said = "use_index_dedup=True needs a GPU: FBGEMM has no CPU kernel.*Leave it out: the embeddings are the same"
    with pytest.raises(ConfigError, match=said):
        shard(monkeypatch, {}, unsharded(sequence=True), use_index_dedup=True, world_size=1)
    shard(monkeypatch, {}, use_index_dedup=True)  # it is about sequences
