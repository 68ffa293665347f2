"""Refusal to use a pool whose state changed only in part."""

from __future__ import annotations

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

    >>> guard = ChangeGuard("rank 0, tables a")
    >>> with guard.change("growing"):
    ...     pass
    >>> guard.is_broken
    False
    """

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
            f"{self._pool}: {self._change} did not end ({cause}), so it is not certain which row is in which slot. "
            "Nothing is read, trained or saved from now on. Fix the cause and resume from the last checkpoint"
        ) from self._cause
