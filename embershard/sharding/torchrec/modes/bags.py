"""The distinct ids of each table in a batch, its bags over their rows, and their pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache import loops
from embershard.cache.rows import memory
from embershard.errors import ConfigError

_ID_BITS = 40  # more than the rows of any table


def check_weights(features: KeyedJaggedTensor, mode: str) -> None:
    """Check a batch of weighted tables before its bags are cut into parts, as `mode` does.

    Raises:
        ConfigError: the ids have no weights yet. A feature processor would weigh them by their positions in the parts.
    """
    weights = features.weights_or_none()
    if weights is None or not torch.is_floating_point(weights):
        raise ConfigError(
            f"{mode}: the tables of {features.keys()[:5]} are weighted, and the batch has no weights. Feature "
            "processors (FeatureProcessedEmbeddingBagCollection) find weights after the ids were exchanged, by their "
            'places in whole bags: with them use exchange="pooled" and mode="sharded", without hot rows. Without '
            "them, give each id a weight, or the collection is_weighted=False"
        )


class DistinctIds(NamedTuple):
    """Distinct ids of G groups.

    Attributes:
        ids: int64 [M], group after group.
        inverse: int64 [N], the place in `ids` of each id of the batch.
        counts: distinct ids of each group; G numbers with the sum M.
    """

    ids: Tensor
    inverse: Tensor
    counts: list[int]

    @staticmethod
    def of(ids: Tensor, lengths: Sequence[int]) -> DistinctIds:
        """Find the distinct ones among ids [N], of which group g has the next `lengths[g]`. A GPU's host waits
        once, for their number.

        >>> DistinctIds.of(torch.tensor([7, 5, 7, 5, 5]), [3, 2])
        DistinctIds(ids=tensor([7, 5, 5]), inverse=tensor([0, 1, 0, 2, 2]), counts=[2, 1])
        """
        return _by_loop(ids, lengths) if ids.is_cpu else _by_sorting(ids, lengths)


def _by_loop(ids: Tensor, lengths: Sequence[int]) -> DistinctIds:
    bounds = np.fromiter(accumulate(lengths, initial=0), np.int64, len(lengths) + 1)
    counts = np.empty(len(lengths), np.int64)
    distinct, inverse = (torch.empty(ids.numel(), dtype=torch.int64) for _ in range(2))
    found = loops.distinct_ids(ids.long().contiguous().numpy(), bounds, distinct.numpy(), inverse.numpy(), counts)
    return DistinctIds(distinct[:found], inverse, counts.tolist())


def _by_sorting(ids: Tensor, lengths: Sequence[int]) -> DistinctIds:
    """Give the ids of a group in ascending order."""
    bounds = memory.on_device(list(accumulate(lengths, initial=0)), ids.device)
    groups = torch.arange(len(lengths), device=ids.device)
    first = groups.repeat_interleave(bounds.diff(), output_size=ids.numel()) << _ID_BITS
    ascending, order = (ids + first).sort()
    is_first = torch.ones_like(ascending, dtype=torch.bool)
    is_first[1:] = ascending[1:] != ascending[:-1]
    numbers = is_first.cumsum(0)
    counts = nn.functional.pad(numbers, (1, 0))[bounds].diff().tolist()
    distinct = ascending[is_first.nonzero_static(size=sum(counts)).flatten()] & ((1 << _ID_BITS) - 1)
    return DistinctIds(distinct, torch.empty_like(order).scatter_(0, order, numbers - 1), counts)


@dataclass
class Bags:
    """F * B bags over the rows of a batch's distinct ids.

    Attributes:
        places: int64 [N] of the ids' rows among the distinct ones.
        offsets: int64 [F * B + 1] bounds of the bags, feature after feature.
        scales: fp32 [N], factors of the rows; None: all are 1.
        num_features: F.
    """

    places: Tensor
    offsets: Tensor
    scales: Tensor | None
    num_features: int

    def pool(self, rows: Tensor) -> Tensor:
        """Add up rows [M, D] by bag: [B, F * D].

        >>> bags = Bags(torch.tensor([1, 0, 1]), torch.tensor([0, 2, 3]), None, num_features=1)
        >>> bags.pool(torch.tensor([[1.0, 2.0], [10.0, 20.0]]))
        tensor([[11., 22.],
                [10., 20.]])
        """
        if rows.is_cpu and rows.dtype == torch.float32:
            return _PoolOnCpu.apply(rows, self)  # type: ignore[no-any-return]
        return self._pool_by_torch(rows)

    def _pool_by_torch(self, rows: Tensor) -> Tensor:
        pooled = nn.functional.embedding_bag(
            self.places, rows, self.offsets, mode="sum", per_sample_weights=self.scales, include_last_offset=True
        )
        return pooled.view(self.num_features, -1, rows.shape[1]).transpose(0, 1).flatten(1)

    def loop_arguments(self) -> tuple[Any, ...]:
        """Return places, offsets, scales and F as the compiled loops take them."""
        scales = torch.empty(0) if self.scales is None else self.scales.float().contiguous()
        return self.places.numpy(), self.offsets.numpy(), scales.numpy(), self.num_features


class _PoolOnCpu(torch.autograd.Function):
    """One pass forward and one backward. `embedding_bag` takes four times as long: its backward sorts the ids."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bags: Bags) -> Tensor:  # type: ignore[override]
        ctx.bags, ctx.shape = bags, rows.shape
        num_samples = (bags.offsets.numel() - 1) // bags.num_features
        pooled = torch.empty(num_samples, bags.num_features * rows.shape[1])
        flat = rows.detach().contiguous().view(-1).numpy()
        loops.pool_rows(flat, pooled.view(-1).numpy(), rows.shape[1], *bags.loop_arguments())
        return pooled

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        sums = torch.zeros(ctx.shape)
        flat = gradients.contiguous().view(-1).numpy()
        loops.pool_gradients(flat, sums.view(-1).numpy(), ctx.shape[1], *ctx.bags.loop_arguments())
        return sums, None
