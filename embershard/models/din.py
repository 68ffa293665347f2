"""Deep Interest Network: https://arxiv.org/abs/1706.06978 (Zhou et al., 2018), sections 4.3 and 4.4."""

from __future__ import annotations

from collections.abc import Sequence

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
    layers after it need not learn a multiplication.

    Args:
        num_features: P.
        num_others: O, other features of dim D.
        dim: D.
        history_layers: layer widths of the activation unit, without its last one of width 1.
        over_layers: layer widths of the last MLP; the last one is T, the number of labels.

    >>> model = DIN(num_features=1, num_others=0, dim=4, history_layers=[8], over_layers=[8, 1])
    >>> is_event = torch.tensor([[True, True, False]])
    >>> model(torch.ones(1, 1, 4), torch.ones(1, 3, 1, 4), is_event, torch.ones(1, 0, 4)).shape
    torch.Size([1, 1])
    """

    def __init__(
        self, num_features: int, num_others: int, dim: int, history_layers: Sequence[int], over_layers: Sequence[int]
    ) -> None:
        super().__init__()
        event = num_features * dim
        self.unit = nn.Sequential(MLP(4 * event, list(history_layers)), nn.Linear(history_layers[-1], 1))
        *hidden, last = over_layers
        width = 3 * event + num_others * dim
        self.over = nn.Sequential(MLP(width, hidden), nn.Linear([width, *hidden][-1], last))

    def forward(self, target: Tensor, history: Tensor, is_event: Tensor, others: Tensor) -> Tensor:
        """Return the outputs [B, T] of targets [B, P, D] with histories [B, L, P, D] and other features [B, O, D].

        `is_event`, bool [B, L], is False behind a history's end.
        """
        item, events = target.flatten(1), history.flatten(2)
        beside = item.unsqueeze(1).expand_as(events)
        weights = self.unit(torch.cat([events, beside, events - beside, events * beside], dim=2))
        interest = (weights * is_event.unsqueeze(2) * events).sum(dim=1)
        return self.over(torch.cat([item, interest, item * interest, others.flatten(1)], dim=1))
