"""Samples of a batch in groups of like lengths: each goes through a network padded to its own longest history."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.sparse.jagged_tensor import JaggedTensor

from embershard.models.history import LookedUp

#: Multiply-adds that take as long as another group does, by the kind of device: measured on CPUs
#: (docs/log/data_and_models.md), and on GPUs guessed by what they compute while their host starts operations.
MOST_PADDING = {"cpu": 1 << 21, "cuda": 1 << 30}
#: Returns the most samples that go through a network together, of so many tokens each.
AtOnce = Callable[[int], int]


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
    firsts = np.cumsum([0, *sizes[:-1]]).tolist()
    is_kept = at_once is None or sum(size / at_once(tokens[k]) for size, k in zip(sizes, firsts, strict=True)) <= 1

    def run(_: Tensor, group: LookedUp) -> Tensor:
        return network(*group.padded())

    found = []
    for group in split(looked, looked.order, sizes):
        # The tensor says of which device dropout's masks are drawn again.
        found.append(run(group.target, group) if is_kept else checkpoint(run, group.target, group, use_reentrant=False))
    return torch.cat(found).index_select(0, looked.order.argsort())


def group_sizes(
    tokens: Sequence[int], costs: tuple[float, float], most_padding: float, at_once: AtOnce | None = None
) -> list[int]:
    """Return how many samples each group takes, of samples with so many tokens, the most first.

    A group ends where padding its samples to its first would cost more than `most_padding`, or before more than
    `at_once` are in it. If that is what another group costs, no cut saves much: groups that are narrower by a share
    cost as much more as they pad less.

    >>> group_sizes([9, 9, 8, 3, 3, 3], costs=(1.0, 0.0), most_padding=3)
    [3, 3]
    >>> group_sizes([9, 9, 8, 3, 3, 3], costs=(1.0, 0.0), most_padding=30)
    [6]
    >>> group_sizes([9, 9, 8, 3, 3, 3], costs=(1.0, 0.0), most_padding=30, at_once=lambda tokens: 32 // tokens)
    [3, 3]
    """
    sizes, first = [], 0
    of_samples = np.array(tokens, np.float64)
    work = costs[0] * of_samples + costs[1] * of_samples**2
    while first < len(work):
        padding = np.cumsum(work[first] - work[first:])
        size = int(np.searchsorted(padding, most_padding, side="right"))
        sizes.append(size if at_once is None else min(size, at_once(tokens[first])))
        first += sizes[-1]
    return sizes


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
