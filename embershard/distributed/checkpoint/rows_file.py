"""Files of rows: the rows of a rank's shards that changed since another checkpoint, and their way over its tensors."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embershard.distributed.checkpoint.digests import DigestingFileSystem, FileEntry
from embershard.distributed.checkpoint.manifest import ShardRows
from embershard.distributed.tensors_file import read_header, safetensors_header
from embershard.errors import InvalidCheckpointError

#: Bytes of rows that are read and written at a time.
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class ChangedShard:
    """Rows of a shard on this rank that changed.

    Attributes:
        tensors: whole ones, as a checkpoint names them, whose rows these are.
        offsets: of the shard in each of these.
        like: of each, a tensor with rows of its type and shape.
        keys: int64 [n], row numbers in the shard, ascending.
        read: returns of each tensor the rows [k, ...] of the next k keys, given these.
    """

    tensors: tuple[str, ...]
    offsets: tuple[tuple[int, ...], ...]
    like: tuple[Tensor, ...]
    keys: Tensor
    read: Callable[[Tensor], Sequence[Tensor]]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, all tensors together, without its key."""
        return sum(tensor.dtype.itemsize * tensor.shape[1:].numel() for tensor in self.like)

    def pieces(self) -> list[Tensor]:
        """Return the keys in parts that are read at a time."""
        return list(self.keys.split(max(1, _PIECE_BYTES // max(1, self.row_bytes)))) if len(self.keys) else []


def write_rows(
    path: Path, shards: Sequence[ChangedShard], before_piece: Callable[[], None] = lambda: None
) -> tuple[tuple[ShardRows, ...], FileEntry]:
    """Write and sync a file of rows; return what a manifest has of it.

    Args:
        before_piece: called before rows are read.

    >>> rows = torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    >>> changed = ChangedShard(("t",), ((4, 0),), (rows,), torch.tensor([0, 3]), lambda keys: [rows])
    >>> shards, entry = write_rows(Path("rows_0.safetensors"), [changed])
    >>> table = torch.zeros(8, 2)
    >>> RowsOver([(Path(), shards)], {"t": rows.dtype}).lay_over("t", (0, 0), table)
    >>> table[4].tolist(), table[7].tolist()
    ([5.0, 6.0], [7.0, 8.0])
    """
    entries: dict[str, tuple[torch.dtype, Sequence[int]]] = {}
    found = []
    for place, shard in enumerate(shards):
        pieces = shard.pieces()
        for number, keys in enumerate(pieces):
            entries[f"{place}.{number}.keys"] = torch.int64, keys.shape
            for tensor, like in enumerate(shard.like):
                entries[f"{place}.{number}.{tensor}"] = like.dtype, (len(keys), *like.shape[1:])
        found.append(ShardRows(path.name, place, shard.tensors, shard.offsets, len(pieces), len(shard.keys)))
    files = DigestingFileSystem()
    with files.create_stream(path, "wb") as file:
        file.write(safetensors_header(entries))
        for shard in shards:
            for keys in shard.pieces():
                before_piece()
                for part in (keys, *shard.read(keys)):
                    file.write(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return tuple(found), files.digests[path.name].finish()


class _MappedFile:
    """A file of rows, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self._entries, start = read_header(path)
        memory = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        self._memory = memory[start:]

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        entry = self._entries[name]
        part = self._memory[slice(*entry["data_offsets"])]
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        return part.view(dtype).view(entry["shape"])


@dataclass(frozen=True, eq=False)
class _Piece:
    """Rows of a tensor: their numbers from `place[0]` on, and their columns from `place[1]` on, where they have any."""

    keys: Tensor
    rows: Tensor
    place: tuple[int, ...]


class RowsOver:
    """The rows of deltas, which are laid over what is read of older checkpoints.

    Args:
        links: folder and rows of each delta, the oldest first.
        dtypes: of the tensors that have rows in them.

    Raises:
        InvalidCheckpointError: a file is not what a manifest says of it.
    """

    def __init__(self, links: Sequence[tuple[Path, Sequence[ShardRows]]], dtypes: Mapping[str, torch.dtype]) -> None:
        self._pieces: dict[str, list[_Piece]] = {}
        for folder, shards in links:
            files: dict[str, _MappedFile] = {}
            for shard in filter(lambda shard: shard.pieces, shards):
                try:
                    file = files.get(shard.file) or files.setdefault(shard.file, _MappedFile(folder / shard.file))
                    self._add(file, shard, dtypes)
                except (OSError, ValueError, KeyError, TypeError, RuntimeError, struct.error) as error:
                    raise InvalidCheckpointError(
                        f"{folder}: {shard.file}: place {shard.place} is not as the manifest says "
                        f"({type(error).__name__}: {error})"
                    ) from error
        self._bounds = {
            name: np.array([[int(p.keys[0]) + p.place[0], int(p.keys[-1]) + p.place[0]] for p in pieces])
            for name, pieces in self._pieces.items()
        }

    def _add(self, file: _MappedFile, shard: ShardRows, dtypes: Mapping[str, torch.dtype]) -> None:
        for number in range(shard.pieces):
            keys = file.tensor(f"{shard.place}.{number}.keys", torch.int64)
            for tensor, (name, place) in enumerate(zip(shard.tensors, shard.offsets, strict=True)):
                if name in dtypes:
                    rows = file.tensor(f"{shard.place}.{number}.{tensor}", dtypes[name])
                    self._pieces.setdefault(name, []).append(_Piece(keys, rows, place))

    def lay_over(self, name: str, offsets: Sequence[int], target: Tensor) -> None:
        """Write the rows of tensor `name` that are in a box over `target`, which is the box with these offsets."""
        if name not in self._pieces:
            return
        start, stop = offsets[0], offsets[0] + target.shape[0]
        first, last = self._bounds[name].T
        for number in np.flatnonzero((first < stop) & (last >= start)):
            piece = self._pieces[name][number]
            bounds = torch.tensor([start - piece.place[0], stop - piece.place[0]])
            low, high = torch.searchsorted(piece.keys, bounds).tolist()
            rows, into = piece.rows[low:high], target
            if target.dim() > 1:
                left = max(piece.place[1], offsets[1])
                right = min(piece.place[1] + rows.shape[1], offsets[1] + target.shape[1])
                if left >= right:
                    continue
                rows = rows[:, left - piece.place[1] : right - piece.place[1]]
                into = target.narrow(1, left - offsets[1], right - left)
            places = piece.keys[low:high] + (piece.place[0] - start)
            into[places.to(into.device)] = rows.to(into.device)
