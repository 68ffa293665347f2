"""Samples of a batch in groups of like lengths: each goes through a network padded to its own longest history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.sparse.jagged_tensor import JaggedTensor

from embershard.extras.length_groups.sizes import MOST_PADDING, AtOnce, are_kept, group_sizes
from embershard.models.history import LookedUp


def run_in_groups(
    network: nn.Module, looked: LookedUp, costs: tuple[float, float], at_once: AtOnce | None = None
) -> Tensor:
    """Return the outputs [B, T] of a network over histories, in the order of the samples.

    Samples do not see each other, so groups change nothing but the order of sums. Which samples are together depends on
    the lengths of the batch's histories alone. A program that is recorded has no branches on sizes: it has one group.

    Where a batch takes more memory than `at_once` allows, training computes a group again in its backward pass in place
    of keeping it.

    Args:
        costs: a and b, of multiply-adds a T + b T^2 for a sample of T tokens: its events, other features and scored
            item.
        at_once: None where any number of samples may go together.
    """
    more = looked.others.shape[1] + 1
    tokens = [events + more for events in looked.falling]
    sizes = (
        [] if looked.order is None else group_sizes(tokens, costs, MOST_PADDING[looked.lengths.device.type], at_once)
    )
    if looked.order is None or len(sizes) < 2:
        return network(*looked.padded())
    is_kept = are_kept(tokens, sizes, at_once)

    def run(_: Tensor, group: LookedUp) -> Tensor:
        return network(*group.padded())

    found = []
    for group in split(looked, looked.order, sizes):
        # The tensor says of which device dropout's masks are drawn again.
        found.append(run(group.target, group) if is_kept else checkpoint(run, group.target, group, use_reentrant=False))
    return torch.cat(found).index_select(0, looked.order.argsort())


def split(looked: LookedUp, order: Tensor, sizes: Sequence[int]) -> Iterator[LookedUp]:
    """Yield the samples in another order, that of `falling`, so many at a time. A GPU's host does not wait."""
    ends = np.cumsum(sizes).tolist()
    lengths = looked.lengths.index_select(0, order)
    falling = [looked.falling[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    counts = [sum(each) for each in falling]
    begins = (looked.lengths.cumsum(0) - looked.lengths).index_select(0, order) - (lengths.cumsum(0) - lengths)
    place = torch.arange(sum(counts), device=lengths.device)
    place = place + begins.repeat_interleave(lengths, output_size=sum(counts))

    def of_samples(each: Tensor) -> Sequence[Tensor]:
        return each.index_select(0, order).split(list(sizes))

    def of_events(each: JaggedTensor) -> list[JaggedTensor]:
        parts = each.values().index_select(0, place).split(counts)
        return [JaggedTensor(part, lengths=own) for part, own in zip(parts, lengths.split(list(sizes)), strict=True)]

    times: list[Any] = [None] * len(sizes)
    if looked.times is not None:
        times = list(zip(of_samples(looked.times[0]), of_events(looked.times[1]), strict=True))
    history = zip(*(of_events(each) for each in looked.history), strict=True)
    parts = zip(
        of_samples(looked.target), of_samples(looked.others), lengths.split(list(sizes)), history, times, falling,
        strict=True,
    )  # fmt: skip
    for target, others, own, events, moments, known in parts:
        yield LookedUp(target, others, own, events, moments, None, known)
