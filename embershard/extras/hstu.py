"""HSTU: layers of attention among the events of a user's history, up to the item that is scored.

Letters: B samples, P features of the scored item, Q >= P of an event, D the dim, C contextual tokens (one per other
feature), L the longest history of a batch, K scored items per sample, S = C + L + K tokens, H heads of dim d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, silu
from torchrec.modules.mlp import MLP

from embershard.lazy_names import named
from embershard.models.hstu_config import NUM_TIME_BUCKETS, TIME_BOUNDS, HstuConfig


@dataclass
class Pairs:
    """What attention knows of each two tokens of a sample, query before key: [B, S, S].

    Attributes:
        sees: bool; the query attends to the key.
        has_bias: bool; both are events or scored items.
        distance: of their positions, from 0 to the most events.
        bucket: of the difference of their times; None without times.
        lengths, num_tokens: as in `pairs_of`.
    """

    sees: Tensor
    has_bias: Tensor
    distance: Tensor
    bucket: Tensor | None
    lengths: Tensor
    num_tokens: tuple[int, int, int]


#: Of events and scored items in seconds, int64 [B, L + K]; and the least seconds of each bucket of their differences,
#: but the first.
Times = tuple[Tensor, Tensor]


def pairs_of(
    lengths: Tensor, times: Times | None, num_tokens: tuple[int, int, int], max_events: int, window: int | None
) -> Pairs:
    """Return the pairs of the tokens [context, events, scored items] of a batch.

    ```text
    query           sees
    context         all context, all events
    event i         all context, itself and the events before it
    scored item     all context, all events, itself
    ```

    With a window w, an event sees only w events before itself, and a scored item the last w. Nothing sees what stands
    behind a history's end.

    Args:
        lengths: events of each sample, [B].
        times: see `Times`; None without.
        num_tokens: C, L and K.
    """
    contexts, events, scored = num_tokens
    size, device = lengths.shape[0], lengths.device
    place = torch.arange(events, device=device)
    ones = torch.ones(size, contexts + scored, dtype=torch.bool, device=device)
    exists = torch.cat([ones[:, :contexts], place < lengths.unsqueeze(1), ones[:, contexts:]], dim=1)
    position = torch.cat(
        [
            lengths.new_full((size, contexts), -1),
            place.to(lengths.dtype).expand(size, -1),
            lengths.unsqueeze(1).expand(-1, scored),
        ],
        dim=1,
    )
    kind = torch.cat([torch.full((n,), k, device=device) for k, n in enumerate(num_tokens)])
    is_context, is_scored = kind == 0, kind == 2
    distance = position.unsqueeze(2) - position.unsqueeze(1)
    sees = distance >= 0
    if window is not None:
        sees = sees & (distance <= window)
    sees = (sees | is_context.unsqueeze(1)) & ~is_scored
    sees = sees | is_context | torch.eye(kind.shape[0], dtype=torch.bool, device=device)
    has_bias = (~is_context & ~is_context.unsqueeze(1)).expand_as(sees)
    bucket = None
    if times is not None:
        of_tokens, bounds = times
        moments = torch.cat([of_tokens.new_zeros(size, contexts), of_tokens], dim=1)
        ago = moments.unsqueeze(2) - moments.unsqueeze(1)
        bucket = torch.bucketize(ago, bounds, right=True)
    sees = sees & exists.unsqueeze(1)
    return Pairs(sees, has_bias, distance.clamp(0, max_events), bucket, lengths, num_tokens)


def attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, pairs: Pairs, divisor: int) -> Tensor:
    """Return `A v` of `HSTULayer`, [B, H, S, d], of queries (scaled), keys and values like it, and biases [B, S, S]."""
    scores = queries @ keys.transpose(2, 3)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) + bias.unsqueeze(1)
    weights = silu(scores) * pairs.sees.unsqueeze(1) / divisor
    return weights.to(values.dtype) @ values


def attend_to_all(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, lengths: Tensor, num_tokens: tuple[int, int, int],
    divisor: int,
) -> Tensor:  # fmt: skip
    """Return `attend` without a window."""
    pairs = pairs_of(lengths, None, num_tokens, num_tokens[1], None)
    return attend(queries, keys, values, bias, pairs, divisor)


class HSTULayer(nn.Module):
    """One layer: `x + out([u, a, u * a])`, with a the normalized attention and u its gate.

    ```text
    u, v, q, k = silu(into(norm(x)))                                   H heads of d numbers each
    A_ij = silu(q_i . k_j / sqrt(d) + position[i - j] + time[bucket of t_i - t_j]) / N      where i sees j, else 0
    a = attention_norm(A v)
    ```

    Scores and weights are float32 at least, also with automatic mixed precision: a sum over thousands of events has
    terms of very different sizes.
    """

    def __init__(self, dim: int, settings: HstuConfig, has_times: bool) -> None:
        super().__init__()
        self._heads, self._divisor, width = settings.num_heads, settings.max_events, settings.token_width(1)
        self._scale, self._dropout = settings.head_dim**-0.5, settings.linear_dropout
        self._kernel = None
        if settings.kernel == "fbgemm":
            self._kernel = partial(named("embershard.extras.hstu_fbgemm:attend"), instead=attend_to_all)
        self.norm, self.attention_norm = nn.LayerNorm(dim), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(dim, settings.token_width(4)), nn.Linear(settings.token_width(3), dim)
        self.position = nn.Parameter(torch.randn(settings.max_events + 1) * 0.02)
        self.time = nn.Parameter(torch.randn(NUM_TIME_BUCKETS) * 0.02) if has_times else None

    def forward(self, tokens: Tensor, pairs: Pairs) -> Tensor:
        """Return the next layer's tokens, [B, S, D]."""
        parts = silu(self.into(self.norm(tokens))).unflatten(2, (4, self._heads, -1)).permute(2, 0, 3, 1, 4)
        gate, values, queries, keys = parts  # [B, H, S, d]
        bias = self.position[pairs.distance]
        if self.time is not None:
            bias = bias + self.time[pairs.bucket]
        inputs = queries * self._scale, keys, values, bias * pairs.has_bias
        if self._kernel is not None and tokens.is_cuda:
            attended = self._kernel(*inputs, pairs.lengths, pairs.num_tokens, self._divisor)
        else:
            attended = attend(*inputs, pairs, self._divisor)
        attended, gate = (each.transpose(1, 2).flatten(2) for each in (attended, gate))
        attended = self.attention_norm(attended)
        gated = torch.cat([gate, attended, gate * attended], dim=2)
        return tokens + self.out(dropout(gated, self._dropout, self.training))


class HSTU(nn.Module):
    """Hierarchical Sequential Transduction Units (Zhai et al., Actions Speak Louder than Words, arXiv 2402.17152,
    section 3) over a user's history and the item that is scored.

    ```text
    tokens = [other features; event([features of event i]) for every i; event([features of the item, zeros])]
    logit = over(norm(the item's token after all layers))
    ```

    The zeros stand for those features of events that the item does not have, such as what the user did. `HSTULayer` has
    the attention: pointwise, without a softmax, so that a long interest counts more than a short one (section 3.2);
    `pairs_of` has what sees what. To the paper's layer are added, as MLPerf Training's DLRMv4 has them: the scores are
    scaled by 1 / sqrt(d), the last projection gets gate and attention beside their product, and N is one number (the
    most events of a history) for all batches.

    Sequences are padded to the longest history of the samples that go through the layers together, a group by length
    (`embershard/extras/length_groups/`); what stands behind a history's end is never seen.

    Args:
        num_features: Q, features of an event.
        dim: D.
        settings: sizes, mask and dropout.
        over_layers: layer widths of the last MLP; the last one is T, the number of labels.

    >>> model = HSTU(1, 4, HstuConfig(num_layers=1), over_layers=[8, 1])
    >>> is_event = torch.tensor([[True, True, False]])
    >>> model(torch.ones(1, 1, 4), torch.ones(1, 3, 1, 4), is_event, torch.ones(1, 2, 4)).shape
    torch.Size([1, 1])
    """

    _time_bounds: Tensor | None

    def __init__(self, num_features: int, dim: int, settings: HstuConfig, over_layers: Sequence[int]) -> None:
        super().__init__()
        self._settings, self._num_features = settings, num_features
        # On the device once: a copy in every forward would make a GPU's host wait.
        bounds = torch.tensor(TIME_BOUNDS) if settings.times else None
        self.register_buffer("_time_bounds", bounds, persistent=False)
        self.event = nn.Linear(num_features * dim, dim)
        self.layers = nn.ModuleList(HSTULayer(dim, settings, bool(settings.times)) for _ in range(settings.num_layers))
        self.norm = nn.LayerNorm(dim)
        *hidden, last = over_layers
        self.over = nn.Sequential(MLP(dim, hidden), nn.Linear([dim, *hidden][-1], last))

    def forward(
        self, target: Tensor, history: Tensor, is_event: Tensor, others: Tensor, times: Tensor | None = None
    ) -> Tensor:
        """Return the outputs [B, T] of targets [B, P, D] with histories [B, L, Q, D] and other features [B, O, D].

        Args:
            is_event: bool [B, L], False behind a history's end.
            times: of events and of the target in seconds, int64 [B, L + 1]; needed where the settings have them.
        """
        absent = target.new_zeros(target.shape[0], self._num_features - target.shape[1], target.shape[2])
        item = torch.cat([target, absent], dim=1).unsqueeze(1)
        return self.over(self.encode(item, history, is_event.sum(1), others, times)[:, 0])

    def encode(
        self, scored: Tensor, history: Tensor, lengths: Tensor, contexts: Tensor, times: Tensor | None = None
    ) -> Tensor:
        """Return what the layers make of scored items [B, K, Q, D], each without a look at the others: [B, K, D]."""
        events = self.event(torch.cat([history, scored], dim=1).flatten(2))
        tokens = torch.cat([contexts.to(events.dtype), events], dim=1)
        counts = contexts.shape[1], history.shape[1], scored.shape[1]
        settings = self._settings
        with_bounds = None if times is None or self._time_bounds is None else (times, self._time_bounds)
        pairs = pairs_of(lengths, with_bounds, counts, settings.max_events, settings.window)
        tokens = dropout(tokens, settings.input_dropout, self.training)
        for layer in self.layers:
            tokens = layer(tokens, pairs)
        return self.norm(tokens[:, -counts[2] :])
