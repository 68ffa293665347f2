"""Rows that are elsewhere than in memory, as `cache.host = "file"` has them, out of a checkpoint, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from embershard.cache.homes.home import Home
from embershard.distributed.checkpoint.load import BoxReader, without_known_warnings
from embershard.errors import ConfigError
from embershard.sharding.torchrec import cached_embeddings

_BLOCK_BYTES = 16 << 20
_Groups = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class _SavedPart:
    """Where a shard's part of a table (weights, or one state) is in a checkpoint.

    Attributes:
        name: in the checkpoint.
        offsets, sizes: of the shard in the run's tensor.
        whole: size of that.
        num_rows: of the table.
    """

    reader: BoxReader
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]
    num_rows: int

    def read(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of the shard, as `RowStates` spreads states over other column shards."""
        entry = self.reader.tensors.get(self.name)
        saved = self.whole if entry is None else tuple(entry.size)
        if saved == self.whole or len(saved) != 1 or saved[0] % self.num_rows:
            return self._box(self.offsets[0] + start, stop - start)
        first = self.offsets[0] % self.num_rows + start
        shards = [self._box(first + shard, stop - start) for shard in range(0, saved[0], self.num_rows)]
        return torch.stack(shards).mean(0)

    def _box(self, first: int, count: int) -> Tensor:
        return self.reader.read(self.name, (first, *self.offsets[1:]), (count, *self.sizes[1:]))


def without_rows_elsewhere(model: nn.Module, groups: Mapping[str, _Groups | Mapping[str, Any]]) -> dict[str, Any]:
    """Return the groups of a checkpoint's tensors without those whose rows are elsewhere.

    >>> without_rows_elsewhere(model, {"model": {"clicks.weight": torch.zeros(1)}})  # a model whose rows are in memory
    {'model': {'clicks.weight': tensor([0.])}}
    """
    hosts = _hosts(model)

    def kept(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        found = {name: kept(each) for name, each in value.items() if not any(_places(each, hosts))}
        return {name: each for name, each in found.items() if not _is_empty(each) or _is_empty(value[name])}

    with without_known_warnings():
        return {name: kept(group) for name, group in groups.items()}


def check_all_parts(model: nn.Module, groups: Mapping[str, Any]) -> None:
    """Raise unless weights and all optimizer states of rows elsewhere are among the groups of a checkpoint's tensors.

    Raises:
        ConfigError: with the tables and what to give.

    >>> check_all_parts(model, {})  # a model whose rows are in memory
    """
    hosts = _hosts(model)
    with without_known_warnings():
        found = {place[:2] for _, value in _named("", groups) for place, *_ in _places(value, hosts)}
    pools = [pool for pool in cached_embeddings(model) if pool.host.takes_blocks]
    for number, pool in enumerate(pools):
        if left := [name for part, name in enumerate(pool.host.views.names) if (number, part) not in found]:
            raise ConfigError(
                f"tables {sorted(set(pool.cache.tables))}: got an optimizer without {', '.join(left)} of their rows, "
                "which are in a file. Give one with the tables' states: CombinedOptimizer([model.fused_optimizer, "
                "your own])"
            )


def load_rows_elsewhere(model: nn.Module, checkpoint: Path, groups: Mapping[str, Any]) -> None:
    """Read weights and optimizer states of rows elsewhere out of a verified checkpoint.

    Args:
        groups: the tensors, weights and states, by the names that they have in the checkpoint.

    Raises:
        CheckpointError: the checkpoint lacks rows.

    >>> load_rows_elsewhere(model, Path("step_4"), {})  # a model whose rows are in memory
    """
    hosts = _hosts(model)
    if not hosts:
        return
    sources: dict[tuple[int, int, int], dict[int, _SavedPart]] = {}  # by pool, first row and number of rows; by part
    reader = BoxReader(checkpoint)
    with without_known_warnings():
        found = [(path, value, *place) for path, value in _named("", groups) for place in _places(value, hosts)]
        sizes = {(pool, first): value.size(0) for _, value, (pool, part, first), *_ in found if part == 0}
        for path, value, (pool, part, first), offsets, local in found:
            num_rows = sizes[pool, first]
            source = _SavedPart(reader, path, offsets, tuple(local.shape), tuple(value.size()), num_rows)
            sources.setdefault((pool, first, local.shape[0]), {})[part] = source
    for (pool, first, num_rows), of_parts in sources.items():
        step = max(1, _BLOCK_BYTES // hosts[pool].slot_row_bytes)
        for start in range(0, num_rows, step):
            rows = [of_parts[part].read(start, min(start + step, num_rows)) for part in sorted(of_parts)]
            hosts[pool].put_block(first + start, rows)
    for embeddings in cached_embeddings(model):
        if embeddings.host.takes_blocks:
            for table in dict.fromkeys(embeddings.cache.tables):
                embeddings.host_rows_changed(table)


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def _hosts(model: nn.Module) -> list[Home]:
    return [pool.host for pool in cached_embeddings(model) if pool.host.takes_blocks]


def _places(value: Any, hosts: Sequence[Home]) -> Iterator[tuple[tuple[int, int, int], tuple[int, ...], Tensor]]:
    """Yield of each local part of a tensor whose rows are elsewhere: number of the host, number of the payload tensor
    and first row there; its offsets in the whole; and itself."""
    if isinstance(value, ShardedTensor):
        parts = [(tuple(shard.metadata.shard_offsets), shard.tensor.detach()) for shard in value.local_shards()]
    else:
        parts = [((0,) * value.dim(), value.detach())] if isinstance(value, Tensor) and value.dim() else []
    for offsets, local in parts:
        for number, host in enumerate(hosts):
            if (place := host.views.place_of(local)) is not None:
                yield (number, *place), offsets, local


def _named(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _named(f"{prefix}.{name}" if prefix else name, each)
    else:
        yield prefix, value
