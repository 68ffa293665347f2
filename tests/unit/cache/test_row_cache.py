"""After any sequence of operations: every row right, no pin broken, every counter true."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import get_args
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.cache import CacheGrowthWarning
from embershard.cache.config import CachePolicy, Policy
from embershard.cache.gpu.readback import read_at_once
from embershard.cache.homes.memory import MemoryRows
from embershard.cache.homes.shape import PoolShape
from embershard.cache.parts.changed import ChangedKeys
from embershard.cache.row_cache import RowCache
from embershard.cache.rows.transfer import StagedTransfer
from embershard.cache.rows.uva_transfer import UvaTransfer
from embershard.cache.tickets import InFlight
from embershard.errors import CacheError, CacheOverflowError
from tests.covering import covering, examples, keep
from tests.unit.cache.faults import FAULTS
from tests.unit.cache.harness import Pool, held_operations, random_operations, run, windowed_operations

POLICIES = get_args(Policy)
NUM_ROWS = 30

rows = st.lists(st.integers(0, NUM_ROWS - 1), max_size=8).map(tuple)
which = st.tuples(st.integers(0, 3))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("prepare"), rows),
        st.tuples(st.just("prepare"), rows),
        st.tuples(st.just("train"), which),
        st.tuples(st.just("train"), which),
        st.tuples(st.sampled_from(["abandon", "flush", "hold"]), which),
        st.tuples(st.sampled_from(["read", "load", "load_unseen"]), rows),
    ),
    max_size=50,
)


@pytest.mark.slow
@given(
    operations,
    st.sampled_from(POLICIES),
    st.integers(1, 12),
    st.sampled_from(["grow", "raise"]),
    st.sampled_from([None, 0.9, 1e-3]),
    st.booleans(),
)
@examples(120)
def test_every_row_is_right_after_any_operations(operations, policy, num_slots, overflow, decay, warmup):
    profile = [(7 * k) % 23 for k in range(NUM_ROWS)] if warmup else None
    decay = decay if policy == "lfu" else None
    run(
        Pool(num_slots=num_slots, policy=policy, overflow=overflow, decay=decay, profile=profile, warmup=warmup),
        operations,
    )


window_operations = st.lists(
    st.one_of(
        st.tuples(st.just("know"), rows),
        st.tuples(st.just("know"), rows),
        st.tuples(st.just("prepare_known"), which),
        st.tuples(st.just("prepare_known"), which),
        st.tuples(st.just("train"), which),
        st.tuples(st.just("train"), which),
        st.tuples(st.sampled_from(["prepare", "prepare_if_it_fits", "read", "load", "load_unseen"]), rows),
        st.tuples(st.sampled_from(["skip_known", "fail_known", "abandon", "cancel", "flush", "forget"]), which),
        st.tuples(st.sampled_from(["freeze_pins", "unfreeze_pins", "hold", "next_piece"]), which),
    ),
    max_size=50,
)


@pytest.mark.slow
@given(
    window_operations,
    st.integers(1, 14),
    st.sampled_from(["grow", "raise"]),
    st.sampled_from([None, 0.9]),
    st.sampled_from([None, "counts", "warmup"]),
    st.sampled_from([None, 1]),
)
@examples(120)
def test_every_row_is_right_after_any_operations_in_a_window(
    operations, num_slots, overflow, decay, profile, pinned_table
):
    """The same with batches that are known ahead; and every slot knows when its row is used next."""
    run(
        Pool(
            num_slots=num_slots + 1 if pinned_table else num_slots,
            policy="lookahead",
            overflow=overflow,
            decay=decay,
            profile=[(7 * k) % 23 for k in range(NUM_ROWS)] if profile else None,
            warmup=profile == "warmup",
            pinned_table=pinned_table,
        ),
        operations,
    )


TRANSFERS = ["plain", StagedTransfer, functools.partial(StagedTransfer, buffer_bytes=1), UvaTransfer]


@pytest.mark.slow
@given(
    window_operations.map(lambda found: [operation for operation in found if operation[0] != "fail_known"]),
    st.integers(1, 14),
    st.sampled_from(TRANSFERS),
    st.sampled_from([None, 1]),
)
@examples(100)
def test_every_transfer_in_a_window(operations, num_slots, transfer, pinned_table):
    """What a GPU uses: copies that land later, the kernel in Triton's interpreter."""
    run(
        Pool(
            num_slots=num_slots + 1 if pinned_table else num_slots,
            policy="lookahead",
            overflow="grow",
            pinned_table=pinned_table,
            transfer=transfer,
        ),
        operations,
    )


@pytest.mark.slow
@given(operations, st.sampled_from(POLICIES), st.sampled_from(TRANSFERS))
@examples(60)
def test_every_transfer_with_every_policy(operations, policy, transfer):
    kept = [operation for operation in operations if operation[0] != "fail"]
    run(Pool(num_slots=8, policy=policy, overflow="grow", transfer=transfer), kept)


@pytest.mark.slow
@given(operations, st.sampled_from(POLICIES), st.integers(2, 12))
@examples(60)
def test_rows_that_stay_with_every_policy(operations, policy, num_slots):
    run(Pool(num_slots=num_slots, policy=policy, overflow="grow", pinned_table=1), operations)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "overflow"), covering(tuple(POLICIES), ("raise", "grow")))
def test_many_evictions_with_batches_in_flight(policy, overflow):
    pool = Pool(num_slots=16 if overflow == "raise" else 4, policy=policy, overflow=overflow)
    run(pool, random_operations(seed=1, steps=150))
    totals = {name: int(values.sum()) for name, values in pool.expected.items()}
    assert totals["evictions"] > 100
    assert totals["write_backs"] > 100
    if (policy, overflow) == ("static", "grow"):
        assert totals["hits_unique"] == 0, "a static cache that had to grow has given up all of its rows"
    else:
        assert 100 < totals["hits_unique"] < totals["unique_ids"]
    assert (totals["overflow_growths"] > 0) == (overflow == "grow")


def check_scenarios() -> None:
    """What the negative controls run: it passes when nothing is broken."""
    run(Pool(num_slots=12), random_operations(seed=0, steps=100))
    run(Pool(num_slots=3, overflow="grow"), random_operations(seed=1, steps=60, batch_size=14, growing=True))
    run(Pool(num_slots=24, policy="lru"), random_operations(seed=2, steps=200, batch_size=3))
    run(Pool(num_slots=20, policy="lookahead"), windowed_operations(seed=3, steps=90))
    run(Pool(num_slots=24, policy="lookahead"), windowed_operations(seed=2, steps=150, batch_size=3))
    run(Pool(num_slots=6, overflow="grow"), held_operations(seed=3, steps=25))


@pytest.mark.matrix
def test_the_negative_controls_pass_without_a_fault():
    check_scenarios()


@pytest.mark.slow
@pytest.mark.parametrize("fault", keep(["pins_ignored"], FAULTS))
def test_a_fault_is_noticed(fault):
    with FAULTS[fault](), pytest.raises(AssertionError):
        check_scenarios()


# -- pins ---------------------------------------------------------


def test_a_plan_that_takes_a_slot_in_flight_is_stopped_before_a_row_moves():
    pool = Pool(num_slots=4, policy="lru")
    pool.step([1])
    pool.prepare([2, 3, 4])
    checked = mock.patch.object(InFlight, "check_victims", InFlight.check_victims)
    stopped = pytest.raises(AssertionError, match="slot of batch 2 was to be evicted; batches")
    with FAULTS["pins_ignored"](), checked, stopped:
        pool.cache.prepare(*pool.split_by_feature([5, 6]))
    pool.batch += 1
    pool.check()
    pool.finish()


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=6), min_size=2, max_size=4), st.permutations(range(4)))
@examples(60)
def test_batches_in_flight_keep_their_slots_whatever_the_order_of_release(held, order):
    pool = Pool(num_slots=26, policy="lru")
    numbers = [pool.prepare(keys) for keys in held]
    rng = np.random.default_rng(len(held))
    for index in [i for i in order if i < len(held)]:
        for _ in range(3):
            pool.step(rng.integers(NUM_ROWS, size=2).tolist())
            pool.check()
        pool.train(numbers[index])
        pool.release(numbers[index])
        pool.check()
    pool.finish()


def test_held_pins_stay_until_they_are_let_go():
    """A worker plans while the training thread releases: what it plans must not depend on who was first."""
    pool = Pool(num_slots=6, policy="lru")
    numbers = [pool.prepare([1, 2]), pool.prepare([3, 4])]
    pool.freeze_pins()
    for number in numbers:
        pool.train(number)
        pool.release(number)
    assert pool.prepare([5, 6]) is not None
    assert pool.resident() == {1, 2, 3, 4, 5, 6}
    assert pool.prepare([7], if_it_fits=True) is None
    pool.unfreeze_pins()
    assert pool.prepare([7], if_it_fits=True) is not None
    assert pool.resident() == {2, 3, 4, 5, 6, 7}
    pool.check()


def test_releasing_twice_does_nothing_to_others():
    pool = Pool(num_slots=4, policy="lru")
    first, second = pool.prepare([1, 2]), pool.prepare([3, 4])
    ticket, _ = pool.tickets[first]
    pool.release(first)
    pool.cache.release(ticket)
    assert ticket.released
    pool.check()
    assert pool.prepare([5, 6]) is not None
    assert {3, 4} <= pool.resident()
    pool.release(second)
    pool.check()


def test_a_ticket_that_nobody_holds_unpins():
    pool = Pool(num_slots=4, policy="lru")
    pool.abandon(pool.prepare([1, 2, 3, 4]))
    assert not pool.cache._in_flight
    pool.step([5, 6, 7, 8])
    pool.check()


@pytest.mark.slow
def test_a_ticket_in_a_reference_cycle_unpins_when_it_is_collected():
    pool = Pool(num_slots=4, policy="lru")
    ticket, _ = pool.tickets.pop(pool.prepare([1, 2, 3, 4]))
    cycle = [ticket]
    cycle.append(cycle)
    with pytest.raises(CacheOverflowError):
        pool.cache.prepare(torch.tensor([5]), torch.tensor([0, 1, 0, 0]))
    del ticket, cycle
    gc.collect()
    pool.batch += 1
    pool.step([5])
    pool.check()


def test_known_batches_leave_nothing_behind():
    pool = Pool(num_slots=8, policy="lookahead")
    for step in range(50):
        pool.know([step % NUM_ROWS])
        pool.release(pool.prepare_known())
        assert len(pool.cache._in_flight._rows) <= 1


def test_tickets_do_not_keep_the_cache_alive_and_leave_nothing_behind():
    pool = Pool(num_slots=8)
    registered = len(weakref.finalize._registry)
    for step in range(50):
        pool.step([step % NUM_ROWS])
        pool.abandon(pool.prepare([step % NUM_ROWS]))
    assert not pool.cache._in_flight
    assert len(weakref.finalize._registry) == registered
    number = pool.prepare([1])
    ticket, _ = pool.tickets[number]
    cache = weakref.ref(pool.cache)
    del pool
    gc.collect()
    assert cache() is None
    assert ticket.slots.numel() == 1


# -- overflow ---------------------------------------------------------


def test_raising_names_what_is_missing_and_leaves_the_cache_as_it_was():
    pool = Pool(num_slots=4, policy="lru")
    pool.step([1, 2, 3])
    message = "tables t0, t1, t2: batch 2 and 0 in flight need 6 slots at once, there are 4; .*larger cache.ratio"
    with pytest.raises(CacheOverflowError, match=message):
        pool.cache.prepare(torch.tensor([3, 4, 5, 6, 7, 8]), torch.tensor([6, 0, 0, 0]))
    pool.batch += 1
    pool.last_batch[3] = pool.batch
    pool.check()
    pool.step([4, 5, 6, 7])
    pool.check()
    pool.finish()


def test_growing_keeps_contents_and_warns_once():
    pool = Pool(num_slots=4, policy="lru", overflow="grow")
    pool.step([1, 2, 3, 4])
    ids, lengths = pool.split_by_feature([1, 2, 5, 6, 7, 20])
    message = r"need 6 slots at once, there are 4; the cache grows to 6 slots \([0-9]+ B more device memory\)"
    with pytest.warns(CacheGrowthWarning, match=message) as caught:
        pool.cache.prepare(ids, lengths)
    assert len(caught) == 1
    assert pool.map.num_slots == 6
    for held, truth in zip(pool.slots, pool.rows, strict=True):
        assert torch.equal(held[pool.map.lookup(torch.tensor([1, 2]))], truth[[1, 2]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.cache.prepare(ids, lengths)


def test_growing_adds_a_quarter_at_least_and_never_more_than_there_are_rows():
    pool = Pool(num_slots=12, overflow="grow")
    pool.step(range(13))
    assert pool.map.num_slots == 15
    pool.step(range(29))
    assert pool.map.num_slots == 29
    pool.step(range(30))
    assert pool.map.num_slots == 30
    assert pool.expected["overflow_growths"].sum() == 3
    pool.finish()


def test_growing_is_refused_while_batches_are_in_flight():
    pool = Pool(num_slots=4, overflow="grow")
    number = pool.prepare([1, 2, 3])
    with pytest.raises(CacheOverflowError, match="cannot grow while 1 earlier batches wait for their backward"):
        pool.cache.prepare(torch.tensor([4, 5]), torch.tensor([2, 0, 0, 0]))
    pool.batch += 1
    pool.check()
    pool.train(number)
    pool.release(number)
    pool.step([4, 5, 6, 7, 8])
    pool.check()
    pool.finish()


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*POLICIES, "in a window"])
def test_a_cache_that_grows_keeps_the_batches_that_train_together(policy):
    is_known = policy == "in a window"
    pool = Pool(num_slots=6, policy="lookahead" if is_known else policy, overflow="grow")
    run(pool, held_operations(seed=2 if is_known else 3, steps=25, is_known=is_known))
    assert pool.expected["overflow_growths"].sum() >= 2
    assert pool.expected["evictions"].sum() >= 50


@pytest.mark.parametrize("overflow", ["grow", "raise"])
def test_a_batch_that_must_train_now_waits_for_none_that_trains_with_it(overflow):
    """Early, it waits: it may belong to the next update."""
    pool = Pool(num_slots=4, policy="lookahead", overflow=overflow)
    for keys in ([1, 2, 3], [4, 5]):
        pool.know(keys)
    pool.prepare_known()
    pool.hold()
    assert pool.prepare_known(if_it_fits=True) is None
    if overflow == "grow":
        assert pool.prepare_known(critical_path=True, if_it_fits=True)
    else:
        known, keys = pool.known[0]
        needed = r"batch 3 and 1 in flight \(1 of which train together with it\) need 5 slots at once, there are 4; set"
        with pytest.raises(CacheOverflowError, match=needed):
            pool.cache.prepare(*pool.split_by_feature(keys), True, known, if_it_fits=True)
        pool.batch += 1
    pool.check()
    pool.hold()
    pool.train_held()
    pool.finish()


def test_growth_warnings_as_errors_leave_the_cache_as_it_was():
    pool = Pool(num_slots=4, overflow="grow")
    pool.step([1, 2, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheGrowthWarning)
        with pytest.raises(CacheGrowthWarning):
            pool.cache.prepare(torch.arange(4, 10), torch.tensor([6, 0, 0, 0]))
    pool.batch += 1
    pool.check()
    pool.step([4, 5, 6])
    pool.finish()


# -- reading, flushing, dropping ---------------------------------------------------------


@given(rows, rows, st.sampled_from(POLICIES))
@examples(40)
def test_reading_changes_neither_map_nor_counters_nor_scores(trained, read, policy):
    pool = Pool(num_slots=10, policy=policy)
    pool.step([*trained, 3])
    number = pool.prepare(trained)
    stamps = pool.map.use_stamp.clone()
    pool.read(read)
    assert torch.equal(pool.map.use_stamp, stamps)
    pool.train(number)
    pool.read(read)
    pool.release(number)


def test_read_rows_are_a_copy():
    pool = Pool(num_slots=4)
    pool.step([1])
    pool.cache.read(torch.tensor([1, 2])).zero_()
    pool.check()


def test_flushing_keeps_rows_cached_and_moves_nothing_the_second_time():
    pool = Pool(num_slots=8)
    pool.step([1, 2, 3])
    pool.flush()
    assert pool.resident() == {1, 2, 3}
    assert sum(s.write_backs for s in pool.cache.stats()) == 3
    pool.flush()
    assert sum(s.write_backs for s in pool.cache.stats()) == 3
    pool.step([2])
    pool.flush()
    assert sum(s.write_backs for s in pool.cache.stats()) == 4
    pool.finish()


def test_flushing_with_batches_in_flight_is_followed_by_another_write_back():
    pool = Pool(num_slots=8)
    number = pool.prepare([1, 2])
    pool.step([2, 3])
    pool.flush()
    pool.train(number)
    pool.release(number)
    pool.flush()
    pool.check()
    pool.finish()


@pytest.mark.parametrize("tensor", range(3))
def test_new_contents_of_the_host_tier_are_noticed(tensor):
    pool = Pool(num_slots=8)
    pool.step([1, 2])
    pool.flush()
    pool.host.parts[tensor][1] = 5.0
    pool.rows[tensor][1] = 5.0
    pool.step([])
    pool.check_rows()
    pool.step([1, 3])
    pool.check_rows()


def test_host_rows_that_change_between_steps_are_fetched_again_for_batches_that_wait():
    """What `dcp.load` does in place, with batches resident that train later. Their slots stay pinned."""
    pool = Pool(num_slots=8, policy="lookahead")
    for keys in ([1, 2], [2, 3], [4, 5], [6, 7]):
        pool.know(keys)
    numbers = [pool.prepare_known() for _ in range(3)]
    pool.train(numbers[0])
    pool.release(numbers[0])
    pool.flush()
    pool.load([2, 4, 7], 5.0)
    assert pool.resident() == {1, 2, 3, 4, 5}
    pool.check()
    pool.prepare_known()
    for number in numbers[1:]:
        pool.train(number)
        pool.release(number)
    pool.check()
    pool.finish()


def test_a_forward_that_waits_for_its_backward_refuses_new_contents():
    pool = Pool(num_slots=8)
    number = pool.prepare([1, 2])
    ticket, _ = pool.tickets[number]
    pool.cache.read_by_forward(ticket)
    pool.host.weights[7] = 5.0
    pool.rows[0][7] = 5.0
    with pytest.raises(CacheError, match="host rows were replaced while 1 batches waited for their backward"):
        pool.cache.read(torch.tensor([1]))
    pool.abandon(number)
    del ticket
    pool.step([1, 7])
    pool.check_rows()


@pytest.mark.parametrize("write", ["data", "numpy"])
def test_writes_that_torch_does_not_count_are_read_once_they_are_announced(write):
    pool = Pool(num_slots=8)
    pool.step([1, 2, 3])
    pool.flush()
    if write == "data":
        pool.host.weights.data.mul_(2.0)
    else:
        pool.host.weights.numpy()[:] *= 2.0
    pool.rows[0] *= 2.0
    with pytest.raises(AssertionError, match="wrong in its slot"):
        pool.check_rows()
    pool.cache.host_rows_changed(torch.tensor([1, 2, 7]))
    with pytest.raises(AssertionError, match="wrong in its slot"):
        pool.check_rows()  # row 3 was not named
    pool.cache.host_rows_changed()
    pool.check_rows()
    pool.step([1, 2, 3, 4])
    pool.check_rows()


def test_announcing_writes_to_rows_that_were_not_flushed_is_an_error():
    pool = Pool(num_slots=8)
    pool.step([1, 2, 3])
    with pytest.raises(CacheError, match="while 2 trained rows had not been written back"):
        pool.cache.host_rows_changed(torch.tensor([2, 3, 9]))
    pool.flush()
    pool.cache.host_rows_changed()


def test_new_contents_under_trained_rows_are_an_error():
    for use in (lambda p: p.cache.flush(), lambda p: p.cache.read(torch.tensor([1])), lambda p: p.prepare([3])):
        pool = Pool(num_slots=8)
        pool.step([1, 2])
        pool.host.weights[7] = 5.0
        with pytest.raises(CacheError, match="written to in place while 2 trained rows had not been written back"):
            use(pool)
        pool.cache.flush()  # said once; the host's rows count from then on
        assert pool.cache.read(torch.tensor([7]))[0, 0] == 5.0
        assert torch.equal(pool.cache.read(torch.tensor([1, 2])), pool.host.weights[[1, 2]])


def test_rows_that_have_not_landed_do_not_overwrite_what_was_written_to_the_host_tier():
    """Staged copies land with the next plan; a write in between, without a flush, counts."""
    pool = Pool(num_slots=4, policy="lru", transfer=StagedTransfer)
    pool.step([1, 2])
    pool.step([3, 4, 5, 6])  # rows 1 and 2 are on their way out
    pool.host.weights[1] = 5.0
    with pytest.raises(CacheError, match="while 6 trained rows had not been written back"):
        pool.cache.flush()
    pool.cache.flush()
    assert (pool.host.weights[1] == 5.0).all()


@pytest.mark.parametrize("end", [Pool.cancel, Pool.abandon])
def test_new_contents_under_rows_that_were_only_resident_lose_nothing(end):
    pool = Pool(num_slots=8)
    pool.step([1, 2])
    pool.flush()
    end(pool, pool.prepare([2, 3]))
    pool.host.weights[7] = 5.0
    pool.rows[0][7] = 5.0
    pool.step([3, 7])
    pool.check_rows()
    pool.host.weights[1] = 5.0
    with pytest.raises(CacheError, match="written to in place while 2 trained rows"):
        pool.cache.flush()


# -- interruptions ---------------------------------------------------------


@pytest.mark.parametrize("direction", ["write_back", "fill"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_copy_that_fails_loses_no_row(direction, error, monkeypatch):
    """Ctrl-C, or no memory for a staging buffer: a checkpoint, or a smaller batch, must then be right."""
    pool = Pool(num_slots=4, policy="lru")
    pool.step([1, 2, 3, 4])

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(pool.cache._copies.transfer, direction, fail)
        with pytest.raises(error):
            pool.cache.prepare(torch.tensor([5, 6]), torch.tensor([1, 1, 0, 0]))
    pool.cache.flush()
    for host, truth in zip(pool.host.parts, pool.rows, strict=True):
        assert torch.equal(host, truth)


@pytest.mark.parametrize("step", ["unbind", "claim", "bind"])
def test_planning_that_is_interrupted_ends_the_pool(step, monkeypatch):
    """Rows are neither here nor there: nothing may be trained or saved as if they were."""
    pool = Pool(num_slots=4, policy="lru")
    pool.step([1, 2, 3, 4])

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool.map, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.cache.prepare(torch.tensor([5, 6]), torch.tensor([1, 1, 0, 0]))
    for use in (pool.cache.flush, lambda: pool.step([1]), lambda: pool.cache.read(torch.tensor([1]))):
        with pytest.raises(CacheError, match=r"filling the rows of batch 2 did not end .KeyboardInterrupt"):
            use()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_an_exception_behind_the_planning_never_leaves_rows_that_nobody_copied(error, monkeypatch):
    """When the batch is counted off what is known, its rows are in the map. They must be in their slots, or the next
    flush writes others over them."""
    pool = Pool(num_slots=4, policy="lookahead")
    for keys in ([1, 2, 3, 4], [5, 6]):
        pool.know(keys)
    number = pool.prepare_known()
    pool.train(number)
    pool.release(number)
    known, keys = pool.known[0]

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(pool.cache.next_use_index, "arrive", fail)
        with pytest.raises(error):
            pool.cache.prepare(*pool.split_by_feature(keys), known=known)
    before = [tensor.clone() for tensor in pool.host.parts]
    with pytest.raises(CacheError, match=f"filling the rows of batch 2 did not end .{error.__name__}"):
        pool.cache.flush()
    assert all(torch.equal(a, b) for a, b in zip(before, pool.host.parts, strict=True))


# -- shapes of batches and pools ---------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_slots", [1, 6, NUM_ROWS])
def test_empty_batches_single_ids_and_exact_fits(policy, num_slots):
    pool = Pool(num_slots=num_slots, policy=policy)
    for keys in ([], [5], [], [5, 5, 5], range(num_slots), [], range(NUM_ROWS - num_slots, NUM_ROWS), [0]):
        pool.step(list(keys))
        pool.check()
    pool.finish()


def test_nothing_leaves_a_cache_that_holds_all_rows():
    pool = Pool(num_slots=NUM_ROWS)
    run(pool, random_operations(seed=2, steps=60))
    assert pool.expected["evictions"].sum() == 0


@pytest.mark.slow
def test_a_mapped_file_gives_the_same_rows_as_memory(tmp_path):
    pools = [Pool(num_slots=12), Pool(num_slots=12, mmap_dir=tmp_path)]
    for pool in pools:
        run(pool, random_operations(seed=3, steps=80))
    for a, b in zip(pools[0].host.parts, pools[1].host.parts, strict=True):
        assert torch.equal(a, b)
    assert pools[0].observed() == pools[1].observed()


def test_only_the_true_working_set_counts_against_the_slots():
    """A batch of many lookups of few rows fits few slots."""
    pool = Pool(num_slots=3)
    pool.step([1, 2, 3] * 50)
    pool.check()
    assert (pool.expected["lookups"].sum(), pool.expected["fills"].sum()) == (150, 3)


def test_an_id_out_of_range_changes_nothing():
    pool = Pool(num_slots=3)
    pool.step([1, 2, 3])
    before = pool.observed()
    with pytest.raises((IndexError, RuntimeError)):
        pool.cache.prepare(torch.tensor([5, NUM_ROWS]), torch.tensor([2, 0, 0, 0]))
    assert pool.observed() == before


def test_a_warm_up_that_fails_leaves_no_row_that_was_not_copied(monkeypatch):
    pool = Pool(num_slots=8, policy="lfu", profile=list(range(NUM_ROWS)), warmup=True)
    pool.host.weights.data += 1.0  # so that an empty slot would be seen

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool.cache._copies.transfer, "fill", fail)
        with pytest.raises(KeyboardInterrupt):
            pool.cache.prepare(torch.tensor([1]), torch.tensor([1, 0, 0, 0]))
    assert not pool.resident()
    keys = torch.arange(pool.host.num_rows)
    assert torch.equal(pool.cache.read(keys), pool.host.weights)


class LandsOnlyAtTheEnd(StagedTransfer):
    """Breaks the rule: what leaves does not land before the next plan fills."""

    def _land(self) -> None:
        pass

    def finish(self) -> None:
        super()._land()


def late_landings(transfer: type[StagedTransfer]) -> int:
    """Many evictions, with nothing between them that would wait for the rows that leave. Returns how many were on
    their way when the next plan came."""
    pool = Pool(num_slots=12, policy="lru", transfer=transfer)
    waiting, kept = 0, ("prepare", "train")
    write_back = transfer.write_back

    def counted(self: StagedTransfer, slots: torch.Tensor, keys: torch.Tensor) -> None:
        nonlocal waiting
        waiting += sum(late.numel() for _, late in self._landing)
        write_back(self, slots, keys)

    operations = [each for each in random_operations(seed=4, steps=300) if each[0] in kept]
    with mock.patch.object(transfer, "write_back", counted), mock.patch.object(pool, "check"):
        run(pool, operations)  # at the end it compares all host rows
    return waiting


@pytest.mark.slow
def test_rows_that_land_with_the_next_plan_are_right():
    assert late_landings(StagedTransfer) > 100


@pytest.mark.slow
def test_rows_that_land_too_late_are_noticed():
    with pytest.raises(AssertionError):
        late_landings(LandsOnlyAtTheEnd)


def test_a_read_sees_rows_that_are_on_their_way():
    pool = Pool(num_slots=4, policy="lru", transfer=StagedTransfer)
    first = pool.prepare([0, 1, 2, 3])
    pool.train(first)
    pool.release(first)
    pool.prepare([4, 5, 6, 7])
    assert pool.cache._copies.transfer._landing, "nothing was on its way"
    pool.read([0, 1, 2, 3])


def test_rows_change_by_updates_and_by_writes_of_others_alone():
    """Not what is prepared, read, evicted or cancelled."""
    host = MemoryRows(PoolShape([9], 2))
    cache = RowCache(
        ["t"], host, lambda count: [torch.zeros(count + 1, 2)], 4, [0], CachePolicy("lru"), torch.device("cpu")
    )
    cache.parts.add(changed := ChangedKeys(host, torch.device("cpu")))
    ends = [cache.prepare(torch.tensor(keys), torch.tensor([len(keys)])) for keys in ([1, 2, 1], [3])]
    cache.read(torch.tensor([7]))
    assert changed.take().tolist() == []
    first, second = ends
    assert first is not None
    cache.begin_update(first)
    cache.release(first)
    second.cancel()
    third = cache.prepare(torch.tensor([5, 6, 7, 8]), torch.tensor([4]))  # evicts all others
    assert third is not None
    assert changed.take().tolist() == [1, 2]
    cache.begin_update(third)  # and then fails
    assert changed.take().tolist() == [5, 6, 7, 8]
    cache.release(third)
    cache.flush()
    cache.host_rows_changed([range(2, 4)])
    cache.host_rows_changed(torch.tensor([8]))
    assert changed.take().tolist() == [2, 3, 8], "somebody else wrote to them"


OPERATIONS: dict[str, Callable[[Pool], object]] = {
    "know": lambda pool: pool.cache.know(*pool.split_by_feature([5])),
    "prepare": lambda pool: pool.cache.prepare(*pool.split_by_feature([5])),
    "preparing": lambda pool: read_at_once(pool.cache.preparing(*pool.split_by_feature([5]), True, None, False)),
    "reinitialise": lambda pool: pool.cache.reinitialise(torch.tensor([5]), torch.tensor([7])),
    "read": lambda pool: pool.cache.read(torch.tensor([5])),
    "flush": lambda pool: pool.cache.flush(),
    "host_rows_changed": lambda pool: (pool.cache.flush(), pool.cache.host_rows_changed()),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_run_one_at_a_time(operation: str) -> None:
    """Each holds the pool's lock when it looks whether it may begin."""
    pool, held = Pool(num_slots=6, policy="lookahead", lazy=True), list[bool]()
    check = pool.cache._moves.check

    def looked() -> None:
        held.append(pool.cache._lock._is_owned())  # type: ignore[attr-defined]
        check()

    with mock.patch.object(pool.cache._moves, "check", looked):
        OPERATIONS[operation](pool)
    assert held
    assert all(held)
