"""Access to the caches of a sharded model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache.file.file_counts import FileCounts
from embershard.cache.homes.home import FrozenRows
from embershard.cache.statistics import TableStats
from embershard.errors import ConfigError
from embershard.sharding.torchrec.compat import lookups_of, unwrapped, with_int32_ids
from embershard.sharding.torchrec.counter_init import CounterInit
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.modules import CachedModule


def cached_embeddings(model: nn.Module) -> Iterator[CachedTableBatchedEmbeddings]:
    """Yield every pool of this rank, in a fixed order.

    >>> [pool.cache.tables for pool in cached_embeddings(model)]  # a sharded model
    [['clicks']]
    """
    for _, pool in pools_by_module(model):
        yield pool


def pools_by_module(model: nn.Module) -> Iterator[tuple[str, CachedTableBatchedEmbeddings]]:
    """Yield the path of the sharded module in the model, and the pool, for every pool of this rank, in a fixed order.

    The wrappers that distribute the model are not part of the path.

    >>> [path for path, pool in pools_by_module(model)]  # a sharded model
    ['tables']
    """
    seen: set[int] = set()
    for path, module in _named_modules(model, "", set()):
        for lookup in lookups_of(module):
            for pool in tables_of(lookup):
                if isinstance(pool, CachedTableBatchedEmbeddings) and id(pool) not in seen:
                    seen.add(id(pool))
                    yield path, pool


def pools_with_features(
    module: ShardedModule, received: Sequence[KeyedJaggedTensor]
) -> Iterator[tuple[CachedTableBatchedEmbeddings, KeyedJaggedTensor]]:
    """Yield every pool of a sharded module on this rank, with the features of a batch that it reads.

    Args:
        module: of any sharding.
        received: what the module's input all-to-all gave for the batch; nothing, for a batch of hot rows.
    """
    if not len(received):
        return
    for features, lookup in zip(received, lookups_of(module), strict=True):
        pools = tables_of(lookup)
        if any(isinstance(pool, CachedTableBatchedEmbeddings) for pool in pools):
            for pool, group in zip(pools, features.split(lookup._feature_splits), strict=True):
                if isinstance(pool, CachedTableBatchedEmbeddings):
                    yield pool, group


def narrowed(module: ShardedModule, received: KJTList, given: Tensor) -> KJTList:
    """Return what a module received of a batch, with int32 ids where all tables that they are of are cached: such a
    pool has fewer than 2^31 rows, by which ids were checked. Ids that are views of the batch's own, `given`, stay."""
    own = given.untyped_storage().data_ptr()
    found = []
    for features, lookup in zip(received, lookups_of(module), strict=True):
        pools = tables_of(lookup)
        has_rows = all(isinstance(p, CachedTableBatchedEmbeddings) and not p.keys.gives_rows for p in pools)
        is_own = features.values().untyped_storage().data_ptr() == own
        found.append(with_int32_ids(features) if pools and has_rows and not is_own else features)
    return KJTList(found)


def tables_of(lookup: Any) -> list[Any]:
    """Return the tables of each of a lookup's kernels: a pool, FBGEMM's own, or None."""
    return [getattr(kernel, "emb_module", None) for kernel in getattr(lookup, "_emb_modules", ())]


def _named_modules(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules like `named_modules`, without the wrappers' names in the paths."""
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    is_wrapper = isinstance(module, DistributedModelParallel) or unwrapped(module) is not module
    for name, child in module.named_children():
        yield from _named_modules(child, path if is_wrapper else f"{path}.{name}".lstrip("."), seen)


def flush(model: nn.Module) -> None:
    """Write every trained row of this rank back to its host tier. `state_dict` does so by itself.

    Collective in mode "data_parallel": returns when all ranks have written, and none reads rows until its next forward.

    >>> flush(model)  # a sharded model

    Raises:
        CacheError: a rank did not call it in that mode.
    """
    try:
        for pool in cached_embeddings(model):
            pool.flush()
    except BaseException:  # the other ranks wait here; those that have left are not waited for
        _meet(model, "flush", is_waiting=False)
        raise
    _meet(model, "flush")


def _meet(model: nn.Module, what: str, is_waiting: bool = True) -> None:
    for pool in cached_embeddings(model):
        pool.host.meet_at_writes(f"{pool.cache.name}: {what}, which every rank calls in mode data_parallel", is_waiting)


def freeze(model: nn.Module) -> list[FrozenRows]:
    """Return the rows of this rank's host tiers as they are now, to be read while training goes on; close each.

    >>> [frozen.close() for frozen in freeze(model)]  # a sharded model
    [None]
    """
    frozen: list[FrozenRows] = []
    try:
        for pool in cached_embeddings(model):
            frozen.append(pool.freeze())
    except BaseException:
        for rows in frozen:
            rows.close()
        raise
    return frozen


def cancel_forward(model: nn.Module) -> None:
    """Unpin the rows of the forward that ran last, whose backward will not run. Until it is freed, and between ranks
    autograd may keep it, they would stay pinned.

    >>> cancel_forward(model)  # a sharded model
    """
    for pool in cached_embeddings(model):
        pool.cache.cancel(forwarded=True)


@contextmanager
def without_flushes(model: nn.Module) -> Iterator[None]:
    """Return a context in which `state_dict` takes references to rows and reads none: no row is written back or made.

    >>> with without_flushes(model):  # a sharded model
    ...     tensors = model.state_dict()
    """
    with ExitStack() as stack:
        for pool in cached_embeddings(model):
            stack.enter_context(pool.without_flushes())
        yield


def cache_stats(model: nn.Module) -> list[TableStats]:
    """Return what the caches of the calling rank did, per table, sorted by name and then by module.

    Several column shards of a table on the rank are added up. Tables of one name in two modules are two.

    >>> [(table.table, table.rows, table.lookups, table.fills) for table in cache_stats(model)]  # a sharded model
    [('clicks', 1000, 3, 3)]
    """
    found: dict[tuple[str, str], TableStats] = {}
    for module, pool in pools_by_module(model):
        for stats in pool.stats():
            place = (stats.table, module)
            found[place] = found[place] + stats if place in found else dataclasses.replace(stats, module=module)
    return [found[place] for place in sorted(found)]


def copied_rows(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of this rank's rows with copies on every rank, and how many ids of them it looked up so far.

    >>> copied_rows(model)  # a sharded model, without such rows
    (0, 0)
    """
    found = [module.copied_rows() for module in model.modules() if isinstance(module, CachedModule)]
    return sum(num_bytes for num_bytes, _ in found), sum(lookups for _, lookups in found)


def file_counts(model: nn.Module) -> FileCounts:
    """Return what the file tier of this rank read and wrote so far: rows and pages, and batches that waited. With rows
    in memory (`cache.host`), zeros.

    >>> file_counts(model).rows_read  # a sharded model, whose rows are in memory
    0
    """
    return FileCounts.total(pool.host.counts for pool in cached_embeddings(model))


def host_rows_changed(model: nn.Module, table: str | None = None, rows: Tensor | None = None) -> None:
    """Announce a write to rows of this rank's host tier: cached copies of these rows are fetched again.

    Needed only for writes that torch does not count: through `.data` or NumPy, by a collective such as `broadcast` or
    `all_to_all_single` into a table, by another process into a mapped file. Call `flush` before writing. Collective in
    mode "data_parallel", where every rank gives the rows that any rank wrote, and with hot rows, which all ranks take
    from the host tiers again.

    >>> import torch
    >>> flush(model)  # a sharded model; then write to rows 7 and 8 through NumPy
    >>> host_rows_changed(model, "clicks", torch.tensor([7, 8]))

    Args:
        model: sharded.
        table: a table's name; None for all tables.
        rows: int64 [K] row numbers in the whole table; those on other ranks are ignored. None for all rows.

    Raises:
        CacheError: trained rows among them had not been flushed (what they learned is lost: the host's rows count from
            now on), or a forward waits for its backward. Of hot rows on all ranks, if any was trained since the flush.
        ConfigError: no sharded module has such a table, or `rows` without `table`.
    """
    if table is None and rows is not None:
        raise ConfigError("host_rows_changed got rows without a table; name their table")
    tables = {name for module in model.modules() for name in getattr(module, "module_sharding_plan", None) or ()}
    if table is not None and table not in tables:
        raise ConfigError(f"host_rows_changed got the table {table!r}; the sharded tables are {sorted(tables)}")
    _meet(model, "host_rows_changed")
    try:
        for pool in cached_embeddings(model):
            if table is None:
                pool.cache.host_rows_changed()
            else:
                pool.host_rows_changed(table, rows)
    finally:  # the other ranks wait here
        for module in model.modules():  # not by pool: a rank may have none
            if isinstance(module, CachedModule):
                module.host_rows_changed(table, rows)


@torch.no_grad()
def write_initial_weights(sharded: nn.Module, init: CounterInit) -> None:
    """Write the initial weights of a sharded module's tables on this rank, except for cached ones, which make their
    own."""
    for lookup in lookups_of(sharded):
        for kernel in lookup._emb_modules:
            if not isinstance(kernel.emb_module, CachedTableBatchedEmbeddings):
                weights = kernel.emb_module.split_embedding_weights()
                for table, shard in zip(kernel.config.embedding_tables, weights, strict=True):
                    init.of_shard(table).write(shard)
