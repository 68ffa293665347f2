"""Samples as numpy arrays: what sources read, and what the stream cuts and joins into batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.data.batch import Batch, Schema


@dataclass(frozen=True)
class Block:
    """n samples.

    Attributes:
        dense: float32 [n, D].
        labels: float32 [n].
        values: for each sparse feature its bags' ids, sample after sample, int64.
        lengths: int32 [F, n], ids per bag; or one number per feature when all its bags have the same size,
            which spares the work of counting.
    """

    dense: NDArray[np.float32]
    labels: NDArray[np.float32]
    values: tuple[NDArray[np.int64], ...]
    lengths: NDArray[np.int32] | tuple[int, ...]

    @property
    def num_samples(self) -> int:
        """n."""
        return len(self.labels)

    def take(self, rows: NDArray[np.int64]) -> Block:
        """The samples number ``rows``, in that order."""
        lengths = self.lengths
        if isinstance(lengths, tuple):
            pairs = zip(self.values, lengths, strict=True)
            values = tuple(v[rows] if size == 1 else v.reshape(-1, size)[rows].ravel() for v, size in pairs)
            return Block(self.dense[rows], self.labels[rows], values, lengths)
        values = tuple(take_bags(v, n, rows) for v, n in zip(self.values, lengths, strict=True))
        return Block(self.dense[rows], self.labels[rows], values, lengths[:, rows])

    @staticmethod
    def join(blocks: Sequence[Block]) -> Block:
        """The samples of all blocks (at least one), in order."""
        if len(blocks) == 1:
            return blocks[0]
        values = tuple(np.concatenate(parts) for parts in zip(*(b.values for b in blocks), strict=True))
        first = blocks[0].lengths
        lengths: NDArray[np.int32] | tuple[int, ...] = first
        if not isinstance(first, tuple):
            lengths = np.concatenate([np.asarray(b.lengths) for b in blocks], axis=1)
        dense = np.concatenate([b.dense for b in blocks])
        return Block(dense, np.concatenate([b.labels for b in blocks]), values, lengths)

    def to_batch(self, schema: Schema) -> Batch:
        """The same samples as tensors. Memory of ``dense`` and ``labels`` is shared."""
        if isinstance(self.lengths, tuple):
            lengths = _equal_lengths(self.lengths, self.num_samples)
        else:
            lengths = torch.from_numpy(np.ascontiguousarray(self.lengths)).view(-1)
        sparse = KeyedJaggedTensor(
            keys=schema.keys, values=torch.from_numpy(np.concatenate(self.values)), lengths=lengths
        )
        return Batch(torch.from_numpy(self.dense), sparse, torch.from_numpy(self.labels))


def empty_block(schema: Schema) -> Block:
    """No samples: what a rank gets when an evaluation ends before its slice begins."""
    none = tuple(np.empty(0, np.int64) for _ in schema.sparse)
    dense = np.empty((0, schema.num_dense), np.float32)
    return Block(dense, np.empty(0, np.float32), none, np.empty((len(none), 0), np.int32))


def take_bags(values: NDArray[np.int64], lengths: NDArray[np.int32], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ids of the bags number ``rows``, bag after bag."""
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    sizes = lengths[rows].astype(np.int64)
    shift = starts[rows] - (np.cumsum(sizes) - sizes)
    return values[np.repeat(shift, sizes) + np.arange(sizes.sum())]


@lru_cache(maxsize=8)
def _equal_lengths(sizes: tuple[int, ...], num_samples: int) -> torch.Tensor:
    """Lengths [F * B] when every bag of a feature has the same size; shared by batches, read only."""
    return torch.tensor(sizes, dtype=torch.int32).repeat_interleave(num_samples)
