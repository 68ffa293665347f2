"""The replay of a trace against training: on all rows it counts what the trainer counts, to the last lookup."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import cache_stats
from embershard.cache import CacheConfig, CacheGrowthWarning
from embershard.cache.config import CachePolicy
from embershard.cache.next_use import pinned_tables
from embershard.commands.plan.inputs import replay_settings
from embershard.commands.profile.data_pass import PassOptions, profile_data
from embershard.data import DataConfig
from embershard.data.batch import Batch
from embershard.data.config import SyntheticConfig
from embershard.distributed import CheckpointConfig
from embershard.frequency import FrequencyProfile, SampledTrace
from embershard.frequency.config import ProfileConfig
from embershard.frequency.downsampling import downsampled
from embershard.pipeline import look_ahead
from embershard.pipeline.config import LookAheadConfig
from embershard.pipeline.worker import PrefetchDepth
from embershard.planning.simulate.pool_report import PoolReport, RowRange, ShardReport
from embershard.planning.simulate.replay import StepCut, TraceBatches, replay_pool, replay_preferences
from embershard.sharding.run_shape import ReplaySettings
from embershard.sharding.torchrec import cached_embeddings
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.trainer import Trainer
from tests.small_runs import small_model
from tests.unit.planning.traces import skewed, trace_of

DATA = DataConfig(synthetic=SyntheticConfig(num_samples=600, scale=0.0001, bag_sizes=(2,)), num_workers=0)
COUNTED = ("lookups", "unique_ids", "hits_unique", "hits_lookups", "fills")
POLICIES = {
    "lookahead": ReplaySettings(lookahead=6),
    "lfu": ReplaySettings(CachePolicy("lfu", by_next_use=False), 0),
    "lru": ReplaySettings(CachePolicy("lru", by_next_use=False), 0),
    "frequency": ReplaySettings(CachePolicy("frequency", by_next_use=False, warmup=True), 0, profile_samples=None),
    "static": ReplaySettings(CachePolicy("frequency", False, warmup=True, is_static=True), 0, profile_samples=None),
}


@pytest.fixture(scope="module")
def profile() -> FrequencyProfile:
    return profile_data(DATA, PassOptions())


LOOK_AHEAD, PROFILE, TRAIN = ("lookahead", "prefetch"), ("samples",), ("accumulate",)


def run_config(batch_size: int, **settings: Any) -> RunConfig:
    """Settings of the cache, the look-ahead, the profile and the training, which have no name in common."""
    others = LOOK_AHEAD + PROFILE + TRAIN
    return RunConfig(
        data=DATA,
        model=small_model(),
        cache=CacheConfig(**{name: value for name, value in settings.items() if name not in others}),
        look_ahead=LookAheadConfig(**{name: settings[name] for name in LOOK_AHEAD if name in settings}),
        profile=ProfileConfig(**{name: settings[name] for name in PROFILE if name in settings}),
        train=TrainConfig(
            batch_size=batch_size,
            log_every=1000,
            device="cpu",
            **{name: settings[name] for name in TRAIN if name in settings},
        ),
        checkpoint=CheckpointConfig(at_end=False),
    )


TRAINED = {
    "lookahead 4, held 3 ahead": {"ratio": 0.6, "lookahead": 4, "prefetch": 3},
    "lookahead 3, of a decaying lfu": {"ratio": 0.2, "lookahead": 3, "prefetch": 1, "decay": 0.5},
    "lfu with decay": {"ratio": 0.25, "policy": "lfu", "decay": 0.5, "lookahead": 0},
    "lru": {"ratio": 0.3, "policy": "lru", "lookahead": 0},
    "frequency, warm": {"ratio": 0.3, "policy": "frequency", "samples": 200, "lookahead": 2},
    "lfu from a profile": {"ratio": 0.3, "policy": "lfu", "samples": 200, "lookahead": 2},
    "lru, warm": {"ratio": 0.3, "policy": "lru", "samples": 200, "lookahead": 0},
    "lookahead, warm": {"ratio": 0.3, "warmup": True, "samples": 200, "lookahead": 4},
    "a batch does not fit": {"ratio": 0.04, "lookahead": 4},
    "a batch does not fit lru": {"ratio": 0.04, "lookahead": 0, "policy": "lru"},
    "lookahead 2, in 3 pieces": {"ratio": 0.6, "lookahead": 2, "accumulate": 3},
    "lfu in 7 pieces, held 3 ahead": {"ratio": 0.4, "policy": "lfu", "lookahead": 2, "prefetch": 1, "accumulate": 7},
    "lru in 2 pieces": {"ratio": 0.3, "policy": "lru", "lookahead": 0, "accumulate": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_replay_counts_what_training_counts(ranks, profile, name, monkeypatch):
    """Hits, fills and rows held per table; growth where a batch does not fit."""
    config = run_config(60, **TRAINED[name])
    trainer = Trainer(config, ranks)
    (pool,) = cached_embeddings(trainer.model)
    slots, tables = pool.cache.num_slots, pool.cache.tables
    held, pieces = 3 if "held 3" in name else 1, config.train.accumulate
    monkeypatch.setattr(look_ahead, "PrefetchDepth", lambda most, is_adaptive: PrefetchDepth(held, False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheGrowthWarning)
        list(trainer.train())
    trainer.close()
    shards = [RowRange(table, 0, profile.num_rows(table)) for table in tables]
    pinned = [tables[number] for number in pinned_tables([shard.num_rows for shard in shards], slots)]
    policy = replay_settings(config, config.has_profile, trainer.stream.num_samples, "cpu")
    assert policy.prefetch == 1, "what a CPU holds while its steps do not wait"
    policy = dataclasses.replace(policy, prefetch=held, lookahead=policy.lookahead * pieces)
    statistics = profile.need_statistics()
    assert statistics.trace is not None
    found = replay_pool(statistics.trace, shards, slots, 60, policy, pinned_tables=pinned, cut=StepCut(1, pieces))
    trained = {stats.table: stats for stats in cache_stats(trainer.model)}
    expected = {table: [getattr(trained[table], each) for each in (*COUNTED, "write_backs")] for table in tables}
    assert found.num_steps == trainer.steps == 9
    assert totals(found.shards, 9, (*COUNTED, "write_backs")) == expected
    assert {each.shard.table: each.held_rows for each in found.shards} == {t: trained[t].slots for t in tables}
    assert found.num_slots == pool.cache.num_slots
    assert found.grew == (found.num_slots > slots) == ("does not fit" in name)
    assert pinned, "no table stays: this was to be tested too"


@pytest.mark.slow
def test_a_second_epoch_has_another_order(ranks, profile):
    """Which one, a trace does not know: hits of two epochs are close, not equal. The first one is as it is."""
    config = run_config(60, ratio=0.3, policy="lru", lookahead=0)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=2))
    trainer = Trainer(config, ranks)
    (pool,) = cached_embeddings(trainer.model)
    slots, tables = pool.cache.num_slots, pool.cache.tables
    list(trainer.train())
    trainer.close()
    shards = [RowRange(table, 0, profile.num_rows(table)) for table in tables]
    pinned = [tables[number] for number in pinned_tables([shard.num_rows for shard in shards], slots)]
    policy = replay_settings(config, False, trainer.stream.num_samples, "cpu")
    trace = profile.need_statistics().trace
    assert trace is not None
    found, other = (
        replay_pool(trace, shards, slots, 60, each, pinned_tables=pinned, num_steps=18)
        for each in (policy, dataclasses.replace(policy, shuffle_window=0))
    )
    stats = cache_stats(trainer.model)
    trained = sum(s.hits_unique for s in stats) / sum(s.unique_ids for s in stats)
    replayed = sum(s.hits_unique for s in found.shards) / sum(s.unique_ids for s in found.shards)
    assert replayed == pytest.approx(trained, abs=0.005)
    assert sum(s.lookups for s in found.shards) * 18 == sum(s.lookups for s in stats)
    first = [
        replay_pool(trace, shards, slots, 60, each, num_steps=9).shards
        for each in (policy, ReplaySettings(CachePolicy("lru"), 0))
    ]
    assert policy.shuffle_window > 0
    assert found.shards != other.shards
    assert first[0] == first[1]


def totals(shards: tuple[ShardReport, ...], num_steps: int, names: tuple[str, ...] = COUNTED) -> dict[str, list[int]]:
    """Whole numbers over all steps, by table."""
    found = {}
    for report in shards:
        values = [getattr(report, name) * num_steps for name in names]
        assert np.allclose(values, np.round(values), atol=1e-6), "not whole lookups"
        found[report.shard.table] = [round(value) for value in values]
    return found


def all_of(report: PoolReport) -> list[list[float]]:
    names = [field.name for field in dataclasses.fields(ShardReport) if field.name != "shard"]
    return [[getattr(shard, name) for name in names] for shard in (*report.shards, *report.late)]


@pytest.mark.parametrize("name", POLICIES)
def test_a_block_of_rows_is_a_table_of_its_own(name):
    lookups = {"a": skewed(300, 4000), "b": skewed(90, 4000, seed=1)}
    blocks = [RowRange("a", 100, 200), RowRange("b", 30, 60)]
    found = replay_pool(trace_of(lookups), blocks, 60, 200, POLICIES[name])
    alone = {}
    whole = trace_of(lookups)
    for block in blocks:
        table = whole.tables[block.table]
        inside = (table.rows >= block.start) & (table.rows < block.stop)
        alone[block.table] = dataclasses.replace(
            table, samples=table.samples[inside], rows=table.rows[inside] - block.start
        )
    own = SampledTrace(1.0, whole.num_samples, alone, {}, {})
    expected = replay_pool(own, [RowRange("a", 0, 100), RowRange("b", 0, 30)], 60, 200, POLICIES[name])
    assert all_of(found) == all_of(expected)
    assert 0 < found.shards[0].hits_unique < found.shards[0].unique_ids


def test_blocks_together_have_all_lookups():
    trace = trace_of({"a": skewed(301, 4000)})
    edges = [0, 76, 152, 228, 301, 301]
    blocks = [replay_pool(trace, [RowRange("a", a, b)], 40, 200, POLICIES["lru"]) for a, b in itertools.pairwise(edges)]
    whole = replay_pool(trace, [RowRange("a", 0, 301)], 301, 200, POLICIES["lru"])
    for name in ("lookups", "unique_ids"):
        assert sum(getattr(b.shards[0], name) for b in blocks) == pytest.approx(getattr(whole.shards[0], name))
    assert blocks[-1].shards[0].lookups == blocks[-1].shards[0].fills == 0, "a block without rows"


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_share_of_the_rows_says_what_all_of_them_say(name):
    """An eighth of 24,000 rows with 80,000 lookups. About 600 distinct rows of it are in the cache at a time, so the
    hit rate's standard error is about sqrt(0.25 / 600) of what differs between rows: 2 points. With all slots, not an
    eighth of them, it would be far off."""
    lookups = {"a": skewed(24_000, 80_000, power=3), "b": skewed(3000, 80_000, seed=2, power=3)}
    trace = trace_of(lookups)
    sampled = downsampled(trace, 80_000 * 2 // 8)
    assert sampled.rate < 0.25
    shards = [RowRange("a", 0, 24_000), RowRange("b", 0, 3000)]

    def rates(found: PoolReport) -> list[float]:
        hits = [sum(getattr(s, n) for s in found.shards) for n in ("hits_unique", "hits_lookups")]
        return [hits[0] / sum(s.unique_ids for s in found.shards), hits[1] / sum(s.lookups for s in found.shards)]

    full = replay_pool(trace, shards, 5000, 2000, POLICIES[name])
    part = replay_pool(sampled, shards, 5000, 2000, POLICIES[name])
    wrong = replay_pool(dataclasses.replace(sampled, rate=0.999), shards, 5000, 2000, POLICIES[name])
    assert rates(part) == pytest.approx(rates(full), abs=0.02)
    assert rates(wrong) != pytest.approx(rates(full), abs=0.06)
    assert sum(s.lookups for s in part.shards) == pytest.approx(sum(s.lookups for s in full.shards), rel=0.02)
    assert sum(s.unique_ids for s in part.shards) == pytest.approx(sum(s.unique_ids for s in full.shards), rel=0.02)
    assert sum(s.held_rows for s in part.shards) == pytest.approx(5000, rel=0.01)


@pytest.mark.slow
def test_constant_rows_are_counted_as_if_replayed():
    """Three rows in nearly every sample beside 2000 others: their number, and not their sampling, decides."""
    random = np.random.default_rng(3)
    rows = np.where(random.random(40_000) < 0.6, random.integers(0, 3, 40_000), random.integers(3, 2003, 40_000))
    trace = trace_of({"a": rows})
    is_constant = rows < 3
    table = dataclasses.replace(trace.tables["a"], samples=np.flatnonzero(~is_constant), rows=rows[~is_constant])
    split = SampledTrace(1 - 1e-9, 40_000, {"a": table}, {"a": np.arange(3)}, {"a": np.bincount(rows)[:3]})
    for name in ("lru", "lookahead"):
        full = replay_pool(trace, [RowRange("a", 0, 2003)], 1503, 1000, POLICIES[name]).shards[0]
        found = replay_pool(split, [RowRange("a", 0, 2003)], 1503, 1000, POLICIES[name]).shards[0]
        for each in (*COUNTED, "held_rows"):
            assert getattr(found, each) == pytest.approx(getattr(full, each), rel=1e-3), each
    block = replay_pool(split, [RowRange("a", 1, 2)], 1, 1000, POLICIES["lru"])
    assert block.shards[0].unique_ids == pytest.approx(1.0)
    assert block.shards[0].lookups == pytest.approx(np.count_nonzero(rows == 1) / 40)
    assert block.shards[0].fills == pytest.approx(1 / 40)
    assert block.late[0].fills == 0


@pytest.mark.parametrize("name", POLICIES)
def test_tables_that_stay_are_counted_where_rows_are_sampled(name):
    lookups = {"small": skewed(40, 20_000), "large": skewed(4000, 20_000, seed=1)}
    shards = [RowRange("small", 0, 40), RowRange("large", 0, 4000)]
    full = replay_pool(trace_of(lookups), shards, 1000, 1000, POLICIES[name], pinned_tables=["small"])
    sampled = downsampled(trace_of(lookups), 8000)
    assert sampled.rate < 1
    found = replay_pool(sampled, shards, 1000, 1000, POLICIES[name], pinned_tables=["small"]).shards[0]
    assert found.hits_unique == pytest.approx(found.unique_ids)
    assert full.shards[0].hits_unique == full.shards[0].unique_ids
    assert full.shards[0].held_rows == found.held_rows == 40
    assert found.unique_ids == pytest.approx(full.shards[0].unique_ids, rel=0.05)
    assert found.fills == pytest.approx(full.shards[0].fills)


@pytest.mark.parametrize("name", POLICIES)
def test_late_is_what_the_second_half_added(name):
    trace, shards, policy = trace_of({"a": skewed(500, 7000)}), [RowRange("a", 0, 500)], POLICIES[name]
    policy = dataclasses.replace(policy, lookahead=0)  # else the last steps of the half would know less
    whole = replay_pool(trace, shards, 200, 1000, policy)
    half = replay_pool(trace, shards, 200, 1000, policy, num_steps=3)
    added = np.array(totals(whole.shards, 7)["a"]) - totals(half.shards, 3)["a"]
    assert totals(whole.late, 4)["a"] == added.tolist()
    assert whole.over(None) == whole.over(5) == whole.over(7) == whole.shards
    twice = whole.over(14)[0]
    for each in COUNTED:
        values = [getattr(report, each) for report in (whole.shards[0], whole.late[0])]
        assert getattr(twice, each) == pytest.approx(sum(values) / 2)
    assert whole.over(10**9)[0].hits_unique == pytest.approx(whole.late[0].hits_unique)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_first_touches_are_the_rows_that_the_cache_never_had(name):
    """Every row once, but for those of a warm-up; a second epoch has none. With a slot for every row all misses are."""
    rows = skewed(400, 3000)
    shards, trace = [RowRange("a", 0, 150), RowRange("a", 150, 400)], trace_of({"a": rows})
    for num_slots in (120, 400):
        found = replay_pool(trace, shards, num_slots, 60, POLICIES[name], num_steps=100)
        first = [round(each.first_touches * 100) for each in found.shards]
        misses = [round((each.unique_ids - each.hits_unique) * 100) for each in found.shards]
        distinct = [len(np.unique(rows[each.has(rows)])) for each in shards]
        assert sum(each.first_touches for each in found.late) == 0
        if POLICIES[name].policy.warmup:
            cold = max(0, len(np.unique(rows)) - num_slots)
            assert cold <= sum(first) <= cold + 60 * (cold > 0), "the first batch evicts some rows of the warm-up"
        else:
            assert first == distinct
        assert (first == misses) is (num_slots == 400)


def test_a_step_is_cut_as_training_cuts_its_batches():
    """Two ranks' batches of seven samples, in three pieces: 3, 2 and 2 samples of each."""
    samples = torch.arange(14.0).view(2, 7)
    no_ids = KeyedJaggedTensor(["a"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(7, dtype=torch.int64))
    ranks = [Batch(torch.zeros(7, 1), no_ids, own).micro_batches(3) for own in samples]
    pieces = [torch.cat([own.labels for own in piece]).int().tolist() for piece in zip(*ranks, strict=True)]
    order, bounds = StepCut(2, 3).order(14)
    assert pieces == [part.tolist() for part in np.split(order, bounds[1:-1])]


@pytest.mark.parametrize("is_distinct", [False, True])
def test_pieces_are_looked_up_one_after_the_other(is_distinct):
    """Also where samples come again in another order; distinct rows are those of each rank's piece."""
    rows = skewed(50, 90)
    given = (trace_of({"a": rows}), [RowRange("a", 0, 50)], 20, None, 30)
    whole, cut = (TraceBatches(*given, StepCut(2, pieces, is_distinct)) for pieces in (1, 3))
    for step in range(8):  # two epochs of four batches
        pieces = [cut.get(3 * step + piece)[0].tolist() for piece in range(3)]
        assert [len(each) for each in pieces] == [8, 6, 6] or is_distinct
        every = whole.get(step)[0].tolist()
        assert {*itertools.chain(*pieces)} == {*every}
        if not is_distinct:
            assert sorted(itertools.chain(*pieces)) == sorted(every)
    if is_distinct:
        found = [rows[20 + rank : 20 + rank + 4].tolist() for rank in (0, 10)]
        again = TraceBatches(*given, StepCut(2, 3, is_distinct))
        piece = [again.get(number)[0].tolist() for number in range(4)][-1]
        assert sorted(piece) == sorted([*set(found[0]), *set(found[1])])


def test_more_steps_than_batches_begin_again():
    rows = skewed(500, 3500)
    found = replay_pool(trace_of({"a": rows}), [RowRange("a", 0, 500)], 200, 1000, POLICIES["lookahead"], num_steps=7)
    again = np.concatenate([rows[:3000], rows[:3000], rows[:1000]])
    expected = replay_pool(trace_of({"a": again}), [RowRange("a", 0, 500)], 200, 1000, POLICIES["lookahead"])
    assert all_of(found) == all_of(expected)


def test_a_trace_shorter_than_a_batch_is_refused():
    with pytest.raises(ValueError, match="99 samples, less than a batch of 100"):
        replay_pool(trace_of({"a": np.arange(99)}), [RowRange("a", 0, 99)], 10, 100, POLICIES["lru"])


@pytest.mark.slow
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 90), st.integers(0, 5), st.sampled_from(sorted(POLICIES)))
@settings(max_examples=20)
def test_counters_fit_each_other(num_slots, num_rows, batch_size, seed, name):
    trace = trace_of({"a": skewed(num_rows, 120, seed), "b": skewed(30, 120, seed + 9)}, bag_size=1)
    shards = [RowRange("a", 0, num_rows), RowRange("b", 5, 25), RowRange("b", 30, 30)]
    found = replay_pool(trace, shards, num_slots, batch_size, POLICIES[name])
    assert found.num_slots >= min(num_slots, num_rows + 20)
    for report in found.shards:
        assert 0 <= report.hits_unique <= report.unique_ids <= report.lookups
        assert report.hits_unique <= report.hits_lookups <= report.lookups
        assert report.held_rows <= max(1, report.shard.num_rows)
        if name != "frequency":  # which fills before the first step, too
            assert report.fills == pytest.approx(report.unique_ids - report.hits_unique)
        assert report.write_backs <= report.fills + 1e-9


@pytest.mark.slow
def test_preferences_tell_a_loop_from_a_skew():
    """In a loop longer than the cache nothing is found by its past. Of few hot rows most is found by their counts."""
    loop = np.tile(np.arange(400), 15)
    found = replay_preferences(trace_of({"a": loop}), {"a": 400}, 50, share_of_rows=0.5)
    assert found["lru"] == found["lfu"] == 1.0
    assert found["lookahead"] < 0.7
    found = replay_preferences(trace_of({"a": skewed(4000, 6000)}), {"a": 4000}, 50, share_of_rows=0.1)
    assert found["frequency"] < found["lru"] - 0.05
    assert found["lookahead"] < found["lfu"]
