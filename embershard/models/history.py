"""Embeddings of an item that is scored, of a user's history, and of all other features; and the models over them.

Letters: B samples, L the longest history of them, N all their events, P features of the scored item and Q >= P of an
event (item, category, ...), O other features, D the dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.mlp import MLP

from embershard.data.schema import Schema
from embershard.errors import DataError
from embershard.lazy_names import named
from embershard.models.config import HISTORY_LAYER_SIZES, ModelConfig
from embershard.models.dropout import add_dropout
from embershard.models.loss import WithLoss
from embershard.models.table_modules import bags_of, sequences_of
from embershard.models.tables import built_in_tables


@dataclass
class LookedUp:
    """Embeddings of samples, as they were looked up.

    Attributes:
        target: [B, P, D], of the item that is scored.
        others: [B, O, D], of the other features and, where there are any, of the dense ones.
        lengths: events of each sample, [B].
        history: of each feature of an event a JaggedTensor with rows [N, D], oldest event first.
        times: where the settings name them, int64 [B, 1] of the samples, and a JaggedTensor [N] of the events.
        order: [B], the samples from the longest history to the shortest; None in a program that is recorded.
        falling: their lengths in that order, on the host; in a program that is recorded the longest alone.
    """

    target: Tensor
    others: Tensor
    lengths: Tensor
    history: Sequence[Any]
    times: tuple[Tensor, Any] | None
    order: Tensor | None
    falling: list[Any]

    def padded(self) -> tuple[Tensor, ...]:
        """Return what a network is called with: target, history [B, L, Q, D] with zeros behind a history's end,
        is_event bool [B, L], False there, others, and where there are times, those of the events and the sample, int64
        [B, L + 1]. L is 1 at least.
        """
        longest = max(1, self.falling[0]) if self.falling else 1
        history = torch.stack([each.to_padded_dense(longest) for each in self.history], 2)
        is_event = torch.arange(longest, device=self.lengths.device) < self.lengths.unsqueeze(1)
        times = [] if self.times is None else [torch.cat([_padded(self.times[1], longest), self.times[0]], 1)]
        return self.target, history, is_event, self.others, *times


class HistoryEmbeddings(nn.Module):
    """Tables for sequences, which target and history share; bags of the other features; an MLP over the dense ones."""

    def __init__(self, config: ModelConfig, schema: Schema, device: torch.device) -> None:
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
        order, falling = self._check(lengths, names)
        target = [found[name].to_padded_dense(1)[:, 0] for name in self._target]
        others = [] if self.dense_arch is None else [self.dense_arch(dense)]
        if self.bags is not None:
            bags = self.bags(features).to_dict()
            others += [bags[name] for name in self._others]
        empty = target[0].new_zeros(lengths.shape[1], 0, self._dim)
        times = [found[name] for name in self.read_as_ids]
        return LookedUp(
            torch.stack(target, 1),
            torch.stack(others, 1) if others else empty,
            lengths[0],
            [found[name] for name in self._history],
            (_padded(times[0], 1), times[1]) if times else None,
            order,
            falling,
        )

    def _check(self, lengths: Tensor, names: Sequence[str]) -> tuple[Tensor | None, list[Any]]:
        """Return `order` and `falling` of `LookedUp`. `lengths` are [names, B]; a GPU's host waits once."""
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
            return None, [lengths[0].max().item()] if lengths.numel() else []
        falling, order = lengths[0].sort(descending=True, stable=True)
        on_host = torch.cat([falling, torch.stack(are_met)]).tolist()
        for is_met, problem in zip(on_host[len(falling) :], problems, strict=True):
            if not is_met:
                raise DataError(problem)
        return order, on_host[: len(falling)]


def _padded(ids: Any, length: int) -> Tensor:
    """Return a JaggedTensor's ids as int64 [B, length], zeros behind a sample's end."""
    values, lengths = ids.values(), ids.lengths()
    steps = torch.arange(length, device=lengths.device)
    places = (lengths.cumsum(0) - lengths).unsqueeze(1) + steps
    return torch.cat([values, values.new_zeros(1)])[torch.where(steps < lengths.unsqueeze(1), places, values.shape[0])]


class HistoryModel(nn.Module):
    """Tables, and a network over what they give; for `WithLoss`, which adds the loss. `runs`: calls the network with
    what was looked up, in groups of samples."""

    def __init__(self, embeddings: HistoryEmbeddings, network: nn.Module, runs: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embeddings, self.network, self._runs = embeddings, network, runs

    def forward(self, dense_features: Tensor, sparse_features: Any) -> Tensor:
        """Return the outputs [B, T]."""
        looked = self.embeddings(dense_features, sparse_features)
        return self._runs(self.network, looked)


def features_read_as_ids(model: nn.Module) -> list[str]:
    """Return the features whose ids themselves a model of `build_model` reads: they look up no table."""
    return [name for each in model.modules() if isinstance(each, HistoryEmbeddings) for name in each.read_as_ids]


def build_with_history(config: ModelConfig, schema: Schema, device: torch.device) -> nn.Module:
    """Build a DIN, a TBSM, or the network of an `ArchSection`: see `build_model`."""
    embeddings = HistoryEmbeddings(config, schema, device)
    sizes = list(config.history_layer_sizes or HISTORY_LAYER_SIZES)
    over, dim = config.over_layers(len(schema.target.labels)), config.embedding_dim
    with device:
        network: Any
        if config.section is not None:
            network = named(config.section.network)(len(config.history), dim, config.section, over)
            costs, at_once = config.section.token_costs(len(config.history), dim), config.section.samples_at_once
        else:
            counts, own = (len(config.target), embeddings.num_others, dim), {"activation": config.activation}
            make = named(f"embershard.extras.networks.over_history:{config.arch.upper()}")
            network = make(*counts, sizes, over, **(own if config.arch == "din" else {}))
            costs, at_once = (sum(each.numel() for each in network.event_layers.parameters()), 0), None
        add_dropout(network.over, config.dropout)
        runs = partial(named("embershard.extras.length_groups.groups:run_in_groups"), costs=costs, at_once=at_once)
        return WithLoss(HistoryModel(embeddings, network, runs), schema.target, config.label_weighting)
