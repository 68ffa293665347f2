"""What keeps the threads, the streams and the failures of a pool from spoiling its state.

`one_at_a_time` and `StreamOrder` order its operations, `UpdateGate` keeps backward passes and copies of rows apart, and
`ChangeGuard` refuses a pool whose state changed only in part.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar, cast

import torch

from embershard.cache.tickets import Ticket
from embershard.errors import CacheError


class ChangeGuard:
    """Detects a change that began and did not end.

    Slot map, scores and next uses change together, in many small operations. An exception between two of them (an
    interrupt, a lack of memory) would leave a map that promises rows nobody copied. So `change` sets a mark before the
    first operation and removes it after the last one, and `check` refuses everything while the mark is set. The mark
    stays by itself: no `try` has to be in the right place.

    Args:
        pool: name of the pool, for messages.

    Attributes:
        pool: its name.
        doubt: what is not certain any more after a change that did not end, for messages.
        num_changes: how many were begun.

    >>> guard = ChangeGuard("rank 0, tables a")
    >>> with guard.change("growing"):
    ...     pass
    >>> guard.is_broken
    False
    """

    doubt = "it is not certain which row is in which slot"

    def __init__(self, pool: str) -> None:
        self.pool, self.num_changes = pool, 0
        self._coming = ""  # what the next change is
        self._change: str | None = None
        self._cause: BaseException | None = None

    @property
    def is_broken(self) -> bool:
        """True after a change that did not end."""
        return self._change is not None

    def change(self, what: str) -> AbstractContextManager[None]:
        """Guard the body of a `with` as one change, described by `what`. Changes do not nest.

        Raises:
            CacheError: an earlier change did not end.
        """
        self._coming = what
        return self

    def __enter__(self) -> None:
        self.check()
        self.num_changes += 1
        self._change = self._coming

    def __exit__(self, cls: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if cls is None:
            self._change = None
        elif self._change is not None and not issubclass(cls, GeneratorExit):  # raised when nobody resumes this one
            self._cause = error

    def settle(self) -> None:
        """Inside `change`: declare the state consistent although an exception is being raised."""
        self._change = None

    def check(self) -> None:
        """Raise if an earlier change did not end.

        Raises:
            CacheError: the change and the exception that ended it.
        """
        if self._change is None:
            return
        cause = "interrupted" if self._cause is None else f"{type(self._cause).__name__}: {self._cause}"
        raise CacheError(
            f"{self.pool}: {self._change} did not end ({cause}), so {self.doubt}. "
            "Nothing is read, trained or saved from now on. Fix the cause and resume from the last checkpoint"
        ) from self._cause


class CopiesGuard(ChangeGuard):
    """Refuses rows of which other ranks have equal copies, after an update that did not end on this rank.

    An update takes gradients from all ranks, and gives this rank's to them. From then on the others may have trained
    the rows, whatever happens here.

    Other threads wait for the end of an update: what they read is whole.

    >>> guard = CopiesGuard("rank 0, hot rows of tables a")
    >>> with guard.change("training"):
    ...     pass
    >>> guard.check()
    """

    doubt = "these rows may differ from their copies on the other ranks"

    def __init__(self, pool: str) -> None:
        super().__init__(pool)
        self._lock = threading.RLock()

    @contextmanager
    def change(self, what: str) -> Iterator[None]:
        """As every guard."""
        with self._lock, super().change(what):
            yield

    def check(self) -> None:
        """As every guard."""
        with self._lock:
            super().check()


_MOST_SECONDS = 60.0


class UpdateGate:
    """Keeps copies and updates of rows apart.

    A backward pass updates rows in their slots; a flush in another thread (an asynchronous checkpoint) copies them.
    Each waits for the other, so every copied row is whole: weights and optimizer states of one step.

    The copying thread holds `lock` in a `with` statement of its own: an interrupt could leave a flag set, but cannot
    leave the lock taken.

    An update that raised never ends. It does not count any more when its own thread copies, or once its ticket is gone.

    Args:
        pool: name of the pool, for messages.

    Attributes:
        lock: no update begins while it is held. The same thread may take it several times.
        have_run: updates began or ended since somebody set it to False: since the last write-back.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._running: tuple[int, weakref.ref[Ticket]] | None = None
        self.have_run = False

    def begin(self, ticket: Ticket) -> None:
        """Begin an update of the ticket's rows by the calling thread; wait for copies to end."""
        with self.lock:
            self._running = threading.get_ident(), weakref.ref(ticket)
            self.have_run = True

    def end(self) -> None:
        """End the update."""
        with self.lock:
            self._running = None
            self.have_run = True
            self._changed.notify_all()

    def wait_until_idle(self) -> None:
        """Block until no update runs. The caller holds `lock`, so no other update begins.

        Raises:
            CacheError: an update has been running for a minute.
        """

        def is_idle() -> bool:
            if self._running is None:
                return True
            thread, ticket = self._running
            return thread == threading.get_ident() or ticket() is None

        if not self._changed.wait_for(is_idle, _MOST_SECONDS):
            raise CacheError(
                f"{self._pool}: rows cannot be copied, because a backward pass in another thread has been updating "
                f"them for {_MOST_SECONDS:.0f} seconds. If it failed, drop its loss and its output first"
            )


_ON_A_CPU = nullcontext()


class StreamOrder:
    """Makes the work queued in one turn wait for the work of all earlier turns.

    Batches are planned on one stream, while evaluations, flushes and statistics run on the training stream. They share
    maps, scores and counters. The first turn follows the work queued when this object was made. On a CPU there is
    nothing to do.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.current_stream(device)
            self._done = self._stream.record_event()

    def next(self) -> AbstractContextManager[None]:
        """Make the body one turn, on the current stream."""
        return _ON_A_CPU if self._done is None else self._turn(self._done)

    @contextmanager
    def _turn(self, done: torch.cuda.Event) -> Iterator[None]:
        stream = torch.cuda.current_stream(self._device)
        if stream != self._stream:
            stream.wait_event(done)
        try:
            yield
        finally:
            self._done, self._stream = stream.record_event(), stream


_Method = TypeVar("_Method", bound=Callable[..., Any])


class _HasLock(Protocol):
    _lock: threading.RLock
    _stream_order: StreamOrder


def one_at_a_time(method: _Method) -> _Method:
    """Let one thread and one stream at a time run the method: while a worker plans ahead, an evaluation or a flush in
    the training thread waits. If the method is a generator, others may run where it yields."""

    @functools.wraps(method)
    def locked(self: _HasLock, *args: Any, **kwargs: Any) -> Any:
        with self._lock, torch.no_grad(), self._stream_order.next():
            return method(self, *args, **kwargs)

    @functools.wraps(method)
    def in_parts(self: _HasLock, *args: Any, **kwargs: Any) -> Any:
        work, values = method(self, *args, **kwargs), None
        while True:
            with self._lock, torch.no_grad(), self._stream_order.next():
                try:
                    wanted = work.send(values)
                except StopIteration as end:
                    return end.value
            values = yield wanted

    return cast(_Method, in_parts if inspect.isgeneratorfunction(method) else locked)
