"""Hits in the long run are told as a range where counts last, and not at all where popularity moves on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from embershard.cache.config import CachePolicy
from embershard.cache.statistics import CacheReport
from embershard.commands.plan.view import HITS_LEGEND, NOT_TOLD, hits_cells
from embershard.planning.budget import Budget
from embershard.planning.make_plan import make_plan
from embershard.planning.simulate.held_part import try_counts
from embershard.planning.simulate.pool_report import RowRange
from embershard.planning.simulate.replay import replay_pool
from embershard.planning.simulate.steady_state import steady_state
from embershard.sharding.plan import long_run_range
from embershard.sharding.run_shape import ReplaySettings
from tests.unit.planning.requests import make_request
from tests.unit.planning.traces import Ints, counted, skewed

ROWS, SAMPLES, BATCH = 4000, 60_000, 64
POLICIES = {
    "lru": ReplaySettings(CachePolicy("lru", False), 0),
    "lfu": ReplaySettings(CachePolicy("lfu", False), 0),
    "frequency": ReplaySettings(CachePolicy("frequency", False, warmup=True), 0, profile_samples=None),
    "look-ahead": ReplaySettings(),
}


def moving(rows: int, count: int, times: int, seed: int = 0) -> Ints:
    """Lookups whose popular rows are others after each of so many parts: one row comes after the other."""
    shift = np.arange(count) * times * rows // (2 * count)
    return (skewed(rows, count, seed, scattered=False) // 2 + shift) % rows


def long_run(lookups: Ints, share: float, slots: int, settings: ReplaySettings) -> tuple[tuple[float, float], float]:
    """Return the range that a first part tells, and what a replay of all has in its second half."""
    known = counted({"t": (ROWS, lookups[: round(share * len(lookups))])}, share_of_samples=share)
    shards = [RowRange("t", 0, ROWS)]
    sizes = (known.num_samples, slots, BATCH, settings.policy)
    told = steady_state([known.tables["t"]], shards, [1.0], *sizes, is_sample=True, grows=True, ahead=settings.ahead)
    held = try_counts(known, ["t"], slots / ROWS, BATCH, settings)
    assert held is not None
    assert known.trace is not None
    if settings.profile_samples is None:
        settings = dataclasses.replace(settings, profile_samples=known.num_samples)
    replayed = replay_pool(known.trace, shards, slots, BATCH, settings)
    everything = counted({"t": (ROWS, lookups)})
    assert everything.trace is not None
    later = CacheReport.total(replay_pool(everything.trace, shards, slots, BATCH, settings).late).hit_rate_lookups
    in_profile = CacheReport.total(replayed.shards).hit_rate_lookups
    assert later is not None
    return held.range_of("t", CacheReport.total(told.shards).hit_rate_lookups or 0.0, in_profile or 0.0), later


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("share_of_rows", [0.05, 0.2])
def test_where_counts_last_the_range_is_narrow_and_right(policy: str, share_of_rows: float) -> None:
    slots = round(share_of_rows * ROWS)
    (low, high), later = long_run(skewed(ROWS, SAMPLES), 0.25, slots, POLICIES[policy])
    assert low - 0.03 <= later <= high + 0.03
    assert high - low < 0.12


@pytest.mark.parametrize("policy", POLICIES)
def test_where_popularity_moves_on_counts_tell_nothing(policy: str) -> None:
    """The estimate is far off, and a profile of a part says so by itself. The same lookups in another order last."""
    lookups = moving(ROWS, SAMPLES, times=2)
    found, later = long_run(lookups, 0.25, ROWS // 20, POLICIES[policy])
    assert found == (0.0, 1.0), later
    mixed = np.random.default_rng(0).permutation(lookups)
    (low, high), later = long_run(mixed, 0.25, ROWS // 20, POLICIES[policy])
    assert (low, high) != (0.0, 1.0)
    assert low - 0.03 <= later <= high + 0.03


def test_too_few_samples_are_not_tried() -> None:
    data = counted({"t": (ROWS, skewed(ROWS, 150))})
    assert try_counts(data, ["t"], 0.1, BATCH, ReplaySettings()) is None
    assert try_counts(dataclasses.replace(data, trace=None), ["t"], 0.1, BATCH, ReplaySettings()) is None


def test_a_plan_says_what_its_counts_do_not_tell() -> None:
    rows = (3000, 2000)
    of_tables = {
        "moving": {f"t{number}": (each, moving(each, 20_000, 2, number)) for number, each in enumerate(rows)},
        "lasting": {f"t{number}": (each, skewed(each, 20_000, number)) for number, each in enumerate(rows)},
    }
    plans = {}
    for name, lookups in of_tables.items():
        data = counted(lookups, share_of_samples=0.1)
        plans[name] = make_plan(make_request(Budget(ratio=0.05), rows=rows, data=data))
        assert plans[name].prediction is not None
    notes = {name: [note for note in plan.notes if "do not last" in note] for name, plan in plans.items()}
    assert notes["lasting"] == []
    (note,) = notes["moving"]
    assert "embershard profile with a larger --sample" in note
    tables = {name: plan.prediction.tables for name, plan in plans.items() if plan.prediction is not None}
    assert long_run_range(tables["moving"]) == pytest.approx((0.0, 1.0))
    assert hits_cells(tables["moving"])[2] == NOT_TOLD
    assert "not told" in HITS_LEGEND
    found = long_run_range(tables["lasting"])
    assert found is not None
    assert found[1] - found[0] < 0.15
    assert hits_cells(tables["lasting"])[2].endswith("%")
