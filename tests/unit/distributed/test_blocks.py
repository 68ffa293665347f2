"""Tensors are written in blocks that every reader of torch's checkpoints can load."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from embershard.distributed import Ranks, TensorBlocks, save_checkpoint
from embershard.distributed.checkpoint import blocks
from embershard.distributed.checkpoint.metadata import read_metadata


class _Frozen:
    """Memory whose earlier contents are kept in a copy; it notes the order of reads."""

    def __init__(self, tensor: torch.Tensor, block_rows: int) -> None:
        self.tensor, self.kept, self.block_rows, self.read_rows = tensor, tensor.clone(), block_rows, []

    def position(self, tensor: torch.Tensor) -> int | None:
        row, left = divmod(tensor.data_ptr() - self.tensor.data_ptr(), self.tensor[:1].nbytes)
        return row if 0 <= row < len(self.tensor) and not left else None

    def read(self, part: torch.Tensor) -> torch.Tensor:
        row = self.position(part)
        self.read_rows.append((row, len(part)))
        return self.kept[row : row + len(part)].clone()


def saved(folder: Path, ranks: Ranks, tensors: TensorBlocks) -> Path:
    return save_checkpoint(folder, 1, tensors, {}, ranks, keep_last=1, run_id="run")


def stock_loaded(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by torch alone."""
    found = read_metadata(checkpoint).state_dict_metadata
    tensors = {name: torch.full(entry.size, 7, dtype=entry.properties.dtype) for name, entry in found.items()}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(checkpoint))
    return tensors


def test_large_tensors_have_blocks_and_come_back_whole(tmp_path, ranks):
    tensors = {"a": torch.randn(25, 4), "b": torch.randn(4, 25)[:, 3:7], "c": torch.tensor(3), "d": torch.randn(9)}
    with mock.patch.object(blocks, "_BLOCK_BYTES", 64):
        checkpoint = saved(tmp_path, ranks, TensorBlocks(tensors))
    assert len(read_metadata(checkpoint).state_dict_metadata["a"].chunks) == 7  # of 4 rows
    loaded = stock_loaded(checkpoint)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(("copy_bytes", "is_copied"), [(1000, True), (100, False), (0, False)])
def test_what_is_copied_may_change_at_once_and_the_rest_once_it_is_written(tmp_path, ranks, copy_bytes, is_copied):
    table = torch.arange(40.0).reshape(10, 4)
    tensors = {"z_large": torch.zeros(50), "small": torch.zeros(5), "table": table}
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    frozen = _Frozen(table, 3)
    planned = TensorBlocks(tensors, [frozen], copy_bytes)
    assert planned.is_copied is is_copied
    calls = []

    def train() -> None:
        calls.append(list(frozen.read_rows))
        for tensor in tensors.values():
            tensor.add_(1.0)

    if is_copied:
        train()
    else:
        planned.before_block = train
    loaded = stock_loaded(saved(tmp_path, ranks, planned))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert calls[0] == []  # before any frozen block was read
    assert frozen.read_rows == [(0, 3), (3, 3), (6, 3), (9, 1)]


def test_tensors_that_change_before_they_are_written_would_be_noticed(tmp_path, ranks):
    """What torch's own asynchronous save does with tensors in host memory (pytorch issue 144657)."""
    tensors = {"w": torch.zeros(50)}
    planned = TensorBlocks(tensors)
    tensors["w"].add_(1.0)
    assert stock_loaded(saved(tmp_path, ranks, planned))["w"].sum() == 50
