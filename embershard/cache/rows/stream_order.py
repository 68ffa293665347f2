"""One operation on a cache after the other, whichever CUDA streams they are queued on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StreamOrder:
    """Batches are planned on one stream, while evaluations, flushes and statistics come from the stream that trains.
    They share maps, scores and counters: what is queued in one turn comes after all that was queued in earlier turns.

    On a CPU there is nothing to do. The first turn comes after what was queued when this object was made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._end(torch.cuda.current_stream(device))

    @contextmanager
    def next(self) -> Iterator[None]:
        """What is queued inside, on the current stream, is one turn."""
        if self._done is None:
            yield
            return
        stream = torch.cuda.current_stream(self._device)
        if stream != self._stream:
            stream.wait_event(self._done)
        try:
            yield
        finally:
            self._end(stream)

    def _end(self, stream: torch.cuda.Stream) -> None:
        self._done, self._stream = stream.record_event(), stream
