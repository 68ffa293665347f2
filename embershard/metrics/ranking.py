"""How well samples are ranked inside of groups (a user, a session): AUC, NDCG, precision and recall of each.

Equal predictions are in no order: a figure is its mean over all orders of them. So no figure depends on the order of
the samples, or on the number of ranks.

Letters: N samples, G groups, K numbers of places.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class GroupFigures:
    """Figures of each group, NaN where a group has none.

    Attributes:
        weight: [G], the sum of the samples' weights.
        auc: [G], the share of the pairs of a positive and another sample, each counting by the product of their
            weights, in which the positive one has the larger prediction; an equal one counts half. Of a group whose
            labels are all equal, none. (`torchrec.metrics.auc` takes equal predictions in the order of the samples,
            which differs with the number of ranks.)
        ndcg, precision, recall: [K, G]; NDCG and recall of a group without a positive label, none.
    """

    weight: Floats
    auc: Floats
    ndcg: Floats
    precision: Floats
    recall: Floats

    @property
    def gauc(self) -> float | None:
        """Mean AUC of the groups that have one, by their weights (Zhu et al., KDD 2018); None if none has.

        >>> by_group([0.9, 0.1, 0.3, 0.8], [1, 0, 1, 0], [7, 7, 8, 8]).gauc
        0.5
        """
        return weighted_mean(self.auc, self.weight)


def by_group(
    predictions: Sequence[float] | Floats,
    labels: Sequence[float] | Floats,
    groups: Sequence[int] | Ints,
    weights: Floats | None = None,
    places: Sequence[int] = (),
) -> GroupFigures:
    """Return the figures of each group, the lowest number first.

    DCG at k is the sum of label / log2(1 + place) over the first k places, NDCG its share of the largest one;
    precision at k is the labels' sum there over k, recall its share of all labels of the group. Weights of samples
    count in the AUC alone.

    Args:
        predictions: [N], larger ones come first.
        labels: [N], at least 0; of an AUC 0 and 1.
        groups: [N], the group of each sample.
        weights: [N]; None: 1 each.
        places: K numbers k.
    """
    blocks = _Blocks.of(np.asarray(predictions), np.asarray(labels, np.float64), np.asarray(groups, np.int64), weights)
    gains = np.stack([blocks.at(place) for place in places]) if places else np.empty((0, 3, blocks.num_groups))
    return GroupFigures(blocks.of_groups(blocks.weight), blocks.auc(), gains[:, 0], gains[:, 1], gains[:, 2])


def weighted_mean(values: Floats, weights: Floats | None = None) -> float | None:
    """Return the mean of the values that are not NaN; None if there is none, or none with a weight.

    >>> weighted_mean(np.array([1.0, np.nan, 3.0]))
    2.0
    """
    there = ~np.isnan(values)
    weight = np.ones(int(there.sum())) if weights is None else weights[there]
    return float((values[there] * weight).sum() / weight.sum()) if weight.sum() > 0 else None


@dataclass(frozen=True)
class _Blocks:
    """Samples of one group with equal predictions, as one block; blocks by group, larger predictions first.

    Attributes:
        group: [blocks], numbers from 0.
        first, last: places in the group, from 0: a block has those of [first, last).
        labels: sum of the labels.
        positive, weight: sum of the weights of positive samples, and of all.
    """

    num_groups: int
    group: Ints
    first: Ints
    last: Ints
    labels: Floats
    positive: Floats
    weight: Floats
    starts: Ints
    """[G], where each group begins among the samples [N] in order."""
    samples: tuple[Floats, Ints]
    """Labels and groups of the samples [N] as they were given."""

    @classmethod
    def of(cls, predictions: Floats, labels: Floats, groups: Ints, weights: Floats | None) -> _Blocks:
        weights = np.ones(len(labels)) if weights is None else np.asarray(weights, np.float64)
        is_one = not len(groups) or bool((groups == groups[0]).all())  # the usual case, which sorts five times as fast
        order = np.argsort(-predictions) if is_one else np.lexsort((-predictions, groups))
        sorted_groups, sorted_predictions = groups[order], predictions[order]
        begins_group = np.diff(sorted_groups, prepend=sorted_groups[:1] - 1) != 0
        begins_block = begins_group | (np.diff(sorted_predictions, prepend=np.nan) != 0)
        starts, block_starts = np.flatnonzero(begins_group), np.flatnonzero(begins_block)
        group = np.cumsum(begins_group)[block_starts] - 1
        ends = np.append(block_starts[1:], len(order))

        def sums(values: Floats) -> Floats:
            return np.add.reduceat(values[order], block_starts) if len(order) else np.empty(0)

        return cls(
            num_groups=len(starts),
            group=group,
            first=block_starts - starts[group],
            last=ends - starts[group],
            labels=sums(labels),
            positive=sums(weights * (labels > 0)),
            weight=sums(weights),
            starts=starts,
            samples=(labels, groups),
        )

    @functools.cached_property
    def ideal(self) -> Floats:
        """[N], labels by group, the largest first."""
        labels, groups = self.samples
        return labels[np.lexsort((-labels, groups))]

    def of_groups(self, values: Floats) -> Floats:
        """Return the sum over the blocks of each group."""
        if self.num_groups == 1:
            return values.sum(keepdims=True).astype(np.float64)
        return np.bincount(self.group, values, self.num_groups).astype(np.float64)

    def auc(self) -> Floats:
        """Return the share of the pairs of a positive and another sample in which the positive one comes first."""
        others = self.weight - self.positive
        all_positive, all_others = self.of_groups(self.positive), self.of_groups(others)
        before = np.cumsum(others) - others
        first_of_group = np.searchsorted(self.group, np.arange(self.num_groups))
        below = all_others[self.group] - (before - before[first_of_group][self.group]) - others / 2
        with np.errstate(invalid="ignore", divide="ignore"):
            share = self.of_groups(self.positive * below) / (all_positive * all_others)
        return np.where((all_positive > 0) & (all_others > 0), share, np.nan)

    def at(self, place: int) -> Floats:
        """Return NDCG, precision and recall at a place, [3, G]."""
        discounts = np.cumsum(1 / np.log2(np.arange(2, place + 2)))
        discounts = np.insert(discounts, 0, 0.0)  # of the first n places
        first, last = np.minimum(self.first, place), np.minimum(self.last, place)
        mean = self.labels / (self.last - self.first)
        gain = self.of_groups(mean * (discounts[last] - discounts[first]))
        hits = self.of_groups(mean * (last - first))
        places = np.arange(len(self.ideal)) - np.repeat(self.starts, np.diff(np.append(self.starts, len(self.ideal))))
        terms = np.where(
            places < place, self.ideal * np.diff(discounts, append=0.0)[np.minimum(places, place - 1)], 0.0
        )
        best = np.add.reduceat(terms, self.starts) if self.num_groups else np.empty(0)
        labels = self.of_groups(self.labels)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.stack([
                np.where(best > 0, gain / best, np.nan), hits / place, np.where(labels > 0, hits / labels, np.nan)
            ])  # fmt: skip
