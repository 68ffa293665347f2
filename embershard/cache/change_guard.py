"""A mark on a pool while its state changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from embershard.errors import CacheError


class ChangeGuard:
    """Notices a change that began and did not end.

    Maps, scores and chains of uses change together, in many small operations. An exception between two of them (an
    interrupt, a lack of memory) would leave maps that promise rows nobody copied. So a mark is set before the first
    operation and removed after the last one. While the mark is there, :meth:`check` refuses everything: no ``try`` has
    to be in the right place, because nothing has to run for the mark to stay.

    Args:
        pool: whose state it is, for messages.

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
        """Whether a change began and did not end."""
        return self._change is not None

    @contextmanager
    def change(self, what: str) -> Iterator[None]:
        """The body is one change, which ``what`` describes. Changes do not nest.

        Raises:
            CacheError: an earlier change did not end.
        """
        self.check()
        self._change = what
        try:
            yield
        except BaseException as error:
            if self._change is not None and not isinstance(error, GeneratorExit):  # which only says that it is given up
                self._cause = error
            raise
        self._change = None

    def settle(self) -> None:
        """Inside :meth:`change`: the state is consistent, although an exception is on its way."""
        self._change = None

    def check(self) -> None:
        """Refuse to go on after a change that did not end.

        Raises:
            CacheError: with what was going on and why it ended.
        """
        if self._change is None:
            return
        cause = "interrupted" if self._cause is None else f"{type(self._cause).__name__}: {self._cause}"
        raise CacheError(
            f"{self._pool}: {self._change} did not end ({cause}), so it is not certain which row is in which slot. "
            "Nothing is read, trained or saved from now on. Mend the cause and resume from the last checkpoint"
        ) from self._cause
