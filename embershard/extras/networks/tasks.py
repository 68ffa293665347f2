"""Layers over the interaction for several labels: shared bottom, MMoE and PLE, and a tower for each label.

Letters: B samples, I numbers of the interaction, E experts, W numbers of an expert's output, T labels. A label with
classes is one label here, whose tower has an output for each class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.mlp import MLP

from embershard.models.config import ModelConfig
from embershard.models.loss import OwnOutputs


class SharedBottom(nn.Module):
    """One MLP for all labels (Caruana, "Multitask Learning", 1997): x_k = f(x) for every label k.

    >>> [each.shape for each in SharedBottom(5, [4, 3], num_labels=2)(torch.ones(7, 5))]
    [torch.Size([7, 3]), torch.Size([7, 3])]
    """

    def __init__(self, width: int, layers: Sequence[int], num_labels: int) -> None:
        super().__init__()
        self.bottom, self._num_labels = MLP(width, list(layers)), num_labels

    def forward(self, features: Tensor) -> list[Tensor]:
        """Return for each label [B, W], of features [B, I]."""
        return [self.bottom(features)] * self._num_labels


class MMoE(nn.Module):
    """Experts, and a gate for each label (Ma et al., "Modeling Task Relationships in Multi-task Learning with
    Multi-gate Mixture-of-Experts", KDD 2018, equations 5 to 7).

    ```text
    x_k = sum over the experts i of g_k(x)_i f_i(x)      g_k(x) = softmax(W_k x + b_k)
    ```

    >>> [each.shape for each in MMoE(5, [4, 3], num_experts=2, num_labels=2)(torch.ones(7, 5))]
    [torch.Size([7, 3]), torch.Size([7, 3])]
    """

    def __init__(self, width: int, layers: Sequence[int], num_experts: int, num_labels: int) -> None:
        super().__init__()
        self.experts = _experts(width, layers, num_experts)
        self.gates = nn.ModuleList(nn.Linear(width, num_experts) for _ in range(num_labels))

    def forward(self, features: Tensor) -> list[Tensor]:
        """Return for each label [B, W], of features [B, I]."""
        found = [expert(features) for expert in self.experts]
        return [_mixture(gate(features), found) for gate in self.gates]


class PLE(nn.Module):
    """Progressive layered extraction: levels of shared experts and of experts of one label (Tang et al., "Progressive
    Layered Extraction", RecSys 2020, equations 1 to 7).

    ```text
    x_k = softmax(W_k x_k' + b_k) . [experts of label k of x_k', shared experts of x_s']      for every label k
    x_s = softmax(W_s x_s' + b_s) . [experts of all labels, shared experts]                   not in the last level
    ```

    x_k' and x_s' are what the level before gave; in the first level all are the features.

    >>> ple = PLE(5, [4, 3], num_experts=2, num_label_experts=1, num_levels=2, num_labels=2)
    >>> [each.shape for each in ple(torch.ones(7, 5))]
    [torch.Size([7, 3]), torch.Size([7, 3])]
    """

    def __init__(
        self,
        width: int,
        layers: Sequence[int],
        num_experts: int,
        num_label_experts: int,
        num_levels: int,
        num_labels: int,
    ) -> None:
        super().__init__()
        counts, self._num_labels = (num_experts, num_label_experts, num_labels), num_labels
        widths = [width, *[layers[-1]] * (num_levels - 1)]
        last = num_levels - 1
        self.levels = nn.ModuleList(
            _Extraction(inputs, layers, *counts, is_last=number == last) for number, inputs in enumerate(widths)
        )

    def forward(self, features: Tensor) -> list[Tensor]:
        """Return for each label [B, W], of features [B, I]."""
        found = [features] * (self._num_labels + 1)
        for level in self.levels:
            found = level(found)
        return found


class _Extraction(nn.Module):
    """A level of `PLE`."""

    def __init__(
        self,
        width: int,
        layers: Sequence[int],
        num_experts: int,
        num_label_experts: int,
        num_labels: int,
        *,
        is_last: bool,
    ) -> None:
        super().__init__()
        self.shared = _experts(width, layers, num_experts)
        self.of_labels = nn.ModuleList(_experts(width, layers, num_label_experts) for _ in range(num_labels))
        self.gates = nn.ModuleList(nn.Linear(width, num_experts + num_label_experts) for _ in range(num_labels))
        self.shared_gate = None if is_last else nn.Linear(width, num_experts + num_labels * num_label_experts)

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        """Return for each label, and unless this is the last level for the next one's shared experts, [B, W]; of
        features for each label and for the shared experts."""
        shared = [expert(features[-1]) for expert in self.shared]
        of_labels: Any = self.of_labels
        own = [[expert(x) for expert in experts] for experts, x in zip(of_labels, features, strict=False)]
        found = [_mixture(gate(x), [*mine, *shared]) for gate, x, mine in zip(self.gates, features, own, strict=False)]
        if self.shared_gate is not None:
            every = [output for mine in own for output in mine]
            found.append(_mixture(self.shared_gate(features[-1]), [*every, *shared]))
        return found


def _experts(width: int, layers: Sequence[int], count: int) -> nn.ModuleList:
    return nn.ModuleList(MLP(width, list(layers)) for _ in range(count))


def _mixture(scores: Tensor, outputs: list[Tensor]) -> Tensor:
    """Return the mean [B, W] of E outputs [B, W], by the softmax of scores [B, E]."""
    return (scores.softmax(dim=1).unsqueeze(1) @ torch.stack(outputs, dim=1)).squeeze(1)


class Towers(OwnOutputs):
    """An MLP for each label over what `bottom` gives it; in place of the MLP over the interaction.

    With a funnel, labels come after each other, as click and buy, and each one's tower gives the probability under the
    condition of the one before. Outputs are the logits of the products (Ma et al., "Entire Space Multi-Task Model",
    SIGIR 2018, equation 2), so that the model learns from all samples.

    Args:
        bottom: from features [B, I] to T times [B, width].
        layers: of a tower, without its outputs.
        widths: outputs of each label's tower.
        funnel: places of the funnel's labels, the first one first.

    Attributes:
        last_layers: of each label.
    """

    def __init__(
        self,
        bottom: Callable[[Tensor], list[Tensor]],
        width: int,
        layers: Sequence[int],
        widths: Sequence[int],
        funnel: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.bottom, self._steps = bottom, list(pairwise(funnel))
        self.towers = nn.ModuleList(
            nn.Sequential(MLP(width, list(layers)), nn.Linear([width, *layers][-1], each)) for each in widths
        )

    @property
    def last_layers(self) -> list[nn.Linear]:
        return [tower[1] for tower in self.towers]  # type: ignore[index, misc]

    def forward(self, features: Tensor) -> Tensor:
        """Return the outputs [B, sum of the widths] of features [B, I]."""
        found = [tower(x) for tower, x in zip(self.towers, self.bottom(features), strict=True)]
        for before, after in self._steps:
            found[after] = logit_of_both(found[before], found[after])
        return torch.cat(found, dim=1)


def logit_of_both(first: Tensor, second: Tensor) -> Tensor:
    """Return the logit of the product of the probabilities with these logits: -log(e^-a + e^-b + e^-(a + b)).

    >>> logit_of_both(torch.tensor(0.0), torch.tensor(0.0)).sigmoid()
    tensor(0.2500)
    """
    return -torch.stack([-first, -second, -first - second]).logsumexp(dim=0)


def build_towers(config: ModelConfig, width: int, heads: Mapping[str, range]) -> Towers:
    """Return the layers of `config` over an interaction of `width` numbers; `heads` are the target's."""
    layers, count = config.expert_layers, len(heads)
    if config.arch == "shared_bottom":
        bottom: nn.Module = SharedBottom(width, layers, count)
    elif config.arch == "mmoe":
        bottom = MMoE(width, layers, config.experts, count)
    else:
        bottom = PLE(width, layers, config.experts, config.label_experts, config.levels, count)
    funnel = [list(heads).index(name) for name in config.funnel]
    return Towers(bottom, layers[-1], config.over_arch_layer_sizes[:-1], [*map(len, heads.values())], funnel)
