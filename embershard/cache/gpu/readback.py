"""Reads of numbers that kernels find: work that needs some gives up control, and one read serves all that wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from embershard.stages import stage

T = TypeVar("T")


class Count:
    """A number of the device; int64, 0-dimensional or [1]."""

    def __init__(self, tensor: Tensor, readback: Readback) -> None:
        self._tensor, self._readback = tensor.view(1), readback
        self.value: int | None = None  # None until it is read

    def __int__(self) -> int:
        if self.value is None:
            read_at_once(self._readback.read())
            assert self.value is not None, "reading reads all counts"
        return self.value


class Readback:
    """Counts of one pool that are not read yet: the pool's next read reads them, too.

    >>> readback = Readback()
    >>> count = readback.count(torch.tensor(5))
    >>> read_at_once(readback.read(torch.tensor([1, 2]))), count.value
    ([[1, 2]], 5)
    """

    def __init__(self) -> None:
        self._unread: list[Count] = []

    def count(self, tensor: Tensor) -> Count:
        """Return a count that the next read reads, too, so that the host does not wait for it."""
        self._unread.append(Count(tensor, self))
        return self._unread[-1]

    def read(self, *tensors: Tensor) -> Reads[list[list[int]]]:
        """Return the numbers of `tensors` (int64 [?] each), and note all counts."""
        counts = list(self._unread)
        values = yield [*tensors, *(count._tensor for count in counts)]
        for count, (value,) in zip(counts, values[len(tensors) :], strict=True):
            count.value = value
        self._unread = [count for count in self._unread if count.value is None]
        return values[: len(tensors)]


#: Work that yields the tensors (int64 [?] each) whose numbers it needs, and goes on with these.
Reads = Generator[list[Tensor], list[list[int]], T]


class ReadTogether(Generic[T]):
    """Work of several pools, begun up to what each of them wants to read. `end` goes on with all of it: every read of
    the device is one for all pools.

    >>> first, second = Readback(), Readback()
    >>> begun = ReadTogether([first.read(torch.tensor([3])), second.read(torch.tensor([4, 5]))])
    >>> begun.end()
    [[[3]], [[4, 5]]]
    """

    def __init__(self, works: Sequence[Reads[T]]) -> None:
        self._works = list(works)
        self._wanted: list[list[Tensor] | None] = [None] * len(works)  # by each of these; None: it is done
        self._results: list[Any] = [None] * len(works)
        for number in range(len(works)):
            self._go_on(number, None)

    def _go_on(self, number: int, values: Any) -> None:
        self._wanted[number] = None
        try:
            self._wanted[number] = self._works[number].send(values)
        except StopIteration as end:
            self._results[number] = end.value

    @property
    def is_waiting(self) -> bool:
        """True if some of the work wants to read."""
        return any(wanted is not None for wanted in self._wanted)

    def end(self) -> list[T]:
        """Do the rest of the work; return the results. The host waits for the current stream."""
        while waiting := {number: wanted for number, wanted in enumerate(self._wanted) if wanted is not None}:
            parts = [tensor for wanted in waiting.values() for tensor in wanted]
            found: list[int] = (parts[0] if len(parts) == 1 else torch.cat(parts)).tolist()
            bounds = list(accumulate((part.numel() for part in parts), initial=0))
            values = iter([found[start:stop] for start, stop in pairwise(bounds)])
            for number, wanted in waiting.items():
                self._go_on(number, [next(values) for _ in wanted])
        return self._results


def planned(work: Reads[T], version: Callable[[], Any]) -> Reads[T | None]:
    """Do `work`, which plans; give up and return None if `version` is another one after a read than before."""
    before, values = version(), None
    while True:
        try:
            with stage("plan"):
                wanted = work.send(values)  # type: ignore[arg-type]
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        values = yield wanted
        if version() != before:
            work.close()
            return None


def timed(work: Reads[T], add_seconds: Callable[[float], None]) -> Reads[T]:
    """Do `work`, and count the time of its parts."""
    values = None
    while True:
        started = time.perf_counter()
        try:
            wanted = work.send(values)  # type: ignore[arg-type]
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            add_seconds(time.perf_counter() - started)
        values = yield wanted


def read_at_once(work: Reads[T]) -> T:
    """Do the work of one pool, with its reads."""
    return ReadTogether([work]).end()[0]
