"""Which samples of a batch go through a network together, by their lengths alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

#: Multiply-adds that take as long as another group does, by the kind of device: measured on CPUs
#: (docs/log/data_and_models.md), and on GPUs guessed by what they compute while their host starts operations.
MOST_PADDING = {"cpu": 1 << 21, "cuda": 1 << 30}
#: Returns the most samples that go through a network together, of so many tokens each.
AtOnce = Callable[[int], int]


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


def are_kept(tokens: Sequence[int], sizes: Sequence[int], at_once: AtOnce | None) -> bool:
    """Return whether all groups of a batch are kept for its backward pass: together they take no more memory than
    `at_once` allows. Else each is computed again."""
    firsts = np.cumsum([0, *sizes[:-1]]).tolist()
    return at_once is None or sum(size / at_once(tokens[k]) for size, k in zip(sizes, firsts, strict=True)) <= 1
