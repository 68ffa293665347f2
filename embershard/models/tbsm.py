"""Time-based Sequence Model: https://arxiv.org/abs/2008.11922 (Ishkhanov et al., 2020), section 2."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.mlp import MLP

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
