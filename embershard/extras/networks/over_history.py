"""Networks over a user's history: DIN and TBSM.

Letters: B samples, L the longest history of them, P features of an event (item, category, ...), O other features, D
the dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.mlp import MLP


class DIN(nn.Module):
    """Attention over a user's history by the item that is scored.

    ```text
    w_i = unit([h_i, t, h_i - t, h_i * t])       for every event i of the history
    logit = over([t, sum of w_i h_i, t * sum of w_i h_i, others])
    ```

    The weights are not normalized, so that a long interest counts more than a short one (section 4.3). With P features
    of an event of dim D, h_i and t have E = P D numbers. The product in the last line is an addition to the paper: the
    layers after it need not learn a multiplication. Hidden layers have ReLU, or PReLU with a slope each (equation 2).

    The paper's Dice (equation 3) is missing: it takes means and variances of a batch, so losses would depend on the
    number of ranks, and a batch that is left out would leave its traces. So is its regularization by mini-batch.

    Args:
        num_features: P.
        num_others: O, other features of dim D.
        dim: D.
        history_layers: layer widths of the activation unit, without its last one of width 1.
        over_layers: layer widths of the last MLP; the last one is T, the number of labels.
        activation: "relu" or "prelu".

    >>> model = DIN(num_features=1, num_others=0, dim=4, history_layers=[8], over_layers=[8, 1])
    >>> is_event = torch.tensor([[True, True, False]])
    >>> model(torch.ones(1, 1, 4), torch.ones(1, 3, 1, 4), is_event, torch.ones(1, 0, 4)).shape
    torch.Size([1, 1])
    """

    def __init__(
        self,
        num_features: int,
        num_others: int,
        dim: int,
        history_layers: Sequence[int],
        over_layers: Sequence[int],
        activation: str = "relu",
    ) -> None:
        super().__init__()
        event = num_features * dim
        function: Any = nn.PReLU if activation == "prelu" else torch.relu  # a class: one slope for each layer
        unit = MLP(4 * event, list(history_layers), activation=function)
        self.unit = nn.Sequential(unit, nn.Linear(history_layers[-1], 1))
        *hidden, last = over_layers
        width = 3 * event + num_others * dim
        over = MLP(width, hidden, activation=function)
        self.over = nn.Sequential(over, nn.Linear([width, *hidden][-1], last))

    @property
    def event_layers(self) -> nn.Module:
        """Layers that see each event by itself."""
        return self.unit

    def forward(self, target: Tensor, history: Tensor, is_event: Tensor, others: Tensor) -> Tensor:
        """Return the outputs [B, T] of targets [B, P, D] with histories [B, L, P, D] and other features [B, O, D].

        `is_event`, bool [B, L], is False behind a history's end.
        """
        item, events = target.flatten(1), history.flatten(2)
        beside = item.unsqueeze(1).expand_as(events)
        weights = self.unit(torch.cat([events, beside, events - beside, events * beside], dim=2))
        interest = (weights * is_event.unsqueeze(2) * events).sum(dim=1)
        return self.over(torch.cat([item, interest, item * interest, others.flatten(1)], dim=1))


_NO_EVENT = -1e4  # as a score; not minus infinity: a history may be empty


class TBSM(nn.Module):
    """A DLRM for every event of a user's history and for the item that is scored, and attention to the latter.

    ```text
    z_i = step([vectors of event i and of the other features, their dot products])    of length 1
    a = softmax of s z_i . z_t over the events i       s: learned, at first sqrt(Z)
    logit = over([z_t, c, z_t * c])                    c = sum of a_i z_i; zeros without a history
    ```

    The paper's time series layer has an MLP over the dot products of histories of one length; the softmax takes
    histories of any length. The product in the last line is an addition.

    Args:
        num_features: P, features of an event.
        num_others: O, other features, alike for all events of a sample.
        dim: D.
        history_layers: layer widths of the MLP of a step; the last one is Z, the numbers of z.
        over_layers: layer widths of the last MLP; the last one is T, the number of labels.

    >>> model = TBSM(num_features=1, num_others=1, dim=4, history_layers=[8], over_layers=[8, 1])
    >>> is_event = torch.tensor([[True, True, False]])
    >>> model(torch.ones(1, 1, 4), torch.ones(1, 3, 1, 4), is_event, torch.ones(1, 1, 4)).shape
    torch.Size([1, 1])
    """

    def __init__(
        self, num_features: int, num_others: int, dim: int, history_layers: Sequence[int], over_layers: Sequence[int]
    ) -> None:
        super().__init__()
        count = num_features + num_others
        self._pairs = [(a, b) for a in range(count) for b in range(a)]
        *hidden, width = history_layers
        inputs = count * dim + len(self._pairs)
        self.step = nn.Sequential(MLP(inputs, hidden), nn.Linear([inputs, *hidden][-1], width))
        self.scale = nn.Parameter(torch.tensor([math.sqrt(width)]))
        *hidden, last = over_layers
        self.over = nn.Sequential(MLP(3 * width, hidden), nn.Linear([3 * width, *hidden][-1], last))

    @property
    def event_layers(self) -> nn.Module:
        """Layers that see each event by itself."""
        return self.step

    def forward(self, target: Tensor, history: Tensor, is_event: Tensor, others: Tensor) -> Tensor:
        """Return the outputs [B, T] of targets [B, P, D] with histories [B, L, P, D] and other features [B, O, D].

        `is_event`, bool [B, L], is False behind a history's end.
        """
        steps = torch.cat([history, target.unsqueeze(1)], dim=1)  # [B, L + 1, P, D]
        around = others.unsqueeze(1).expand(-1, steps.shape[1], -1, -1)
        z = nn.functional.normalize(self._step(torch.cat([steps, around], dim=2)), dim=2)
        past, now = z[:, :-1], z[:, -1]
        scores = self.scale * (past @ now.unsqueeze(2)).squeeze(2)
        weights = scores.masked_fill(~is_event, _NO_EVENT).softmax(dim=1) * is_event
        context = (weights.unsqueeze(1) @ past).squeeze(1)
        return self.over(torch.cat([now, context, now * context], dim=1))

    def _step(self, vectors: Tensor) -> Tensor:
        """Return z [B, L + 1, Z] before it gets length 1, for vectors [B, L + 1, P + O, D] of every step."""
        dots = vectors @ vectors.transpose(2, 3)
        each = [dots[:, :, a, b, None] for a, b in self._pairs]
        return self.step(torch.cat([vectors.flatten(2), *each], dim=2))
