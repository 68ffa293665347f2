"""Rows of a small type in host memory (`cache.host_dtype`), out of a checkpoint, which has them as float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from embershard.distributed.checkpoint.boxes import RowWriter
from embershard.sharding.torchrec import pools_by_module
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings

#: Name of a run's full rows among a checkpoint's groups of tensors; of each table and rank.
MARKED_ROWS = "full_rows"


def saved_marks(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """Return the rows of this rank's pools that are not rounded, named by module, table and rank.

    >>> saved_marks(model, rank=0)  # a sharded model, whose rows are float32
    {}
    """
    found: dict[str, list[Tensor]] = {}
    for path, pool in pools_by_module(model):
        for table, rows in pool.marked_rows.items():
            found.setdefault(f"{path}.{table}.{rank}", []).append(rows)
    joined = {place: torch.cat(rows).unique() for place, rows in found.items()}
    return {place: rows for place, rows in joined.items() if rows.numel()}


def restore_marks(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Let the rows that `saved_marks` returned on any ranks be those that are not rounded. Call it first.

    >>> restore_marks(model, {})  # a sharded model
    """
    tables: dict[str, list[Tensor]] = {}
    for place, rows in saved.items():
        tables.setdefault(place.rpartition(".")[0], []).append(rows)
    for path, pool in pools_by_module(model):
        prefix = f"{path}."
        own = {place.removeprefix(prefix): rows for place, rows in tables.items() if place.startswith(prefix)}
        pool.mark({table: torch.cat(rows) for table, rows in own.items()})


class RoundedTable(RowWriter):
    """A table with small rows on this rank. Weights that are written are rounded; optimizer states are none of it.

    Attributes:
        table: its name.
        pools: that have some of its rows.
    """

    def __init__(self, table: str) -> None:
        self.table, self.pools = table, list[CachedTableBatchedEmbeddings]()

    def put(self, read: Callable[[int, int], Iterable[tuple[Tensor, Tensor]]]) -> None:
        """Write rows, rounded.

        Raises:
            CacheError: a row holds NaN, infinity or too large a number.
        """
        for pool in self.pools:
            pool.put_rows(self.table, read)


def tensors_to_fill(model: nn.Module, tensors: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the tensors of a checkpoint of a model that has not trained, by group, with a `RoundedTable` in place of
    weights that are small rows in host memory.

    >>> found = tensors_to_fill(model, lambda: {"model": model.state_dict()})  # a sharded model
    >>> sorted(found["model"])
    ['over.bias', 'over.weight', 'tables.embedding_bags.clicks.weight']
    """
    with taking_references(model):
        found = tensors()
    return {**found, "model": {**found["model"], **rounded_tables(model)}}


def load_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load a model's state dict, but for small rows in host memory, which are filled in.

    >>> load_weights(model, model.state_dict())  # a sharded model
    """
    with taking_references(model):  # TorchRec flushes first, and there is nothing to read
        is_whole = all(pool.host.views.are_rows for _, pool in pools_by_module(model))
        model.load_state_dict(without_rounded_rows(model, weights), strict=is_whole)


@contextmanager
def taking_references(model: nn.Module) -> Iterator[None]:
    """Return a context in which nobody reads small rows, or rows in files, as memory: to flush them does nothing,
    rather than to raise.

    >>> with taking_references(model):  # a sharded model
    ...     tensors = model.state_dict()
    """
    with ExitStack() as stack:
        for _, pool in pools_by_module(model):
            stack.enter_context(pool.taking_references())
        yield


def without_rounded_rows(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict without the weights that are small rows in host memory.

    >>> sorted(without_rounded_rows(model, {"tables.embedding_bags.clicks.weight": 0}))  # a model of float32 rows
    ['tables.embedding_bags.clicks.weight']
    """
    small = rounded_tables(model)
    return {name: value for name, value in weights.items() if name not in small}


def rounded_tables(model: nn.Module) -> dict[str, RoundedTable]:
    """Return the tables with small rows on this rank, by the name of their weights.

    >>> rounded_tables(model)  # a sharded model, whose rows are float32
    {}
    """
    found: dict[str, RoundedTable] = {}
    for path, pool in pools_by_module(model):
        if pool.host.rounds:
            for table in dict.fromkeys(pool.cache.tables):
                name = f"{path}.{pool.holder}.{table}.weight".lstrip(".")
                found.setdefault(name, RoundedTable(table)).pools.append(pool)
    return found
