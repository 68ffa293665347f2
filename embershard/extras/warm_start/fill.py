"""Fills the tensors of a new model from a trained one, as a matching says. Each rank fills its own shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from embershard.distributed.checkpoint.boxes import BLOCK_BYTES, Box, Saved, fill, parts_of
from embershard.extras.warm_start.matching import Entry, Matching
from embershard.extras.warm_start.shapes import MODEL, ModelShape, TableShape

_ROW_STATES, _DENSE_STATES = "embedding_optimizer", "dense_optimizer"


def fill_tables(
    tensors: Mapping[str, Any], saved: Saved, old: ModelShape, new: ModelShape, matching: Matching, *, states: bool
) -> None:
    """Fill rows of row numbers, and their states.

    Args:
        tensors: by group of a checkpoint, as `RunState.tensors` returns them; rows are written back.
        states: of the optimizer, too.
    """
    for entry in matching.of("table"):
        was, table = old.tables[entry.was], new.tables[entry.name]
        if table.has_ids:
            continue
        num_rows = min(was.num_rows, table.num_rows)
        fill(tensors["model"][table.tensor.removeprefix(MODEL)], saved, was.tensor, Box((0, 0), (num_rows, table.dim)))
        for name, value in row_states(tensors, table).items() if states else ():
            source = state_name(was, table, name)
            if source not in saved.sizes():
                continue
            if len(value.size()) == 1:
                _fill_row_state(value, saved, source, was.num_rows, table.num_rows)
            else:
                fill(value, saved, source, Box((0, 0), (num_rows, saved.sizes()[source][1])))


def row_states(tensors: Mapping[str, Any], table: TableShape) -> dict[str, Tensor | ShardedTensor]:
    """Return the states of a table's rows, by name."""
    return dict(tensors[_ROW_STATES].get(table.tensor.removeprefix(MODEL), {}))


def state_name(was: TableShape, table: TableShape, name: str) -> str:
    """Return the name in a checkpoint of the old table's state that is `name` of the new one."""
    own = name.removeprefix(f"{table.name}.")
    return f"{_ROW_STATES}.{was.tensor.removeprefix(MODEL)}.{was.name}.{own}"


def _fill_row_state(target: Tensor | ShardedTensor, saved: Saved, name: str, old_rows: int, new_rows: int) -> None:
    """Fill a state of one number per row: [c * R] of c column shards, one shard after another. With another number of
    them, each shard gets the mean of the saved ones, as on a resume."""
    was, now = saved.sizes()[name][0] // old_rows, target.size()[0] // new_rows
    step = BLOCK_BYTES // 4
    for box, values in parts_of(target):
        first, last = box.offsets[0], box.offsets[0] + box.sizes[0]
        for shard in range(now):
            start, stop = max(first, shard * new_rows), min(last, shard * new_rows + min(old_rows, new_rows))
            for begin in range(start, stop, step):
                count, row = min(step, stop - begin), begin - shard * new_rows
                shards = [shard] if was == now else range(was)
                parts = [saved.read(name, Box((each * old_rows + row,), (count,))) for each in shards]
                found = parts[0] if len(parts) == 1 else torch.stack(parts).mean(0)
                with torch.no_grad():
                    values.narrow(0, begin - first, count).copy_(found)


def fill_layers(tensors: Mapping[str, Any], saved: Saved, matching: Matching, *, states: bool) -> None:
    """Fill dense layers, and their states. Those of new entries are 0.

    Args:
        states: of the optimizer, too; its tensors are 0.
    """
    for entry in matching.of("layer"):
        _fill_entries(tensors["model"][entry.name], saved.whole(f"{MODEL}{entry.was}"), entry, zeros=True)
        for name, value in tensors[_DENSE_STATES].get(entry.name, {}).items() if states else ():
            source = f"{_DENSE_STATES}.{entry.was}.{name}"
            if source in saved.sizes():
                _fill_entries(value, saved.whole(source), entry, zeros=False)


def _fill_entries(target: Tensor, source: Tensor, entry: Entry, *, zeros: bool) -> None:
    """Copy the entries of a tensor that a matching names; a number, as a count of steps, is copied."""
    with torch.no_grad():
        if not source.dim() or all(places is None for places in entry.places):
            target.copy_(source)
            return
        places = [each or (tuple(range(size)),) * 2 for each, size in zip(entry.places, target.shape, strict=True)]
        for dim, new in enumerate(entry.zeros if zeros else ()):
            target.index_fill_(dim, torch.tensor(new, dtype=torch.int64, device=target.device), 0)
        for dim, (sources, _) in enumerate(places):
            source = source.index_select(dim, torch.tensor(sources, dtype=torch.int64))
        into = [torch.tensor(own, dtype=torch.int64, device=target.device) for _, own in places]
        target[torch.meshgrid(*into, indexing="ij")] = source.to(target)
