"""Paired bootstrap: how far the difference of two models' figures, on the same samples, may be chance.

A replicate draws how often each unit counts, a sample or all samples of a user, from Poisson's distribution with mean 1
(Chamandy et al. 2012): in place of a resample of all units, which needs them all at once. Both models get the same
draws, which are a function of seed, replicate and unit.

Letters: N samples, U units, R replicates, C columns.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from numpy.typing import NDArray

from embershard.cache.loops.compiled import compiled_for

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_F, _I, _S = numba.float64[::1], numba.int64[::1], numba.float64[:, ::1]
#: A word of 64 bits has the draws of so many replicates, each of 16 bits.
_PER_WORD = 4
#: How often a unit counts, by 16 random bits: Poisson's distribution with mean 1, as far as 16 bits can tell.
_COUNTS = np.searchsorted(
    np.cumsum([math.exp(-1) / math.factorial(count) for count in range(9)]), (np.arange(2**16) + 0.5) / 2**16
).astype(np.uint8)
_Counts = NDArray[np.uint8]


@compiled_for([(numba.int64, numba.int64, numba.int64)])
def _word(seed: int, number: int, unit: int) -> int:
    """Return the random bits of a unit for the word with this number: twice the finaliser of SplitMix64."""
    word = np.uint64(unit) + np.uint64(number) * np.uint64(0xD1342543DE82EF95) + np.uint64(seed)
    for _ in range(2):
        word += np.uint64(0x9E3779B97F4A7C15)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word = word ^ (word >> np.uint64(31))
    return word  # type: ignore[return-value]


@compiled_for([(_S, _I, numba.int64, numba.uint8[::1], _S)])
def _sums(values: Floats, units: Ints, seed: int, counts: _Counts, out: Floats) -> None:
    for number in range(out.shape[0] // _PER_WORD):
        for place in range(values.shape[0]):
            word = _word(seed, number, units[place])
            for part in range(_PER_WORD):
                times = counts[(word >> np.uint64(16 * part)) & np.uint64(0xFFFF)]
                for column in range(values.shape[1]):
                    out[_PER_WORD * number + part, column] += times * values[place, column]


@compiled_for([(_F, _F, _I, _I, numba.int64, numba.uint8[::1], _F)])
def _areas(
    positives: Floats, others: Floats, blocks: Ints, units: Ints, seed: int, counts: _Counts, out: Floats
) -> None:
    for number in range(len(out) // _PER_WORD):
        area, below, all_positives = np.zeros(_PER_WORD), np.zeros(_PER_WORD), np.zeros(_PER_WORD)
        of_block, others_of_block = np.zeros(_PER_WORD), np.zeros(_PER_WORD)
        for place in range(len(units)):
            if place and blocks[place] != blocks[place - 1]:
                for part in range(_PER_WORD):
                    area[part] += of_block[part] * (below[part] + others_of_block[part] / 2)
                    all_positives[part] += of_block[part]
                    below[part] += others_of_block[part]
                    of_block[part] = others_of_block[part] = 0.0
            word = _word(seed, number, units[place])
            for part in range(_PER_WORD):
                times = counts[(word >> np.uint64(16 * part)) & np.uint64(0xFFFF)]
                of_block[part] += times * positives[place]
                others_of_block[part] += times * others[place]
        for part in range(_PER_WORD):
            area[part] += of_block[part] * (below[part] + others_of_block[part] / 2)
            pairs = (all_positives[part] + of_block[part]) * (below[part] + others_of_block[part])
            out[_PER_WORD * number + part] = area[part] / pairs if pairs > 0 else np.nan


def resampled_sums(values: Floats, num_replicates: int, units: Ints | None = None, seed: int = 0) -> Floats:
    """Return the sum of each column in each replicate, [R, C].

    Args:
        values: [N, C].
        units: [N], the unit of each row; None: each row is one.

    >>> resampled_sums(np.ones((1000, 1)), 1)
    array([[1010.]])
    """
    units = np.arange(len(values)) if units is None else np.ascontiguousarray(units, np.int64)
    out = np.zeros((_whole_words(num_replicates), values.shape[1]))
    _sums(np.ascontiguousarray(values, np.float64), units, seed, _COUNTS, out)
    return out[:num_replicates]


def resampled_auc(
    predictions: Floats,
    labels: Floats,
    num_replicates: int,
    weights: Floats | None = None,
    units: Ints | None = None,
    seed: int = 0,
) -> Floats:
    """Return the AUC in each replicate, [R]; NaN where all labels that count are equal.

    Args:
        predictions: [N]; equal ones count half.
        labels: [N], 0 and 1.
        weights: [N]; None: 1 each.
        units: [N], the unit of each sample; None: each sample is one.
    """
    order = np.argsort(predictions, kind="stable")
    ordered = predictions[order]
    blocks = np.cumsum(np.diff(ordered, prepend=ordered[:1]) != 0)
    weights = np.ones(len(labels)) if weights is None else weights.astype(np.float64)
    positives = weights * (labels > 0)
    units = order if units is None else np.ascontiguousarray(units[order], np.int64)
    out = np.empty(_whole_words(num_replicates))
    _areas(positives[order], (weights - positives)[order], blocks, units, seed, _COUNTS, out)
    return out[:num_replicates]


def _whole_words(num_replicates: int) -> int:
    return -(-num_replicates // _PER_WORD) * _PER_WORD
