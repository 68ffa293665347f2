"""Look-ahead puts out the best rows that there are, at a cost that follows the batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embershard.cache import NextUseIndex, SlotMap, SlotState, loops, make_scores
from embershard.cache import eviction as victims
from embershard.cache.config import CachePolicy
from embershard.cache.eviction import VictimQueue
from embershard.cache.planner import CachePlan, CachePlanner
from tests.covering import examples, keep, matrix
from tests.unit.cache.faults import FAULTS_OF_CHOICE
from tests.unit.cache.harness import Operation, Pool, run, windowed_operations

NUM_ROWS = 30
CPU = torch.device("cpu")

# -- exact: no slot that could go is better than one that goes ---------------------------------------------------------

rows = st.lists(st.integers(0, NUM_ROWS - 1), max_size=6).map(tuple)
which = st.tuples(st.integers(0, 3))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("know"), rows),
        st.tuples(st.just("know"), rows),
        st.tuples(st.just("prepare_known"), which),
        st.tuples(st.just("prepare_known"), which),
        st.tuples(st.just("train"), which),
        st.tuples(st.just("train"), which),
        st.tuples(st.sampled_from(["abandon", "flush", "drop", "forget", "freeze_pins", "unfreeze_pins"]), which),
    ),
    max_size=80,
)


@pytest.mark.slow
@given(
    operations,
    st.integers(3, 18),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([None, "counts", "warmup"]),
    st.sampled_from([None, 1]),
    st.sampled_from(["grow", "raise"]),
)
@examples(150)
def test_victims_are_the_best_there_are_when_all_batches_are_known(
    operations, num_slots, queue_share, profile, pinned_table, overflow
):
    """The pool compares every victim with every row that could have gone, by the naive oracle's next uses."""
    with mock.patch.object(victims, "_QUEUE_SHARE", queue_share):
        pool = Pool(
            num_slots=num_slots,
            policy="lookahead",
            overflow=overflow,
            profile=[(7 * k) % 5 for k in range(NUM_ROWS)] if profile else None,
            warmup=profile == "warmup",
            pinned_table=pinned_table,
            best_victims=True,
        )
        run(pool, operations)


def all_known(seed: int, steps: int, lookahead: int) -> list[Operation]:
    windowed = windowed_operations(seed, steps, lookahead=lookahead)
    return [operation for operation in windowed if operation[0] not in ("prepare", "skip_known", "fail_known")]


def check_choices() -> None:
    """What the negative controls run."""
    for num_slots, lookahead in ((20, 3), (18, 8), (24, 20)):
        pool = Pool(num_slots=num_slots, policy="lookahead", best_victims=True)
        run(pool, all_known(num_slots, steps=80, lookahead=lookahead))


@pytest.mark.matrix
def test_the_negative_controls_pass_without_a_fault():
    check_choices()


@pytest.mark.slow
@pytest.mark.parametrize("fault", keep(["known_uses_do_not_matter"], FAULTS_OF_CHOICE))
def test_a_fault_of_choice_is_noticed(fault):
    with FAULTS_OF_CHOICE[fault](), pytest.raises(AssertionError, match="not the best victims"):
        check_choices()


@pytest.mark.parametrize("seed", keep([1, 3], range(4)))
def test_the_lowest_ranks_of_many_slots_go_right_after_a_refill(seed):
    """More slots than are ranked one by one: a sample gives the bound. Any next uses, counts and ages."""
    rng = np.random.default_rng(seed)
    num_slots, num_pinned, count, oldest_pinned = 20_000, 7, 1500, 60
    slot_map = SlotMap(num_slots, num_slots)
    next_use_index, scores = NextUseIndex(slot_map), make_scores(CachePolicy("lfu"), num_slots, num_slots, CPU)
    every = slot_map.next_free(num_slots)
    slot_map.claim(num_slots)
    slot_map.bind(every - 1, every, batch=0)
    slot_map.use_stamp[1:] = torch.from_numpy(rng.integers(70, size=num_slots)) << 32
    known = rng.random(num_slots) < (0.05, 0.5, 0.95, 1.0)[seed]
    next_use_index.next_use[1:] = torch.from_numpy(np.where(known, rng.integers(1, 90, size=num_slots), 0))
    scores.of_slots()[1:] = torch.from_numpy(rng.integers(30, size=num_slots) / 7)
    queue = VictimQueue(SlotState(slot_map, scores, next_use_index, num_pinned))

    def ranks(slots: Tensor) -> list[tuple[float, ...]]:
        columns = next_use_index.next_use, scores.of_slots(), slot_map.use_stamp >> 32
        each = zip(*(column[slots].tolist() for column in columns), strict=True)
        return [(1, -use) if use else (0, score, batch) for use, score, batch in each]

    for _ in range(2):  # the second finds a ranking, and slots that were used since
        chosen = queue.pop(count, oldest_pinned)
        assert chosen.unique().numel() == count
        evictable = torch.zeros(num_slots + 1, dtype=torch.bool)
        evictable[num_pinned + 1 :] = (slot_map.use_stamp[num_pinned + 1 :] >> 32) < oldest_pinned
        assert evictable[chosen].all()
        left = evictable.index_fill(0, chosen, False).nonzero().flatten()
        assert max(ranks(chosen)) <= min(ranks(left))
        slot_map.use_stamp[chosen] = 65 << 32
        slot_map.use_stamp[left[::3]] = 66 << 32


@pytest.mark.parametrize("look_ahead", [False, True])
def test_the_queue_gives_what_there_is_and_no_slot_twice(look_ahead):
    slot_map = SlotMap(10, 6)
    scores = make_scores(CachePolicy("lfu"), 10, 6, CPU)
    queue = VictimQueue(SlotState(slot_map, scores, NextUseIndex(slot_map) if look_ahead else None, num_pinned=1))
    slot_map.bind(torch.arange(5), slot_map.next_free(5), batch=3)
    slot_map.claim(5)
    assert queue.pop(9, oldest_pinned=3).tolist() == []
    assert sorted(queue.pop(9, oldest_pinned=4).tolist()) == [2, 3, 4, 5]
    first = queue.pop(2, oldest_pinned=4).tolist()
    slot_map.use_stamp[first] = 4 << 32
    assert sorted(first + queue.pop(2, oldest_pinned=4).tolist()) == [2, 3, 4, 5]


@pytest.mark.parametrize("seed", keep([0, 1, 2], range(10)))
def test_slots_whose_next_use_becomes_known_move_back_and_are_handed_out_once(seed, monkeypatch):
    """A long ranking of which little is taken at a time, while slots are used, and uses become known, all over it."""
    monkeypatch.setattr(victims, "_QUEUE_SHARE", 1 + seed % 4)
    rng = np.random.default_rng(seed)
    num_slots, in_flight = 80, 2
    slot_map = SlotMap(num_slots, num_slots)
    next_use_index, scores = NextUseIndex(slot_map), make_scores(CachePolicy("lfu"), num_slots, num_slots, CPU)
    queue = VictimQueue(SlotState(slot_map, scores, next_use_index))
    every = slot_map.next_free(num_slots)
    slot_map.claim(num_slots)
    slot_map.bind(every - 1, every, batch=0)
    scores.of_slots()[1:] = torch.from_numpy(rng.integers(6, size=num_slots) / 3)
    for batch in range(1, 60):
        becoming_known = torch.from_numpy(rng.permutation(num_slots)[: rng.integers(20)] + 1)
        becoming_known = becoming_known[next_use_index.next_use[becoming_known] == 0]
        next_use_index.next_use[becoming_known] = batch
        hits = torch.from_numpy(rng.permutation(num_slots)[: rng.integers(8)] + 1)
        slot_map.use_stamp[hits] = batch << 32
        count, oldest_pinned = int(rng.integers(1, 9)), max(1, batch - in_flight)
        expected = queue._rank().ranks.masked_fill(slot_map.use_stamp[1:] >> 32 >= oldest_pinned, 2**63 - 1)
        chosen = queue.pop(count, oldest_pinned)
        assert chosen.unique().numel() == chosen.numel() == count
        assert expected[chosen - 1].sort().values.tolist() == expected.sort().values[:count].tolist()
        used = torch.cat([hits, chosen])
        slot_map.use_stamp[used] = batch << 32
        gone = torch.from_numpy(rng.random(used.numel()) < 0.6)
        next_use_index.next_use[used[gone]] = 0
        queue.offer(used, next_use_index.next_use[used], batch)


def test_a_guess_about_another_row_does_not_make_a_slot_be_handed_out_twice(monkeypatch):
    """A row with an overdue guess ranks behind all others: even the slots of the batch at hand are in the ranking."""
    monkeypatch.setattr(victims, "_QUEUE_SHARE", 1)
    pool = Pool(num_slots=3, policy="lookahead")
    for keys in ([1, 2], [1, 3], [4, 5], [7]):
        pool.know(keys)
    pool.step([7])  # its next use is guessed to be the first batch
    while pool.known:
        number = pool.prepare_known()
        assert number is not None
        pool.train(number)
        pool.release(number)
        pool.check()
    pool.finish()


# -- close to the best: fills over a long run ---------------------------------------------------------


def zipf(seed: int, num_batches: int, drift: int = 0, num_rows: int = 2000, size: int = 60) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    batches = []
    for number in range(num_batches):
        keys = ((rng.random(size) ** 4 * num_rows).astype(int) + drift * number) * 7919 % num_rows
        batches.append(torch.from_numpy(keys))
    return batches


def scan(seed: int, num_batches: int) -> list[Tensor]:
    """Half of each batch is never seen again for a long time."""
    batches = zipf(seed, num_batches, size=30)
    return [torch.cat([keys, (torch.arange(30) + 30 * n) * 7919 % 2000]) for n, keys in enumerate(batches)]


STREAMS = {"steady": zipf(0, 200), "drift": zipf(1, 200, drift=3), "scan": scan(2, 200)}


class Pipeline:
    """A planner that knows L batches beyond the one in training and holds P of them; no rows move."""

    def __init__(self, num_slots: int, lookahead: int, prefetch: int = 2, num_rows: int = 2000) -> None:
        slot_map = SlotMap(num_rows, num_slots)
        self.next_use_index = NextUseIndex(slot_map)
        scores = make_scores(CachePolicy("lfu"), num_rows, num_slots, CPU)
        self.planner = CachePlanner(SlotState(slot_map, scores, self.next_use_index))
        self.lookahead, self.prefetch = lookahead, prefetch
        self.fills: list[int] = []

    def run(self, stream: Sequence[Tensor]) -> int:
        known: deque[Any] = deque()
        for number in range(1, len(stream) + 1):
            while len(known) < self.lookahead and number - 1 + len(known) < len(stream):
                known.append(self.next_use_index.know(stream[number - 1 + len(known)]))
            self._prepare(stream[number - 1], number, known.popleft())
        return sum(self.fills)

    def _prepare(self, keys: Tensor, number: int, known: Any) -> None:
        planner = self.planner
        plan = planner.plan(keys, number, max(1, number - self.prefetch))
        assert isinstance(plan, CachePlan)
        planner.evict(plan)
        planner.note_filled(plan, known)
        self.fills.append(plan.fill_keys.numel())


def naive_fills(stream: Sequence[Tensor], num_slots: int, lookahead: int, prefetch: int = 2) -> int:
    """Row by row: the furthest known next use goes, else the lowest count, else the longest unused."""
    batches = [set(keys.tolist()) for keys in stream]
    counts: dict[int, int] = {}
    cached: dict[int, int] = {}  # with the last batch
    fills = 0
    for number, batch in enumerate(batches, start=1):
        missing = batch - set(cached)
        cached.update(dict.fromkeys(batch & set(cached), number))
        next_use: dict[int, int] = {}
        for ahead in range(min(number + lookahead - 1, len(batches)), number, -1):
            next_use.update(dict.fromkeys(batches[ahead - 1], ahead))
        evictable = [k for k, last in cached.items() if last < max(1, number - prefetch)]
        evictable.sort(key=lambda k: (1, -next_use[k]) if k in next_use else (0, counts[k], cached[k]))
        for key in evictable[: max(0, len(cached) + len(missing) - num_slots)]:
            del cached[key]
        cached.update(dict.fromkeys(missing, number))
        for key in batch:
            counts[key] = counts.get(key, 0) + 1
        fills += len(missing)
    return fills


@pytest.mark.slow
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize(("num_slots", "lookahead"), [(250, 16), matrix(250, 4), matrix(500, 64)])
def test_fills_are_those_of_a_naive_exact_implementation(stream, num_slots, lookahead):
    """They differ only in which of several equally good rows goes: measured, by 0.07 % at most."""
    fills = Pipeline(num_slots, lookahead).run(STREAMS[stream])
    naive = naive_fills(STREAMS[stream], num_slots, lookahead)
    assert abs(fills / naive - 1) <= 0.002


@pytest.mark.slow
@pytest.mark.parametrize("fault", keep(["known_uses_do_not_matter"], FAULTS_OF_CHOICE))
def test_a_fault_of_choice_costs_fills(fault):
    """The comparison above would notice."""
    with FAULTS_OF_CHOICE[fault]():
        fills = Pipeline(500, 64).run(STREAMS["steady"])
    assert fills / naive_fills(STREAMS["steady"], 500, 64) - 1 > 0.002


# -- cheap: what a batch costs follows the batch ---------------------------------------------------------


class Work:
    """Counts the refills, and the slots that are looked at otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refills, self.pops, self.looked_at = 0, 0, 0
        self._refilling = False
        refill, pop, unused, rank = VictimQueue._refill, VictimQueue.pop, VictimQueue._unused, VictimQueue._rank

        def count_refill(queue: VictimQueue, *arguments: int) -> None:
            self.refills += 1
            self._refilling = True
            refill(queue, *arguments)
            self._refilling = False

        def count_pop(queue: VictimQueue, *arguments: int) -> Tensor:
            self.pops += 1
            return pop(queue, *arguments)

        def count_unused(queue: VictimQueue, ranked: Any, oldest_pinned: int) -> Tensor:
            self.looked_at += ranked.slots.numel()
            return unused(queue, ranked, oldest_pinned)

        def count_rank(queue: VictimQueue, slots: Tensor | None = None) -> Any:
            ranked = rank(queue, slots)
            self.looked_at += 0 if self._refilling else ranked.slots.numel()
            return ranked

        for name, function in (
            ("_refill", count_refill),
            ("pop", count_pop),
            ("_unused", count_unused),
            ("_rank", count_rank),
        ):
            monkeypatch.setattr(VictimQueue, name, function)
        self._count_loops(monkeypatch)

    def _count_loops(self, monkeypatch: pytest.MonkeyPatch) -> None:
        candidates, offer = loops.candidates, loops.offer

        def count_candidates(*arguments: Any) -> Any:
            found, ready_slots = candidates(*arguments), arguments[4]
            self.looked_at += found[-1] + ready_slots.size
            return found

        def count_offered(slots: Any, *arguments: Any) -> int:
            self.looked_at += slots.size
            return offer(slots, *arguments)

        monkeypatch.setattr(loops, "candidates", count_candidates)
        monkeypatch.setattr(loops, "offer", count_offered)


def work_of(lookahead: int, monkeypatch: pytest.MonkeyPatch) -> Work:
    """4,000 slots in front of 20,000 rows, 60 ids a batch: few rows have known uses, or most."""
    work = Work(monkeypatch)
    rng = np.random.default_rng(0)
    stream = [torch.from_numpy((rng.random(60) ** 2 * 20_000).astype(int)) for _ in range(400 + lookahead)]
    Pipeline(4000, lookahead, num_rows=20_000).run(stream)
    assert work.pops > 300
    return work


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", keep([4, 256], [4, 32, 256]))
def test_many_batches_share_a_refill_and_nothing_is_scanned_in_between(lookahead, monkeypatch):
    """Measured: 16 to 60 batches a refill; beside it a batch looks at 220 to 250 slots."""
    work = work_of(lookahead, monkeypatch)
    assert work.pops / work.refills > 12, f"{work.refills} refills"
    assert work.looked_at / work.pops < 4000 / 10, f"{work.looked_at} slots in {work.pops} batches"


@pytest.mark.slow
def test_looking_at_all_that_is_offered_would_be_noticed(monkeypatch):
    monkeypatch.setattr(VictimQueue, "_trim", lambda self, waiting, enough: waiting)
    work = work_of(256, monkeypatch)
    assert work.looked_at / work.pops > 4000 / 10


def test_batches_that_evict_nothing_leave_nothing_behind():
    """What is offered and never taken must not pile up, over any number of batches."""
    pipeline = Pipeline(num_slots=300, lookahead=3, num_rows=2000)
    often = list(torch.arange(100).split(20)) * 20  # not known to be used again when they are used: offered, and kept
    once = list(torch.arange(100, 500).split(5))
    pipeline.run([*often, *once, *often, *often])
    assert sum(pipeline.fills[-200:]) == 0
    offered = pipeline.planner._queue._offered
    assert len(offered) < 20
    assert sum(part.slots.numel() for _, part in offered) <= 300
