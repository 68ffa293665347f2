"""The input of a training: `Steps`, the next batch, from the look-ahead pipeline or one at a time; and what fails."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from embershard.data import Batch, BatchStream, Source, StreamState
from embershard.distributed import Ranks, shortest
from embershard.distributed.agreement import Supply
from embershard.errors import DataError
from embershard.pipeline import LookAheadPipeline, LookAheadStats
from embershard.pipeline.intake import Intake
from embershard.training.config import RunConfig

T = TypeVar("T")


@dataclass
class InputFailure:
    """The exception by which the input of a rank ended, on all ranks after the same number of steps; None so far."""

    error: Exception | None = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note an exception of the input that all ranks raise together."""
        try:
            yield
        except DataError as error:
            self.error = error
            raise

    def watch(self, iterator: Iterator[T]) -> Iterator[T]:
        """Yield what the iterator yields, and note its exception."""
        try:
            yield from iterator
        except Exception as error:
            self.error = error
            raise


def open_stream(
    config: RunConfig, source: Source, ranks: Ranks, state: StreamState | None, **options: Any
) -> BatchStream:
    """Open the training data at `state`, with options of `BatchStream`; or, with None, the held-out part."""
    given = {"epochs": 1 if state is None else config.train.num_epochs, **options}
    return BatchStream(
        source,
        batch_size=config.train.rank_batch_size(ranks.world_size),
        rank=ranks.rank,
        world_size=ranks.world_size,
        split="eval" if state is None else "train",
        config=config.data,
        state=state,
        pin_memory=ranks.device.type == "cuda",
        **given,
    )


class MicroBatches:
    """Those of a rank's batch of a step, each to be forwarded, with its backward, before the next one comes.

    Attributes:
        num_samples: of all of them.
        taken: those that were given out, on the device.
    """

    def __init__(
        self,
        first: AbstractContextManager[Batch],
        begin: Callable[[], AbstractContextManager[Batch]],
        count: int,
        num_samples: int,
    ) -> None:
        self._first, self._begin, self._count = first, begin, count
        self.num_samples = num_samples
        self.taken: list[Batch] = []

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self._count):
            with self._begin() if number else self._first as micro_batch:
                self.taken.append(micro_batch)
                yield micro_batch


class Steps:
    """The batches of a run, one per step. `state` is the position behind the last one that was trained: batches ahead
    of it, though known or resident already, belong to later steps.

    Args:
        stream: the batches of this rank.
        limit: steps of the run; None: there is none.
        device: on which the model trains.
        pipeline: knows batches ahead of their step; None: no batch is known ahead.
        failure: gets the exception of a rank's input.
        micro_batches: of a step.
    """

    def __init__(
        self,
        stream: BatchStream,
        limit: int | None,
        device: torch.device,
        pipeline: LookAheadPipeline | None,
        failure: InputFailure,
        micro_batches: int = 1,
    ) -> None:
        self._stream, self._device, self._pipeline, self._failure = stream, device, pipeline, failure
        self._batches = self._limited(None if limit is None else max(0, limit))
        self._micro_batches = micro_batches
        self._states: deque[tuple[StreamState, int, int]] = (
            deque()
        )  # behind each batch that was read; its parts, samples
        self._state = stream.state
        self._num_to_replace = 0
        self._is_waiting = False  # the stream had no batch when it was last asked, and may get one

    def next(self) -> AbstractContextManager[Batch | MicroBatches]:
        """Return a context with the next batch on the device, to train on inside, or its micro-batches. Collective.

        Raises:
            StopIteration: there is none, or none yet.
            DataError: the input of another rank failed; that rank raises its own exception.
        """
        try:
            return self._counted(self._begin())
        except StopIteration:
            if self._is_waiting or not self._num_to_replace:
                raise
        self._batches = self._limited(self._num_to_replace)
        self._num_to_replace = 0
        return self._counted(self._begin())

    @property
    def state(self) -> StreamState:
        """Position behind the last trained batch."""
        return self._stream.to_save(self._state)

    def replace_one(self) -> StreamState:
        """Read one more batch than the limit: a batch was skipped, and was no step. Return the position behind it."""
        self._num_to_replace += 1
        return self.state

    @property
    def carrier(self) -> Intake | None:
        """What takes losses of a step along to the other ranks; None where a gather does."""
        return None if self._pipeline is None else self._pipeline.carrier

    def stats(self) -> LookAheadStats | None:
        """Return the counters of the look-ahead; None without a pipeline."""
        if self._pipeline is None or self._micro_batches == 1:
            return None if self._pipeline is None else self._pipeline.stats()
        return self._pipeline.stats().by_step(self._micro_batches)

    def close(self) -> None:
        """Drop the batches ahead, and end the threads that parse."""
        if self._pipeline is not None:
            self._pipeline.detach()
        self._stream.close()

    def _read(self, most: int | None) -> Iterator[Any]:
        """Yield this number of batches at most; `Supply.NOT_YET` where there is none yet."""
        count = itertools.count()
        while most is None or next(count) < most:
            while (batch := next(self._stream, None)) is None:
                if not self._stream.waits:
                    return
                self._is_waiting = True
                yield Supply.NOT_YET
            self._is_waiting = False
            is_whole = self._micro_batches == 1
            parts, samples = ([batch], 0) if is_whole else (batch.micro_batches(self._micro_batches), batch.num_samples)
            self._states.append((self._stream.state, len(parts), samples))
            yield from parts

    def _limited(self, most: int | None) -> Iterator[Any]:
        batches = self._read(most)
        return self._failure.watch(batches if self._pipeline is not None else shortest(batches, self._device))

    def _begin(self) -> AbstractContextManager[Any]:
        try:  # not `noting`: a context more in every step takes six calls of Python
            if self._pipeline is not None:
                return self._pipeline.step(self._batches)
            if (batch := next(self._batches)) is Supply.NOT_YET:
                raise StopIteration
            return nullcontext(batch.to(self._device, non_blocking=True))
        except DataError as error:
            self._failure.error = error
            raise

    @contextmanager
    def _counted(self, first: AbstractContextManager[Batch]) -> Iterator[Batch | MicroBatches]:
        if self._micro_batches == 1:
            with first as batch:
                yield batch
        else:
            yield MicroBatches(first, self._begin, *self._states[0][1:])
        self._state = self._states.popleft()[0]
