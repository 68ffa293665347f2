"""Processor time of a thread by part of a step, without what a GPU would do in its place."""

from __future__ import annotations

import ctypes
import functools
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch.utils._python_dispatch import TorchDispatchMode

from embershard.cache import loops
from embershard.cache.ids import loops as ids
from embershard.cache.loops import initial_rows, next_uses, rows, slots, victims
from embershard.sharding.torchrec.feature_keys import FeatureKeys

#: The part of what is in no other.
REST = "rest"
_KERNELS = "kernels"
#: Compiled loops that read host memory on a machine with a GPU, too. The others stand for kernels.
_HOST_LOOPS = {"are_rows"}


class HostClock(TorchDispatchMode):
    """Counts the processor time of this thread, part by part, without that of torch's operations, of FBGEMM's look-ups
    and of the caches' compiled loops, which are kernels on a GPU.

    What is left is Python, NumPy, and what is in front of each operation. Where it grows with the batch, the host
    reads or copies what a batch has.

    Args:
        functions: by part, the objects and the names of their functions. A part inside of another one counts by itself.
        sees_operations: False: only time in all, at the speed of a program that nobody watches.
    """

    def __init__(self, functions: dict[str, list[tuple[Any, str]]], *, sees_operations: bool = True) -> None:
        super().__init__()
        self._functions, self._sees_operations = functions, sees_operations
        self._thread, self._parts, self._last = threading.get_ident(), [REST], 0.0
        self._host_seconds, self._num_operations = defaultdict[str, float](float), Counter[str]()

    def step(self, program: Callable[[], Any]) -> tuple[dict[str, float], Counter[str]]:
        """Run a step; return milliseconds and operations of each part of it."""
        self._host_seconds, self._num_operations = defaultdict[str, float](float), Counter[str]()
        with ExitStack() as stack:
            for part, functions in self._functions.items():
                for owner, name in functions:
                    stack.enter_context(mock.patch.object(owner, name, self._timed(getattr(owner, name), part)))
            if self._sees_operations:
                for owner, name in _kernels():
                    stack.enter_context(mock.patch.object(owner, name, self._apart(getattr(owner, name))))
                stack.enter_context(self)
            self._last = time.thread_time()
            program()
            self._note()
        milliseconds = {part: 1e3 * seconds for part, seconds in self._host_seconds.items() if part != _KERNELS}
        return milliseconds, self._num_operations

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what is inside as part `name`."""
        self._note()
        self._parts.append(name)
        try:
            yield
        finally:
            self._note()
            self._parts.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note()
        found = func(*args, **(kwargs or {}))
        self._skip()
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        self._num_operations[self._parts[-1]] += not is_view
        return found

    def _note(self) -> None:
        now = time.thread_time()
        self._host_seconds[self._parts[-1]] += now - self._last
        self._last = now

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            with self.part(part):
                return function(*args, **kwargs)

        return timed

    def _apart(self, function: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed(function, _KERNELS)

        def apart(*args: Any, **kwargs: Any) -> Any:
            found = timed(*args, **kwargs)
            node = getattr(found, "grad_fn", None)
            if node is not None:  # of FBGEMM: no operation of torch's runs its backward
                node.register_prehook(lambda _: self._note())
                node.register_hook(lambda *_: self._skip())
            return found

        return apart

    def _skip(self) -> None:
        self._last = time.thread_time()


def _kernels() -> list[tuple[Any, str]]:
    """Return what no operation of torch's is, and a kernel on a GPU."""
    rooms = (ids, initial_rows, next_uses, rows, slots, victims)
    compiled = {name for room in rooms for name, value in vars(room).items() if hasattr(value, "py_func")}
    used = sorted(name for name in compiled - _HOST_LOOPS if hasattr(loops, name))  # others are called by loops
    own = [(FeatureKeys, "_of_in_loop"), (SplitTableBatchedEmbeddingBagsCodegen, "forward")]
    return [*((loops, name) for name in used), *own]


def keep_memory() -> None:
    """Let malloc keep what is freed: to give hundreds of megabytes back takes milliseconds of a step, which a GPU's
    memory does not. Call it before threads start."""
    for option, value in ((-4, 0), (-1, 2**31 - 1), (-8, 1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_ARENA_MAX of glibc
        ctypes.CDLL(None).mallopt(option, value)


def medians(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each part over steps; a part that a step has not took nothing.

    >>> medians([{"a": 1.0}, {"a": 3.0, "b": 2.0}, {"a": 2.0}])
    {'a': 2.0, 'b': 0.0}
    """
    parts = dict.fromkeys(part for step in steps for part in step)
    return {part: statistics.median(step.get(part, 0.0) for step in steps) for part in parts}
