"""The batches ahead of the one in training."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import torch

from embershard.pipeline.staged_batch import StagedBatch

_WEIGH_EVERY = 8


class Window:
    """Batches between the iterator and their step, oldest first.

        [ first ... known to the caches | not known yet ] <- arriving

    A batch enters at the right with :meth:`add` and leaves at the left with :meth:`take_first`. An exception in between
    loses no batch: a batch leaves a place only when it has arrived in the next.
    """

    def __init__(self) -> None:
        self._batches: deque[StagedBatch] = deque()
        self._unknown: deque[StagedBatch] = deque()  # the newest of those
        self._arriving: deque[StagedBatch] = deque()
        self._bytes: dict[StagedBatch, int] = {}
        self._last_weighed, self._weighed_ids, self._num_counted = 0, 0, 0  # bytes and ids of a batch, and batches
        #: Memory of the batches and of their known uses, in bytes, as of when they became known; estimated.
        self.known_bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def first(self) -> StagedBatch:
        """The batch of the next step."""
        return self._batches[0]

    @property
    def num_unknown(self) -> int:
        """Batches that the caches do not know yet."""
        return len(self._unknown)

    @property
    def num_known(self) -> int:
        """Batches that the caches know."""
        return len(self._batches) - len(self._unknown)

    @property
    def num_arriving(self) -> int:
        """Batches whose ids are on their way."""
        return len(self._arriving)

    @property
    def newest_arriving(self) -> Any:
        """The batch that was added last, as the iterator gave it; None when none is arriving."""
        return self._arriving[-1].batch if self._arriving else None

    def coming(self, first: int, count: int) -> list[StagedBatch]:
        """Return up to `count` batches from place `first` on."""
        return list(itertools.islice(self._batches, first, first + count))

    def add(self, staged: StagedBatch) -> None:
        """Add a batch that all ranks have agreed on."""
        self._arriving.append(staged)

    def send(self) -> None:
        """Send the ids of all arriving batches. Collective."""
        for staged in self._arriving:
            staged.send()

    def arrive(self) -> None:
        """Receive the ids of the oldest arriving batch. Collective."""
        staged = self._arriving[0]
        staged.receive()
        self._batches.append(self._arriving.popleft())
        self._unknown.append(staged)
        if not torch.is_grad_enabled():  # else it is about to become known, and larger
            self._weigh(staged)

    def know(self) -> None:
        """Tell the caches about every batch that they do not know yet."""
        while self._unknown:
            staged = self._unknown.popleft()
            staged.know()
            self._weigh(staged)

    def take_first(self) -> None:
        """Remove the batch of this step. If the caches do not know it, they need not: it is only evaluated."""
        staged = self._batches.popleft()
        self.known_bytes -= self._bytes.pop(staged, 0)
        if self._unknown and self._unknown[0] is staged:
            self._unknown.popleft()

    def put_back(self, staged: StagedBatch) -> None:
        """Make a batch whose step did not begin the first one again, if it is not any more."""
        if not self._batches or self._batches[0] is not staged:
            self._batches.appendleft(staged)
        self._weigh(staged)

    def clear(self) -> None:
        """Close and forget all batches: they will not train."""
        for staged in [*self._batches, *self._arriving]:
            staged.close()
        for batches in (self._batches, self._unknown, self._arriving, self._bytes):
            batches.clear()
        self.known_bytes = 0

    def _weigh(self, staged: StagedBatch) -> None:
        """Count a batch's memory. The tensors of one batch in eight are walked through, and of those with a number of
        ids that is not about that of the last one; the others are taken to be like it."""
        num_ids = staged.num_ids
        if self._num_counted % _WEIGH_EVERY == 0 or 16 * abs(num_ids - self._weighed_ids) > self._weighed_ids:
            self._last_weighed, self._weighed_ids = staged.known_bytes, num_ids
        self._num_counted += 1
        self.known_bytes += self._last_weighed - self._bytes.get(staged, 0)
        self._bytes[staged] = self._last_weighed
