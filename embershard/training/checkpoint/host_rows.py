"""Rows of a small type in host memory (`cache.host_dtype`), out of a checkpoint, which has them as float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embershard.distributed.checkpoint.load import saved_rows
from embershard.sharding.torchrec import pools_by_module

#: Name of a run's full rows among a checkpoint's groups of tensors; of each table and rank.
FULL_ROWS = "full_rows"


def saved_full_rows(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """Return the rows of this rank's pools that are not rounded, named by module, table and rank.

    >>> saved_full_rows(model, rank=0)  # a sharded model, whose rows are float32
    {}
    """
    found: dict[str, list[Tensor]] = {}
    for path, pool in pools_by_module(model):
        for table, rows in pool.full_rows.items():
            found.setdefault(f"{path}.{table}.{rank}", []).append(rows)
    joined = {place: torch.cat(rows).unique() for place, rows in found.items()}
    return {place: rows for place, rows in joined.items() if rows.numel()}


def restore_full_rows(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Let the rows that `saved_full_rows` returned on any ranks be those that are not rounded. Call it first.

    >>> restore_full_rows(model, {})  # a sharded model
    """
    tables: dict[str, list[Tensor]] = {}
    for place, rows in saved.items():
        tables.setdefault(place.rpartition(".")[0], []).append(rows)
    for path, pool in pools_by_module(model):
        prefix = f"{path}."
        own = {place.removeprefix(prefix): rows for place, rows in tables.items() if place.startswith(prefix)}
        pool.keep_full({table: torch.cat(rows) for table, rows in own.items()})


def load_weights(model: nn.Module, checkpoint: Path, weights: Mapping[str, Any], group: str = "model") -> None:
    """Load a model's weights: `weights`, which were read from the checkpoint, and those that they leave out, which are
    small rows in host memory and are read here, block by block.

    Args:
        weights: `without_small_rows` of the model's state dict.

    Raises:
        CacheError: a small row holds NaN, infinity or too large a number.
        CheckpointError: the checkpoint lacks rows.
    """
    small = small_rows_of(model)
    with without_small_flushes(model):  # TorchRec flushes first, and there is nothing to read
        model.load_state_dict(weights, strict=all(pool.host.is_memory for _, pool in pools_by_module(model)))
    for name, (table, pools) in small.items():
        for pool in pools:
            pool.put_small_rows(table, partial(_read, checkpoint, f"{group}.{name}"))


@contextmanager
def without_small_flushes(model: nn.Module) -> Iterator[None]:
    """Return a context in which nobody reads small rows, or rows in files, as memory: to flush them does nothing,
    rather than to raise.

    >>> with without_small_flushes(model):  # a sharded model
    ...     tensors = model.state_dict()
    """
    with ExitStack() as stack:
        for _, pool in pools_by_module(model):
            if not pool.host.is_memory:
                stack.enter_context(pool.without_flushes())
        yield


def without_small_rows(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict without the weights that are small rows in host memory.

    >>> sorted(without_small_rows(model, {"tables.embedding_bags.clicks.weight": 0}))  # a model of float32 rows
    ['tables.embedding_bags.clicks.weight']
    """
    small = small_rows_of(model)
    return {name: value for name, value in weights.items() if name not in small}


def small_rows_of(model: nn.Module) -> dict[str, tuple[str, list[Any]]]:
    """Return the tables with small rows on this rank by the name of their weights: name of the table, and its pools.

    >>> small_rows_of(model)  # a sharded model, whose rows are float32
    {}
    """
    found: dict[str, tuple[str, list[Any]]] = {}
    for path, pool in pools_by_module(model):
        if pool.host.small is not None:
            for table in dict.fromkeys(pool.cache.tables):
                found.setdefault(f"{path}.{pool.holder}.{table}.weight".lstrip("."), (table, []))[1].append(pool)
    return found


def _read(checkpoint: Path, name: str, start: int, stop: int) -> Iterator[Tensor]:
    return saved_rows(checkpoint, name, start, stop)
