"""SIGTERM, SIGHUP and Ctrl-C, in a rank and in its launcher: the first ends the run in order, a second one at once."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from embershard import distributed

#: Requests to stop. SIGHUP comes when a terminal is closed or an ssh session ends.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: A second signal that comes sooner is the same request: many send it to the launcher and to the ranks.
_SAME_REQUEST_SECONDS = 1.0


class StopAsked:
    """The requests to stop that this process received.

    Attributes:
        number: of the first signal; 0 for none.
        is_at_once: there was a second one.

    >>> asked = StopAsked()
    >>> for at_seconds in (7.0, 7.1, 9.0):
    ...     asked.receive(signal.SIGINT, at_seconds)
    ...     print(asked.is_at_once)
    False
    False
    True
    """

    def __init__(self) -> None:
        self.number, self.is_at_once, self._at_seconds = 0, False, 0.0

    def receive(self, number: int, at_seconds: float) -> None:
        """Note a signal."""
        if not self.number:
            self.number, self._at_seconds = number, at_seconds
        elif at_seconds - self._at_seconds > _SAME_REQUEST_SECONDS:
            self.is_at_once = True


def stop_code(number: int) -> int:
    """Return the exit code of a run that ended in order after this signal: 0, and 130 after Ctrl-C.

    >>> stop_code(signal.SIGTERM), stop_code(signal.SIGHUP), stop_code(signal.SIGINT)
    (0, 0, 130)
    """
    return 130 if number == signal.SIGINT else 0


@contextmanager
def stop_asked(then: Callable[[StopAsked], None] | None = None) -> Iterator[StopAsked]:
    """Note SIGTERM, SIGINT and SIGHUP, and call `then` after each. A SIGHUP that is ignored (`nohup`) stays so."""
    asked = StopAsked()

    def receive(number: int, _: FrameType | None) -> None:
        leave_closed_terminal()
        asked.receive(number, time.monotonic())
        if then is not None:
            then(asked)

    is_kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    noted = [number for number in STOP_SIGNALS if not (is_kept and number == signal.SIGHUP)]
    before = {number: signal.signal(number, receive) for number in noted}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_training_on_signals(supervision: distributed.Supervision) -> Iterator[None]:
    """Have signals end the training after its step; before the training, and when they repeat, they end the process."""

    def then(asked: StopAsked) -> None:
        if asked.is_at_once:
            os._exit(128 + asked.number)
        if not supervision.is_training:
            if os.environ.get("RANK", "0") == "0" and not supervision.has_launcher:
                with suppress(OSError):
                    os.write(2, b"embershard: stopped before the first step. Nothing was trained.\n")
            os._exit(stop_code(asked.number))
        if supervision.notice and not supervision.signal:
            with suppress(OSError):
                os.write(2, f"{supervision.notice}\n".encode())
        supervision.signal = asked.number

    with stop_asked(then):
        yield


def leave_closed_terminal() -> None:
    """Write to nowhere from now on where standard output or standard error is a terminal that was closed: at its end,
    Python would fail with what it could not write."""
    for descriptor in (1, 2):
        try:
            if is_device(descriptor):
                os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def is_device(descriptor: int) -> bool:
    """Return whether it is a terminal, or another device, and no file on a disk."""
    return stat.S_ISCHR(os.fstat(descriptor).st_mode)
