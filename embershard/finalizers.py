"""`end_with`: what must end with an object, and may wait or take locks, in a thread of its own.

A finalizer runs at any line of any thread that makes objects. That thread may hold a lock: of a pool of threads, or of
Python's own start of a thread. A finalizer that joins a thread, or shuts down a pool of them, may wait for itself.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

_log = logging.getLogger(__name__)


class _Ends:
    """The thread, and what it has to end. `SimpleQueue.put` takes no lock, and may run inside of itself."""

    def __init__(self) -> None:
        self._due: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="embershard-ends", daemon=True)
                self._thread.start()

    def put(self, end: Callable[[], Any]) -> None:
        self._due.put(end)

    def _run(self) -> None:
        while True:
            try:
                self._due.get()()
            except Exception:
                _log.exception("something that an object left behind did not end")


_ends = _Ends()


def _begin_anew() -> None:
    global _ends
    _ends = _Ends()  # threads do not survive a fork


os.register_at_fork(after_in_child=_begin_anew)


def end_with(owner: object, end: Callable[..., Any], *given: Any) -> weakref.finalize[..., Any]:
    """Call `end(*given)` in a thread of its own when `owner` is gone; not at the end of the process.

    Returns:
        The finalizer: where its `detach` returns something, the caller may end by itself.

    >>> class Owner: ...
    >>> owner = Owner()
    >>> finalizer = end_with(owner, print, "ended")
    >>> del owner
    >>> wait_for_ends()
    ended
    """
    _ends.start()
    finalizer = weakref.finalize(owner, lambda: _ends.put(partial(end, *given)))
    finalizer.atexit = False
    return finalizer


def wait_for_ends() -> None:
    """Wait until what objects left behind so far has ended. Not in a finalizer."""
    _ends.start()
    is_done = threading.Event()
    _ends.put(is_done.set)
    is_done.wait()
