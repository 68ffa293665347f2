"""Plans are values, equal for equal inputs, and cost what the batch costs."""

from __future__ import annotations

import dataclasses
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.cache import (
    CacheGrowthWarning,
    CachePlan,
    CachePlanner,
    KnownBatch,
    MemoryRows,
    NextUseIndex,
    RowCache,
    SlotMap,
    SlotState,
    Ticket,
    make_scores,
)
from embershard.cache import planning_classes as classes
from embershard.cache.config import CachePolicy, Policy, Scoring
from embershard.cache.eviction import VictimQueue
from embershard.cache.homes.shape import PoolShape
from embershard.errors import SetupError
from embershard.frequency.counts import RowCounts
from tests.covering import examples
from tests.unit.cache.harness import Pool

CPU = torch.device("cpu")
batches = st.lists(st.lists(st.integers(0, 39), min_size=0, max_size=10), max_size=25)


def make(policy: str = "lru", num_slots: int = 12, num_keys: int = 40) -> CachePlanner:
    scoring = {"lookahead": "lfu", "static": "frequency"}.get(policy, policy)
    initial = RowCounts.of_dense(torch.arange(num_keys, 0, -1) // 3) if scoring == "frequency" else None
    slot_map = SlotMap(num_keys, num_slots)
    scores = make_scores(CachePolicy(scoring), num_keys, num_slots, CPU, initial)
    return CachePlanner(SlotState(slot_map, scores, NextUseIndex(slot_map) if policy == "lookahead" else None))


def plan(
    planner: CachePlanner,
    keys: list[int],
    batch: int,
    oldest_pinned: int | None = None,
    known: KnownBatch | None = None,
) -> CachePlan:
    """What the cache does for one batch that fits."""
    made = planner.plan(torch.tensor(keys, dtype=torch.int64), batch, oldest_pinned or batch)
    assert isinstance(made, CachePlan)
    planner.evict(made)
    planner.note_filled(made, known)
    return made


def values(plan: CachePlan) -> dict[str, object]:
    fields = dataclasses.asdict(plan)
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in fields.items()}


@pytest.mark.slow
@given(batches, st.sampled_from(get_args(Scoring)))
def test_equal_states_and_keys_give_equal_plans(batches, policy):
    a, b = make(policy), make(policy)
    for number, keys in enumerate(batches, start=1):
        assert values(plan(a, keys, number)) == values(plan(b, keys, number))
        assert torch.equal(a.state.map.slot_of_key, b.state.map.slot_of_key)
        assert torch.equal(a.state.map.use_stamp[1:], b.state.map.use_stamp[1:])


@pytest.mark.slow
@given(batches, st.integers(1, 6))
@examples(60)
def test_equal_states_keys_and_known_batches_give_equal_plans(batches, ahead):
    pair = make("lookahead"), make("lookahead")
    ids = [torch.tensor(keys, dtype=torch.int64) for keys in batches]
    known = [[planner.state.next_use_index.know(keys) for keys in ids[:ahead]] for planner in pair]
    for number, keys in enumerate(batches, start=1):
        plans = []
        for planner, tokens in zip(pair, known, strict=True):
            plans.append(plan(planner, keys, number, known=tokens[number - 1]))
            tokens.extend(
                planner.state.next_use_index.know(later) for later in ids[number + ahead - 1 : number + ahead]
            )
        assert values(plans[0]) == values(plans[1])
        assert torch.equal(pair[0].state.map.slot_of_key, pair[1].state.map.slot_of_key)
        assert torch.equal(pair[0].state.next_use_index.next_use[1:], pair[1].state.next_use_index.next_use[1:])


@given(batches, st.sampled_from(get_args(Policy)), st.integers(10, 14))
@examples(60)
def test_a_plan_accounts_for_every_id(batches, policy, num_slots):
    planner = make(policy, num_slots)
    for number, keys in enumerate(batches, start=1):
        before = {int(k) for k in (planner.state.map.slot_of_key > 0).nonzero()}
        found = plan(planner, keys, number)
        distinct = set(keys)
        assert found.batch == number
        assert planner.state.map.keys(found.slots).tolist() == keys
        assert int(found.first_hits.sum()) == len(distinct & before)
        hit_keys = torch.tensor(keys, dtype=torch.int64)[found.first_hits].tolist()
        assert set(hit_keys) == distinct & before
        assert found.fill_keys.tolist() == sorted(distinct - before)
        assert planner.state.map.keys(found.fill_slots).tolist() == found.fill_keys.tolist()
        assert found.missed.tolist() == [i for i, k in enumerate(keys) if k not in before]
        assert not distinct & set(found.evicted_keys.tolist()), "a victim that the batch itself needs"
        assert set(found.evicted_keys.tolist()) <= before
        assert set(found.evicted_slots.tolist()) <= set(found.fill_slots.tolist())
        assert set(found.write_back_keys.tolist()) <= set(found.evicted_keys.tolist())
        assert found.slots.numel() == 0 or int(found.slots.min()) > 0, "the null slot is nobody's"


def test_free_slots_go_first():
    planner = make(num_slots=4)
    assert plan(planner, [5, 6], 1).evicted_slots.numel() == 0
    assert plan(planner, [7], 2).fill_slots.tolist() == [3]
    found = plan(planner, [8, 9], 3)
    assert found.fill_slots[0] == 4
    assert found.evicted_keys.tolist() in ([5], [6])


def test_rows_that_were_never_trained_are_not_written_back():
    planner = make(num_slots=4)
    planner.state.preload(torch.tensor([1, 2]), planner.state.map.next_free(2))
    plan(planner, [3, 4], 1)
    found = plan(planner, [5, 6], 2)
    assert sorted(found.evicted_keys.tolist()) == [1, 2]
    assert found.write_back_keys.tolist() == []
    assert plan(planner, [7], 3).write_back_keys.tolist() in ([3], [4])


def test_rows_that_were_written_back_are_clean_until_used_again():
    planner = make(num_slots=3)
    plan(planner, [1, 2, 3], 1)
    state, used = planner.state, planner.state.map.used_slots()
    state.clean_through = 1
    assert not state.is_dirty(used).any()
    plan(planner, [1], 2)
    assert state.map.keys(used[state.is_dirty(used)]).tolist() == [1]
    found = plan(planner, [7, 8, 9], 3)
    assert sorted(found.evicted_keys.tolist()) == [1, 2, 3]
    assert found.write_back_keys.tolist() == [1]


def test_the_queue_gives_what_is_not_pinned_and_no_more():
    planner = make(num_slots=4)
    for batch in (1, 2, 3):
        plan(planner, [batch], batch)
    assert planner._queue.pop(4, oldest_pinned=3).tolist() == [1, 2]
    assert planner._queue.pop(4, oldest_pinned=1).tolist() == []
    assert planner._queue.pop(2, oldest_pinned=9).tolist() == [1, 2]


def test_one_choice_among_ties_and_always_the_same():
    choices = []
    for _ in range(3):
        planner = make(num_slots=6)
        plan(planner, [9, 8, 7, 6, 5, 4], 1)
        choices.append(planner._queue.pop(4, oldest_pinned=2).tolist())
    assert choices[0] == choices[1] == choices[2]
    assert len(set(choices[0])) == 4


@pytest.mark.parametrize("policy", get_args(Policy))
def test_the_cache_is_ranked_once_for_many_batches(policy, monkeypatch):
    """No scan of all slots per step: a refill ranks an eighth of them, and the queue hands that out."""
    refills = []
    refill = VictimQueue._refill
    monkeypatch.setattr(VictimQueue, "_refill", lambda self, *a: (refills.append(a), refill(self, *a))[1])
    planner = make(policy, num_slots=800, num_keys=100_000)
    rng = np.random.default_rng(0)
    hot = np.arange(400)
    for batch in range(1, 401):
        cold = rng.integers(400, 100_000, size=10)
        plan(planner, [*rng.choice(hot, 40).tolist(), *cold.tolist()], batch)
    evictions_per_refill = 10 * 400 / len(refills)
    assert evictions_per_refill > 50, f"{len(refills)} refills"


@pytest.mark.slow
def test_two_caches_side_by_side_never_differ():
    rng = np.random.default_rng(5)
    pools = [Pool(num_slots=11, policy="lfu", decay=0.9) for _ in range(2)]
    for _ in range(120):
        keys = (rng.random(8) ** 2 * 30).astype(int).tolist()
        for pool in pools:
            pool.step(keys)
        assert pools[0].observed() == pools[1].observed()
        used = pools[0].map.used_slots()
        assert all(torch.equal(a[used], b[used]) for a, b in zip(pools[0].slots, pools[1].slots, strict=True))


def make_cache(num_slots: int, scoring: Scoring = "lru") -> RowCache:
    host = MemoryRows(PoolShape([20], 2))

    def slots(count: int) -> list[torch.Tensor]:
        return [torch.zeros(count + 1, 2)]

    return RowCache(["t"], host, slots, num_slots, [0], CachePolicy(scoring, by_next_use=False), torch.device("cpu"))


def prepare(cache: RowCache, *keys: int, if_it_fits: bool = False) -> Ticket | None:
    return cache.prepare(torch.tensor(keys), torch.tensor([len(keys)]), if_it_fits=if_it_fits)


def train(cache: RowCache, *keys: int) -> None:
    ticket = prepare(cache, *keys)
    assert ticket is not None
    cache.release(ticket)


def test_evictions_of_older_rows_put_pins_under_no_pressure() -> None:
    cache = make_cache(4)
    watch = cache.watch_pins()
    train(cache, 0, 1)
    train(cache, 2, 3)
    held = prepare(cache, 4)
    train(cache, 5)
    assert held is not None
    assert cache.stats()[0].evictions == 2
    assert (watch.in_flight, watch.own) == (0, 0)


def test_slots_that_rank_below_a_victim_were_passed_over() -> None:
    cache = make_cache(4, "lfu")
    watch = cache.watch_pins()
    for _ in range(2):
        train(cache, 0, 1, 2)
    held = prepare(cache, 3)
    train(cache, 4)  # row 3 was used once
    assert held is not None
    assert cache.state.map.lookup(torch.arange(5)).sign().tolist() == [0, 1, 1, 1, 1]
    assert (watch.in_flight, watch.own) == (1, 0)


def test_a_batch_that_does_not_fit_passes_all_pinned_slots_over() -> None:
    cache = make_cache(4)
    watch = cache.watch_pins()
    held = prepare(cache, 0, 1, 2)
    assert prepare(cache, 3, 4, if_it_fits=True) is None
    assert held is not None
    assert (watch.in_flight, watch.own) == (3, 0)


def test_a_batch_alone_saves_the_rows_that_it_found() -> None:
    cache = make_cache(3)
    watch = cache.watch_pins()
    train(cache, 0, 1, 2)
    train(cache, 2, 4, 5)
    assert (watch.in_flight, watch.own) == (0, 0), "row 2 ranks above those that left"
    with pytest.warns(CacheGrowthWarning):
        train(cache, 2, 4, 6, 7)
    assert (watch.in_flight, watch.own) == (0, 2)


def test_caches_on_a_gpu_without_triton_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(classes, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"Triton kernels, and triton is not installed\. CUDA builds of torch"):
        classes.planning_classes(torch.device("cuda"))
    assert classes.planning_classes(torch.device("cpu")) == (SlotMap, NextUseIndex, CachePlanner)
