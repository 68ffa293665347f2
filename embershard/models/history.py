"""Embeddings of an item that is scored, of a user's history, and of all other features; and the models over them.

Letters: B samples, L the longest history of a batch, P features of an event (item, category, ...), O other features, D
the dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.mlp import MLP

from embershard.errors import DataError
from embershard.lazy_names import named
from embershard.models.config import HISTORY_LAYER_SIZES, ModelConfig
from embershard.models.dropout import add_dropout
from embershard.models.loss import WithLoss
from embershard.models.schema import SchemaLike
from embershard.models.table_modules import bags_of, sequences_of
from embershard.models.tables import built_in_tables


@dataclass
class LookedUp:
    """Embeddings of a batch, as the networks take them.

    Attributes:
        target: [B, P, D], of the item that is scored.
        history: [B, L, P, D], oldest event first; zeros behind a history's end.
        is_event: bool [B, L]; False behind a history's end.
        others: [B, O, D], of the other features and, where there are any, of the dense ones.
        times: int64 [B, L + 1], of the events and of the sample, where the settings name them.
    """

    target: Tensor
    history: Tensor
    is_event: Tensor
    others: Tensor
    times: Tensor | None = None


class HistoryEmbeddings(nn.Module):
    """Tables for sequences, which target and history share; bags of the other features; an MLP over the dense ones."""

    def __init__(self, config: ModelConfig, schema: SchemaLike, device: torch.device) -> None:
        super().__init__()
        self._target, self._history, self._dim = list(config.target), list(config.history), config.embedding_dim
        tables = built_in_tables(config, schema)
        self.sequences = sequences_of([table for table in tables if table.is_sequence])
        bags = [table for table in tables if not table.is_sequence]
        self.bags = bags_of(bags) if bags else None
        names = [feature.name for feature in schema.sparse if feature.name not in config.event_features]
        num_dense = len(schema.dense)
        layers = list(config.dense_arch_layer_sizes)
        self.dense_arch = MLP(num_dense, layers, device=device) if num_dense else None
        self._others, self.read_as_ids = names, list(config.times)
        self._most = None if config.section is None else (f"model.{config.arch}.max_events", config.section.max_events)
        self.num_others = len(names) + (num_dense > 0)

    def forward(self, dense: Tensor, features: Any) -> LookedUp:
        """Look up a batch's features.

        Raises:
            DataError: a sample's histories have different lengths, or more events than the settings allow.
        """
        sequences = self.sequences(features)
        found = {name: sequences[name] for name in (*self._target, *self._history)}
        found |= {name: features[name] for name in self.read_as_ids}
        names = [*self._history, *self.read_as_ids[1:]]
        lengths = torch.stack([found[name].lengths() for name in names])
        longest = self._check(lengths, names)
        target = [found[name].to_padded_dense(1)[:, 0] for name in self._target]
        history = [found[name].to_padded_dense(longest) for name in self._history]
        others = [] if self.dense_arch is None else [self.dense_arch(dense)]
        if self.bags is not None:
            bags = self.bags(features).to_dict()
            others += [bags[name] for name in self._others]
        is_event = torch.arange(longest, device=lengths.device) < lengths[0].unsqueeze(1)
        empty = target[0].new_zeros(is_event.shape[0], 0, self._dim)
        times = [_padded(found[name], length) for name, length in zip(self.read_as_ids, (1, longest), strict=False)]
        return LookedUp(
            torch.stack(target, 1),
            torch.stack(history, 2),
            is_event,
            torch.stack(others, 1) if others else empty,
            torch.cat(times[::-1], 1) if times else None,
        )

    def _check(self, lengths: Tensor, names: Sequence[str]) -> Any:
        """Return the length of the longest history, 1 at least. `lengths` are [names, B]; a GPU's host waits once."""
        differ = f"the features of model.history ({', '.join(names)}) have different numbers of ids in one sample"
        problems = [f"{differ}; needed an id in each for every event"]
        are_met = [(lengths == lengths[:1]).all()]
        if self._most is not None:
            setting, most = self._most
            longer = f"a history in {names[0]} has more events than {setting} = {most}"
            problems.append(f"{longer}; raise it, or shorten the histories")
            are_met.append((lengths <= most).all())
        if torch.compiler.is_exporting():  # a program has no branches on values
            for is_met, problem in zip(are_met, problems, strict=True):
                torch._assert_async(is_met, problem)
            return max(1, lengths[0].max().item()) if lengths.numel() else 1
        if not lengths.numel():
            return 1
        longest, *found = torch.stack([lengths[0].max(), *are_met]).tolist()
        for is_met, problem in zip(found, problems, strict=True):
            if not is_met:
                raise DataError(problem)
        return max(1, longest)


def _padded(ids: Any, length: int) -> Tensor:
    """Return a JaggedTensor's ids as int64 [B, length], zeros behind a sample's end."""
    values, lengths = ids.values(), ids.lengths()
    steps = torch.arange(length, device=lengths.device)
    places = (lengths.cumsum(0) - lengths).unsqueeze(1) + steps
    return torch.cat([values, values.new_zeros(1)])[torch.where(steps < lengths.unsqueeze(1), places, values.shape[0])]


class HistoryModel(nn.Module):
    """Tables, and a network over what they give; for `WithLoss`, which adds the loss."""

    def __init__(self, embeddings: HistoryEmbeddings, network: nn.Module) -> None:
        super().__init__()
        self.embeddings, self.network = embeddings, network

    def forward(self, dense_features: Tensor, sparse_features: Any) -> Tensor:
        """Return the outputs [B, T]."""
        looked = self.embeddings(dense_features, sparse_features)
        times = () if looked.times is None else (looked.times,)
        return self.network(looked.target, looked.history, looked.is_event, looked.others, *times)


def features_read_as_ids(model: nn.Module) -> list[str]:
    """Return the features whose ids themselves a model of `build_model` reads: they look up no table."""
    return [name for each in model.modules() if isinstance(each, HistoryEmbeddings) for name in each.read_as_ids]


def build_with_history(config: ModelConfig, schema: SchemaLike, device: torch.device) -> nn.Module:
    """Build a DIN, a TBSM, or the network of an `ArchSection`: see `build_model`."""
    embeddings = HistoryEmbeddings(config, schema, device)
    sizes = list(config.history_layer_sizes or HISTORY_LAYER_SIZES)
    over, dim = config.over_layers(len(schema.target.labels)), config.embedding_dim
    with device:
        network: Any
        if config.section is not None:
            network = named(config.section.network)(len(config.history), dim, config.section, over)
        else:
            counts, own = (len(config.target), embeddings.num_others, dim), {"activation": config.activation}
            make = named(f"embershard.extras.networks.over_history:{config.arch.upper()}")
            network = make(*counts, sizes, over, **(own if config.arch == "din" else {}))
        add_dropout(network.over, config.dropout)
        return WithLoss(HistoryModel(embeddings, network), schema.target, config.label_weighting)
