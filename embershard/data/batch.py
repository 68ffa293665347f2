"""A sample's schema, and batches of samples: the input of a model.

Letters: B samples of a batch, D dense features, F sparse features, N ids of all bags.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from embershard.errors import ConfigError


@dataclass(frozen=True)
class SparseFeature:
    """One categorical column and the rows of its embedding table, of which row 0 stands for a missing value.

    A table of one row has no other: all its ids are row 0.

    >>> SparseFeature("user", num_rows=1000).name
    'user'
    """

    name: str
    num_rows: int

    def __post_init__(self) -> None:
        if not self.name or any(c in "./\\" or not c.isprintable() for c in self.name):
            raise ConfigError(
                f"sparse feature {self.name!r}: needed a name without dot, slash, backslash and control characters, "
                "since modules, tensors and files are named after it; rename the column"
            )
        if self.num_rows < 1:
            raise ConfigError(f"sparse feature {self.name!r} has num_rows={self.num_rows}; needed at least 1")


@dataclass(frozen=True)
class Schema:
    """The columns of a sample, in order.

    >>> schema = Schema(dense=("age",), sparse=(SparseFeature("user", 1000), SparseFeature("item", 50)))
    >>> schema.keys, schema.num_dense
    (['user', 'item'], 1)

    Raises:
        ConfigError: two columns have the same name, or there is no sparse column.
    """

    dense: tuple[str, ...]
    sparse: tuple[SparseFeature, ...]
    label: str = "label"

    def __post_init__(self) -> None:
        names = [*self.dense, *self.keys, self.label]
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
        return len(self.dense)


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
        labels: float32 [B], 0 or 1.
        is_hot: every sample of this step, on all ranks, looks up hot rows only (`sharding.mode = "hot_cold"`); the same
            on all ranks.
    """

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor
    is_hot: bool = False

    @property
    def num_samples(self) -> int:
        return int(self.labels.shape[0])

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Return a copy on `device`, or this batch itself where it is there already."""
        return Batch(
            self.dense_features.to(device, non_blocking=non_blocking),
            self.sparse_features.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            self.is_hot,
        )

    def pin_memory(self) -> Batch:
        """Return a copy in page-locked host memory, from which `to(..., non_blocking=True)` is asynchronous."""
        dense, sparse, labels = self.dense_features, self.sparse_features, self.labels
        return Batch(dense.pin_memory(), sparse.pin_memory(), labels.pin_memory(), self.is_hot)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of all tensors until `stream` is done with them."""
        for tensor in (self.dense_features, self.sparse_features, self.labels):
            tensor.record_stream(stream)
