"""How well samples are ranked inside of groups (a user, a session): AUC, NDCG, precision and recall of each.

Equal predictions are in no order: a figure is its mean over all orders of them. So no figure depends on the order of
the samples, or on the number of ranks.

Letters: N samples, G groups, K numbers of places.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


def by_group(
    predictions: Sequence[float] | Floats | NDArray[np.float32],
    labels: Sequence[float] | Floats,
    groups: Sequence[int] | Ints | None = None,
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
        groups: [N], the group of each sample; None: all are in one.
        weights: [N]; None: 1 each.
        places: K numbers k.
    """
    groups = np.zeros(len(labels), np.int64) if groups is None else np.asarray(groups, np.int64)
    weights = None if weights is None else np.asarray(weights, np.float64)
    blocks = _Blocks.of(np.asarray(predictions), np.asarray(labels, np.float64), groups, weights)
    gains = np.stack([blocks.at(place) for place in places]) if places else np.empty((0, 3, blocks.num_groups))
    return GroupFigures(blocks.of_groups(blocks.weight), blocks.auc(), gains[:, 0], gains[:, 1], gains[:, 2])


def weighted_mean(values: Floats, weights: Floats | None = None) -> float | None:
    """Return the mean of the values that are not NaN; None if there is none, or none with a weight. Of AUCs, by the
    groups' weights, it is the GAUC (Zhu et al., KDD 2018).

    >>> weighted_mean(np.array([1.0, np.nan, 3.0]))
    2.0
    """
    there = ~np.isnan(values)
    weight = np.ones(int(there.sum())) if weights is None else weights[there]
    return float((values[there] * weight).sum() / weight.sum()) if weight.sum() > 0 else None


def _sums(values: Floats, starts: Ints) -> Floats:
    """Return the sums of the parts of values that begin at the starts."""
    return np.add.reduceat(values, starts) if len(starts) else np.empty(0)


@dataclass(frozen=True)
class _Blocks:
    """Samples of one group with equal predictions, as one block; blocks by group, larger predictions first.

    Attributes:
        group: [blocks], numbers from 0.
        positive, weight: sum of the weights of positive samples, and of all.
        starts: [G], where each group begins among the samples [N] in order.
        block_starts: where each block begins.
        order, sample_labels, sample_groups: [N], of the samples.
    """

    group: Ints
    positive: Floats
    weight: Floats
    starts: Ints
    block_starts: Ints
    order: Ints
    sample_labels: Floats
    sample_groups: Ints

    @classmethod
    def of(cls, predictions: NDArray[Any], labels: Floats, groups: Ints, weights: Floats | None) -> _Blocks:
        if (groups == groups[:1]).all():  # the usual case, which sorts five times as fast
            order, begins_group = np.argsort(-predictions), np.zeros(len(labels), bool)
            begins_group[:1] = True
        else:
            order = np.lexsort((-predictions, groups))
            begins_group = np.diff(groups[order], prepend=groups.min() - 1) != 0
        ranked, begins_block = predictions[order], begins_group.copy()
        begins_block[1:] |= ranked[1:] != ranked[:-1]
        starts, block_starts = np.flatnonzero(begins_group), np.flatnonzero(begins_block)
        group = np.cumsum(begins_group)[block_starts] - 1 if len(starts) > 1 else np.zeros(len(block_starts), np.int64)
        positive = (labels > 0).astype(np.float64)
        if weights is None:
            weight = np.diff(block_starts, append=len(order)).astype(np.float64)
        else:
            positive, weight = weights * positive, _sums(weights[order], block_starts)
        return cls(
            group=group,
            positive=_sums(positive[order], block_starts),
            weight=weight,
            starts=starts,
            block_starts=block_starts,
            order=order,
            sample_labels=labels,
            sample_groups=groups,
        )

    @property
    def num_groups(self) -> int:
        return len(self.starts)

    @functools.cached_property
    def labels(self) -> Floats:
        """[blocks], sum of the labels."""
        return _sums(self.sample_labels[self.order], self.block_starts)

    @functools.cached_property
    def ideal(self) -> Floats:
        """[N], labels by group, the largest first."""
        return self.sample_labels[np.lexsort((-self.sample_labels, self.sample_groups))]

    def of_groups(self, values: Floats) -> Floats:
        """Return the sum over the blocks of each group."""
        if self.num_groups == 1:
            return values.sum(keepdims=True).astype(np.float64)
        return np.bincount(self.group, values, self.num_groups).astype(np.float64)

    def auc(self) -> Floats:
        """Return the share of the pairs of a positive and another sample in which the positive one comes first."""
        others = self.weight - self.positive
        all_positive, all_others = self.of_groups(self.positive), self.of_groups(others)
        behind = all_others
        before = np.cumsum(others) - others
        if self.num_groups > 1:
            behind = all_others[self.group]
            before -= before[np.searchsorted(self.group, np.arange(self.num_groups))][self.group]
        below = behind - before - others / 2
        with np.errstate(invalid="ignore", divide="ignore"):
            share = self.of_groups(self.positive * below) / (all_positive * all_others)
        return np.where((all_positive > 0) & (all_others > 0), share, np.nan)

    def at(self, place: int) -> Floats:
        """Return NDCG, precision and recall at a place, [3, G]."""
        discounts = np.cumsum(1 / np.log2(np.arange(2, place + 2)))
        discounts = np.insert(discounts, 0, 0.0)  # of the first n places
        first = self.block_starts - self.starts[self.group]  # places in the group, from 0, of a block: [first, last)
        last = np.append(self.block_starts[1:], len(self.order)) - self.starts[self.group]
        mean = self.labels / (last - first)
        first, last = np.minimum(first, place), np.minimum(last, place)
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
