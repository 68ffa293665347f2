"""Raising an exception at any one line of the cache, as an interrupt or a lack of memory would."""

from __future__ import annotations

import ast
import dis
import functools
import gc
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

T = TypeVar("T")

ERRORS: tuple[type[BaseException], ...] = (KeyboardInterrupt, MemoryError, RuntimeError)

_ROOT = Path(__file__).resolve().parent.parent.parent / "embershard"
#: compiled.py runs when a process calls a loop for the first time, so the same line is not reached again.
_SHOWS_NOTHING = {"__init__.py", "compiled.py", "config.py", "page_lock.py", "planning_classes.py", "uva_transfer.py"}
_TORCHREC = (
    "distributed/row_gradients.py",
    "extras/data_parallel/mode.py",
    "extras/hot_cold/hot_tables.py",
    "extras/hot_cold/mode.py",
    "sharding/torchrec/embeddings.py",
    "sharding/torchrec/feature_keys.py",
    "sharding/torchrec/modes/bags.py",
    "sharding/torchrec/modes/replicated_rows.py",
    "sharding/torchrec/modes/routes.py",
    "sharding/torchrec/modes/rows_exchange.py",
    "pipeline/module_input.py",
    "pipeline/pipelined_forward.py",
    "pipeline/staged_batch.py",
)
#: Where exceptions are raised, by group: all of the cache but what runs on GPUs only or when a model is built.
GROUPS: dict[str, frozenset[str]] = {
    "cache": frozenset(
        str(path)
        for path in (_ROOT / "cache").rglob("*.py")
        if path.name not in _SHOWS_NOTHING and path.parent.name != "gpu"
    ),
    "torchrec": frozenset(str((_ROOT / path).resolve(strict=True)) for path in _TORCHREC),
}
ALL_FILES = frozenset().union(*GROUPS.values())
#: An exception where a batch is taken ends the data of all ranks: only one rank alone goes on behind it.
_INTAKE, _TELL = str((_ROOT / "pipeline/intake.py").resolve(strict=True)), "ModelInputs.tell"

#: Not the cache: what looks at a batch as it is taken, before other ranks count on it.
_NOT_CACHE = {"Intake._read", "ModelInputs.check", "PipelinedForward.check", "pipelined_forwards", "_named_forwards"}
#: As many lines as another rank is late.
_WAITS = {"Barriers._wait"}


class HangError(BaseException):
    """Something took far too long."""


class Injector:
    """Counts the lines that run in some files while it is entered, and raises once, at one of them.

    A line counts before it runs, and a function's return once more. While it counts only (`at` is None), `events`
    tells for each line in which operation it is (the outermost function of these files), and where. An exception of a
    trace function is raised in the frame that it traces.

    Args:
        at: number of the line, from 0; None to count.
        error: what is raised.
        is_alone: the rank is the only one.
    """

    def __init__(
        self,
        at: int | None = None,
        error: type[BaseException] = KeyboardInterrupt,
        files: frozenset[str] = ALL_FILES,
        is_alone: bool = False,
    ) -> None:
        self.events: list[tuple[str, str]] = []
        self.count = 0
        self.raised: BaseException | None = None
        self.where = "nowhere"
        self._at, self._error, self._files = at, error, files | {_INTAKE} if is_alone else files
        self._outside = _NOT_CACHE if is_alone else _NOT_CACHE | {_TELL}
        self._local = threading.local()

    def __enter__(self) -> Injector:
        self._local.before, self._local.stack = sys.gettrace(), []
        if self.raised is None:
            sys.settrace(self._enter)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self._local.before)

    def run(self, function: Callable[[], T]) -> T:
        """`function()` with the injector entered: for other threads."""
        with self:
            return function()

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files or code.co_qualname in _WAITS:
            return None
        if not code.co_flags & inspect.CO_OPTIMIZED:  # of a module or a class, which a process runs once
            return None
        name = code.co_qualname
        if name == "one_at_a_time.<locals>.locked":
            name = f"RowCache.{frame.f_locals['method'].__name__}"
        self._local.stack.append(name)
        return self._line

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        code, operation = frame.f_code, self._local.stack[0]
        is_outside = not self._outside.isdisjoint(self._local.stack)
        if event == "return":
            self._local.stack.pop()
            if code.co_flags & inspect.CO_GENERATOR or frame.f_lasti not in _returns(code):
                return self._line  # raised at a yield it would not pass through the generator; or another one passes
        elif event != "line" or frame.f_lasti in _nowhere(code):
            return self._line
        if is_outside:
            return self._line
        number, self.count = self.count, self.count + 1
        if self._at is None:
            self.events.append((operation, _place(frame, event)))
        elif number == self._at and self.raised is None:
            self.where = f"{self._error.__name__} at {_place(frame, event)} in {operation}"
            self.raised = self._error("injected")
            raise self.raised
        return self._line


def _place(frame: FrameType, event: str) -> str:
    code = frame.f_code
    return (
        f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_qualname}{' (return)' if event == 'return' else ''}"
    )


@functools.cache
def _returns(code: CodeType) -> frozenset[int]:
    return frozenset(each.offset for each in dis.get_instructions(code) if each.opname.startswith("RETURN_"))


@functools.cache
def _nowhere(code: CodeType) -> frozenset[int]:
    return _lock_exits(code) | _handler_starts(code) | _empty_lines(code)


def _handler_starts(code: CodeType) -> frozenset[int]:
    """Where an exception was caught and is not noted yet: raised here, another one would not have it for its context.
    Neither a signal handler nor anything else runs here."""
    return frozenset(each.offset for each in dis.get_instructions(code) if each.opname == "PUSH_EXC_INFO")


def _empty_lines(code: CodeType) -> frozenset[int]:
    """A line that does nothing, as `try:`. The first one inside of a `with` may not be in what it guards."""
    return frozenset(each.offset for each in dis.get_instructions(code) if each.opname == "NOP")


def _lock_exits(code: CodeType) -> frozenset[int]:
    """Where `with lock:` gives the lock back: between the last line inside and that call the interpreter runs no
    signal handler and takes no memory, so nothing can be raised there."""
    lines = _lock_lines(code.co_filename)
    first: dict[int, int] = {}
    for offset, line in dis.findlinestarts(code):
        if line in lines:
            first.setdefault(line, offset)
    return frozenset(o for o, line in dis.findlinestarts(code) if line in first and first[line] != o)


@functools.cache
def _lock_lines(file: str) -> frozenset[int]:
    statements = (node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.With))
    ends = ("lock", "_changed", "parsing", "_room(size)")
    return frozenset(node.lineno for node in statements if ast.unparse(node.items[0].context_expr).endswith(ends))


@contextmanager
def no_hang(seconds: float) -> Iterator[None]:
    """In the main thread: raises `HangError` inside when it takes longer."""

    def late(*_: Any) -> None:
        raise HangError(f"no end after {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def no_collections() -> Iterator[None]:
    """No garbage is collected at a moment of its own: finalizers would count as lines of whatever runs."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def is_refusal(error: BaseException, cause: BaseException | None) -> bool:
    """Whether `error` is what a pool says after a change that did not end, with its cause."""
    from embershard.errors import CacheError

    text = str(error)
    named = "interrupted" in text or cause is None or type(cause).__name__ in text
    return isinstance(error, CacheError) and "did not end" in text and named
