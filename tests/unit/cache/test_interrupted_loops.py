"""Interrupts while Numba compiles a loop or loads it, in processes that they may break."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numba.core.registry import cpu_target
from numba.core.utils import stream_list

from embershard.cache.loops.compiled import compiled_when_called
from embershard.errors import CacheError
from embershard.interrupts import interrupts_wait
from tests.covering import matrix
from tests.faults.children import fork

pytestmark = pytest.mark.slow  # loops are compiled


def child(work: Callable[[], object]) -> int:
    return os.waitpid(fork(work), 0)[1]


@compiled_when_called()
def doubled(numbers: Any) -> Any:
    return numbers + numbers


def interrupt_in(frames: list[FrameType]) -> Callable[[FrameType, str, Any], Any]:
    """Trace: an interrupt comes while Numba's generator of what is new for all loops runs."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not stream_list.__code__:
            return trace if not frames else None
        if event == "line" and not frames:
            frames.append(frame)
            signal.raise_signal(signal.SIGINT)
        return trace

    return trace


def double_two_types(waits: bool) -> None:
    """The first call is interrupted: the second one is of another type, which is not loaded yet."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not waits:
        doubled.compile = doubled.compile.args[1]  # Numba's own
    frames = list[FrameType]()
    sys.settrace(interrupt_in(frames))
    try:
        doubled(np.ones(2, np.int64))
        raise AssertionError("no interrupt")
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    assert frames
    assert doubled(np.ones(2, np.int32)).tolist() == [2, 2]
    assert doubled(np.ones(2, np.int64)).tolist() == [2, 2]


def test_an_interrupt_waits_until_a_loop_is_loaded() -> None:
    assert child(lambda: double_two_types(waits=True)) == 0


@pytest.mark.matrix
def test_without_a_wait_no_loop_is_loaded_any_more(capfd: pytest.CaptureFixture[str]) -> None:
    """The control."""
    assert child(lambda: double_two_types(waits=False)) != 0
    assert "generator raised StopIteration" in capfd.readouterr().err


def call_after(cut: Callable[[], None]) -> None:
    """Call a loop of a type that is new, in a process that something has cut off."""
    doubled(np.ones(2, np.int16))
    cut()
    for _ in range(2):
        with pytest.raises(CacheError) as raised:
            doubled(np.ones(2, np.float32))
        print(raised.value, file=sys.stderr)


def end_generators() -> None:
    """As an exception in them does."""
    for loader in cpu_target.typing_context._registries.values():
        for each in loader._registrations.values():
            each.close()


def no_memory() -> None:
    """An exception in the middle, and then what it leaves."""
    right = cpu_target.target_context.refresh

    def refresh() -> None:
        cpu_target.target_context.refresh = right
        end_generators()
        raise MemoryError

    cpu_target.target_context.refresh = refresh
    with pytest.raises(MemoryError):
        doubled(np.ones(2, np.float64))


@pytest.mark.parametrize(("cut", "cause"), [(end_generators, "something"), matrix(no_memory, "MemoryError")])
def test_what_fails_from_then_on_is_told(
    capfd: pytest.CaptureFixture[str], cut: Callable[[], None], cause: str
) -> None:
    status = child(lambda: call_after(cut))
    said = capfd.readouterr().err
    assert status == 0, said
    needed = (
        f"'doubled' could not be loaded: Numba has been unable to load any in this process since {cause} cut it off"
    )
    assert said.count(needed) == 2
    assert said.count("Start the process again") == 2


def test_interrupts_of_blocks_in_blocks_come_once() -> None:
    done = []

    def interrupted() -> None:
        with interrupts_wait():
            with interrupts_wait():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert done == ["inner", "outer"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
