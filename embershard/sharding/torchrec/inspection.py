"""Reaching the caches of a model that is already sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor, nn

from embershard.cache.statistics import TableStats
from embershard.errors import ConfigError
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings


def cached_embeddings(model: nn.Module) -> Iterator[CachedTableBatchedEmbeddings]:
    """Every pool of this rank, in a fixed order."""
    seen: set[int] = set()
    for module in model.modules():
        for lookup in getattr(module, "_lookups", None) or ():
            for kernel in getattr(lookup, "_emb_modules", ()):
                pool = getattr(kernel, "emb_module", None)
                if isinstance(pool, CachedTableBatchedEmbeddings) and id(pool) not in seen:
                    seen.add(id(pool))
                    yield pool


def flush(model: nn.Module) -> None:
    """Write every trained row of this rank back to its host tier. ``state_dict`` does it by itself."""
    for pool in cached_embeddings(model):
        pool.flush()


def cache_stats(model: nn.Module) -> list[TableStats]:
    """What the caches of the calling rank did: one value per table, sorted by name.

    A table of which the rank holds several column shards counts once, with the sum over its shards.
    """
    by_table: dict[str, TableStats] = {}
    for pool in cached_embeddings(model):
        for stats in pool.stats():
            known = by_table.get(stats.table)
            by_table[stats.table] = stats if known is None else _sum(known, stats)
    return [by_table[table] for table in sorted(by_table)]


def _sum(a: TableStats, b: TableStats) -> TableStats:
    """Two column shards of one table hold the same rows; everything else adds up."""
    added = [field.name for field in dataclasses.fields(a) if field.name not in ("table", "rows")]
    return dataclasses.replace(a, **{name: getattr(a, name) + getattr(b, name) for name in added})


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
