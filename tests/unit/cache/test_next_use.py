"""Every slot knows when its row is used next. The oracle looks through all known batches: `harness.Pool.next_uses`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.cache import NextUseIndex, SlotMap
from embershard.cache import next_use as next_use_index
from tests.covering import examples, matrix
from tests.unit.cache.harness import Operation, Pool, run, windowed_operations

NUM_ROWS = 30
POLICY = "lookahead"
Resize = Callable[[NextUseIndex, int, int, int], int]

rows = st.lists(st.integers(0, NUM_ROWS - 1), max_size=8).map(tuple)
which = st.tuples(st.integers(0, 3))
# Many repeats within a batch, and short windows that fill up: rings turn and grow, numbers start again.
operations = st.lists(
    st.one_of(
        st.tuples(st.just("know"), rows),
        st.tuples(st.just("know"), st.lists(st.integers(0, 5), max_size=16).map(tuple)),
        st.tuples(st.just("know"), rows),
        st.tuples(st.just("prepare_known"), which),
        st.tuples(st.just("prepare_known"), which),
        st.tuples(st.just("train"), which),
        st.tuples(st.just("prepare"), rows),
        st.tuples(st.sampled_from(["skip_known", "fail_known", "flush", "drop", "forget"]), which),
        st.tuples(st.just("load"), rows),
    ),
    max_size=60,
)


def run_with_small_ring(operations, **settings) -> Pool:
    with mock.patch.multiple(next_use_index, _LEAST_CHAIN=4, _WRAP=64):
        pool = Pool(policy=POLICY, **settings)
        pool.most_known_uses = 64
        run(pool, operations)
    return pool


@pytest.mark.slow
@given(operations, st.integers(3, 14), st.sampled_from([None, 0, 1]), st.booleans())
@examples(150)
def test_next_uses_are_those_of_the_naive_oracle_whatever_happens(operations, num_slots, pinned_table, warmup):
    if pinned_table is not None:
        num_slots += (17, 1)[pinned_table]
    profile = [(7 * k) % 23 for k in range(NUM_ROWS)] if warmup else None
    run_with_small_ring(
        operations, num_slots=num_slots, overflow="grow", pinned_table=pinned_table, profile=profile, warmup=warmup
    )


def run_and_measure(
    operations: list[Operation], resize: Resize | None = None, **settings: Any
) -> tuple[Pool, list[int]]:
    """The pool, and the cells of its ring whenever they changed. `resize`: in place of the true one."""
    cells = [4]

    def measured(self: NextUseIndex, oldest: int, end: int, needed: int) -> int:
        cells.append((resize or _RESIZE)(self, oldest, end, needed))
        return cells[-1]

    with mock.patch.object(NextUseIndex, "_resize", measured):
        pool = run_with_small_ring(operations, **settings)
    return pool, cells


def check_ring() -> list[int]:
    """What the negative controls run: many turns of the ring and of the numbers, and growth in between. Cells of the
    last ring whenever they changed."""
    for lookahead in (2, 8):
        operations = windowed_operations(seed=lookahead, steps=70, lookahead=lookahead)
        pool, cells = run_and_measure(operations, num_slots=16, overflow="grow")
    assert pool.cache.next_use_index._end > 4 * 64, "the numbers started again several times"
    return cells


def bursts(seed: int, steps: int) -> list[Operation]:
    """Some large batches, then many small ones, over and over, with a window of two to four."""
    rng = np.random.default_rng(seed)
    operations: list[Operation] = []
    for step in range(steps):
        size = int(rng.integers(10, 17)) if step % 10 < 2 else int(rng.integers(1, 4))
        operations.append(("know", tuple(int(k) for k in rng.integers(NUM_ROWS, size=size))))
        if step % 10 >= 2:
            operations += [("prepare_known", (1,)), ("train", (0,))]
        if step % 10 > 4:
            operations += [("prepare_known", (1,)), ("train", (0,))]
        if rng.random() < 0.1:
            operations.append((str(rng.choice(["flush", "skip_known", "forget", "drop"])), (0,)))
    return operations


def check_bursts(resize: Resize | None = None) -> list[int]:
    """What the negative controls run for a ring that shrinks."""
    return run_and_measure(bursts(seed=0, steps=120), resize, num_slots=20, overflow="grow")[1]


@pytest.mark.slow
@given(st.integers(0, 2**32), st.sampled_from([None, 0, 1]))
@examples(15)
def test_next_uses_stay_exact_when_the_ring_grows_and_shrinks(seed, pinned_table):
    num_slots = 18 if pinned_table is None else 18 + (17, 1)[pinned_table]
    _, cells = run_and_measure(bursts(seed, 40), num_slots=num_slots, overflow="grow", pinned_table=pinned_table)
    changes = [after > before for before, after in itertools.pairwise(cells)]
    assert set(changes) == {True, False}, cells


@pytest.mark.matrix
def test_the_negative_controls_pass_without_a_fault():
    assert max(check_ring()) == 64, "as many cells as uses were known at a time"
    cells = check_bursts()
    assert sum(after < before for before, after in itertools.pairwise(cells)) > 5


def _cells_not_cleared(self: NextUseIndex, count: int) -> int:
    found = self._next_batch.clone()
    first_use = _RESERVE(self, count)
    if self._next_batch.numel() == found.numel():
        self._next_batch.copy_(found)
    return first_use


def _growth_starts_afresh(self: NextUseIndex, count: int) -> int:
    capacity = self._next_batch.numel()
    first_use = _RESERVE(self, count)
    if self._next_batch.numel() != capacity:
        self._next_batch.zero_()
    return first_use


def _growth_counts_without_the_oldest(self: NextUseIndex, count: int) -> int:
    """The ring is as large as one batch needs."""
    known, self._known = self._known, type(self._known)()
    first_use = _RESERVE(self, count)
    self._known = known
    return first_use


def _shrinking_starts_afresh(self: NextUseIndex, oldest: int, end: int, needed: int) -> int:
    before = self._next_batch.numel()
    capacity = _RESIZE(self, oldest, end, needed)
    if self._next_batch.numel() < before:
        self._next_batch.zero_()
    return capacity


def _shrinks_to_the_new_batch(self: NextUseIndex, oldest: int, end: int, needed: int) -> int:
    return _RESIZE(self, oldest, end, needed if needed > self._next_batch.numel() - 1 else self._end - end)


_RESERVE, _RESIZE = NextUseIndex._reserve, NextUseIndex._resize


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [_cells_not_cleared, matrix(_growth_starts_afresh), matrix(_growth_counts_without_the_oldest)]
)
def test_a_fault_in_the_ring_is_noticed(fault):
    with mock.patch.object(NextUseIndex, "_reserve", fault), pytest.raises(AssertionError):
        check_ring()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [matrix(_shrinking_starts_afresh), _shrinks_to_the_new_batch])
def test_a_fault_in_shrinking_the_ring_is_noticed(fault):
    with pytest.raises(AssertionError):
        check_bursts(fault)


def test_numbers_that_start_again_too_early_are_noticed():
    """The patched constant is in use: with fewer numbers than known uses, rows are taken for others."""
    operations = windowed_operations(seed=8, steps=80, lookahead=8)
    pool = Pool(policy=POLICY, num_slots=16, overflow="grow")
    with mock.patch.object(next_use_index, "_WRAP", 16), pytest.raises(AssertionError):
        run(pool, operations)


# -- one row's uses, by hand ---------------------------------------------------------


def next_use(pool: Pool, key: int) -> int:
    return int(pool.cache.next_use_index.next_use[pool.map.lookup(torch.tensor([key]))])


def test_the_chain_of_a_row_s_uses_is_followed():
    pool = Pool(policy=POLICY, num_slots=8)
    for keys in ([3, 4], [4, 4], [3], [5], [3, 3]):
        pool.know(keys)
    found = []
    while pool.known:
        number = pool.prepare_known()
        found.append((next_use(pool, 3), next_use(pool, 4)))
        pool.train(number)
        pool.release(number)
    assert found == [(3, 2), (3, 0), (5, 0), (5, 0), (0, 0)]


def test_a_row_that_left_and_comes_back_has_its_uses():
    pool = Pool(policy=POLICY, num_slots=2)
    pool.know([1, 2])
    for keys in ([3, 4], [1], [2, 5], [1]):
        pool.know(keys)
    pool.release(pool.prepare_known())
    pool.release(pool.prepare_known())
    assert pool.resident() == {3, 4}
    pool.check()
    pool.release(pool.prepare_known())
    assert next_use(pool, 1) == 5


def test_a_row_brought_in_by_an_unknown_batch_is_guessed_to_be_used_soon():
    pool = Pool(policy=POLICY, num_slots=2)
    for keys in ([1], [2], [7], [7]):
        pool.know(keys)
    pool.step([7])
    assert next_use(pool, 7) == 1
    for guess in (1, 1, 4, 0):
        pool.release(pool.prepare_known())
        assert next_use(pool, 7) == guess
        pool.check()


def test_a_forgotten_or_second_token_changes_nothing():
    pool = Pool(policy=POLICY, num_slots=8)
    pool.know([1, 2])
    (stale, _), *_ = pool.known
    pool.forget()
    pool.know([3])
    pool.know([1])
    for _ in range(2):
        ids, lengths = pool.split_by_feature([1, 2])
        pool.cache.release(pool.cache.prepare(ids, lengths, known=stale))
        assert (next_use(pool, 1), next_use(pool, 2)) == (2, 0)  # a guess, as 1 came in unknown: batch 3 is to come
    fresh = pool.known[0][0]
    ids, lengths = pool.split_by_feature([3])
    for _ in range(2):
        pool.cache.release(pool.cache.prepare(ids, lengths, known=fresh))
        assert (next_use(pool, 1), next_use(pool, 3)) == (2, 0)


# -- memory ---------------------------------------------------------


def known_ids(pool: Pool) -> int:
    return sum(len(set(keys)) for _, keys in pool.known)


@pytest.mark.slow
@pytest.mark.parametrize(("pinned_table", "per_id"), [(None, 4), (1, 8)])
def test_what_is_known_takes_a_few_bytes_per_distinct_id_and_goes_when_prepared(pinned_table, per_id, monkeypatch):
    """Beside the ring, whose cells are as many as ids were known at a time, rounded up to a power of two."""
    monkeypatch.setattr(next_use_index, "_LEAST_CHAIN", 4)
    pool = Pool((1000, 1, 100), policy=POLICY, num_slots=600, pinned_table=pinned_table)
    rng = np.random.default_rng(0)
    assert pool.known_bytes == pool.cache.next_use_index.chain_bytes == 20
    most = 0
    for _ in range(4):
        for _ in range(16):
            pool.know(np.concatenate([rng.integers(1000, size=50), rng.integers(1001, 1101, size=5)]).tolist())
        most = max(most, sum(len(keys) for _, keys in pool.known))
        assert pool.known_bytes - pool.cache.next_use_index.chain_bytes == per_id * known_ids(pool)
        assert pool.cache.next_use_index.chain_bytes <= 4 * (2 * most + 1)
        while len(pool.known) > 3:
            before = pool.known_bytes
            pool.release(pool.prepare_known())
            assert pool.known_bytes < before
            assert pool.known_bytes - pool.cache.next_use_index.chain_bytes == per_id * known_ids(pool)
    pool.forget()
    assert pool.known_bytes == pool.cache.next_use_index.chain_bytes <= 4 * (2 * most + 1)


def test_a_burst_of_large_batches_does_not_keep_the_ring_large_for_good():
    """`LookAheadPipeline` counts the ring towards the memory that limits its window."""
    pool = Pool((3000,), policy=POLICY, num_slots=2500)
    for start in (0, 500):
        pool.know(list(range(start, start + 2000)))
    assert pool.cache.next_use_index.chain_bytes == 4 * (4096 + 1)
    for step in range(4):
        pool.know(list(range(step, step + 100)))
        if pool.known:
            pool.release(pool.prepare_known())
    found = []
    for step in range(6):
        pool.know(list(range(step, step + 100)))
        found.append(pool.cache.next_use_index.chain_bytes)
        pool.release(pool.prepare_known())
        pool.check()
    assert set(found) == {4 * (1024 + 1)}, "no less than it starts with"


def test_a_steady_window_never_changes_the_ring():
    pool = Pool((3000,), policy=POLICY, num_slots=2500)
    for _ in range(8):
        pool.know(range(300))
    with mock.patch.object(NextUseIndex, "_resize", side_effect=AssertionError("not needed")):
        for step in range(30):
            pool.release(pool.prepare_known())
            pool.know(range(step, step + 250 + step % 50))


def test_repeats_take_no_memory_of_their_own_beside_the_ring():
    pool = Pool(policy=POLICY)
    pool.know([3] * 1000)
    pool.know([4] * 5)
    assert pool.known_bytes - pool.cache.next_use_index.chain_bytes == 2 * 4


def test_tokens_hold_nothing_of_the_batch():
    """A pipeline keeps tokens for as long as batches are known: they must not hold the ids' memory."""
    pool = Pool(policy=POLICY)
    pool.know([3] * 1000)
    known = pool.known[0][0]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (known.uses, known.positions)}
    assert sum(held.values()) == known.num_bytes == 4


def test_the_index_takes_eight_bytes_a_slot_and_none_a_row():
    for num_rows in (100, 10_000):
        found = NextUseIndex(SlotMap(num_rows, 10))
        assert found.device_bytes == 8 * 11
        found.grow(20)
        assert found.device_bytes == 8 * 21
    plain = Pool(policy="lfu").cache
    assert Pool(policy=POLICY).cache.device_bytes == plain.device_bytes + 8 * 11


def test_without_look_ahead_nothing_is_known():
    pool = Pool(policy="lfu")
    pool.know([1, 2])
    pool.forget()
    assert pool.known_bytes == 0
    assert pool.cache.next_use_index is None


def test_a_batch_that_nobody_heard_of_does_not_end_the_looking_ahead():
    """An exception came when it had just become known: nobody will ever prepare or skip it."""
    slot_map = SlotMap(10, 6)
    index = NextUseIndex(slot_map)
    keys = [torch.tensor(each) for each in ([1, 2], [2, 3], [3, 2])]
    _, second, third = (index.know(each) for each in keys)
    slots = slot_map.next_free(2)
    slot_map.claim(2)
    index.bind(keys[1], slots, batch=1)
    arrived = index.arrive(second, slots)
    assert arrived[1].tolist() == [third.number, third.number]
    assert index.arrive(third, slots.flip(0)) is not None
    assert index.next_use[1:].tolist() == [0] * 6
    assert index.arrive(second, slots) is None
