"""The trainer's next batch: from the look-ahead pipeline, or one at a time."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from embershard.data import Batch, BatchStream, StreamState
from embershard.pipeline import LookAheadPipeline, LookAheadStats


class Steps:
    """The batches of a run, one per step, and the end of the *trained* part of the data: batches that are only known or
    resident belong to later steps.

    Args:
        stream: the batches of this rank.
        limit: steps of the run.
        device: on which the model trains.
        pipeline: knows batches ahead of their step; None: no batch is known ahead.
    """

    def __init__(
        self, stream: BatchStream, limit: int, device: torch.device, pipeline: LookAheadPipeline | None
    ) -> None:
        self._stream, self._device, self._pipeline = stream, device, pipeline
        self._batches = itertools.islice(self._read(), max(0, limit))
        self._states: deque[StreamState] = deque()  # behind each batch that was read and not trained
        self.state = stream.state
        self._num_to_replace = 0

    def next(self) -> AbstractContextManager[Batch]:
        """Return a context with the next batch on the device, to train on inside. Collective.

        Raises:
            StopIteration: there is none.
        """
        try:
            return self._counted(self._begin())
        except StopIteration:
            if not self._num_to_replace:
                raise
        self._batches = itertools.islice(self._read(), self._num_to_replace)
        self._num_to_replace = 0
        return self._counted(self._begin())

    def replace_one(self) -> None:
        """Read one more batch than the limit: a batch was skipped, and was no step."""
        self._num_to_replace += 1

    def stats(self) -> LookAheadStats | None:
        """Return the counters of the look-ahead; None without a pipeline."""
        return None if self._pipeline is None else self._pipeline.stats()

    def close(self) -> None:
        """Drop the batches ahead, and end the threads that parse."""
        if self._pipeline is not None:
            self._pipeline.detach()
        self._stream.close()

    def _read(self) -> Iterator[Batch]:
        for batch in self._stream:
            self._states.append(self._stream.state)
            yield batch

    def _begin(self) -> AbstractContextManager[Any]:
        return self._plain() if self._pipeline is None else self._pipeline.step(self._batches)

    def _plain(self) -> AbstractContextManager[Batch]:
        batch = next(self._batches)
        return nullcontext(batch.to(self._device, non_blocking=True))

    @contextmanager
    def _counted(self, inner: AbstractContextManager[Batch]) -> Iterator[Batch]:
        with inner as batch:
            yield batch
        self.state = self._states.popleft()
