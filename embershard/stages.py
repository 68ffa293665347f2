"""Names of a step's stages in traces of torch's profiler. Where no trace is taken, a stage costs one more call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Stage = Literal[
    "input", "id exchange", "know", "warm-up", "plan", "fills", "lookup", "forward", "backward", "optimizer", "averages"
]  # fmt: skip
#: Folder of the traces in that of a run; and the ending of the files of each rank's stage times.
TRACES, STAGES_ENDING = "profile", ".stages.json"
#: Begins the names of stages in a trace.
PREFIX = "embershard: "
_is_recorded = False
_NOT_RECORDED = nullcontext()


def stage(name: Stage) -> AbstractContextManager[Any]:
    """Return a context whose work is the stage `name` in a trace.

    >>> with stage("lookup"):
    ...     pass
    """
    if not _is_recorded:
        return _NOT_RECORDED
    from torch.profiler import record_function

    return record_function(PREFIX + name)


def is_stage(name: Stage) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: the function's work is the stage `name` in a trace.

    >>> @is_stage("plan")
    ... def plan(num_rows):
    ...     return num_rows
    >>> plan(3)
    3
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def named(*args: P.args, **kwargs: P.kwargs) -> R:
            if not _is_recorded:
                return function(*args, **kwargs)
            with stage(name):
                return function(*args, **kwargs)

        return named

    return decorate


@contextmanager
def stages_recorded() -> Iterator[None]:
    """Name the stages inside: for as long as a profiler runs."""
    global _is_recorded
    _is_recorded = True
    try:
        yield
    finally:
        _is_recorded = False
