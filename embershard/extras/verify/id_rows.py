"""Rows for the ids that stock TorchRec's tables look up, for a comparison: a map of each whole table on every rank."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache import loops
from embershard.cache.ids.config import ID_TENSORS, Buckets, IdTable
from embershard.cache.ids.id_map import IdMap, mixed
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.cache.rows.lazy_rows import LazyRows
from embershard.distributed import Ranks
from embershard.errors import ConfigError
from embershard.extras.verify.comparison import TensorPart, Tensors
from embershard.extras.verify.twins import (
    cached_sharders,
    collection_of,
    configs_of,
    is_of_ids,
    sharded_modules,
)
from embershard.sharding.torchrec.compat import as_keyed_jagged
from embershard.sharding.torchrec.counter_init import CounterInit


@dataclass(frozen=True)
class _Table:
    """A table of ids, whole.

    Attributes:
        prefix: of its tensors' names: `tables.embedding_bags.users`.
        features: that look it up.
        ids: which id has which of its rows.
        initial: weights of an id that gets a row.
        shards: its rows on this rank: the number of the first, and weights or states, which are the tables' own memory.
    """

    prefix: str
    features: tuple[str, ...]
    rules: IdTable
    buckets: Buckets
    ids: IdMap
    initial: ShardWeights
    shards: tuple[tuple[int, Tensor], ...]
    states: tuple[tuple[int, Tensor], ...]

    def rows_of(self, ids: np.ndarray, *, trains: bool) -> np.ndarray:
        """Return the rows [N] of ids (mixed); with `trains` those of a step, whose new ids begin anew."""
        if not trains:
            return self._looked_up(ids, self.ids.find(ids))
        found = self.ids.resolve(ids)
        self.ids.commit()
        for first, weights in self.shards:
            here = (found.born >= first) & (found.born < first + len(weights))
            rows, numbers = (torch.from_numpy(part[here]) for part in (found.born, found.ids))
            LazyRows(weights, [len(weights)], [self.initial]).reinitialise(rows - first, numbers)
        for first, states in self.states:
            here = (found.born >= first) & (found.born < first + len(states))
            states[torch.from_numpy(found.born[here] - first)] = 0
        return self._looked_up(ids, found.rows)

    def _looked_up(self, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return rows, with the first one of an id's bucket, which no id has, for embeddings that are zero."""
        numbers = np.empty(len(ids), np.int64)
        loops.buckets_of_ids(ids, self.buckets.num_buckets, numbers)
        return np.where(rows >= 0, rows, numbers * self.buckets.rows)

    def clear_zeros(self) -> None:
        """Make the rows that stand for zeros zero again, and their states."""
        if self.rules.unadmitted == "zero":
            for _, rows in (*self.shards, *self.states):
                rows[:: self.buckets.rows] = 0  # shards have whole buckets

    def forget_unused(self, records: Tensor, rows: Tensor) -> None:
        """Make rows of a shard that nobody reads zero, in place; `records` [R, 2]: of their ids."""
        is_used = records[:, 1] >= 0
        is_used[:: self.buckets.rows] = self.rules.unadmitted == "shared"
        rows[~is_used] = 0


class StockIds:
    """Tables of ids in stock TorchRec, which gets rows in their place: whose rows are whose follows from the batches of
    all ranks, as one map per table says that begins as the model's own. Collective, as every forward is.

    The rules and the weights of new ids are those of the cache's maps, by the same functions; which ranks have which
    buckets, when rows are given away, and what slots hold is found out anew.

    Args:
        model: with tables of ids, in caches.
        stock: its twin without caches, which begins to get rows.
    """

    def __init__(self, model: DistributedModelParallel, stock: DistributedModelParallel, ranks: Ranks) -> None:
        self._ranks = ranks
        sharders = {name: sharder for sharder in cached_sharders(model) for name in sharder.ids}
        own = model.state_dict()
        saved = {name: _of_all_ranks(own[name], ranks) for name in own if is_of_ids(name, sharders)}
        state = {**stock.state_dict(), **_states_of(stock)}
        self._tables = dict[str, _Table]()
        for path, module in sharded_modules(stock.module):
            configs = configs_of(module)
            names = [config.name for config in configs if config.name in sharders]
            for config in configs:
                if config.name in names:
                    self._tables[config.name] = _table(module, path, config, sharders[config.name], saved, state)
            if names:
                _check_features(path, configs, names)
                module.register_forward_pre_hook(self._hook(names))
        self.after_step()

    def _hook(self, tables: Sequence[str]) -> Any:
        def with_rows(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            features = as_keyed_jagged(given[0])
            own = {name: mixed(_ids(features, self._tables[name].features)) for name in tables}
            every: list[dict[str, np.ndarray]] = self._ranks.all_gather_objects(own)
            values = features.values().clone()
            for name, table in ((name, self._tables[name]) for name in tables):
                of_ranks = [found[name] for found in every]
                rows = table.rows_of(np.concatenate(of_ranks), trains=torch.is_grad_enabled())
                first = sum(map(len, of_ranks[: self._ranks.rank]))
                _put(values, features, table.features, rows[first : first + len(own[name])])
            found = copy.copy(features)
            found._values, found._jt_dict = values, None
            return (found, *given[1:])

        return with_rows

    def after_step(self) -> None:
        """Note that a step has trained."""
        for table in self._tables.values():
            table.clear_zeros()

    def add_to(self, tensors: Tensors) -> None:
        """Add this rank's part of the maps to a stock model's tensors, by the names that they have in a cached one."""
        for table in self._tables.values():
            state = {kind: torch.from_numpy(values) for kind, values in table.ids.tensors().items()}
            part = tensors.get(f"{table.prefix}.weight")
            if part is None:  # no row of it is here
                continue
            for name, kind in ID_TENSORS.items():
                entries = len(state[kind]) // table.buckets.num_buckets
                first, rows = (n // table.buckets.rows * entries for n in (part.first_row, len(part.tensor)))
                if entries:
                    tensors[f"{table.prefix}.{name}"] = TensorPart(first, state[kind][first : first + rows], True)

    def forget_unused(self, tensors: Tensors) -> None:
        """Make rows that no id has zero, in place: what they hold, nobody reads."""
        for table in self._tables.values():
            for name, part in tensors.items():
                if name.startswith(f"{table.prefix}.weight"):
                    table.forget_unused(tensors[f"{table.prefix}.ids"].tensor, part.tensor)


def _table(
    module: nn.Module, path: str, config: Any, sharder: Any, saved: Mapping[str, np.ndarray], state: Mapping[str, Any]
) -> _Table:
    """Return a table of a stock model's sharded module.

    Args:
        path: of the module.
        sharder: of its twin with a cache.
        saved: ids of all ranks, by the names of their tensors.
        state: references to weights and states, by names.
    """
    name, rules = config.name, sharder.ids[config.name]
    buckets = rules.buckets_of(name, config.num_embeddings)
    low, high = CounterInit.of_module(collection_of(path, module), sharder._init_seed).ranges[name]
    prefix = next(each.removesuffix(".weight") for each in state if each.endswith(f".{name}.weight"))
    ids = IdMap(name, rules, buckets, sharder._init_seed)
    kept = {kind: saved[f"{prefix}.{tensor}"] for tensor, kind in ID_TENSORS.items() if f"{prefix}.{tensor}" in saved}
    ids.load({**ids.tensors(), **kept})
    return _Table(
        prefix,
        tuple(config.feature_names),
        rules,
        buckets,
        ids,
        ShardWeights(name, sharder._init_seed, config.embedding_dim, low, high),
        tuple(_local(state[f"{prefix}.weight"])),
        tuple(part for key, value in state.items() if key.startswith(f"{prefix}.weight: ") for part in _local(value)),
    )


def _check_features(path: str, configs: Sequence[Any], of_ids: Container[str]) -> None:
    """Raise where a feature of a table of ids is looked up in another table, too: it would need other rows there."""
    for table in (config for config in configs if config.name in of_ids):
        for other in configs:
            shared = set(table.feature_names) & set(other.feature_names)
            if other is not table and shared:
                raise ConfigError(
                    f"verify: feature {min(shared)!r} of {path or 'the model'} is looked up in the tables "
                    f"{table.name!r}, of ids, and {other.name!r}: stock TorchRec takes one row for both. Compare with "
                    "a feature for each."
                )


def _states_of(model: DistributedModelParallel) -> dict[str, Any]:
    """Return references to the states of the fused optimizer, by names that begin with their table's."""
    states = model.fused_optimizer.state_dict()["state"]
    return {f"{of}: {name}": value for of, values in states.items() for name, value in values.items()}


def _local(value: Any) -> Iterator[tuple[int, Tensor]]:
    """Yield this rank's shards of a tensor by rows: the number of the first row, and the rows. Others have none."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield shard.metadata.shard_offsets[0], shard.tensor.detach()


def _of_all_ranks(value: ShardedTensor, ranks: Ranks) -> np.ndarray:
    """Return a whole tensor by rows. Collective."""
    parts: list[list[tuple[int, Tensor]]] = ranks.all_gather_objects(list(_local(value)))
    ordered = sorted((part for own in parts for part in own), key=lambda part: part[0])
    return torch.cat([rows for _, rows in ordered]).numpy()


def _ids(features: KeyedJaggedTensor, names: Sequence[str]) -> np.ndarray:
    """Return the ids [N] of these features, one after the other."""
    parts = features.to_dict()
    return np.concatenate([parts[name].values().numpy() for name in names])


def _put(values: Tensor, features: KeyedJaggedTensor, names: Sequence[str], rows: np.ndarray) -> None:
    """Write rows [N] in place of the ids of these features, in their order, to the values of a batch."""
    bounds, first = dict(zip(features.keys(), itertools.pairwise(features.offset_per_key()), strict=True)), 0
    for name in names:
        start, stop = bounds[name]
        values[start:stop] = torch.from_numpy(rows[first : first + stop - start])
        first += stop - start
