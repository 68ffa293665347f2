"""What a look-ahead pipeline did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LookAheadStats:
    """What a pipeline did on this rank.

    Attributes:
        steps: batches trained.
        lookahead_min, lookahead_mean: batches known beyond the one in training, while there was more data; None without
            such a step.
        prefetch_min, prefetch_mean: batches resident beyond the one in training, while there were enough: the fewest
            for which no step waited, and fewer when they did not fit. None without such a step.
        prefetch_depth: how many the pipeline holds now, where they fit; the same on all ranks.
        known_bytes, max_known_bytes: memory of the batches that are known and not trained, now and at most, in bytes.
        stall_seconds: how long the steps waited for rows.
    """

    steps: int
    lookahead_min: int | None
    lookahead_mean: float | None
    prefetch_min: int | None
    prefetch_mean: float | None
    prefetch_depth: int
    known_bytes: int
    max_known_bytes: int
    stall_seconds: float


class Depths:
    """How far the steps looked ahead."""

    def __init__(self) -> None:
        self.steps = self.most_known_bytes = 0
        self._known, self._resident = _Depth(), _Depth()

    def add(self, known: int | None, resident: int | None) -> None:
        """A step ends; a depth that only the data's end limits is None."""
        self.steps += 1
        self._known.add(known)
        self._resident.add(resident)

    def stats(self, prefetch_depth: int, known_bytes: int, stall_seconds: float) -> LookAheadStats:
        """Everything so far."""
        return LookAheadStats(
            steps=self.steps,
            lookahead_min=self._known.least,
            lookahead_mean=self._known.mean,
            prefetch_min=self._resident.least,
            prefetch_mean=self._resident.mean,
            prefetch_depth=prefetch_depth,
            known_bytes=known_bytes,
            max_known_bytes=self.most_known_bytes,
            stall_seconds=stall_seconds,
        )


class _Depth:
    """Least and mean of some numbers."""

    def __init__(self) -> None:
        self.least: int | None = None
        self._count = self._sum = 0

    def add(self, depth: int | None) -> None:
        if depth is not None:
            self.least = depth if self.least is None else min(depth, self.least)
            self._count, self._sum = self._count + 1, self._sum + depth

    @property
    def mean(self) -> float | None:
        return self._sum / self._count if self._count else None
