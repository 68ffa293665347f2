"""Compilation and launch of the planning kernels, and the read of the numbers that they find.

With `TRITON_INTERPRET=1` Triton runs them on a CPU, for tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import triton
from torch import Tensor

_BLOCK = 512


def launch(kernel: Any, count: int, *arguments: Any, block: int = _BLOCK, **constants: Any) -> None:
    """Launch `kernel` over `count` items, `block` of them in a program; `count` is its last argument. Does nothing
    without items."""
    if count:
        _run(kernel, (-(-count // block),), (*arguments, count), {"BLOCK": block, **constants})


def _run(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    kernel[grid](*arguments, **constants)


def kernel(*aligned: str) -> Callable[[Callable[..., None]], Any]:
    """Compile a function once for all sizes and alignments; by default Triton compiles others for 1, for multiples of
    16 and for each alignment, while the training waits. Names in capitals are constants.

    Args:
        aligned: tensors that begin at multiples of 16 bytes, which allows wider accesses.
    """

    def compiled(function: Callable[..., None]) -> Any:
        names = inspect.signature(function).parameters
        arguments = [name for name in names if not name.isupper() and name not in aligned]
        return triton.jit(function, do_not_specialize=arguments, do_not_specialize_on_alignment=arguments)

    return compiled


class Count:
    """A number of the device; 0-dimensional or [1], any integer type."""

    def __init__(self, tensor: Tensor, readback: Readback) -> None:
        self._tensor, self._readback = tensor.view(1), readback
        self.value: int | None = None  # None until it is read

    def __int__(self) -> int:
        if self.value is None:
            self._readback.read([])
            assert self.value is not None, "reading reads all counts"
        return self.value


class Readback:
    """Reads numbers of the device with one copy to the host.

    >>> readback = Readback()
    >>> count = readback.count(torch.tensor(5))
    >>> readback.read([torch.tensor([1, 2])]), count.value
    ([[1, 2]], 5)
    """

    def __init__(self) -> None:
        self._unread: list[Count] = []

    def count(self, tensor: Tensor) -> Count:
        """Return a count that the next `read` reads, too, so that the host does not wait for it."""
        self._unread.append(Count(tensor, self))
        return self._unread[-1]

    def read(self, tensors: Sequence[Tensor]) -> list[list[int]]:
        """Return the numbers of `tensors` (int64 [?] each), and read all counts. The host waits for the stream."""
        counts = self._unread
        parts = [*tensors, *(count._tensor for count in counts)]
        found: list[int] = (parts[0] if len(parts) == 1 else torch.cat(parts)).tolist()
        bounds = list(accumulate((part.numel() for part in parts), initial=0))
        values = [found[start:stop] for start, stop in pairwise(bounds)]
        for count, (value,) in zip(counts, values[len(tensors) :], strict=True):
            count.value = value
        self._unread = []  # last: after an interrupt they are read again
        return values[: len(tensors)]
