"""How a rank shows the exception that ends it."""

from __future__ import annotations

import errno
import sys
from functools import partial
from types import TracebackType

from embershard.distributed import Supervision, is_lost_connection
from embershard.errors import EmbershardError, StepError, os_problem
from embershard.models.own_errors import message_for_user


def show_errors_of_rank(supervision: Supervision) -> None:
    """Show our own errors without a traceback from now on, and tell the launcher whether a new start may help."""
    sys.excepthook = partial(_show_error, supervision)


def _show_error(
    supervision: Supervision, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show our own errors without a traceback, since they say what to do, and once; of errors in a user's own model
    the lines of that model; others with their traceback."""
    if isinstance(error, EmbershardError) and error.is_shown_elsewhere:
        return
    if is_lost_connection(error):
        if not supervision.has_launcher:  # which names the rank that failed
            print("This rank lost the connection to another one, which has ended or hangs.", file=sys.stderr)
        return
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    is_final = is_full or (isinstance(error, EmbershardError) and not isinstance(error, StepError))
    supervision.has_failed(is_final)
    if isinstance(error, EmbershardError):  # torch puts the rank in front
        print(f"{kind.__name__}: {error}", file=sys.stderr)
    elif isinstance(error, OSError):
        print(f"{kind.__name__}: {os_problem(error)}", file=sys.stderr)
    elif (text := message_for_user(error)) is not None:
        print(text, file=sys.stderr)
    elif not isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
