"""The distinct ids of each table in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from embershard.cache import loops

_ID_BITS = 40  # more than the rows of any table


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
        """Find the distinct ones among ids [N], of which group g has the next `lengths[g]`. A GPU's host waits.

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
    groups = torch.arange(len(lengths), device=ids.device)
    repeats = torch.tensor(lengths, device=ids.device)
    first = groups.repeat_interleave(repeats, output_size=ids.numel()) << _ID_BITS
    distinct, inverse = torch.unique(ids + first, return_inverse=True)
    counts = torch.bincount(distinct >> _ID_BITS, minlength=len(lengths)).tolist()
    return DistinctIds(distinct & ((1 << _ID_BITS) - 1), inverse, counts)
