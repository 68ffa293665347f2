"""A change that began and did not end is noticed by everything that follows."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from embershard.cache.guards import ChangeGuard, CopiesGuard, UpdateGate
from embershard.cache.tickets import Ticket
from embershard.errors import CacheError


def test_a_change_that_ends_leaves_no_mark() -> None:
    guard = ChangeGuard("pool")
    with guard.change("growing"):
        assert guard.is_broken, "whatever interrupts it from now on, the mark stays"
    guard.check()
    assert not guard.is_broken


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError("no memory"), RuntimeError("a kernel failed")])
def test_a_change_that_raises_is_named_with_its_cause(error: BaseException) -> None:
    guard = ChangeGuard("rank 3, tables a, b")
    with pytest.raises((KeyboardInterrupt, MemoryError, RuntimeError)), guard.change("growing to 7 slots"):
        raise error
    for _ in range(2):
        with pytest.raises(CacheError, match=r"rank 3, tables a, b: growing to 7 slots did not end \(") as caught:
            guard.check()
        assert type(caught.value.__cause__).__name__ in str(caught.value)
    with pytest.raises(CacheError, match="did not end"), guard.change("flushing"):
        raise AssertionError("nothing begins any more")


def test_a_mark_needs_nobody_to_run_for_it() -> None:
    """As if the interrupt hit before any handler."""
    guard = ChangeGuard("pool")
    guard.change("planning").__enter__()
    gc.collect()
    with pytest.raises(CacheError, match=r"planning did not end \((interrupted|GeneratorExit)"):
        guard.check()


def test_what_is_put_right_again_leaves_no_mark() -> None:
    guard = ChangeGuard("pool")

    def bring_in() -> None:
        with guard.change("bringing in rows"):
            guard.settle()
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        bring_in()
    guard.check()


def test_who_reads_copies_waits_for_their_update() -> None:
    guard, order = CopiesGuard("rank 0, hot rows of tables a"), []

    def read() -> None:
        guard.check()
        order.append("read")

    reader = threading.Thread(target=read)
    with guard.change("training a batch"):
        reader.start()
        reader.join(0.05)
        order.append("trained")
    reader.join(10)
    assert order == ["trained", "read"]


def ticket() -> Ticket:
    return Ticket(1, torch.empty(0, dtype=torch.int64))


def test_copies_wait_for_an_update_and_an_update_for_copies() -> None:
    gate, updating, order = UpdateGate("pool"), ticket(), []
    begun, may_end, copying = threading.Event(), threading.Event(), threading.Event()

    def update() -> None:
        gate.begin(updating)
        begun.set()
        may_end.wait(10)
        order.append("updated")
        gate.end()
        copying.wait(10)
        gate.begin(updating)  # the next one
        order.append("updated again")
        gate.end()

    thread = threading.Thread(target=update)
    thread.start()
    begun.wait(10)
    threading.Timer(0.05, may_end.set).start()
    with gate.lock:
        gate.wait_until_idle()
        copying.set()
        assert order == ["updated"]
        thread.join(0.05)
        assert order == ["updated"], "an update began beside copies"
    thread.join(10)
    assert order == ["updated", "updated again"]


def test_an_update_that_failed_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embershard.cache.guards._MOST_SECONDS", 0.05)
    gate, updating = UpdateGate("pool"), ticket()
    gate.begin(updating)  # and raised
    with gate.lock:
        gate.wait_until_idle()  # in the same thread, so it cannot run any more
    thread = threading.Thread(target=gate.begin, args=(updating,))
    thread.start()
    thread.join()
    with gate.lock, pytest.raises(CacheError, match="drop its loss and its output first"):
        gate.wait_until_idle()  # it may still run
    del updating
    with gate.lock:
        gate.wait_until_idle()
