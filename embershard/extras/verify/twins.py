"""A sharded model made again with the same rows at the same places: with its caches, or as stock TorchRec has it."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from embershard.cache.ids.config import ID_TENSORS
from embershard.errors import ConfigError
from embershard.extras.verify.comparison import contents, with_halved_caches
from embershard.sharding.torchrec import cached_embeddings
from embershard.sharding.torchrec.sharders import (
    CachedEmbeddingBagCollectionSharder,
    CachedEmbeddingCollectionSharder,
    StockEmbeddingBagCollectionSharder,
    StockEmbeddingCollectionSharder,
    has_cache,
    inner_sharder,
)
from embershard.sharding.torchrec.spec import CACHED_KERNEL, RAW_IDS_KEY, SPEC_KEY
from embershard.training.checkpoint.host_rows import restore_marks, rounded_tables, saved_marks, taking_references

_FUSED_KERNEL = "fused"


def twin_of(model: DistributedModelParallel, *, halvings: int | None) -> DistributedModelParallel:
    """Return a model like this one, with its weights, optimizer states and learning rates, which trains by itself.

    Args:
        model: with cached sharders.
        halvings: of the sizes of its caches; None: without caches: all tables are TorchRec's own, where `model` has
            them.

    Raises:
        ConfigError: a module cannot be made again.
    """
    plan, sharders = copy.deepcopy(model.plan), list(model.sharders)
    if halvings is None:
        plan, sharders = _stock_plan(plan), [_stock_sharder(sharder) for sharder in sharders]
    elif halvings:
        plan, sharders = _halved_plan(plan, halvings), [_halved_sharder(sharder, halvings) for sharder in sharders]
    twin = DistributedModelParallel(
        _unsharded(model.module),
        env=model._env,
        device=model.device,
        plan=plan,
        sharders=sharders,
        data_parallel_wrapper=model._data_parallel_wrapper,
    )
    _copy_state(model, twin)
    twin.zero_grad(set_to_none=True)
    return twin


def _copy_state(model: DistributedModelParallel, twin: DistributedModelParallel) -> None:
    """Copy weights, states of the fused optimizer, and learning rates. Small rows are those that they stand for."""
    with taking_references(model):
        twin.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())  # trained rows are written back
        weights, small = model.state_dict(), rounded_tables(model)
    if not cached_sharders(twin):
        of_ids = {name for sharder in cached_sharders(model) for name in sharder.ids}
        weights = {name: value for name, value in weights.items() if not is_of_ids(name, of_ids)}
    if not small:
        twin.load_state_dict(weights)
        return
    restore_marks(twin, saved_marks(model, dist.get_rank()))
    filled, pools = rounded_tables(twin), list(cached_embeddings(model))
    with taking_references(twin):
        twin.load_state_dict({name: value for name, value in weights.items() if name not in small}, strict=False)
        own = twin.state_dict()
    for name in small:
        shards = [
            (shard.metadata.shard_offsets, contents(shard.tensor, pools)) for shard in weights[name].local_shards()
        ]
        if name in filled:
            filled[name].put(partial(_rows_of, shards, weights[name].size(1)))
        else:
            for shard, (_, rows) in zip(own[name].local_shards(), shards, strict=True):
                shard.tensor.detach().copy_(rows)


def _rows_of(shards: Any, dim: int, first: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows [first, stop) of a table, and what this rank has of their `dim` columns."""
    whole = torch.zeros(stop - first, dim)
    for (row, column), rows in shards:
        if (row, row + len(rows)) == (first, stop):
            whole[:, column : column + rows.shape[1]] = rows
    yield torch.arange(first, stop), whole


def is_of_ids(name: str, tables: Container[str]) -> bool:
    """Return whether a tensor in a state dict says whose the rows of one of these tables are.

    >>> is_of_ids("over.users.ids", ["users"]), is_of_ids("over.users.weight", ["users"])
    (True, False)
    """
    prefix, _, kind = name.rpartition(".")
    return kind in ID_TENSORS and prefix.rpartition(".")[2] in tables


def cached_sharders(model: DistributedModelParallel) -> list[Any]:
    """Return the model's cached sharders."""
    return [inner_sharder(sharder) for sharder in model.sharders if has_cache(sharder)]


def sharded_modules(module: nn.Module, path: str = "") -> Iterator[tuple[str, ShardedModule[Any, Any, Any, Any]]]:
    """Yield the sharded modules in a module, with their paths."""
    if isinstance(module, ShardedModule):
        yield path, module
        return
    for name, child in module.named_children():
        yield from sharded_modules(child, f"{path}.{name}" if path else name)


def _unsharded(module: nn.Module) -> nn.Module:
    """Return a copy of the model inside of its wrappers, with TorchRec's collections where it has sharded ones."""
    collections = {id(sharded): collection_of(path, sharded) for path, sharded in sharded_modules(module)}
    try:
        return copy.deepcopy(module, collections)
    except (TypeError, RuntimeError) as error:  # of process groups, files, graphs of gradients
        raise ConfigError(
            f"verify: the model cannot be copied ({type(error).__name__}: {error}). What it has beside its layers, "
            "such as process groups, files or tensors that still have a graph, must be kept outside of it."
        ) from error


def configs_of(sharded: Any) -> Any:
    """Return the settings of a sharded module's tables."""
    is_bags = isinstance(sharded, ShardedEmbeddingBagCollection)
    return sharded._embedding_bag_configs if is_bags else sharded._embedding_configs


def collection_of(path: str, sharded: Any) -> nn.Module:
    """Return the collection that was sharded, without memory for its rows, with the optimizers of its tables."""
    found: EmbeddingBagCollection | EmbeddingCollection
    meta = torch.device("meta")
    if isinstance(sharded, ShardedEmbeddingBagCollection):
        found = EmbeddingBagCollection(configs_of(sharded), sharded._is_weighted, meta)
        tables, shardings = found.embedding_bags, sharded._embedding_shardings
    elif isinstance(sharded, ShardedEmbeddingCollection):
        found = EmbeddingCollection(configs_of(sharded), meta, sharded._need_indices)
        tables, shardings = found.embeddings, list(sharded._sharding_type_to_sharding.values())
    else:
        raise ConfigError(
            f"verify: {path or 'the model'} is a {type(sharded).__name__}, needed sharded EmbeddingBagCollections and "
            "EmbeddingCollections. Compare `embershard verify` of such a run, or a model without it."
        )
    for group in (group for sharding in shardings for group in _groups_of(sharding)):
        arguments = {
            name: value for name, value in (group.fused_params or {}).items() if name not in (SPEC_KEY, RAW_IDS_KEY)
        }
        for table in group.embedding_tables:
            weight = tables[table.name].weight
            weight._optimizer_classes, weight._optimizer_kwargs = [None], [arguments]
    return found


def _groups_of(sharding: Any) -> Iterator[Any]:
    """Yield the groups of tables of all ranks; of tables that every rank has whole, which the dense optimizer trains,
    none."""
    for name in ("_grouped_embedding_configs_per_rank", "_grouped_embedding_configs_per_node"):
        for groups in getattr(sharding, name, ()):
            yield from groups


def _halved_plan(plan: ShardingPlan, halvings: int) -> ShardingPlan:
    """Halve the caches of tables that have a share of their own."""
    for table in _placed(plan):
        if table.compute_kernel == CACHED_KERNEL and table.cache_params is not None and table.cache_params.load_factor:
            table.cache_params.load_factor /= 2**halvings
    return plan


def _halved_sharder(sharder: Any, halvings: int) -> Any:
    if not has_cache(sharder):
        return sharder
    found, cache = copy.copy(sharder), replace(sharder.cache, overflow="grow")
    if cache.device_bytes is not None:
        cache = replace(cache, device_bytes=max(1, cache.device_bytes // 2**halvings))
    elif found._plan is not None:
        found._plan = reduce(lambda plan, _: with_halved_caches(plan), range(halvings), found._plan)
    else:
        cache = replace(cache, ratio=(cache.slot_ratio or 1.0) / 2**halvings)
    found._cache = cache
    return found


def _placed(plan: ShardingPlan) -> Iterator[Any]:
    for tables in plan.plan.values():
        yield from tables.values()  # type: ignore[attr-defined]


def _stock_plan(plan: ShardingPlan) -> ShardingPlan:
    for table in _placed(plan):
        if table.compute_kernel == CACHED_KERNEL:
            table.compute_kernel, table.cache_params = _FUSED_KERNEL, None
    return plan


def _stock_sharder(sharder: Any) -> Any:
    if not has_cache(sharder):
        return sharder
    arguments = (sharder.fused_params, sharder.qcomm_codecs_registry)
    if isinstance(sharder, CachedEmbeddingBagCollectionSharder):
        return StockEmbeddingBagCollectionSharder(*arguments)
    assert isinstance(sharder, CachedEmbeddingCollectionSharder)
    return StockEmbeddingCollectionSharder(*arguments)
