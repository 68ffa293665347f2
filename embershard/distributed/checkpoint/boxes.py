"""Parts of saved tensors: `Saved` says what is there, and reads boxes of it. `CheckpointSaved` is that of a checkpoint;
exports have one, too (`embershard/distributed/publish/exported.py`).

A box is some rows, or some columns of some rows: no tensor has to be read whole, whatever ranks and shards wrote it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from embershard.distributed.checkpoint.load import BoxReader
from embershard.errors import CheckpointError

#: Bytes that are read at a time, about.
BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Box:
    """A part of a tensor.

    Attributes:
        offsets, sizes: in each dimension.

    >>> Box((2, 0), (4, 8)).meet(Box((4, 4), (10, 4)))
    Box(offsets=(4, 4), sizes=(2, 4))
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(size: torch.Size) -> Box:
        """Return the box of all of a tensor."""
        return Box((0,) * len(size), tuple(size))

    def meet(self, other: Box) -> Box | None:
        """Return what both have, None for nothing."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = [min(a + n, b + m) for a, n, b, m in zip(*self._parts, *other._parts, strict=True)]
        sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def of(self, tensor: Tensor, start: Box | None = None) -> Tensor:
        """Return this part as a view of a tensor, which is all of the box `start`."""
        firsts = (0,) * len(self.offsets) if start is None else start.offsets
        for dim, (offset, first, size) in enumerate(zip(self.offsets, firsts, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, offset - first, size)
        return tensor

    def rows(self, row_bytes: int) -> Iterator[Box]:
        """Yield its parts of about 16 MiB, in the order of their rows.

        Args:
            row_bytes: of a row of it.
        """
        if not self.sizes:
            yield self
            return
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        for start in range(0, self.sizes[0], step):
            count = min(step, self.sizes[0] - start)
            yield Box((self.offsets[0] + start, *self.offsets[1:]), (count, *self.sizes[1:]))

    @property
    def _parts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.offsets, self.sizes


class Saved(ABC):
    """Tensors on disk, by the names that a checkpoint gives them, with their groups ("model.", ...)."""

    @abstractmethod
    def sizes(self) -> Mapping[str, torch.Size]:
        """Return the size of every tensor, by name."""

    @abstractmethod
    def read(self, name: str, box: Box) -> Tensor:
        """Return a part of a tensor, on the CPU.

        Raises:
            CheckpointError: there is no such tensor, or not all of the part.
        """

    def whole(self, name: str) -> Tensor:
        """Return a tensor. Errors as of `read`."""
        return self.read(name, Box.whole(self._size(name)))

    def blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield all rows of a tensor [R, ...] in parts of about 16 MiB, each with the number of its first row."""
        box = Box.whole(self._size(name))
        row_bytes = 8 * int(np.prod(box.sizes[1:], initial=1))  # at most: no type has more bytes
        for part in box.rows(row_bytes):
            yield part.offsets[0], self.read(name, part)

    def ids(self, table: str) -> tuple[Tensor, Tensor] | None:
        """Return the ids of a table and the row of each, int64 [n] both, where they are kept beside the rows; None
        where a tensor has them, or the table has row numbers."""
        return None

    def _size(self, name: str) -> torch.Size:
        size = self.sizes().get(name)
        if size is None:
            raise CheckpointError(f"{self} has no tensor {name!r}; it is of another model.")
        return size


class CheckpointSaved(Saved):
    """The tensors of a checkpoint; verify it first. Needs no process group.

    Raises:
        InvalidCheckpointError: the checkpoint's `.metadata` is damaged, or would run code.

    >>> from embershard.distributed import process_group, save_checkpoint
    >>> with process_group("cpu") as ranks:
    ...     tensors = {"model": {"t.weight": torch.arange(6.0).view(3, 2)}}
    ...     folder = save_checkpoint(Path("saved"), 4, tensors, {}, ranks, keep_last=1, run_id="8c1f")
    >>> saved = CheckpointSaved(folder)
    >>> saved.sizes(), saved.read("model.t.weight", Box((1, 1), (2, 1))).tolist()
    ({'model.t.weight': torch.Size([3, 2])}, [[3.0], [5.0]])
    """

    def __init__(self, checkpoint: Path) -> None:
        self.folder = checkpoint
        self._reader = BoxReader(checkpoint)

    def __str__(self) -> str:
        return str(self.folder)

    def sizes(self) -> Mapping[str, torch.Size]:
        return {name: entry.size for name, entry in self._reader.tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        return self._reader.read(name, box.offsets, box.sizes)


class RowWriter(ABC):
    """A table's rows that can be written, and are no tensor."""

    @abstractmethod
    def put(self, read: Callable[[int, int], Iterable[tuple[Tensor, Tensor]]]) -> None:
        """Write rows, as far as this rank has them.

        Args:
            read: yields, in blocks, which of the rows [first, stop) are written (int64 [n], distinct), and what they
                are [n, D].
        """


def parts_of(target: Tensor | ShardedTensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield what this rank has of a tensor: each part's box in the whole, and its values.

    >>> [(box, part.shape) for box, part in parts_of(torch.zeros(3, 2))]
    [(Box(offsets=(0, 0), sizes=(3, 2)), torch.Size([3, 2]))]
    """
    if not isinstance(target, ShardedTensor):
        yield Box.whole(target.shape), target
        return
    for shard in target.local_shards():
        yield Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)), shard.tensor


def fill(target: Tensor | ShardedTensor | RowWriter, saved: Saved, name: str, box: Box | None = None) -> None:
    """Copy a part of a saved tensor to the same place of a tensor, as far as this rank has it. Other values stay.

    It is read in blocks of about 16 MiB.

    Args:
        box: the part; None: all of the saved tensor. Of rows that are no tensor, whole rows.

    Raises:
        CheckpointError: there is no such tensor, or not all of the part.
    """
    wanted = box or Box.whole(saved.sizes()[name])
    if isinstance(target, RowWriter):
        whole = wanted.offsets[1:], wanted.sizes[1:]

        def read(first: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
            for block in _blocks(Box((first, *whole[0]), (stop - first, *whole[1])).meet(wanted)):
                yield block.offsets[0] + torch.arange(block.sizes[0]), saved.read(name, block)

        target.put(read)
        return
    for own, values in parts_of(target):
        for block in _blocks(own.meet(wanted)):
            with torch.no_grad():
                block.of(values, own).copy_(saved.read(name, block))


def _blocks(box: Box | None) -> Iterator[Box]:
    return iter(()) if box is None else box.rows(4 * int(np.prod(box.sizes[1:], initial=1)))


def fill_rows(
    target: Tensor | ShardedTensor | RowWriter,
    saved: Saved,
    name: str,
    old_rows: NDArray[np.int64],
    new_rows: NDArray[np.int64],
) -> None:
    """Copy rows of a saved tensor to other rows of a tensor, as far as this rank has them. Other rows stay.

    Args:
        old_rows, new_rows: [n], each once.

    Raises:
        CheckpointError: there is no such tensor.
    """

    def read(first: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        is_here = (new_rows >= first) & (new_rows < stop)
        order = np.argsort(old_rows[is_here])
        sources, rows = old_rows[is_here][order], new_rows[is_here][order]
        for start, block in saved.blocks(name) if len(sources) else ():
            begin, end = np.searchsorted(sources, [start, start + len(block)])
            yield torch.from_numpy(rows[begin:end]), block[torch.from_numpy(sources[begin:end] - start)]

    if isinstance(target, RowWriter):
        target.put(read)
        return
    for box, values in parts_of(target):
        first = box.offsets[0]
        for rows, found in read(first, first + box.sizes[0]):
            columns = Box((0, *box.offsets[1:]), (len(found), *box.sizes[1:])).of(found)
            with torch.no_grad():
                values[(rows - first).to(values.device)] = columns.to(values)
