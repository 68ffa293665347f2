"""Batches of samples: the input of a model.

Letters: B samples of a batch, D dense features, F sparse features, N ids of all bags.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def micro_batches(self, count: int) -> list[Batch]:
        """Return the samples in `count` batches, one after the other, of which the first ones may have one more; in
        fewer where there are fewer samples.

        >>> ids = KeyedJaggedTensor(["user", "item"], torch.tensor([3, 1, 4, 1, 5]), lengths=torch.tensor([1, 2, 0, 2]))
        >>> _, second = Batch(torch.zeros(2, 13), ids, torch.zeros(2)).micro_batches(2)
        >>> second.sparse_features["user"].values().tolist(), second.sparse_features["item"].values().tolist()
        ([1, 4], [1, 5])
        """
        sizes = [len(part) for part in self.labels.tensor_split(max(1, min(count, self.num_samples)))]
        if len(sizes) == 1:
            return [self]
        features = self.sparse_features
        keys, bounds = features.keys(), bounds_of(features)
        lengths = features.lengths().view(len(keys), -1).split(sizes, dim=1)
        num_ids = torch.stack([part.sum(dim=1) for part in lengths])  # [micro-batches, F]
        by_piece = torch.arange(num_ids.numel(), dtype=torch.int32).view(len(keys), -1).t().flatten()
        _, ids, weights = torch.ops.fbgemm.permute_1D_sparse_data(
            by_piece, num_ids.t().flatten(), features.values(), features.weights_or_none(), features.values().numel()
        )
        ends = num_ids.sum(dim=1).tolist()
        of_ids = [None] * len(sizes) if weights is None else weights.split(ends)
        sparse = [
            KeyedJaggedTensor(keys, own, of_own, part.contiguous().flatten(), stride=part.shape[1])
            for own, of_own, part in zip(ids.split(ends), of_ids, lengths, strict=True)
        ]
        for each in sparse:
            note_bounds(each, bounds)
        weighted = [None] * len(sizes) if self.weights is None else self.weights.split(sizes)
        parts = zip(self.dense_features.split(sizes), sparse, self.labels.split(sizes), weighted, strict=True)
        return [Batch(dense, own, labels, self.is_hot, of_own) for dense, own, labels, of_own in parts]

    @staticmethod
    def joined(micro_batches: Sequence[Batch]) -> Batch:
        """Return one batch of the samples of several, one after the other."""
        keys = micro_batches[0].sparse_features.keys()
        parts = [own[key] for key in keys for own in [each.sparse_features.to_dict() for each in micro_batches]]
        weights = [part.weights_or_none() for part in parts]
        features = KeyedJaggedTensor(
            keys,
            torch.cat([part.values() for part in parts]),
            None if weights[0] is None else torch.cat(weights),  # type: ignore[arg-type]  # all or none
            torch.cat([part.lengths() for part in parts]),
        )
        of_samples = [each.weights for each in micro_batches]
        return Batch(
            torch.cat([each.dense_features for each in micro_batches]),
            features,
            torch.cat([each.labels for each in micro_batches]),
            micro_batches[0].is_hot,
            None if of_samples[0] is None else torch.cat(of_samples),  # type: ignore[arg-type]
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
