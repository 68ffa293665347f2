"""Gradients of rows that every rank has a copy of: added up over the ranks before an optimizer sees them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from embershard.distributed.ranks import gather_into


class RowGradients(NamedTuple):
    """Gradients of the rows that a step touched.

    Attributes:
        rows: int64 [T], ascending. A row is here if any rank looked it up, also where its gradient is zero: the
            optimizer then decays its weights or states.
        sums: [T, D].
    """

    rows: Tensor
    sums: Tensor


def sum_rows(rows: Tensor, gradients: Tensor, group: dist.ProcessGroup | None = None) -> RowGradients:
    """Add up the gradients of each row over all ranks, in rank order: every rank gets the same bits. Collective.

    A rank sends its rows and gradients to each other rank.

    Args:
        rows: int64 [M], the distinct rows that this rank looked up; M may differ between ranks, and be 0.
        gradients: [M, D], of the same dtype and D on all ranks.
        group: of the ranks; None: the default group.

    >>> sum_rows(torch.tensor([7, 3]), torch.tensor([[1.0], [0.0]]))  # on one rank
    RowGradients(rows=tensor([3, 7]), sums=tensor([[0.],
            [1.]]))
    """
    of_rank = _gather(rows, gradients, group)
    touched, places = torch.cat([rows for rows, _ in of_rank]).unique(return_inverse=True)
    sums = gradients.new_zeros(touched.numel(), gradients.shape[1])
    # A rank's rows are distinct, so that no call adds twice to one row: a GPU would do so in any order.
    for place, (_, part) in zip(places.split([len(rows) for rows, _ in of_rank]), of_rank, strict=True):
        sums.index_add_(0, place, part)
    return RowGradients(touched, sums)


def _gather(rows: Tensor, gradients: Tensor, group: dist.ProcessGroup | None) -> list[tuple[Tensor, Tensor]]:
    """Return the rows and gradients of every rank, in rank order. They travel as bytes, in one message."""
    world_size = dist.get_world_size(group) if dist.is_initialized() else 1
    if world_size == 1:
        return [(rows, gradients)]
    counts = rows.new_empty(world_size)
    gather_into(counts, rows.new_full((1,), len(rows)), group)
    num_rows = counts.tolist()
    id_bytes, row_bytes = rows.itemsize, gradients.shape[1] * gradients.itemsize
    sent = torch.zeros(max(num_rows), id_bytes + row_bytes, dtype=torch.uint8, device=rows.device)
    sent[: len(rows), :id_bytes] = rows.unsqueeze(1).view(torch.uint8)
    sent[: len(rows), id_bytes:] = gradients.contiguous().view(torch.uint8)
    received = sent.new_empty(world_size * len(sent), sent.shape[1])
    gather_into(received, sent, group)
    of_rank = zip(received.view(world_size, *sent.shape), num_rows, strict=True)
    parts = (part[:count].split([id_bytes, row_bytes], dim=1) for part, count in of_rank)
    return [
        (ids.contiguous().view(rows.dtype).flatten(), values.contiguous().view(gradients.dtype))
        for ids, values in parts
    ]
