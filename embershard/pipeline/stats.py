"""Counts of what a look-ahead pipeline did."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LookAheadStats:
    """Counts of what a pipeline did on this rank.

    >>> depths = Depths()
    >>> depths.add(known=64, resident=1)
    >>> depths.stats(prefetch_depth=1, known_bytes=2**20, stall_seconds=0.1, uses_worker=True).lookahead_min
    64

    Attributes:
        steps: batches trained.
        lookahead_min, lookahead_mean: batches known beyond the one in training, while there was more data; None without
            such a step.
        prefetch_min, prefetch_mean: batches resident beyond the one in training, while there were enough; None without
            such a step.
        prefetch_depth: batches that the pipeline now holds where they fit; the same on all ranks.
        known_bytes, max_known_bytes: memory of the batches that are known and not trained, now and at most, in bytes.
        stall_seconds: time that steps waited for rows.
        uses_worker: a thread beside the training plans now.
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
    uses_worker: bool


@dataclass
class _Depth:
    """Minimum and mean of some depths."""

    least: int | None = None
    count: int = 0
    total: int = 0

    def add(self, depth: int | None) -> None:
        if depth is not None:
            self.least = depth if self.least is None else min(depth, self.least)
            self.count, self.total = self.count + 1, self.total + depth

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class Depths:
    """Totals over the steps so far."""

    steps: int = 0
    most_known_bytes: int = 0
    stall_seconds: float = 0.0
    _known: _Depth = field(default_factory=_Depth)
    _resident: _Depth = field(default_factory=_Depth)

    def add(self, known: int | None, resident: int | None) -> None:
        """Count a step; a depth that only the end of the data limits is None."""
        self.steps += 1
        self._known.add(known)
        self._resident.add(resident)

    def stats(self, prefetch_depth: int, known_bytes: int, stall_seconds: float, uses_worker: bool) -> LookAheadStats:
        """Return the totals; the arguments are values of now."""
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
            uses_worker=uses_worker,
        )
