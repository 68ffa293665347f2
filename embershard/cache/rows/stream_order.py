"""Order of the operations on one cache across CUDA streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_ON_A_CPU = nullcontext()


class StreamOrder:
    """Makes the work queued in one turn wait for the work of all earlier turns.

    Batches are planned on one stream, while evaluations, flushes and statistics run on the training stream. They share
    maps, scores and counters. The first turn follows the work queued when this object was made. On a CPU there is
    nothing to do.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._end(torch.cuda.current_stream(device))

    def next(self) -> AbstractContextManager[None]:
        """Make the body one turn, on the current stream."""
        return _ON_A_CPU if self._done is None else self._turn(self._done)

    @contextmanager
    def _turn(self, done: torch.cuda.Event) -> Iterator[None]:
        stream = torch.cuda.current_stream(self._device)
        if stream != self._stream:
            stream.wait_event(done)
        try:
            yield
        finally:
            self._end(stream)

    def _end(self, stream: torch.cuda.Stream) -> None:
        self._done, self._stream = stream.record_event(), stream
