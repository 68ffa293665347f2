"""Ctrl-C waits while a library changes what belongs to the whole process."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block: in the thread that Python gives it to, and where it has a handler.

    >>> before = signal.signal(signal.SIGINT, signal.default_int_handler)
    >>> try:
    ...     with interrupts_wait():
    ...         signal.raise_signal(signal.SIGINT)
    ...         print("the block goes on")
    ... except KeyboardInterrupt:
    ...     print("interrupted")
    the block goes on
    interrupted
    >>> _ = signal.signal(signal.SIGINT, before)
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    waiting: list[Any] = []
    signal.signal(signal.SIGINT, lambda *interrupt: waiting.append(interrupt))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if waiting:
            handler(*waiting[-1])
