"""Reaching the caches of a model that is already sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel

from embershard.cache.statistics import TableStats
from embershard.errors import ConfigError
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings


def cached_embeddings(model: nn.Module) -> Iterator[CachedTableBatchedEmbeddings]:
    """Every pool of this rank, in a fixed order."""
    for _, pool in pools_by_module(model):
        yield pool


def pools_by_module(model: nn.Module) -> Iterator[tuple[str, CachedTableBatchedEmbeddings]]:
    """Every pool of this rank, in a fixed order, and before it the path of its sharded module in the model. The
    wrappers that distribute the model are not part of the path."""
    seen: set[int] = set()
    for path, module in _named_modules(model, "", set()):
        for lookup in getattr(module, "_lookups", None) or ():
            for kernel in getattr(lookup, "_emb_modules", ()):
                pool = getattr(kernel, "emb_module", None)
                if isinstance(pool, CachedTableBatchedEmbeddings) and id(pool) not in seen:
                    seen.add(id(pool))
                    yield path, pool


def _named_modules(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """As ``named_modules``, with what a wrapper wraps in the wrapper's own place."""
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    is_wrapper = isinstance(module, DistributedModelParallel | DistributedDataParallel)
    for name, child in module.named_children():
        yield from _named_modules(child, path if is_wrapper else f"{path}.{name}".lstrip("."), seen)


def flush(model: nn.Module) -> None:
    """Write every trained row of this rank back to its host tier. ``state_dict`` does it by itself."""
    for pool in cached_embeddings(model):
        pool.flush()


def cache_stats(model: nn.Module) -> list[TableStats]:
    """What the caches of the calling rank did: one value per table, sorted by name and then by module.

    A table of which the rank holds several column shards counts once, with the sum over its shards. Tables of the same
    name in two modules are two.
    """
    found: dict[tuple[str, str], TableStats] = {}
    for module, pool in pools_by_module(model):
        for stats in pool.stats():
            place = (stats.table, module)
            found[place] = found[place] + stats if place in found else dataclasses.replace(stats, module=module)
    return [found[place] for place in sorted(found)]


def host_rows_changed(model: nn.Module, table: str | None = None, rows: Tensor | None = None) -> None:
    """Say that rows of this rank's host tier were written to, so that those that are cached are fetched again.

    Needed only for writes that torch does not count: through ``.data``, through NumPy, by a collective such as
    ``broadcast`` or ``all_to_all_single`` into a table, by another process into a mapped file. Call :func:`flush`
    before writing. Not collective.

    Args:
        model: sharded.
        table: a table's name; None for all tables.
        rows: int64 [K] numbers of the rows in the whole table; those on other ranks are passed over. None for all.

    Raises:
        CacheError: trained rows among them had not been flushed (what they learned is lost: the host's rows count from
            now on), or a forward waits for its backward.
        ConfigError: no sharded module has such a table, or ``rows`` without ``table``.
    """
    if table is None and rows is not None:
        raise ConfigError("host_rows_changed got rows without a table; name the table that they are of")
    tables = {name for module in model.modules() for name in getattr(module, "module_sharding_plan", None) or ()}
    if table is not None and table not in tables:
        raise ConfigError(f"host_rows_changed got the table {table!r}; the sharded tables are {sorted(tables)}")
    for pool in cached_embeddings(model):
        if table is None:
            pool.cache.host_rows_changed()
        else:
            pool.host_rows_changed(table, rows)
