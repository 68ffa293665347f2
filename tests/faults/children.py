"""Work in a process of its own, which may be killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path


def fork(work: Callable[[], object]) -> int:
    """Do something in a new process, which ends with 0, or prints its error and ends with 1; return its id."""
    if child := os.fork():
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def in_child(count: Path, work: Callable[[], int]) -> tuple[int, int]:
    """Do something in a process of its own, which leaves what it returns in a file; return the exit status and that
    number, or 0 if there is none."""
    count.unlink(missing_ok=True)
    _, status = os.waitpid(fork(lambda: count.write_text(str(work()))), 0)
    return status, int(count.read_text()) if count.exists() else 0
