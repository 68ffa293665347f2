"""`TableShard`: what a rank has of a table in a checkpoint's tensors: the same rows in weights, states and ids."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

#: Groups of a checkpoint's tensors: weights, and states of the embedding rows.
MODEL, STATES = "model", "embedding_optimizer"


@dataclass(frozen=True, eq=False)
class TableShard:
    """A shard on this rank, of all tensors of its table that have its rows.

    Attributes:
        table: name of the weights, in the group of the model.
        number: of the shard, among those on this rank.
        names: of the tensors, as a checkpoint has them.
        offsets: of the shard in each of these.
        tensors: its part of each [rows, ...].
    """

    table: str
    number: int
    names: tuple[str, ...]
    offsets: tuple[tuple[int, ...], ...]
    tensors: tuple[Tensor, ...]

    @property
    def key(self) -> tuple[str, int]:
        """What names the shard on this rank."""
        return self.table, self.number

    @property
    def num_rows(self) -> int:
        """Rows of the shard."""
        return len(self.tensors[0])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all tensors together."""
        return sum(tensor.dtype.itemsize * tensor.shape[1:].numel() for tensor in self.tensors)


def weights_and_ids(table: str) -> tuple[str, str]:
    """Return the names that a checkpoint has for a table's weights and for the ids of its rows, if it has any.

    >>> weights_and_ids("t.weight")
    ('model.t.weight', 'model.t.ids')
    """
    return f"{MODEL}.{table}", f"{MODEL}.{table.removesuffix('weight')}ids"


def tables_in(tensors: Mapping[str, Any], tables: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return of every table, by the name of its weights, the tensors that have its rows, by their names in a
    checkpoint; the weights first. A rank may know only the tables of which it has shards.

    Args:
        tables: names of the weights.

    >>> import torch
    >>> weights, state, step = torch.zeros(4, 2), torch.zeros(4), torch.zeros(())
    >>> tensors = {"model": {"t.weight": weights}, "embedding_optimizer": {"t.weight": {"t.sum": state, "step": step}}}
    >>> {name: list(found) for name, found in tables_in(tensors, ["t.weight"]).items()}
    {'t.weight': ['model.t.weight', 'embedding_optimizer.t.weight.t.sum']}
    """
    found = {}
    for table in tables:
        states = tensors.get(STATES, {}).get(table, {})
        if (weights := tensors[MODEL].get(table)) is not None:
            own, ids = weights_and_ids(table)
            others = {f"{STATES}.{table}.{name}": state for name, state in states.items()}
            others[ids] = tensors[MODEL].get(ids.removeprefix(f"{MODEL}."))
            rows = _rows_of_shards(weights)
            alike = {name: other for name, other in others.items() if _rows_of_shards(other) == rows}
            found[table] = {own: weights, **alike}
    return found


def _rows_of_shards(tensor: Any) -> list[int]:
    """Return the rows of all shards of a tensor, on whichever rank they are."""
    if isinstance(tensor, ShardedTensor):
        return [shard.shard_sizes[0] for shard in tensor.metadata().shards_metadata]
    return [] if tensor is None else list(tensor.shape[:1])


def total_bytes(tensors: Mapping[str, Any]) -> int:
    """Return the bytes of tensors, on all ranks together."""
    return sum(tensor.size().numel() * tensor.dtype.itemsize for tensor in tensors.values())


def shards_of(table: str, tensors: Mapping[str, Any], is_first: bool) -> list[TableShard]:
    """Return this rank's shards of a table; one that every rank has is the first rank's.

    >>> import torch
    >>> [shard.offsets for shard in shards_of("t.weight", {"model.t.weight": torch.zeros(4, 2)}, is_first=True)]
    [((0, 0),)]
    """
    parts = []
    for tensor in tensors.values():
        if isinstance(tensor, ShardedTensor):
            parts.append([(tuple(s.metadata.shard_offsets), s.tensor.detach()) for s in tensor.local_shards()])
        else:
            parts.append([((0,) * tensor.dim(), tensor.detach())] if is_first else [])
    found = []
    for number, of_shard in enumerate(zip(*parts, strict=True)):
        offsets, local = zip(*of_shard, strict=True)
        assert len({len(part) for part in local}) == 1, "shards of a table are not in one order"
        found.append(TableShard(table, number, tuple(tensors), offsets, local))
    return found


def without(tensors: Mapping[str, Any], names: Collection[str], at: str = "") -> dict[str, Any]:
    """Return the tensors of a checkpoint without these, and without groups that are empty then.

    >>> import torch
    >>> without({"model": {"a": torch.zeros(1), "b": torch.zeros(1)}, "c": {"d": torch.zeros(1)}}, {"model.a", "c.d"})
    {'model': {'b': tensor([0.])}}
    """
    kept = {}
    for name, value in tensors.items():
        if isinstance(value, dict):
            if value := without(value, names, f"{at}{name}."):
                kept[name] = value
        elif f"{at}{name}" not in names:
            kept[name] = value
    return kept
