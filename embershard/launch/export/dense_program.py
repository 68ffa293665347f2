"""The layers behind the tables as a program of torch operations, which needs neither embershard nor TorchRec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from embershard.data import Schema
from embershard.distributed.checkpoint.rows import saved_rows
from embershard.errors import CheckpointError
from embershard.models import ModelConfig, build_model

#: Of the checkpoint's group of the model, and of the model in `DLRMTrain`.
_PREFIX = "model.model."
_EXAMPLES = 4  # samples of the example by which the program is recorded


class DenseLayers(nn.Module):
    """From dense features [B, D] and pooled embeddings [B, F, dim] to outputs [B], of several labels [B, T]: a model of
    TorchRec without its tables."""

    def __init__(self, model: Any, schema: Schema, embedding_dim: int) -> None:
        super().__init__()
        self.dense_arch, self.inter_arch, self.over_arch = model.dense_arch, model.inter_arch, model.over_arch
        self._keys, self._dim = schema.keys, embedding_dim
        self._takes_keyed = hasattr(model.inter_arch, "deep_fm")
        tables = model.sparse_arch.embedding_bag_collection.embedding_bag_configs()
        self._order = [schema.keys.index(name) for table in tables for name in table.feature_names]

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Return the outputs."""
        sparse: Any = pooled if self._order == sorted(self._order) else pooled[:, self._order]  # by table
        if self._takes_keyed:
            sparse = KeyedTensor(self._keys, [self._dim] * len(self._keys), pooled.flatten(1))
        return self.over_arch(self.inter_arch(self.dense_arch(dense), sparse)).squeeze(-1)


def dense_layers(config: ModelConfig, schema: Schema, checkpoint: Path) -> DenseLayers:
    """Return the layers behind the tables, with the weights in a verified checkpoint, on the CPU.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    model: Any = build_model(config, schema, torch.device("cpu")).model
    layers = DenseLayers(model, schema, config.embedding_dim).eval()
    for name, parameter in layers.named_parameters():
        value = torch.cat(list(saved_rows(checkpoint, f"{_PREFIX}{name}")))
        if value.shape != parameter.shape:
            raise CheckpointError(
                f"{checkpoint}: {name} has the shape {list(value.shape)}, needed {list(parameter.shape)}."
            )
        parameter.data.copy_(value)
    return layers


def dense_program(
    layers: DenseLayers, num_dense: int, num_sparse: int, embedding_dim: int
) -> torch.export.ExportedProgram:
    """Return the layers as a program for any number of samples."""
    example = (torch.zeros(_EXAMPLES, num_dense), torch.zeros(_EXAMPLES, num_sparse, embedding_dim))
    with torch.no_grad():
        batch = torch.export.Dim.DYNAMIC
        return torch.export.export(layers, example, dynamic_shapes=({0: batch}, {0: batch}))
