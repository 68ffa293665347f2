"""Copies in worker threads: whatever their timing, every row is right; and a copy that fails is noticed, once and for
all."""

from __future__ import annotations

import contextlib
import gc
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from embershard.cache import background, copies, row_cache, victims
from embershard.cache.transfer import PlainTransfer
from embershard.errors import CacheError
from tests.unit.cache.faults import FAULTS
from tests.unit.cache.harness import Pool

HALVES = ("collect", "land", "fill")
LONG = 0.004  # seconds


class Dawdling(PlainTransfer):
    """A transfer that takes its time: each copy first sleeps for one of ``seconds``, chosen by a seeded generator of
    its own (two threads call it)."""

    def __init__(
        self, device: list[Tensor], host: list[Tensor], seed: int, seconds: dict[str, tuple[float, ...]]
    ) -> None:
        super().__init__(device, host)
        self._seconds = seconds
        self._dice = {half: random.Random(f"{seed} {half}") for half in HALVES}

    def _wait(self, half: str) -> None:
        seconds = self._dice[half].choice(self._seconds.get(half, (0.0,)))
        if seconds:
            time.sleep(seconds)

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        self._wait("fill")
        super().fill(keys, slots)

    def collect(self, slots: Tensor) -> list[Tensor]:
        self._wait("collect")
        return super().collect(slots)

    def land(self, rows: list[Tensor], keys: Tensor) -> None:
        self._wait("land")
        super().land(rows, keys)


ANY = dict.fromkeys(HALVES, (0.0, 0.0, 0.0002, 0.002))


@contextlib.contextmanager
def dawdling(seed: int = 0, seconds: dict[str, tuple[float, ...]] = ANY) -> Iterator[None]:
    """Pools made in here copy slowly, three rows at a time."""

    def slow(device: list[Tensor], host: list[Tensor]) -> Dawdling:
        return Dawdling(device, host, seed, seconds)

    with mock.patch.object(copies, "PlainTransfer", slow), mock.patch.object(background, "_ROWS_AT_ONCE", 3):
        yield


class Train:
    """A loop that prepares batches ahead of the one in training, and trains each one as late as it can.

    ``returns`` counts, for rows that left and came back, how many batches later that was.
    """

    def __init__(self, pool: Pool, prefetch: int = 2, known: int = 0, seconds: float = 0.0) -> None:
        self.pool, self.prefetch, self.num_known, self.seconds = pool, prefetch, known, seconds
        self.returns: Counter[int] = Counter()
        self._left: dict[int, int] = {}

    def run(self, batches: list[list[int]]) -> None:
        for keys in batches[: self.num_known]:
            self.pool.know(keys)
        for number, keys in enumerate(batches):
            for ahead in batches[number + self.num_known : number + self.num_known + 1] if self.num_known else []:
                self.pool.know(ahead)
            before = self.pool.resident()
            prepared = self.pool.prepare_known() if self.num_known else self.pool.prepare(keys, critical_path=False)
            assert prepared is not None
            after = self.pool.resident()
            self.returns.update(number - self._left.pop(k) for k in after - before if k in self._left)
            self._left.update(dict.fromkeys(before - after, number))
            if len(self.pool.tickets) > self.prefetch:
                self._train_oldest()
        while self.pool.tickets:
            self._train_oldest()

    def _train_oldest(self) -> None:
        oldest = min(self.pool.tickets)
        time.sleep(self.seconds)
        self.pool.train(oldest)
        self.pool.release(oldest)


def tight(seed: int, num_batches: int, size: int = 5) -> list[list[int]]:
    """So few rows that those which leave come back soon."""
    rng = np.random.default_rng(seed)
    return [rng.choice(30, size=size, replace=False).tolist() for _ in range(num_batches)]


def check_rows(
    seed: int, policy: str = "lru", seconds: dict[str, tuple[float, ...]] = ANY, num_batches: int = 150
) -> Counter[int]:
    """Train without ever settling in between; then every row must be what the reference says."""
    with dawdling(seed, seconds):
        pool = Pool(num_slots=16, policy=policy, background=True)
        loop = Train(pool, known=6 if policy == "lookahead" else 0, seconds=max(seconds.get("train", (0.0,))))
        loop.run(tight(seed, num_batches))
        pool.finish()
    return loop.returns


# -- right ---------------------------------------------------------


@pytest.mark.parametrize("policy", ["lookahead", "lfu", "lru"])
@pytest.mark.parametrize("seed", range(2))
def test_rows_that_leave_and_come_back_are_right(policy, seed):
    returns = check_rows(seed, policy)
    assert all(returns[distance] >= 5 for distance in range(1, 7) if policy == "lru"), returns
    assert sum(returns.values()) > 100


@pytest.mark.parametrize("slow", HALVES)
def test_rows_are_right_when_one_half_is_always_late(slow):
    check_rows(1, "lru", {slow: (LONG,)}, num_batches=60)


def test_a_read_a_flush_and_growth_wait_for_what_is_under_way():
    with dawdling(seconds={"land": (LONG,), "fill": (LONG,)}):
        pool = Pool(num_slots=10, policy="lookahead", overflow="grow", background=True)
        for number, keys in enumerate(tight(3, 40, size=4)):
            pool.step(keys)
            if number % 8 == 3:
                pool.read(list(range(30)))
            elif number % 8 == 5:
                pool.flush()
                assert all(torch.equal(a, b) for a, b in zip(pool.host.payload, pool.rows, strict=True))
            elif number % 16 == 7:
                pool.release(pool.prepare(tight(number, 1, size=8)[0]))  # not waited for
                pool.step(list(range(pool.map.num_slots + 1)))
            elif number == 14:
                pool.drop()
        assert pool.expected["overflow_growths"].sum() > 1
        pool.finish()


def test_the_training_does_not_wait_for_the_write_back():
    """Nor does the fill: only a row that is on its way out has to be there before it comes in again."""
    landing = threading.Event()
    pool = Pool(num_slots=4, policy="lru", background=True)
    pool.step([1, 2])
    pool.step([3, 4])
    land = pool.cache._copies.transfer.land

    def held_up(*arguments: Any) -> None:
        assert landing.wait(60)
        land(*arguments)

    with mock.patch.object(pool.cache._copies.transfer, "land", held_up):
        pool.step([5, 6])  # in the slots of 1 and 2
        pool.step([7, 8])  # in those of 3 and 4
        number = pool.prepare([2, 9])
        ticket = pool.tickets[number][0]
        assert isinstance(ticket._filled, Future)
        time.sleep(0.02)
        assert not ticket._filled.done(), "row 2 was read before it landed"
        landing.set()
        del ticket
        pool.train(number)
    pool.finish()


def test_waiting_is_counted_as_a_stall():
    with dawdling(seconds={"fill": (0.02,)}):
        pool = Pool(num_slots=4, policy="lru", background=True)
        number = pool.prepare([1, 2], critical_path=False)
        before = pool.cache.stall_seconds
        pool.train(number)
        assert before == 0.0
        assert pool.cache.stall_seconds > 0.005


# -- negative controls ---------------------------------------------------------


@contextlib.contextmanager
def _host_rows_read_too_early() -> Iterator[None]:
    with mock.patch.object(background._WriteBack, "concerns", return_value=False):
        yield


@contextlib.contextmanager
def _slots_given_away_one_batch_early() -> Iterator[None]:
    pop = victims.VictimQueue.pop

    def hasty(self: Any, count: int, oldest_pinned: int) -> Tensor:
        return pop(self, count, oldest_pinned + 1)

    with mock.patch.object(victims.VictimQueue, "pop", hasty):
        yield


@contextlib.contextmanager
def _filled_before_collected() -> Iterator[None]:
    """The slots are filled while their old rows still wait to be collected."""
    exchange, put_off = background.BackgroundCopies._exchange, background.BackgroundCopies._pass_on

    def fill_first(self: Any, plan: Any, leaving: Tensor, write_back: Any, readable_after: Any) -> None:
        with mock.patch.object(self, "_pass_on"):
            exchange(self, plan, leaving, write_back, readable_after)
        put_off(self, leaving, write_back)

    with mock.patch.object(background.BackgroundCopies, "_exchange", fill_first):
        yield


@contextlib.contextmanager
def _nobody_waits() -> Iterator[None]:
    with mock.patch.object(row_cache.RowCache, "wait", return_value=None):
        yield


CONTROLS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[None]], str]] = {
    "host rows read before they landed": (_host_rows_read_too_early, "land"),
    "slots of batches in flight": (FAULTS["pins_ignored"], "train"),
    "slots given away one batch early": (_slots_given_away_one_batch_early, "train"),
    "filled before collected": (_filled_before_collected, "collect"),
    "nobody waits": (_nobody_waits, "fill"),
    "write-back skipped": (FAULTS["write_back_skipped"], "land"),
    "states stay behind": (FAULTS["states_stay_behind"], "fill"),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_fault_is_noticed_by_the_rows_themselves(control):
    """Without the harness's look at the plans: what was trained must differ."""
    fault, slow = CONTROLS[control]
    with (
        fault(),
        mock.patch.object(Pool, "_check_victims"),
        mock.patch.object(Pool, "_check_pins"),
        pytest.raises(AssertionError, match=r"is wrong|reference"),
    ):
        check_rows(0, "lfu", {slow: (LONG,)}, num_batches=40)


def test_the_controls_pass_without_a_fault():
    with mock.patch.object(Pool, "_check_victims"), mock.patch.object(Pool, "_check_pins"):
        for slow in (*HALVES, "train"):
            check_rows(0, "lfu", {slow: (LONG,)}, num_batches=40)


# -- failures ---------------------------------------------------------

USES: dict[str, Callable[[Pool], object]] = {
    "prepare": lambda pool: pool.cache.prepare(*pool.split_by_feature([9])),
    "prepare what is there": lambda pool: pool.cache.prepare(*pool.split_by_feature([8])),
    "flush": lambda pool: pool.cache.flush(),
    "read": lambda pool: pool.cache.read(torch.tensor([1])),
    "drop": lambda pool: pool.cache.drop(),
}
MESSAGE = (
    r"tables t0, t1, t2: planning or copying rows failed \(OSError: no space left\).*resume from the last checkpoint"
)


def broken(half: str) -> Pool:
    """A pool of which a copy has failed, that nobody waited for; later ones would have worked."""
    pool = Pool(num_slots=4, policy="lru", background=True)
    pool.step([5, 6, 7, 8])
    pool.cache._copies.finish()
    with mock.patch.object(pool.cache._copies.transfer, half, side_effect=OSError("no space left")):
        pool.release(pool.prepare([1, 2]))
        pool.cache._copies._background.finish()  # type: ignore[union-attr]
    return pool


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("use", USES)
def test_a_copy_that_failed_is_an_error_from_then_on(half, use):
    """Also when nobody waited for it: the slots of its rows hold others, which must not be written back."""
    pool = broken(half)
    host = [tensor.clone() for tensor in pool.host.payload]
    for _ in range(3):
        with pytest.raises(CacheError, match=MESSAGE) as caught:
            USES[use](pool)
        assert isinstance(caught.value.__cause__, OSError)
    for other in USES.values():
        with pytest.raises(CacheError, match=MESSAGE):
            other(pool)
    assert all(torch.equal(a, b) for a, b in zip(host, pool.host.payload, strict=True))


@pytest.mark.parametrize("half", HALVES)
def test_a_copy_that_fails_later_is_an_error_of_whatever_comes_next(half):
    """While several plans are under way, and one of them waits for the write-back that fails."""
    for use in ("wait", "read", "flush"):
        with dawdling(seconds=dict.fromkeys(HALVES, (LONG,))):
            pool = Pool(num_slots=4, policy="lru", background=True)
            pool.step([5, 6, 7, 8])
            failing = mock.patch.object(pool.cache._copies.transfer, half, side_effect=OSError("no space left"))
            with failing, pytest.raises(CacheError, match=MESSAGE):
                _three_batches(pool, use)


def _three_batches(pool: Pool, use: str) -> None:
    for keys in ([1, 2], [5, 6], [1, 2]):
        number = pool.prepare(keys)
        ticket, _ = pool.tickets[number]
        pool.release(number)
    if use == "wait":
        pool.cache.wait(ticket)
    else:
        USES[use](pool)


def test_what_follows_a_failed_copy_is_not_copied():
    """Its slots may hold rows of others."""
    pool = Pool(num_slots=4, policy="lru", background=True)
    pool.step([5, 6, 7, 8])
    pool.cache._copies.finish()
    with mock.patch.object(pool.cache._copies.transfer, "fill", side_effect=OSError("no space left")):
        pool.release(pool.prepare([1, 2, 3, 4]))
        with contextlib.suppress(CacheError):
            pool.release(pool.prepare([5, 6, 7, 8]))
        pool.cache._copies._background.finish()  # type: ignore[union-attr]
    for key in (1, 2, 3, 4):
        assert torch.equal(pool.host.weights[key], pool.rows[0][key]), "a row that was never in its slot was written"


def test_an_interrupt_while_waiting_loses_nothing():
    """Ctrl-C in the training thread: no copy failed, and a checkpoint may still be written."""
    pool = Pool(num_slots=4, policy="lru", background=True)
    number = pool.prepare([1, 2])
    filled = pool.tickets[number][0]._filled
    with (
        mock.patch.object(filled, "exception", side_effect=KeyboardInterrupt),
        mock.patch.object(filled, "result", side_effect=KeyboardInterrupt),
    ):
        with pytest.raises(KeyboardInterrupt):
            pool.train(number)
        with pytest.raises(KeyboardInterrupt):
            pool.cache.flush()
    pool.train(number)
    pool.release(number)
    pool.finish()


# -- threads ---------------------------------------------------------


def workers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith(("embershard-fill", "embershard-write-back"))]


@pytest.mark.parametrize("half", [None, *HALVES])
def test_the_threads_end_with_the_cache(half):
    gc.collect()
    before = set(workers())
    if half is None:
        pool = Pool(num_slots=4, policy="lru", background=True)
        for keys in ([1, 2, 3, 4], [5, 6], [1, 2]):
            pool.step(keys)
    else:
        pool = broken(half)
    started = set(workers()) - before
    assert started
    del pool
    for _ in range(100):  # a thread that has just ended a failing copy may hold its frames for a moment more
        gc.collect()
        for thread in started:
            thread.join(0.1)
        if not any(thread.is_alive() for thread in started):
            return
    assert not any(thread.is_alive() for thread in started)


EXIT = """
import time
from tests.unit.cache.harness import Pool

profile = [0] * 30
for key, count in {3: 5, 4: 5, 5: 9, 6: 9}.items():
    profile[key] = count
pool = Pool(num_slots=4, policy="frequency", profile=profile, background=True)
pool.step([1, 2, 3, 4])
pool.flush()
transfer = type(pool.cache._copies.transfer)
collect = transfer.collect


def slow(*arguments):
    time.sleep(0.3)
    return collect(*arguments)


transfer.collect = slow
# The last plan has nothing to write back, and waits for the write-back before it.
for keys in ([1, 2], [5, 6], [1]):
    pool.release(pool.prepare(keys))
"""


def test_a_process_exits_while_copies_are_under_way():
    """The interpreter takes no more work then: what waits for a write-back must hear of it."""
    project = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", EXIT], cwd=project, timeout=120, check=True)
