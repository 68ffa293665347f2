"""The compiled loop of the local search prices a table as its placement is valued, and takes the best of all ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.cache.config import CachePolicy
from embershard.planning import local_search
from embershard.planning.cost_arrays import CostArrays, cost_arrays
from embershard.planning.local_search import Choice, _SearchState, _ways
from embershard.planning.request import Budget
from embershard.sharding.run_shape import ReplaySettings
from tests.covering import matrix
from tests.unit.planning.requests import make_request, rates

ROWS = (9000, 4000, 700, 300, 5000)
RUNS = {
    "ahead": ("cuda", None, ReplaySettings(CachePolicy(), 8, 2)),
    "known ahead": ("cuda", None, ReplaySettings(CachePolicy(), 8, 0)),
    "not ahead": ("cuda", None, ReplaySettings(CachePolicy("lfu"), 0)),
    "cpu": ("cpu", None, ReplaySettings(CachePolicy(), 8, 1)),
    "shared cores": ("cpu", 1, ReplaySettings(CachePolicy(), 8, 1)),
    "two speeds": ("cuda", None, ReplaySettings(CachePolicy(), 8, 2)),
}


def state_of(
    run: str, budget: Budget, ranks_per_node: int, exchange: str = "pooled"
) -> tuple[CostArrays, _SearchState]:
    """All tables but the last are placed, at random."""
    device, cores, cache = RUNS[run]
    request = make_request(
        budget,
        rows=ROWS,
        device=device,
        cores_per_node=cores,
        cache=cache,
        world_size=4,
        ranks_per_node=ranks_per_node,
        exchange=exchange,
        rates=(rates(),) * 2 + (rates("a10x2x2"),) * 2 if run == "two speeds" else None,
    )
    costs = cost_arrays(request, resident=request.may_mix, cached=True)
    return costs, _SearchState(costs, [_ways(options) for options in costs.options])


def places(costs: CostArrays, number: int, kind: str) -> list[tuple[int, ...]]:
    """All ranks that the shards of the last table's option may have."""
    option, size, node = costs.options[-1][number], costs.world_size, costs.ranks_per_node
    if kind == "all":
        return [tuple(range(size))]
    if kind == "any":
        return list(itertools.permutations(range(size), option.num_shards))
    nodes = [tuple(range(first, first + node)) for first in range(0, size, node)]
    return [sum(some, ()) for some in itertools.permutations(nodes, option.num_shards // node)]


def check(run: str, budget: Budget, ranks_per_node: int, seed: int, exchange: str = "pooled") -> int:
    """Compare all options of a table with the value of the placement with it; return how many were compared."""
    costs, state = state_of(run, budget, ranks_per_node, exchange)
    rng = np.random.default_rng(seed)
    for table in range(len(ROWS) - 1):
        state.insert(table, rng=rng)
    last, compared = len(ROWS) - 1, 0
    for way in state._ways[last]:
        paid = state._groups.keys()
        groups = np.array([len(paid) + (group not in paid) for group in way.groups], float)
        values, ranks = state._prices(way, groups)
        for place, number in enumerate(way.numbers):
            state.put(last, Choice(number, tuple(ranks[place].tolist())))
            assert state.value() == pytest.approx(values[place], rel=1e-9), (run, way.types[place])
            state.take(last)
            if costs.options[last][number].num_shards == 1 or way.kind != "any":
                every = []
                for tried in places(costs, number, way.kind):
                    state.put(last, Choice(number, tried))
                    every.append(state.value())
                    state.take(last)
                is_one_by_one = costs.options[last][number].num_shards > costs.ranks_per_node and way.kind == "node"
                assert is_one_by_one or values[place] == pytest.approx(min(every), rel=1e-9)
            compared += 1
    return compared


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(RUNS)), st.sampled_from([2, 4]))
def test_a_price_is_the_value_with_the_table_there(seed: int, run: str, ranks_per_node: int) -> None:
    assert check(run, Budget(device_bytes=3_000_000), ranks_per_node, seed) > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "exchange"),
    [
        matrix(Budget(device_bytes=900_000), "pooled"),
        (Budget(device_bytes=900_000, host_bytes=3_000_000), "pooled"),
        matrix(Budget(ratio=0.1, host_bytes=1_000_000), "rows"),
        (Budget(device_bytes=900_000, less_bytes=(0, 300_000, 0, 0)), "auto"),
    ],
)
def test_memory_that_is_too_small_has_its_price(budget: Budget, exchange: str) -> None:
    for run, seed in itertools.product(("ahead", "cpu"), range(2)):
        assert check(run, budget, 2, seed, exchange) > 3


@pytest.mark.slow
def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a state that counts another weight."""
    monkeypatch.setattr(local_search, "SPREAD", 0.03)
    with pytest.raises(AssertionError):
        check("ahead", Budget(device_bytes=3_000_000), 2, 0)
