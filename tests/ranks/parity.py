"""Train the same model on the same batches with stock TorchRec and with the cache, and compare every bit."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import (
    CacheConfig,
    CachedEmbeddingBagCollectionSharder,
    CachedEmbeddingCollectionSharder,
    FrequencyProfile,
    TableStats,
    cache_stats,
    plan_sharding,
)
from embershard.sharding.config import ShardingConfig
from embershard.sharding.torchrec import StockEmbeddingBagCollectionSharder, StockEmbeddingCollectionSharder
from embershard.sharding.torchrec.counter_init import CounterInit
from embershard.sharding.torchrec.inspection import write_initial_weights
from embershard.sharding.torchrec.sharders import comm_codecs

logging.getLogger("torchrec").setLevel(logging.ERROR)

ROWS = (1000, 500, 2000, 333)
OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    # FBGEMM has these on GPUs only.
    "adam": EmbOptimType.ADAM,
    "partial_rowwise_adam": EmbOptimType.PARTIAL_ROWWISE_ADAM,
    "lamb": EmbOptimType.LAMB,
    "partial_rowwise_lamb": EmbOptimType.PARTIAL_ROWWISE_LAMB,
}


@dataclass(frozen=True)
class Case:
    """One configuration. ``sharding``: one type for all tables, or one per table. ``profile``: give one to policies
    that do not need it. ``cached``: numbers of the cached tables, None for all; ``data_parallel`` tables are never
    cached. ``replicated``: numbers of tables that are sharded in stock TorchRec, and replicated beside the cache.
    ``hot``: rows of each table that every rank has a copy of, the most frequent ones; None: not this mode.
    ``host_dtype``, ``full_rows``, ``host_dir``: of the cache; with ``host_bytes`` rows are in a file there."""

    optimizer: str = "rowwise_adagrad"
    sharding: str | tuple[str, ...] = "table_wise"
    policy: str = "lfu"
    profile: bool = False
    transfer: str | None = None
    slot_map: str = "array"
    cached: tuple[int, ...] | None = None
    sequence: bool = False
    mean: bool = False
    weighted: bool = False
    shared: bool = False
    dims: tuple[int, ...] = (16, 16, 16, 16)
    fp16: tuple[int, ...] = ()
    ratio: float = 0.22
    steps: int = 30
    batch_size: int = 16
    local_world_size: int | None = None
    host_dir: str | None = None
    host_bytes: int | None = None
    overflow: str = "raise"
    evaluate_every: int = 0
    rows: tuple[int, ...] = ROWS
    device: str = "cpu"
    comm: tuple[str, str] = ("fp32", "fp32")
    init_seed: int | None = None
    exchange: str = "pooled"
    mode: str = "sharded"
    replicated: tuple[int, ...] = ()
    hot: int | None = None
    host_dtype: str = "fp32"
    full_rows: float | None = None

    @property
    def features(self) -> list[str]:
        """One per table, and with ``shared`` a second one for table 0."""
        return [f"f{t}" for t in range(len(self.rows))] + (["f0b"] if self.shared else [])


def batches(
    case: Case, rank: int, steps: int | None = None, seed: int = 0
) -> Iterator[tuple[KeyedJaggedTensor, Tensor]]:
    """Ragged multi-hot bags with empty ones among them, skewed over scattered rows; labels."""
    rows = [case.rows[int(name[1])] for name in case.features]
    for step in range(steps or case.steps):
        generator = torch.Generator().manual_seed(100_000 * seed + 1000 * step + rank)
        lengths = torch.randint(0, 6, (len(rows) * case.batch_size,), generator=generator)
        values = []
        for f, num_rows in enumerate(rows):
            count = int(lengths[f * case.batch_size : (f + 1) * case.batch_size].sum())
            skewed = (torch.rand(count, generator=generator) ** 2 * num_rows).long()
            values.append(skewed * 7 % num_rows)
        ids = torch.cat(values)
        weights = torch.rand(ids.numel(), generator=generator) if case.weighted else None
        features = KeyedJaggedTensor(keys=case.features, values=ids, lengths=lengths, weights=weights)
        yield features, torch.rand(case.batch_size, generator=generator)


class _Model(nn.Module):
    """Embeddings and one dense layer, pooled or as sequences."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        common: list[dict[str, Any]] = [
            {
                "name": f"t{t}",
                "embedding_dim": case.dims[t],
                "num_embeddings": rows,
                "feature_names": [name for name in case.features if name[1] == str(t)],
                "data_type": DataType.FP16 if t in case.fp16 else DataType.FP32,
            }
            for t, rows in enumerate(case.rows)
        ]
        meta = torch.device("meta")
        if case.sequence:
            self.embeddings = EmbeddingCollection(tables=[EmbeddingConfig(**c) for c in common], device=meta)
        else:
            pooling = PoolingType.MEAN if case.mean else PoolingType.SUM
            tables = [EmbeddingBagConfig(**c, pooling=pooling) for c in common]
            self.embeddings = EmbeddingBagCollection(tables=tables, device=meta, is_weighted=case.weighted)
        width = sum(case.dims[int(name[1])] for name in case.features)
        self.dense = nn.Linear(width, 1)
        self.sequence, self.names = case.sequence, case.features

    def forward(self, features: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        found = self.embeddings(features)
        if self.sequence:
            pooled = [
                torch.segment_reduce(found[k].values(), "sum", lengths=found[k].lengths(), unsafe=True)
                for k in features.keys()  # noqa: SIM118
            ]
            x = torch.cat(pooled, dim=1)
        else:
            x = found.values()
        return ((self.dense(x).squeeze(1) - labels) ** 2).mean()


class LinearModel(_Model):
    """Gradients of pooled embeddings are the coefficients [B, sum of D], whatever the weights are."""

    def forward(self, features: KeyedJaggedTensor, coefficients: Tensor) -> Tensor:
        found = self.embeddings(features).to_dict()  # their order depends on the plan
        pooled = torch.cat([found[name] for name in self.names], dim=1)
        return (pooled * coefficients).sum() + 0 * self.dense.bias.sum()


def build(case: Case, cached: bool, make_model: Callable[[Case], nn.Module] | None = None) -> DistributedModelParallel:
    """The sharded model, from seed 7, on this rank. ``make_model``: gives an unsharded model with these tables."""
    torch.manual_seed(7)
    model = (make_model or _Model)(case)
    sharders = sharders_of(case, cached)
    plan = plan_of(case, cached, model, sharders, dist.get_world_size())
    counter_init = None
    if case.init_seed is not None and case.sequence and not cached:  # no sharder of ours makes these
        counter_init = CounterInit.of_module(model.embeddings, case.init_seed)
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device(case.device),
        plan=plan,
        sharders=sharders,
    )
    if counter_init is not None:
        module = next(m for m in sharded.modules() if isinstance(m, ShardedEmbeddingCollection))
        write_initial_weights(module, counter_init)
    return sharded


def sharders_of(case: Case, cached: bool) -> list[Any]:
    """Of bags and of sequences."""
    fused_params: dict[str, Any] = {"optimizer": OPTIMIZERS[case.optimizer], "learning_rate": 0.1, "eps": 1e-6}
    if case.fp16:  # on a GPU its random numbers go by a row's place in the sorted batch: slots have another order
        fused_params["stochastic_rounding"] = False
    profile = None
    if case.profile or case.policy in ("frequency", "static"):
        profile = make_profile(case)
    config = CacheConfig(
        ratio=case.ratio,
        policy=case.policy,  # type: ignore[arg-type]
        overflow=case.overflow,  # type: ignore[arg-type]
        host="file" if case.host_bytes else "mmap" if case.host_dir else "memory",
        host_dir=case.host_dir,
        host_bytes=case.host_bytes,
        transfer=case.transfer,  # type: ignore[arg-type]
        slot_map=case.slot_map,  # type: ignore[arg-type]
        host_dtype=case.host_dtype,  # type: ignore[arg-type]
        full_rows=case.full_rows,
    )
    codecs = comm_codecs(ShardingConfig(None, *case.comm), torch.device(case.device))  # type: ignore[arg-type]
    if cached:
        return [
            CachedEmbeddingBagCollectionSharder(
                config,
                profile,
                dict(fused_params),
                codecs,
                init_seed=case.init_seed,
                exchange=case.exchange,  # type: ignore[arg-type]
                hot_rows=None if case.hot is None else hot_rows(case),
                mode=case.mode,  # type: ignore[arg-type]
            ),
            CachedEmbeddingCollectionSharder(config, profile, dict(fused_params), codecs, init_seed=case.init_seed),
        ]
    return [
        StockEmbeddingBagCollectionSharder(dict(fused_params), codecs, init_seed=case.init_seed),
        StockEmbeddingCollectionSharder(dict(fused_params), codecs),
    ]


def plan_of(case: Case, cached: bool, model: nn.Module, sharders: list[Any], world_size: int) -> ShardingPlan:
    """TorchRec's, of so many ranks."""
    return plan_sharding(
        model,
        sharders,
        world_size=world_size,
        local_world_size=case.local_world_size or world_size,
        device=case.device,
        constraints=_constraints(case, cached),
    )


def hot_rows(case: Case) -> dict[str, Tensor]:
    """The most frequent rows of every table in `batches`."""
    return {f"t{t}": (torch.arange(min(case.hot or 0, rows)) * 7 % rows).unique() for t, rows in enumerate(case.rows)}


def _constraints(case: Case, cached: bool) -> dict[str, ParameterConstraints]:
    types = (case.sharding,) * len(case.rows) if isinstance(case.sharding, str) else case.sharding
    constraints = {}
    for t, sharding_type in enumerate(types):
        stock = not cached or (case.cached is not None and t not in case.cached)
        kernel = "dense" if sharding_type == "data_parallel" else "fused" if stock else None
        if cached and t in case.replicated:
            sharding_type, kernel = "data_parallel", "fused"
        constraints[f"t{t}"] = ParameterConstraints(
            sharding_types=[sharding_type], compute_kernels=[kernel] if kernel else None, min_partition=4
        )
    return constraints


def make_profile(case: Case) -> FrequencyProfile:
    """Counts over the batches of all ranks."""
    tables = {name: f"t{name[1]}" for name in case.features}
    counted = []
    for rank in range(dist.get_world_size()):
        for features, _ in batches(case, rank):
            counted += [{tables[name]: jagged.values()} for name, jagged in features.to_dict().items()]
    return FrequencyProfile.count(counted, {f"t{t}": rows for t, rows in enumerate(case.rows)})


def train(
    model: DistributedModelParallel,
    case: Case,
    steps: int | None = None,
    seed: int = 0,
    order: Callable[[KeyedJaggedTensor, Tensor], tuple[KeyedJaggedTensor, Tensor]] | None = None,
) -> list[float]:
    """Train on this rank's batches; the losses (an evaluation's among them, where the case has one). ``order``: of the
    samples of a batch."""
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "dense" in n], lr=0.05)
    losses = []
    given = batches(case, dist.get_rank(), steps, seed)
    for step, (features, labels) in enumerate(itertools.starmap(order, given) if order else given):
        optimizer.zero_grad()
        loss = model(features.to(model.device), labels.to(model.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if case.evaluate_every and step % case.evaluate_every == 0:
            with torch.no_grad():
                unseen = next(batches(case, dist.get_rank(), 1, seed=step + 1000))
                losses.append(model(*(part.to(model.device) for part in unseen)).item())
    return losses


def snapshot(model: DistributedModelParallel, states_first: bool = True) -> dict[str, Tensor]:
    """This rank's shards of all weights and optimizer states, by name and offset. Copies."""
    groups = [("state", _states(model)), ("weight", model.state_dict())]
    found = {}
    for kind, values in groups if states_first else reversed(groups):
        for name, value in values.items():
            if isinstance(value, ShardedTensor):
                for shard in value.local_shards():
                    key = f"{kind}/{name}/{tuple(shard.metadata.shard_offsets)}"
                    found[key] = shard.tensor.detach().cpu().clone()
            elif isinstance(value, Tensor):
                found[f"{kind}/{name}"] = value.detach().cpu().clone()
    return found


@torch.no_grad()
def start_from(model: DistributedModelParallel, initial: dict[str, Tensor]) -> None:
    """Give this rank's weights the values of a snapshot: a GPU draws other numbers than the CPU, where the cached
    tables were initialized."""
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                shard.tensor.copy_(initial[f"weight/{name}/{tuple(shard.metadata.shard_offsets)}"])
        elif isinstance(value, Tensor):
            value.copy_(initial[f"weight/{name}"])


def _states(model: DistributedModelParallel) -> dict[str, Any]:
    return {
        f"{table}.{name}": value
        for table, states in model.fused_optimizer.state_dict()["state"].items()
        for name, value in states.items()
    }


def differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names under which two snapshots are not bitwise equal."""
    only = sorted(set(a) ^ set(b))
    return only + [name for name in sorted(set(a) & set(b)) if not torch.equal(a[name], b[name])]


@dataclass(frozen=True)
class Outcome:
    """What one rank saw. ``different`` is empty when everything was bitwise equal."""

    different: list[str]
    num_compared: int
    num_states: int
    stats: list[TableStats]


def compare(case: Case, policies: tuple[str, ...] | None = None) -> dict[str, Outcome]:
    """Stock against cached, for each policy; by policy, what differed on this rank."""
    warnings.simplefilter("error", category=UserWarning)
    warnings.filterwarnings("ignore", module="torch")
    warnings.filterwarnings("ignore", module="torchrec")
    stock = build(case, cached=False)
    expected = {"initial": snapshot(stock), "losses": train(stock, case), "final": snapshot(stock)}
    outcomes = {}
    for policy in policies or (case.policy,):
        ours = dataclasses.replace(case, policy=policy)
        model = build(ours, cached=True)
        if case.device != "cpu":
            start_from(model, expected["initial"])
        different = [f"initial {name}" for name in differences(expected["initial"], snapshot(model))]
        losses = train(model, ours)
        different += [f"loss {i}" for i, (a, b) in enumerate(zip(expected["losses"], losses, strict=True)) if a != b]
        stats = cache_stats(model)
        final = snapshot(model)
        different += differences(expected["final"], final)
        num_states = sum(name.startswith("state") for name in final)
        outcomes[policy] = Outcome(different, len(final), num_states, stats)
    return outcomes


def compare_all(cases: list[Case], policies: tuple[str, ...] | None = None) -> list[dict[str, Outcome]]:
    """:func:`compare` for several cases in one call."""
    return [compare(case, policies) for case in cases]


def places_of_parameters(case: Case) -> dict[str, str]:
    """Kind of device of every parameter of a cached model."""
    model: Any = build(case, cached=True).module
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return {name: parameter.device.type for name, parameter in inner.named_parameters()}


def losses_of(case: Case) -> list[float]:
    """Of a cached model, on this rank."""
    return train(build(case, cached=True), case)
