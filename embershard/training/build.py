"""Puts a run's parts together: profile, plan, model with the tables' optimizer, cache, sharding, data parallelism.

With `train.precision = "fp64"` the dense layers compute in float64, and gradients of embeddings are rounded once. Sums
over samples and ranks in another order then differ by less than what is left after rounding to the tables' float32.
TorchRec divides the gradients of embeddings by the number of ranks, in float32: by three, that rounds them a second
time. So they are divided before they are rounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.models.dlrm import DLRMTrain
from torchrec.sparse.jagged_tensor import KeyedTensor

from embershard.data import Batch, Schema, Source
from embershard.data.block import Block
from embershard.data.order.stream import SampleReader
from embershard.distributed import Ranks
from embershard.errors import ConfigError, ShardingError
from embershard.frequency import FrequencyProfile
from embershard.lazy_names import named
from embershard.models import build_model
from embershard.models.table_modules import collections_of, tables_in
from embershard.pipeline.pipelined_forward import sharded_modules
from embershard.sharding.plan import Plan
from embershard.sharding.torchrec import (
    CachedEmbeddingBagCollectionSharder,
    CachedEmbeddingCollectionSharder,
    StockEmbeddingBagCollectionSharder,
    StockEmbeddingCollectionSharder,
    plan_sharding,
)
from embershard.sharding.torchrec.planner.placement import check_built, torchrec_plan
from embershard.sharding.torchrec.planner.torchrec_planner import whole_where_even
from embershard.sharding.torchrec.sharders import comm_codecs, has_cache
from embershard.training.config import RunConfig
from embershard.training.fit.id_rules import id_rules
from embershard.training.fit.model_size import named_tables, table_rows, tables_of_run

#: Samples that are read and counted at a time.
_COUNTED_AT_ONCE = 8192


def find_profile(config: RunConfig, source: Source) -> FrequencyProfile | None:
    """Read or count the frequency profile of a run; None where it needs none. The same on every rank.

    Each rank counts the same first `profile.samples` samples of the training order by itself, without talking to the
    others, so the profile does not depend on the number of ranks.
    """
    if not config.cache.enabled:
        return None
    if config.profile.path is not None:
        return FrequencyProfile.load(config.profile.path)
    if not config.counts_a_profile:
        return None
    samples = config.profile.num_counted(source.chunks("train").num_samples)
    blocks = SampleReader(source, "train", config.data).blocks(samples, _COUNTED_AT_ONCE)
    tables = tables_of_run(config)

    def ids_by_table(block: Block) -> dict[str, torch.Tensor]:
        values = dict(zip(source.schema.keys, map(torch.from_numpy, block.values), strict=True))
        return {table.name: torch.cat([values[feature] for feature in table.features]) for table in tables}

    return FrequencyProfile.count(map(ids_by_table, blocks), table_rows(config))


def find_plan(config: RunConfig, ranks: Ranks) -> Plan | None:
    """Read the plan of a run; None where it has none. The same on every rank. Collective.

    Raises:
        ShardingError: the file is no plan, or one for other ranks.
        ConfigError: the optimizers cannot train its replicated tables; or a setting needs a plan.
    """
    config.check_planned()
    path = config.sharding.plan
    if path is None:
        return None
    plan = ranks.from_first(lambda: Plan.load(path))  # read once: files may differ between machines
    for ranks_per_node in sorted(set(ranks.all_gather_objects(ranks.local_world_size))):
        plan.check_ranks(*config.sharding.group_shape(ranks.world_size, ranks_per_node))
    placed = {table.table: table for table in plan.tables}
    for name, pin in config.sharding.pin.items():
        problem = pin.problem(placed[name]) if name in placed else "the plan has no such table"
        if problem:
            raise ConfigError(f"sharding.pin.{name}: {path} was made otherwise: {problem}. Plan again.")
    replicated = [table.table for table in plan.tables if table.kernel == "replicated"]
    if replicated and not config.cache.enabled:  # the dense optimizer must do what the embeddings' would
        embedding, dense = config.embedding_optimizer, config.dense_optimizer
        only_scale = dense.clip_norm is None and dense.weight_decay is None
        if not (embedding.kind == dense.kind == "sgd" and embedding.lr == dense.lr and only_scale):
            raise ConfigError(
                f"The plan replicates the tables {replicated[:5]}, and without a cache these are trained by the dense "
                f"optimizer: got embedding_optimizer {embedding.kind!r} with lr={embedding.lr}, and dense_optimizer "
                f"{dense.kind!r} with lr={dense.lr}, clip_norm={dense.clip_norm}, weight_decay={dense.weight_decay}; "
                "needed 'sgd' for both, with one lr and neither clipping nor weight decay. Or train with a cache, or "
                'plan these tables with kernel "device".'
            )
    return plan


def build_sharded_model(
    config: RunConfig,
    plan: Plan | None,
    profile: FrequencyProfile | None,
    schema: Schema,
    ranks: Ranks,
    sharder_options: Mapping[str, Any] = {},
) -> DistributedModelParallel:
    """Build the model of a run on this rank: sharded tables, and dense layers replicated under DDP. Collective.

    Args:
        plan: obeyed exactly; where it is None, TorchRec's planner places the tables. Without a cache its cached tables
            are whole on the device, at the same places.
        sharder_options: more options of `CachedEmbeddingBagCollectionSharder`.

    Raises:
        ConfigError: the model, the optimizer, the cache or the mode does not fit the data or the device.
        ShardingError: no plan fits, or the given one is for another model.
    """
    torch.manual_seed(config.train.seed)
    num_sharding, per_node = config.sharding.group_shape(ranks.world_size, ranks.local_world_size)
    model = build_model(config.model, schema, ranks.device)
    if config.train.precision == "fp64":
        compute_in_float64(model, num_sharding)
    _attach_optimizer(model, config, ranks.device)
    sharders = _sharders(config, plan, profile, ranks.device, sharder_options)

    def place() -> ShardingPlan:
        if plan is not None:
            return torchrec_plan(plan, model, sharders, ranks.device, cached=config.cache.enabled)
        return plan_sharding(
            model,
            sharders,
            world_size=num_sharding,
            local_world_size=per_node,
            device=ranks.device,
            constraints=_preferred(config, model, ranks),
            batch_size=config.train.rank_batch_size(ranks.world_size),
        )

    placed = ranks.from_first(place)  # once: ranks with different plans would wait for each other for ever
    # TorchRec's own weights: the shards of a table must not start as copies of each other.
    torch.manual_seed(config.train.seed + 1 + ranks.rank)
    sharded = _maker(config)(model, device=ranks.device, plan=placed, sharders=sharders)
    for sharder in filter(has_cache, sharders):
        sharder.drop_profile()  # type: ignore[attr-defined]
    if plan is not None:
        rank, cached = ranks.rank % num_sharding, config.cache.enabled
        ranks.together(lambda: check_built(sharded, plan, rank, cached=cached), ShardingError)
    return sharded


def _maker(config: RunConfig) -> Callable[..., DistributedModelParallel]:
    if config.sharding.groups == 1:
        return partial(DistributedModelParallel, env=ShardingEnv.from_process_group(dist.group.WORLD))
    grouped = named("embershard.extras.groups.model:GroupedModelParallel")
    names = ("groups", "sync_every", "sync_delay", "sync_dtype")
    return partial(grouped, **{name: getattr(config.sharding, name) for name in names})


def _preferred(config: RunConfig, model: nn.Module, ranks: Ranks) -> dict[str, ParameterConstraints]:
    """Return what placements a run without a plan prefers: on CPU ranks of one machine, those that
    `embershard plan` chooses there."""
    is_plain = config.sharding.mode == "sharded" and config.sharding.exchange == "pooled"
    num_sharding, per_node = config.sharding.group_shape(ranks.world_size, ranks.local_world_size)
    if not is_plain or ranks.device.type != "cpu" or not 1 < num_sharding == per_node:
        return {}
    tables = list(tables_in(model))
    if not all(table.pooling for table in tables) or len({table.module for table in tables}) > 1:
        return {}  # caches of several modules would be as uneven as their tables' rows
    columns = {table.name: table.dim * len(table.features) for table in tables}
    return whole_where_even(columns, num_sharding)


def _attach_optimizer(model: Any, config: RunConfig, device: torch.device) -> None:
    for _, collection in collections_of(model):
        config.row_optimizer.apply(collection, device)
    _freeze_tables(model, config)


def _freeze_tables(model: nn.Module, config: RunConfig) -> None:
    """Let the tables in `model.frozen` need no gradient: the cached sharders then do not train them.

    Args:
        model: not sharded, with optimizers attached to its tables.

    Raises:
        ConfigError: there is no such table, or the settings train tables in a way that freezes none.
    """
    if not config.model.frozen:
        return
    tables = list(tables_in(model))
    names = named_tables("model.frozen", config.model.frozen, tables)
    problems = {
        "cache.enabled = false": not config.cache.enabled,
        f'sharding.mode = "{config.sharding.mode}"': config.sharding.mode != "sharded",
        f'sharding.exchange = "{config.sharding.exchange}"': config.sharding.exchange != "pooled",
        "sharding.plan, whose pools are of tables that are trained": config.sharding.plan is not None,
    }
    if problem := next((text for text, holds in problems.items() if holds), None):
        raise ConfigError(
            f'model.frozen: got {problem}; needed cached tables in the mode "sharded" with the exchange "pooled", '
            "without a plan: no other way of training leaves rows as they are. Change it, or train the tables."
        )
    for table in tables:
        if table.name in names:
            model.get_parameter(table.tensor).requires_grad_(False)


def features_of(model: DistributedModelParallel) -> Callable[[Batch], Mapping[str, Any]]:
    """Return a function from a batch to the input of each sharded module: all sparse features."""
    names = list(sharded_modules(model))
    return lambda batch: dict.fromkeys(names, batch.sparse_features)


def _sharders(
    config: RunConfig,
    plan: Plan | None,
    profile: FrequencyProfile | None,
    device: torch.device,
    options: Mapping[str, Any],
) -> list[ModuleSharder]:
    codecs = comm_codecs(config.sharding, device)
    init_seed = config.train.seed if config.train.init == "counter" else None
    # FBGEMM's numbers for it depend on a row's place in the batch, and on what was drawn before.
    fused = {"stochastic_rounding": False} if config.train.deterministic else None
    common: dict[str, Any] = {"fused_params": fused, "qcomm_codecs_registry": codecs, "init_seed": init_seed}
    if not config.cache.enabled:
        return [StockEmbeddingBagCollectionSharder(**common), StockEmbeddingCollectionSharder(**common)]
    cache = config.cache
    if plan is not None:  # which was made for the size in the settings, or for a budget instead of it
        cache = dataclasses.replace(cache, ratio=None, device_bytes=None)
    common |= {"plan": plan, "ids": id_rules(config)}
    bags = CachedEmbeddingBagCollectionSharder(
        cache,
        profile,
        **common,
        exchange="pooled" if plan is not None else config.sharding.exchange,  # type: ignore[arg-type]
        mode="sharded" if config.sharding.mode == "hot_cold" else config.sharding.mode,  # that is `hot_rows`
        **options,
    )
    return [bags, CachedEmbeddingCollectionSharder(cache, profile, **common)]


def compute_in_float64(model: DLRMTrain, world_size: int) -> None:
    """Widen the dense layers of a model that is not sharded yet; its weights keep their values."""
    layers: Any = model.model
    for part in layers.children():
        if part is not layers.sparse_arch:
            part.double()
    layers.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(), *inputs[1:]))
    layers.sparse_arch.register_forward_hook(lambda _, __, pooled: _widen(pooled, world_size))


def divided_once(config: RunConfig, plan: Plan | None) -> AbstractContextManager[None]:
    """With "fp64", divide gradients of embeddings before they are rounded, in a forward and its backward.

    Without a cache, gradients of replicated tables are divided by DDP: with such tables all are divided as ever.
    """
    tables = () if plan is None or config.cache.enabled else plan.tables
    ddp_divides = any(table.kernel == "replicated" for table in tables)
    return nullcontext() if config.train.precision != "fp64" or ddp_divides else _not_divided_later()


@contextmanager
def _not_divided_later() -> Iterator[None]:
    was = get_gradient_division()
    set_gradient_division(False)
    try:
        yield
    finally:
        set_gradient_division(was)


@torch.fx.wrap
def _widen(pooled: Any, world_size: int) -> Any:
    """Return pooled embeddings in float64. Where TorchRec does not divide their gradients, it is done here."""
    if isinstance(pooled, KeyedTensor):
        return KeyedTensor(pooled.keys(), pooled.length_per_key(), _widen(pooled.values(), world_size))
    wide: Tensor = pooled.double()
    if wide.requires_grad:
        wide.register_hook(lambda gradient: gradient if get_gradient_division() else gradient / world_size)
    return wide
