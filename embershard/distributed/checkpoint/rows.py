"""Reads a tensor of a checkpoint some rows at a time: a table is never in memory as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from embershard.distributed.checkpoint.load import checked_reader
from embershard.errors import CheckpointError


def saved_rows(checkpoint: Path, name: str) -> Iterator[Tensor]:
    """Yield all rows of a tensor in their order, in the blocks they were written in. Verify the checkpoint first.

    Any number of ranks may have written it, each with some rows, or some columns of them. Needs no process group.

    Args:
        name: of a tensor with a dimension at least, with the names of the groups it is in.

    Raises:
        InvalidCheckpointError: the checkpoint's `.metadata` is damaged, or would run code.
        CheckpointError: it has no such tensor, or not all of its rows.

    >>> from embershard.distributed import process_group, save_checkpoint
    >>> with process_group("cpu") as ranks:
    ...     tensors = {"model": {"t.weight": torch.arange(6.0).view(3, 2)}}
    ...     saved = save_checkpoint(Path("rows"), 4, tensors, {}, ranks, keep_last=1, run_id="8c1f")
    >>> torch.cat(list(saved_rows(saved, "model.t.weight"))).tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    """
    reader = checked_reader(checkpoint)
    metadata = reader.read_metadata()
    entry = metadata.state_dict_metadata.get(name)
    if not isinstance(entry, TensorStorageMetadata) or not entry.size:
        raise CheckpointError(f"{checkpoint} has no tensor {name!r} with rows; it is of another model.")
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    borders = {row for chunk in entry.chunks for row in (chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])}
    for start, stop in itertools.pairwise(sorted({0, entry.size[0], *borders})):
        window = ChunkStorageMetadata(
            torch.Size((start, *(0 for _ in entry.size[1:]))), torch.Size((stop - start, *entry.size[1:]))
        )
        items = create_read_items_for_chunk_list(name, entry, [window])
        rows = torch.empty(window.sizes, dtype=entry.properties.dtype)
        if sum(item.lengths.numel() for item in items) != rows.numel():
            raise CheckpointError(f"{checkpoint}: {name} lacks some of its rows {start} to {stop - 1}.")
        reader.read_data(LoadPlan(items), _IntoRows(rows)).wait()
        yield rows


class _IntoRows(DefaultLoadPlanner):
    """Puts what is read into a block of rows."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self._rows = rows

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._rows
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        """Nothing to do: it was read into its place."""
