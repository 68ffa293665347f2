"""Refusal to use a pool whose state changed only in part."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
        doubt: what is not certain any more after a change that did not end, for messages.

    >>> guard = ChangeGuard("rank 0, tables a")
    >>> with guard.change("growing"):
    ...     pass
    >>> guard.is_broken
    False
    """

    doubt = "it is not certain which row is in which slot"

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._change: str | None = None
        self._cause: BaseException | None = None

    @property
    def is_broken(self) -> bool:
        """True after a change that did not end."""
        return self._change is not None

    @contextmanager
    def change(self, what: str) -> Iterator[None]:
        """Guard the body as one change, described by `what`. Changes do not nest.

        Raises:
            CacheError: an earlier change did not end.
        """
        self.check()
        self._change = what
        try:
            yield
        except BaseException as error:
            if self._change is not None and not isinstance(error, GeneratorExit):  # raised when nobody resumes this one
                self._cause = error
            raise
        self._change = None

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
            f"{self._pool}: {self._change} did not end ({cause}), so {self.doubt}. "
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
