"""The tensors of a checkpoint, written block by block: large ones are never copied whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from embershard.distributed.checkpoint.load import without_known_warnings
from embershard.errors import CheckpointError

#: Bytes of a block of a tensor that is in no frozen memory.
_BLOCK_BYTES = 16 << 20


class FrozenTensors(Protocol):
    """Memory whose contents of one moment are read later, block by block.

    Attributes:
        block_rows: rows of a block.
    """

    block_rows: int

    def position(self, tensor: Tensor) -> int | None:
        """Return the number of the row that a view of the memory begins with; None for other memory."""

    def read(self, part: Tensor) -> Tensor:
        """Return the contents of a view of up to `block_rows` rows; blocks come in the order of their positions."""


#: The order of writing: read where they are, copied, frozen (one number for each memory).
_LIVE, _COPIED, _FROZEN = range(3)


class _TensorPart(NamedTuple):
    """A block: a view of its tensor or a copy, the frozen memory that it is in, and its place in the order."""

    tensor: Tensor
    frozen: FrozenTensors | None
    order: tuple[int, int]


class TensorBlocks(DefaultSavePlanner):
    """The tensors of a state dict as a plan of blocks for torch.distributed.checkpoint, made in one rank.

    A rank writes, in this order: tensors that are read where they are, and must not change until `before_block` is
    called; small ones that were copied; and those in frozen memory. A block is some rows of a tensor or of its shard on
    this rank, and a chunk of its own in the checkpoint, so that any reader of torch's checkpoints can load it.

    Args:
        tensors: a state dict of tensors and sharded tensors.
        frozen: memory that some of the tensors are in.
        copy_bytes: most bytes of other tensors to copy now, the small ones first.

    Attributes:
        is_copied: no tensor has to be read where it is.
        before_block: called by the writer before each block that was copied or is frozen: from the first call on, all
            tensors may change.

    Raises:
        CheckpointError: something is no tensor.

    >>> blocks = TensorBlocks({"w": torch.ones(3, 2)}, copy_bytes=100)
    >>> [item.index.fqn for item in blocks.create_local_plan().items], blocks.is_copied
    (['w'], True)
    """

    def __init__(self, tensors: dict[str, Any], frozen: Sequence[FrozenTensors] = (), copy_bytes: int = 0) -> None:
        super().__init__()
        _check_tensors(tensors)
        self._parts: dict[MetadataIndex, _TensorPart] = {}
        with without_known_warnings():
            super().set_up_planner(tensors)
            items = super().create_local_plan().items
        self._items = [block for item in items for block in self._blocks(item, frozen)]
        self.is_copied = self._copy(copy_bytes)
        self.before_block: Callable[[], None] = lambda: None

    def set_up_planner(self, *_: Any, storage_meta: Any = None, is_coordinator: bool = False, **__: Any) -> None:
        """Keep what the constructor found."""

    def create_local_plan(self) -> SavePlan:
        return replace(self.plan, items=self._items)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return replace(new_plan, items=sorted(new_plan.items, key=lambda item: self._parts[item.index].order))

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        part = self._parts[write_item.index]
        if part.order[0] > _LIVE:  # what comes before is written
            self.before_block()
        return part.tensor if part.frozen is None else part.frozen.read(part.tensor)

    def _blocks(self, item: WriteItem, frozen: Sequence[FrozenTensors]) -> list[WriteItem]:
        tensor = self.lookup_object(item.index)
        number = next((n for n, memory in enumerate(frozen) if memory.position(tensor) is not None), None)
        memory = None if number is None else frozen[number]
        num_rows = tensor.shape[0] if tensor.dim() else 1
        block_rows = max(1, _BLOCK_BYTES * num_rows // max(1, tensor.nbytes)) if memory is None else memory.block_rows
        items = []
        for start in range(0, max(1, num_rows), block_rows):
            block, new = tensor, item
            if num_rows > block_rows:
                block, data = tensor[start : start + block_rows], item.tensor_data
                assert data is not None, "no tensor"
                offsets = torch.Size((data.chunk.offsets[0] + start, *data.chunk.offsets[1:]))
                part = ChunkStorageMetadata(offsets, torch.Size((block.shape[0], *data.chunk.sizes[1:])))
                index = MetadataIndex(item.index.fqn, offsets)
                new = WriteItem(index, WriteItemType.SHARD, tensor_data=replace(data, chunk=part))
            order = (_LIVE, 0) if number is None else (_FROZEN + number, frozen[number].position(block) or 0)
            self._parts[new.index] = _TensorPart(block, memory, order)
            items.append(new)
        return items

    def _copy(self, most_bytes: int) -> bool:
        """Copy tensors outside of frozen memory, as many as may be; return True if these are all."""
        live = sorted((index for index, part in self._parts.items() if part.frozen is None), key=self._num_bytes)
        for index in live:
            most_bytes -= self._num_bytes(index)
            if most_bytes < 0:
                return False
            part = self._parts[index]
            self._parts[index] = _TensorPart(part.tensor.detach().to("cpu", copy=True), None, (_COPIED, 0))
        return True

    def _num_bytes(self, index: MetadataIndex) -> int:
        return self._parts[index].tensor.nbytes


def _check_tensors(tensors: Any, at: str = "") -> None:
    """Raise unless all values are tensors: torch would pickle others, and loading unpickles nothing."""
    for key, value in tensors.items():
        if isinstance(value, dict):
            _check_tensors(value, f"{at}{key}.")
        elif not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{at}{key} is of type {type(value).__name__}, needed a tensor. Save it as a scalar.")
