"""`embershard.deal`: every sample once, equally many for each rank, about equally much to do; all ranks agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import embershard
from embershard.errors import ConfigError
from embershard.extras.deal.deal import deal, slowest_cost
from tests.covering import examples, matrix

pytestmark = pytest.mark.extra

Costs = NDArray[np.int64]


def zipf(count: int, draw: np.random.Generator, most: int = 4096) -> Costs:
    """Lengths of histories, 1 to `most`, as NVIDIA's recsys-examples draw them (exponent 1.2)."""
    share = np.cumsum(np.arange(1, most + 1.0) ** -1.2)
    return 1 + np.searchsorted(share / share[-1], draw.random(count))


def attention(lengths: Costs) -> Costs:
    """Two tokens an event, width 1024."""
    return 2 * lengths * 5120 + (2 * lengths) ** 2


def ratio(steps: list[Costs], ranks: int, pieces: int = 1, *, dealt_by: list[Costs] | None = None) -> float:
    """The slowest rank's cost over the mean's, summed over steps; in slices, or dealt by these costs."""
    slowest = []
    for step, costs in enumerate(steps):
        slices = np.arange(len(costs)).reshape(ranks, -1)
        parts = slices if dealt_by is None else deal(dealt_by[step], ranks, pieces, seed=step)
        slowest.append(slowest_cost(costs, parts, pieces))
    return sum(slowest) * ranks / sum(int(costs.sum()) for costs in steps)


def steps_of(ranks: int, size: int, steps: int, seed: int = 0) -> list[Costs]:
    draw = np.random.default_rng(seed)
    return [zipf(ranks * size, draw) for _ in range(steps)]


a_cost = st.integers(0, 40) | st.integers(0, 10**9)
shares = st.tuples(st.integers(1, 6), st.integers(1, 7)).flatmap(
    lambda shape: st.tuples(
        st.just(shape[0]), st.lists(a_cost, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])
    )
)


@given(shares, st.integers(1, 9), st.integers(0, 2**63 - 1))
@examples(100)
def test_each_sample_goes_to_one_rank_and_no_deal_is_worse_than_slices(shared, pieces, seed):
    ranks, costs = shared
    dealt = deal(costs, ranks, pieces, seed)
    assert dealt.dtype == np.int64
    assert dealt.shape == (ranks, len(costs) // ranks)
    assert sorted(dealt.flatten().tolist()) == list(range(len(costs)))
    given, slices = np.array(costs), np.arange(len(costs)).reshape(ranks, -1)
    assert slowest_cost(given, dealt, pieces) <= slowest_cost(given, slices, pieces)
    for part in np.array_split(dealt, min(pieces, dealt.shape[1]), axis=1):
        assert (np.diff(part, axis=1) > 0).all(), "in the order of their positions"
    assert np.array_equal(dealt, deal(torch.tensor(costs), ranks, pieces, seed))


def least_ratio(steps: list[Costs], ranks: int) -> float:
    """What no deal of equal counts is below: a rank has its share, or the costliest sample and the cheapest others."""
    others = [int(np.sort(costs)[: len(costs) // ranks - 1].sum()) for costs in steps]
    least = [max(costs.sum() / ranks, costs.max() + rest) for costs, rest in zip(steps, others, strict=True)]
    return sum(least) * ranks / sum(int(costs.sum()) for costs in steps)


@pytest.mark.parametrize(
    ("ranks", "size", "undealt"), [(16, 32, 2.20), matrix(8, 32, 1.94), matrix(64, 32, 2.84), matrix(16, 512, 1.3)]
)
def test_histories_of_very_different_lengths_cost_all_ranks_the_same(ranks, size, undealt):
    """Up to the bound."""
    costs = [attention(lengths) for lengths in steps_of(ranks, size, 100 if size == 32 else 10)]
    assert ratio(costs, ranks, dealt_by=costs) == pytest.approx(least_ratio(costs, ranks), abs=0.001)
    assert ratio(costs, ranks, dealt_by=costs) < 1.03
    assert ratio(costs, ranks) == pytest.approx(undealt, abs=0.15), "a mean of 100 steps"


def test_a_lone_sample_is_the_bound():
    """T^2 of lengths up to 4096: the costliest sample is more than a rank's share."""
    costs = [lengths**2 for lengths in steps_of(16, 32, 100)]
    assert 1.2 < ratio(costs, 16, dealt_by=costs) < least_ratio(costs, 16) + 0.001


def test_costs_that_say_nothing_gain_nothing():
    """The control: dealt by costs drawn by chance."""
    costs = [attention(lengths) for lengths in steps_of(16, 32, 100)]
    by_chance = [np.random.default_rng(step).permutation(each) for step, each in enumerate(costs)]
    assert ratio(costs, 16, dealt_by=by_chance) > 0.9 * ratio(costs, 16)


def test_micro_batches_are_dealt_each_by_itself_the_costliest_first():
    costs = [attention(lengths) for lengths in steps_of(16, 32, 50)]
    assert ratio(costs, 16, pieces=4, dealt_by=costs) < 1.1
    assert ratio(costs, 16, pieces=4) > 3
    dealt = deal(costs[0], 16, pieces=4)
    least = [costs[0][part].min() for part in np.split(dealt, 4, axis=1)]
    most = [costs[0][part].max() for part in np.split(dealt, 4, axis=1)]
    assert all(low >= high for low, high in zip(least, most[1:], strict=False))


@pytest.mark.slow
def test_many_samples_are_dealt_in_rounds():
    costs = [attention(lengths) for lengths in steps_of(64, 512, 1)]
    assert ratio(costs, 64, dealt_by=costs) == pytest.approx(1.0, abs=0.01)
    assert ratio(costs, 64) > 1.2


def test_the_seed_draws_who_gets_the_costliest():
    costs = attention(zipf(64, np.random.default_rng(1)))
    owners = {int(np.argwhere(deal(costs, 4, seed=step) == costs.argmax())[0, 0]) for step in range(40)}
    assert owners == {0, 1, 2, 3}
    alike = [sorted(map(tuple, deal(costs, 4, seed=step).tolist())) for step in range(2)]
    assert alike[0] == alike[1], "of the same parts"


@pytest.mark.smoke
def test_equal_costs_leave_slices():
    assert deal([7] * 12, 3).tolist() == np.arange(12).reshape(3, 4).tolist()
    assert deal([9, 8, 7, 1], 1).tolist() == [[0, 1, 2, 3]]


def test_it_is_public():
    assert embershard.deal is deal


@pytest.mark.parametrize(
    ("costs", "ranks", "message"),
    [
        ([1.5, 2.0], 2, "costs: got float64 [2], needed an integer of each sample"),
        ([[1, 2]], 1, "costs: got int64 [1, 2]"),
        ([], 1, "needed an integer of each sample"),
        ([1, 2, 3], 2, "got 3 costs, ranks = 2 and pieces = 1; needed at least 1 of each, and equally many samples"),
        ([1, 2], 0, "ranks = 0"),
        ([-1, 2], 2, "costs: got -1 to 2, needed 0 or more"),
        ([2**61, 1], 2, "needed 0 or more, and below 1e+18 for 2 samples. Divide them."),
    ],
)
def test_what_cannot_be_dealt_is_refused(costs, ranks, message):
    with pytest.raises(ConfigError) as refused:
        deal(costs, ranks)
    assert message in str(refused.value)
