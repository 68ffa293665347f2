"""The layers around the tables as a program of torch operations, which needs neither embershard nor TorchRec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from embershard.data import Batch, Schema
from embershard.distributed.checkpoint.load import load_served
from embershard.errors import ConfigError
from embershard.models import ModelConfig, ModelTable, build_model
from embershard.models.history import features_read_as_ids
from embershard.models.loss import class_logits
from embershard.models.own_model import OwnModel
from embershard.models.table_modules import collections_of, tables_in
from embershard.settings.own_code import place_of

_EXAMPLES, _IDS = 4, 2  # samples of the example by which the program is recorded, and ids in each of its sequences


class GivenFeatures:
    """In place of a batch's sparse features: what the tables have found for them.

    Attributes:
        found: of each lookup, pooled embeddings [B, dim], or the rows [N, dim] of a sequence and its lengths [B].
        ids: by name, the features that the model reads as ids: ids [N] and lengths [B].
    """

    def __init__(
        self,
        found: Sequence[Tensor | tuple[Tensor, Tensor]],
        num_samples: int,
        ids: Mapping[str, tuple[Tensor, Tensor]],
    ) -> None:
        self.found, self._num_samples, self.ids = found, num_samples, ids

    def __getitem__(self, name: str) -> JaggedTensor:
        return PlainSequence(*self.ids[name])

    def stride(self) -> int:
        """Return the number of samples, as a KeyedJaggedTensor does."""
        return self._num_samples


class PlainSequence(JaggedTensor):
    """A JaggedTensor without operations of FBGEMM.

    >>> sequence = PlainSequence(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0, 1]))
    >>> sequence.to_padded_dense(2).squeeze(-1).tolist()
    [[1.0, 2.0], [0.0, 0.0], [3.0, 0.0]]
    """

    def __init__(self, rows: Tensor, lengths: Tensor) -> None:
        super().__init__(rows, lengths=lengths, offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Return [B, desired_length, dim]."""
        rows, lengths = self.values(), self.lengths()
        length = lengths.max().item() if desired_length is None else desired_length
        steps = torch.arange(length)
        places = torch.where(steps < lengths.unsqueeze(1), self.offsets()[:-1].unsqueeze(1) + steps, rows.shape[0])
        return torch.cat([rows, rows.new_full((1, rows.shape[1]), padding_value)])[places]


class _GivenCollection(nn.Module):
    """In place of a collection of tables: hands out what was found in them."""

    def __init__(self, tables: Sequence[ModelTable], configs: list[Any], first: int) -> None:
        super().__init__()
        names = get_embedding_names_by_table(configs)
        self._names = [name for each in names for name in each]
        self._dims = [table.dim for table in tables for _ in table.features]
        self._places, self._is_sequence = slice(first, first + len(self._names)), tables[0].is_sequence

    def forward(self, features: GivenFeatures) -> Any:
        """Return what the collection would: a KeyedTensor, or a dict of JaggedTensor."""
        found: Any = features.found[self._places]
        if self._is_sequence:
            return {name: PlainSequence(*each) for name, each in zip(self._names, found, strict=True)}
        return KeyedTensor(self._names, self._dims, torch.cat(found, dim=1))


class DenseLayers(nn.Module):
    """A model without its tables.

    Args:
        model: of `build_model`; its collections are replaced.

    Attributes:
        lookups: table and feature of each lookup, in the order of the tables and of their features.
        read_as_ids: features of which the model reads the ids themselves; they come after the lookups.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        tables, first = list(tables_in(model)), 0
        self.lookups = [(table, feature) for table in tables for feature in table.features]
        for path, collection in list(collections_of(model)):
            own = [table for table in tables if table.module == path]
            configs = collection.embedding_configs() if own[0].is_sequence else collection.embedding_bag_configs()
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, _GivenCollection(own, configs, first))
            first += sum(len(table.features) for table in own)
        self.model: Any = model
        self.read_as_ids = features_read_as_ids(model)

    def forward(self, dense: Tensor, found: list[Tensor]) -> Tensor:
        """Return the outputs, [B] or of several labels [B, T], of dense features [B, D].

        Args:
            found: of each lookup the pooled embeddings [B, dim]; or, for a sequence, rows [N, dim] and lengths [B]. Of
                features that are read as ids, ids [N] and lengths [B].
        """
        parts = iter(found)
        features: Any = GivenFeatures(
            [(next(parts), next(parts)) if table.is_sequence else next(parts) for table, _ in self.lookups],
            dense.shape[0],
            {name: (next(parts), next(parts)) for name in self.read_as_ids},
        )
        if isinstance(self.model, OwnModel):
            # A loss may read labels and weights: of the shapes of training.
            target, num_samples = self.model.target, dense.shape[0]
            labels = dense.new_zeros((num_samples, len(target.labels)) if len(target.labels) > 1 else num_samples)
            weights = None if target.weight is None else dense.new_ones(num_samples)
            outputs = self.model.model(Batch(dense, features, labels, weights=weights))
            outputs = outputs[1] if isinstance(outputs, tuple) else outputs
        else:
            outputs = self.model.model(dense, features)
        return class_logits(self.model.target, outputs.squeeze(-1) if outputs.dim() > 1 else outputs)


def dense_layers(config: ModelConfig, schema: Schema, checkpoint: Path) -> DenseLayers:
    """Return the layers around the tables, with the weights in a verified checkpoint, on the CPU.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    layers = DenseLayers(build_model(config, schema, torch.device("cpu"))).eval()
    load_served(checkpoint, layers.model.state_dict(), alone=True)
    return layers


def dense_program(layers: DenseLayers, num_dense: int) -> torch.export.ExportedProgram:
    """Return the layers as a program for any number of samples.

    Raises:
        ConfigError: torch.export cannot record a model of one's own.
    """
    found = []
    for table, _ in layers.lookups:
        if table.is_sequence:
            found += [torch.zeros(_EXAMPLES * _IDS, table.dim), torch.full((_EXAMPLES,), _IDS)]
        else:
            found.append(torch.zeros(_EXAMPLES, table.dim))
    for _ in layers.read_as_ids:
        found += [torch.zeros(_EXAMPLES * _IDS, dtype=torch.int64), torch.full((_EXAMPLES,), _IDS)]
    rows = {0: torch.export.Dim.DYNAMIC}
    try:
        with torch.no_grad():
            example = torch.zeros(_EXAMPLES, num_dense), found
            return torch.export.export(layers, example, dynamic_shapes=(rows, [rows] * len(found)))
    except Exception as error:
        if not isinstance(layers.model, OwnModel):
            raise
        first, *_ = (str(error).strip() or type(error).__name__).splitlines()
        raise ConfigError(
            f"torch.export cannot record this model ({place_of(error)}): {first.rstrip('. ')}. "
            "docs/serving.md says what a model may do. Or export the tables alone (--format parquet)."
        ) from error
