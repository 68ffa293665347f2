"""Batches of samples: the input of a model.

Letters: B samples of a batch, D dense features, F sparse features, N ids of all bags.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from embershard.known_bounds import bounds_of, note_bounds


@dataclass
class Batch(Pipelineable):
    """B samples of one rank, with the attribute names that `torchrec.models.dlrm.DLRMTrain` reads.

    B may be 0: at the end of an evaluation some ranks have no samples, and every rank must still take part in the step.

    >>> ids = KeyedJaggedTensor(["user"], values=torch.tensor([3, 1, 4]), lengths=torch.tensor([1, 2]))
    >>> Batch(torch.zeros(2, 13), ids, torch.zeros(2)).num_samples
    2

    Attributes:
        dense_features: float32 [B, D].
        sparse_features: F keys, int64 values [N], int32 lengths [F * B].
        labels: float32 [B], or [B, T] of several.
        is_hot: every sample of this step, on all ranks, looks up hot rows only (`sharding.mode = "hot_cold"`); the same
            on all ranks.
        weights: float32 [B], of the samples; None: 1 each.
    """

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor
    is_hot: bool = False
    weights: torch.Tensor | None = None

    @property
    def num_samples(self) -> int:
        return int(self.labels.shape[0])

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Return a copy on `device`, or this batch itself where it is there already."""
        tensors = (self.dense_features, self.sparse_features.values(), self.labels, self.weights)
        if {tensor.device for tensor in tensors if tensor is not None} == {device}:
            return self
        return Batch(
            self.dense_features.to(device, non_blocking=non_blocking),
            _known_as_before(self.sparse_features, self.sparse_features.to(device, non_blocking=non_blocking)),
            self.labels.to(device, non_blocking=non_blocking),
            self.is_hot,
            None if self.weights is None else self.weights.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """Return a copy in page-locked host memory, from which `to(..., non_blocking=True)` is asynchronous."""
        dense, labels = self.dense_features.pin_memory(), self.labels.pin_memory()
        sparse = _known_as_before(self.sparse_features, self.sparse_features.pin_memory())
        weights = None if self.weights is None else self.weights.pin_memory()
        return Batch(dense, sparse, labels, self.is_hot, weights)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of all tensors until `stream` is done with them."""
        for tensor in (self.dense_features, self.sparse_features, self.labels, self.weights):
            if tensor is not None:
                tensor.record_stream(stream)


def _known_as_before(features: KeyedJaggedTensor, copy: KeyedJaggedTensor) -> KeyedJaggedTensor:
    note_bounds(copy, bounds_of(features))
    return copy
