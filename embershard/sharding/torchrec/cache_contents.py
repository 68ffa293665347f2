"""The cached rows of a sharded model, for checkpoints: any other layout of the tables can be warmed up with them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from embershard.cache.slot_state import CacheContents
from embershard.sharding.torchrec.inspection import pools_by_module

_FIELDS = ("rows", "ages", "scores")


def saved_contents(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """Return the cached rows of this rank's pools as tensors, named by module, table, rank and field.

    >>> sorted(saved_contents(model, rank=0))  # a sharded model
    ['tables.clicks.0.ages', 'tables.clicks.0.rows', 'tables.clicks.0.scores']
    """
    parts: dict[str, list[CacheContents]] = {}
    for path, pool in pools_by_module(model):
        for table, contents in pool.contents():
            parts.setdefault(f"{path}.{table}.{rank}", []).append(contents)
    joined = {place: CacheContents.join(found) for place, found in parts.items()}
    return {
        f"{place}.{name}": getattr(contents, name)
        for place, contents in joined.items()
        if len(contents.rows)
        for name in _FIELDS
    }


def restore_contents(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Let the caches of this rank begin with rows that `saved_contents` returned on any ranks.

    >>> restore_contents(model, {})  # a sharded model
    """
    parts: dict[str, list[CacheContents]] = {}
    for place in sorted({name.rpartition(".")[0] for name in saved}):  # in the same order on all ranks
        table = place.rpartition(".")[0]
        parts.setdefault(table, []).append(CacheContents(*(saved[f"{place}.{name}"] for name in _FIELDS)))
    joined = {table: CacheContents.join(found) for table, found in parts.items()}
    for path, pool in pools_by_module(model):
        prefix = f"{path}."
        pool.restore({name.removeprefix(prefix): joined[name] for name in joined if name.startswith(prefix)})
