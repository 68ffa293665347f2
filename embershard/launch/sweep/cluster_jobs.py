"""The jobs of a sweep on a cluster: Ctrl-C ends them, and nothing else does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

_ATTEMPTS = 3
_PAUSE_SECONDS = 2.0


@contextmanager
def jobs_outlive_errors(running: Collection[str], cancel: Callable[[str], None], by_hand: str) -> Iterator[None]:
    """Return a context in which jobs run. A user's Ctrl-C cancels all that run then; after any other exception they go
    on, and the user is told so.

    >>> with jobs_outlive_errors([], print, "scancel"):
    ...     pass

    Args:
        running: names of the jobs that run; the caller adds and removes them.
        cancel: ends the job of a name. Where it fails, the other jobs are ended all the same, and it is tried again.
        by_hand: the command that does the same.
    """
    try:
        yield
    except KeyboardInterrupt:
        _cancel_all(list(running), cancel, by_hand)
        raise
    except BaseException:
        if running:
            _say("the jobs that were handed over go on. Start the same command again: it waits for them.")
        raise


def _cancel_all(names: list[str], cancel: Callable[[str], None], by_hand: str) -> None:
    left, reason = dict.fromkeys(names), "interrupted"
    try:
        for attempt in range(_ATTEMPTS):
            time.sleep(_PAUSE_SECONDS if left and attempt else 0)
            for name in list(left):
                try:
                    cancel(name)
                    del left[name]
                except Exception as error:  # whatever it is, the other jobs must end
                    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    finally:
        if left:
            _say(f"{len(left)} jobs could not be cancelled ({reason}). To end them: {by_hand} {' '.join(left)}")


def _say(text: str) -> None:
    print(f"embershard: {text}", file=sys.stderr)
