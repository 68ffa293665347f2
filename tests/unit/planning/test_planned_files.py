"""Plans of rows in a file: estimates where not all can be replayed, memory, and slots that fit the places."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from embershard.cache.config import CachePolicy
from embershard.errors import ShardingError
from embershard.frequency.downsampling import downsampled
from embershard.planning.make_plan import make_plan
from embershard.planning.request import Budget
from embershard.planning.simulate import replay
from embershard.planning.simulate.file_tier import FileTraffic, Levels
from embershard.planning.simulate.pool_report import RowRange
from embershard.planning.simulate.replay import replay_pool
from embershard.planning.workload import Workload
from embershard.sharding import memory_model
from embershard.sharding.home_sizes import FiledSizes
from embershard.sharding.run_shape import ReplaySettings
from embershard.sharding.shards import TablePlacement
from embershard.sharding.sizes import by_pool, place_shards
from tests.unit.planning.requests import make_request, make_workload
from tests.unit.planning.traces import skewed, trace_of

LFU = ReplaySettings(CachePolicy("lfu"), lookahead=16, prefetch=1)
LOOK_AHEAD = ReplaySettings(CachePolicy(), lookahead=16, prefetch=1)
SHARDS = [RowRange("a", 0, 24_000), RowRange("b", 0, 3000)]
LEVELS = Levels(num_slots=4000, num_places=9000, rows_per_page=16)
LOOKUPS = {"a": skewed(24_000, 80_000, power=2), "b": skewed(3000, 80_000, seed=2, power=3)}


def traffic(trace=None, levels: Levels = LEVELS) -> FileTraffic:
    found = replay_pool(trace or trace_of(LOOKUPS), SHARDS, 4000, 2000, LOOK_AHEAD, levels=levels)
    assert found.files is not None
    return found.files


@pytest.mark.slow
def test_a_share_of_the_rows_says_what_all_of_them_move() -> None:
    sampled = downsampled(trace_of(LOOKUPS), 80_000 * 2 // 4)
    assert sampled.rate < 0.4
    full, part = traffic(), traffic(sampled)
    for name in ("rows_read", "rows_written", "rows_drawn"):
        assert getattr(part, name) == pytest.approx(getattr(full, name), rel=0.1), name
    for name in ("pages_read", "pages_written", "pages_patched"):
        assert getattr(part, name) == pytest.approx(getattr(full, name), rel=0.15), name
    assert full.pages_written < 0.9 * full.rows_written, "rows share pages"
    wrong = traffic(dataclasses.replace(sampled, rate=0.999))  # the negative control: places for all rows
    assert wrong.rows_read < 0.5 * full.rows_read


@pytest.mark.slow
def test_pages_are_those_of_all_rows_where_only_those_that_occur_are_replayed(monkeypatch) -> None:
    full = traffic()
    monkeypatch.setattr(replay, "_MOST_IDLE_ROWS", -(10**9))
    assert traffic() == full
    assert traffic(levels=dataclasses.replace(LEVELS, rows_per_page=1)) != full


@pytest.mark.slow
def test_the_second_half_goes_on() -> None:
    found = replay_pool(trace_of(LOOKUPS), SHARDS, 4000, 2000, LOOK_AHEAD, levels=LEVELS)
    assert found.files is not None
    assert found.late_files is not None
    assert found.late_files.rows_read > found.files.rows_read > 0, "the file is empty at first"
    assert found.files_over(40) == found.files
    longer = found.files_over(80)
    assert longer is not None
    assert longer.rows_read == pytest.approx((found.files.rows_read + found.late_files.rows_read) / 2)
    assert replay_pool(trace_of(LOOKUPS), SHARDS, 4000, 2000, LOOK_AHEAD).files_over(80) is None


def filed(workload: Workload, host_bytes: int) -> Workload:
    return dataclasses.replace(workload, shape=dataclasses.replace(workload.shape, home=FiledSizes(host_bytes)))


def one_pool(host_bytes: int):
    """A workload, its one pool on one rank, and the places there."""
    workload = filed(make_workload((5000, 900), (16, 16), world_size=1, cache=LOOK_AHEAD), host_bytes)
    tables = [
        TablePlacement(f"t{n}", rows, 16, "fp32", "table_wise", "cached", (0,)) for n, rows in enumerate((5000, 900))
    ]
    shards = place_shards(workload.model, tables, workload.shape)
    (places,) = workload.shape.home.places(by_pool(shards)).values()
    return workload, shards, places


@pytest.mark.slow
def test_counts_alone_are_near_a_long_replay() -> None:
    """Once all rows were written, which the second half of many epochs shows; look-ahead knows more than counts."""
    workload, shards, places = one_pool(100_000)
    assert places == 100_000 // 68
    ranges, sizes = [RowRange.of(shard) for shard in shards], Levels(300, places, 60)
    replayed = replay_pool(workload.data.trace, ranges, 300, 64, LFU, num_steps=600, levels=sizes).late_files
    counted = workload.pool_reports(shards, 300, 0, places=places)[2]
    assert replayed is not None
    assert counted is not None
    assert replayed.rows_drawn == 0
    assert counted.rows_read == pytest.approx(replayed.rows_read, rel=0.3)
    assert counted.pages_written == pytest.approx(replayed.pages_written, rel=0.3)
    assert workload.pool_reports(shards, 300, 0)[2] is None
    everything = workload.pool_reports(shards, 300, 0, places=10**6)[2]
    assert everything == FileTraffic(steps=1.0)


def test_host_memory_is_the_places_and_what_is_kept_of_all_rows() -> None:
    workload, shards, places = one_pool(100_000)
    found = memory_model.host_bytes(by_pool(shards), workload.shape)
    assert found["rows"] == (places + 1) * 68
    sums = 4 * 5900 / (4096 // 68)  # one a page
    assert found["file_maps"] == int(4.125 * 5900 + sums) + 28 * places + found["rows"] // 8
    _, _, all_rows = one_pool(10**9)
    assert all_rows == 5900


@pytest.mark.slow
def test_slots_are_at_most_half_of_the_places() -> None:
    roomy = make_workload((5000, 900), (16, 16), world_size=1, cache=LOOK_AHEAD)
    request = make_request(Budget(device_bytes=1_000_000), filed(roomy, 100_000))
    pinned_to_caches = dataclasses.replace(request, budget=Budget(cache_bytes=400_000))
    plan = make_plan(pinned_to_caches)
    assert [pool.slots for pool in plan.pools] == [100_000 // 68 // 2]
    without = dataclasses.replace(pinned_to_caches, workload=roomy)
    assert [pool.slots for pool in make_plan(without).pools] > [2000]
    with pytest.raises(ShardingError, match=r"holds 735 rows of the tables \['t0', 't1'\] on rank 0, whose cache has"):
        make_plan(dataclasses.replace(request, budget=Budget(ratio=0.2), workload=filed(roomy, 50_000)))


@pytest.mark.slow
def test_a_node_holds_the_rows_in_front_of_its_files() -> None:
    """Host memory that holds the tables of neither rank, but what is in front of their files."""
    workload = make_workload((50_000, 50_000), (64, 64), cache=LOOK_AHEAD)
    enough = 2 * 1_000_000 + int(100_000 * 4.4) + 250_000 + 700_000
    budget = Budget(ratio=0.02, host_bytes=enough)
    with pytest.raises(ShardingError, match="host"):
        make_plan(make_request(budget, workload))
    plan = make_plan(make_request(budget, filed(workload, 1_000_000)))
    assert plan.prediction is not None
    assert plan.prediction.most_host_bytes(2) <= enough
    assert all(rank.files["rows_written"] > 0 for rank in plan.prediction.ranks)
    assert np.isclose(sum(rank.host_bytes["rows"] for rank in plan.prediction.ranks), 2_000_000, rtol=0.01)
