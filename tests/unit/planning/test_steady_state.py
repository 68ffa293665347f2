"""What counts alone say about a cache, against caches that run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.cache.config import CachePolicy
from embershard.frequency import CountHistogram, TableStatistics
from embershard.frequency.assumed import AssumedTable, assumed_statistics
from embershard.planning.simulate.pool_report import PoolReport, RowRange
from embershard.planning.simulate.replay import StepCut, replay_pool
from embershard.planning.simulate.steady_state import steady_state
from embershard.sharding.run_shape import ReplaySettings
from tests.unit.planning.traces import Ints, counted, skewed, trace_of

LFU = ReplaySettings(CachePolicy("lfu", by_next_use=False), 0)
LRU = ReplaySettings(CachePolicy("lru", by_next_use=False), 0)
FREQUENCY = ReplaySettings(CachePolicy("frequency", by_next_use=False, warmup=True), 0, profile_samples=None)
STATIC = ReplaySettings(CachePolicy("frequency", False, warmup=True, is_static=True), 0, profile_samples=None)
POLICIES = {"lfu": LFU, "lru": LRU, "frequency": FREQUENCY, "static": STATIC, "lookahead": ReplaySettings()}


def from_counts(
    lookups: dict[str, tuple[int, Ints]],
    num_slots: int,
    batch: int,
    policy: ReplaySettings,
    bag_size: int = 1,
    **more: Any,
) -> PoolReport:
    data = counted(lookups, bag_size)
    return steady_state(
        list(data.tables.values()),
        [RowRange(name, 0, rows) for name, (rows, _) in lookups.items()],
        [1.0] * len(lookups),
        data.num_samples,
        num_slots,
        batch,
        policy.policy,
        is_sample=False,
        **more,
    )


def rates(found: Sequence) -> list[float]:
    unique, lookups = sum(s.unique_ids for s in found), sum(s.lookups for s in found)
    return [sum(s.hits_unique for s in found) / unique, sum(s.hits_lookups for s in found) / lookups]


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [180, 300, 400])
@pytest.mark.parametrize("lookahead", [4, 64])
@pytest.mark.parametrize("scoring", ["lfu", "lru"])
def test_look_ahead_keeps_what_comes_back_soon(scoring, lookahead, num_slots):
    """With slots for a part of the known uses, and for more than all: 5 points. Without what is known ahead, counts are
    10 points off."""
    lookups = {"a": (500, skewed(500, 9000, power=3)), "b": (200, skewed(200, 9000, seed=1, power=2))}
    settings = ReplaySettings(CachePolicy(scoring, by_next_use=True), lookahead)
    trace = trace_of({table: rows for table, (_, rows) in lookups.items()})
    found = from_counts(lookups, num_slots, 25, settings, ahead=settings.ahead, grows=True)
    run = replay_pool(trace, [each.shard for each in found.shards], num_slots, 25, settings)
    assert rates(found.shards) == pytest.approx(rates(run.late), abs=0.05)
    if (lookahead, num_slots) == (64, 180):
        blind = from_counts(lookups, num_slots, 25, settings, grows=True)
        assert rates(blind.shards)[0] < rates(run.late)[0] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [180, 400])
@pytest.mark.parametrize("name", ["frequency", "lfu", "lru", "static"])
def test_independent_lookups_hit_as_counts_say(name, num_slots):
    """Two tables with 700 rows in one cache, 9000 independent lookups each, 35 distinct rows per batch. What a batch
    leaves in the cache may be found by the next one, and lfu counts a short past only: 3 points."""
    lookups = {"a": (500, skewed(500, 9000, power=3)), "b": (200, skewed(200, 9000, seed=1, power=2))}
    found = from_counts(lookups, num_slots, 25, POLICIES[name])
    trace = trace_of({table: rows for table, (_, rows) in lookups.items()})
    shards = [each.shard for each in found.shards]
    run = replay_pool(trace, shards, num_slots, 25, POLICIES[name])
    assert rates(found.shards) == pytest.approx(rates(run.late), abs=0.03)
    for one, other in zip(found.shards, run.late, strict=True):
        assert one.lookups == pytest.approx(other.lookups)
        assert one.unique_ids == pytest.approx(other.unique_ids, rel=0.02)
        assert rates([one]) == pytest.approx(rates([other]), abs=0.06), one.shard.table


@pytest.mark.slow
def test_pieces_look_rows_up_again_and_miss_them_once():
    """A step of four pieces: its rows stay until its end, so later pieces find those of earlier ones."""
    lookups = {"a": (500, skewed(500, 9000, power=3))}
    trace, shards = trace_of({"a": lookups["a"][1]}), [RowRange("a", 0, 500)]
    one, four = (from_counts(lookups, 200, 100, LFU, pieces=pieces).shards[0] for pieces in (1, 4))
    whole, cut = (replay_pool(trace, shards, 200, 100, LFU, cut=StepCut(2, pieces)).late[0] for pieces in (1, 4))
    assert one.step_rows == one.unique_ids == pytest.approx(whole.unique_ids, rel=0.02)
    assert four.unique_ids == pytest.approx(cut.unique_ids, rel=0.02)
    assert four.step_rows == one.step_rows < 0.9 * four.unique_ids
    assert (four.lookups, four.fills) == pytest.approx((one.lookups, one.fills))
    assert rates([four]) == pytest.approx(rates([cut]), abs=0.03)
    assert rates([one]) != pytest.approx(rates([cut]), abs=0.03), "the control: counts of whole batches"


@pytest.mark.slow
def test_bags_of_several_ids():
    lookups = {"a": (3000, skewed(3000, 40_000, power=3))}
    found = from_counts(lookups, 800, 50, LRU, bag_size=4)
    run = replay_pool(trace_of({"a": lookups["a"][1]}, bag_size=4), [RowRange("a", 0, 3000)], 800, 50, LRU)
    assert found.shards[0].lookups == pytest.approx(200)
    assert found.shards[0].unique_ids == pytest.approx(run.late[0].unique_ids, rel=0.01)
    assert rates(found.shards) == pytest.approx(rates(run.late), abs=0.03)


@pytest.mark.parametrize("name", ["frequency", "lfu", "lookahead"])
@pytest.mark.parametrize("num_slots", [190, 215, 240, 300])
def test_little_room_beside_rows_of_every_batch(name, num_slots):
    """100 rows of every batch and 80 others each time: the former stay, however little room there is beside them."""
    random = np.random.default_rng(0)
    rows = np.where(
        random.random(160_000) < 0.95, random.integers(0, 100, 160_000), random.integers(100, 10_100, 160_000)
    )
    found = from_counts({"a": (10_100, rows)}, num_slots, 1600, POLICIES[name]).shards[0]
    assert found.unique_ids == pytest.approx(180, rel=0.02)
    assert found.hits_unique == pytest.approx(100, abs=6)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 60)), min_size=1, max_size=6),
    st.integers(1, 300),
    st.lists(st.integers(1, 2000), min_size=2, max_size=6),
    st.sampled_from(sorted(POLICIES)),
    st.booleans(),
)
@settings(max_examples=120)
def test_more_slots_never_hit_less(groups, batch, slots, name, is_sample):
    """Rows held fit the slots; with a slot for every row all are found."""
    by_count = dict(groups)
    counts = np.array(sorted(by_count, reverse=True), dtype=float)
    histogram = CountHistogram(counts, np.array([by_count[int(count)] for count in counts], dtype=float))
    num_rows = int(histogram.num_rows) + 7
    bags = np.array([0.0, 1.0])
    none = np.empty(0)
    table = TableStatistics("a", num_rows, int(histogram.num_lookups), histogram, bags, none.astype(np.int64), none)
    num_samples = int(histogram.num_lookups)
    shards = [
        RowRange("a", 0, num_rows // 3),
        RowRange("a", num_rows // 3, num_rows),
        RowRange("a", num_rows, num_rows),
    ]
    before = -1.0
    for num_slots in [*sorted(slots), num_rows, 3 * num_rows]:
        found = steady_state(
            [table] * 3,
            shards,
            [0.6, 0.4, 0.0],
            num_samples,
            num_slots,
            batch,
            POLICIES[name].policy,
            is_sample=is_sample,
        )
        hits = sum(each.hits_unique for each in found.shards)
        assert hits >= before - 1e-6
        before = hits
        assert sum(each.held_rows for each in found.shards) <= num_slots * (1 + 1e-9)
        for each in found.shards:
            assert 0 <= each.hits_unique <= each.unique_ids * (1 + 1e-9)
            assert 0 <= each.hits_lookups <= each.lookups * (1 + 1e-9)
            assert each.held_rows <= each.shard.num_rows * (1 + 1e-9)
            assert each.fills == each.write_backs == pytest.approx(each.unique_ids - each.hits_unique, abs=1e-9)
        assert found.shards[2].lookups == found.shards[2].held_rows == 0
        assert found.grew == (sum(each.unique_ids for each in found.shards) > num_slots)
    assert before == pytest.approx(sum(each.unique_ids for each in found.shards))


@pytest.mark.slow
def test_other_samples_have_rows_that_this_one_has_not():
    """A tenth of a stream with a long tail: what is expected of other samples is what the rest of them does."""
    stream = np.where(
        np.random.default_rng(0).random(200_000) < 0.5,
        skewed(1000, 200_000),
        1000 + np.random.default_rng(1).integers(0, 49_000, 200_000),
    )
    data = counted({"a": (50_000, stream[:20_000])}, share_of_samples=0.1)
    shard = RowRange("a", 0, 50_000)

    def hit_rate(is_sample: bool) -> float:
        found = steady_state(
            [data.tables["a"]], [shard], [1.0], 20_000, 5000, 1000, FREQUENCY.policy, is_sample=is_sample
        )
        return rates(found.shards)[1]

    run = replay_pool(trace_of({"a": stream}), [shard], 5000, 1000, FREQUENCY)
    assert hit_rate(True) == pytest.approx(rates(run.late)[1], abs=0.03)
    assert hit_rate(False) > hit_rate(True) + 0.05, "as if all rows had been seen"


def test_a_block_is_corrected_as_its_table_is():
    """Whether a row was seen once does not depend on how the table is cut."""
    rows = np.concatenate([skewed(1000, 20_000), 1000 + np.random.default_rng(1).permutation(19_000)[:8000]])
    data = counted({"a": (20_000, rows)})

    def found(share: float) -> list[float]:
        block = steady_state(
            [data.tables["a"]], [RowRange("a", 0, 10_000)], [share], 28_000, 1000, 500, LFU.policy, is_sample=True
        )
        return [block.shards[0].unique_ids, block.shards[0].hits_unique, block.shards[0].hits_lookups]

    assert found(0.5) == pytest.approx(found(0.5 + 1e-9), rel=1e-6)
    assert found(0.5) == pytest.approx(found(0.5 - 1e-9), rel=1e-6)
    assert found(0.5) != pytest.approx(found(0.52), rel=1e-3)


def test_rows_of_every_batch_stay_in_a_cache_of_hundreds_of_millions():
    """Their share of the slots is next to nothing: no number overflows."""
    data = assumed_statistics([AssumedTable("t0", 400_000_000, 1.05)], 10**9)
    settings = ReplaySettings()
    found = steady_state(
        [data.tables["t0"]],
        [RowRange("t0", 0, 400_000_000)],
        [1.0],
        data.num_samples,
        390_000_000,
        65_536,
        settings.policy,
        is_sample=False,
        ahead=settings.ahead,
    )
    (report,) = found.shards
    assert 0.99 < report.hits_lookups / report.lookups <= 1
