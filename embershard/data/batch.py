"""What a model is fed: the schema of a sample, and a batch of samples.

Letters: B samples of a batch, D dense features, F sparse features, N ids of all bags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from embershard.errors import ConfigError


@dataclass(frozen=True)
class SparseFeature:
    """One categorical column and the size of its embedding table.

    ``num_rows`` counts the reserved row 0, which stands for a missing value.
    """

    name: str
    num_rows: int

    def __post_init__(self) -> None:
        if self.num_rows < 2:
            raise ConfigError(
                f"sparse feature {self.name!r} has num_rows={self.num_rows}; needed at least 2: "
                "the reserved row 0 for missing values, and one for real ids"
            )


@dataclass(frozen=True)
class Schema:
    """The columns of a sample, in order.

    Raises:
        ConfigError: two columns have the same name, or there is no sparse column.
    """

    dense: tuple[str, ...]
    sparse: tuple[SparseFeature, ...]
    label: str = "label"

    def __post_init__(self) -> None:
        names = [*self.dense, *(feature.name for feature in self.sparse), self.label]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"the schema has columns twice: {', '.join(twice)}; every name must be unique")
        if not self.sparse:
            raise ConfigError("the schema has no sparse column; a recommendation model needs at least one")

    @property
    def keys(self) -> list[str]:
        """Names of the sparse features: the keys of every batch's KeyedJaggedTensor."""
        return [feature.name for feature in self.sparse]

    @property
    def num_dense(self) -> int:
        """Number of dense features."""
        return len(self.dense)


@dataclass
class Batch(Pipelineable):
    """B samples of one rank.

    The attribute names are those that ``torchrec.models.dlrm.DLRMTrain`` reads. B may be 0: the end of an
    evaluation gives some ranks nothing, and every rank must still take part in the step.

    Attributes:
        dense_features: float32 [B, D].
        sparse_features: F keys, int64 values [N], int32 lengths [F * B].
        labels: float32 [B], 0 or 1.
    """

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor

    @property
    def num_samples(self) -> int:
        """B, the number of samples of this rank's batch."""
        return int(self.labels.shape[0])

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """A copy on ``device`` (or this batch itself, where it is there already)."""
        return Batch(
            self.dense_features.to(device, non_blocking=non_blocking),
            self.sparse_features.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """A copy in page-locked host memory, from which ``to(..., non_blocking=True)`` is asynchronous."""
        return Batch(self.dense_features.pin_memory(), self.sparse_features.pin_memory(), self.labels.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of all tensors until ``stream`` is done with them."""
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)
