"""`SentBytes`: what a rank sent, by kind. Apart from what counts them: reports of runs load no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class SentBytes:
    """Bytes that left a rank, by kind.

    >>> SentBytes(ids=12, embeddings=64).over(4)
    SentBytes(ids=3.0, embeddings=16.0, gradients=0.0, dense_all_reduce=0.0, other=0.0, sync=0.0)

    Attributes:
        ids: of a batch's lookups, with the lengths of bags and with the sizes of these messages.
        embeddings: pooled or per row; the weights of weighted ids are among them.
        gradients: of the embeddings.
        dense_all_reduce: gradients of replicated parameters. A rank sends 2 (W-1)/W times their bytes, as in a ring.
        other: agreements between ranks, reports, checkpoints, and everything in `counted_as_other` (`traffic.py`).
        sync: rows that groups average, and their numbers; without groups 0.
    """

    ids: float = 0
    embeddings: float = 0
    gradients: float = 0
    dense_all_reduce: float = 0
    other: float = 0
    sync: float = 0

    def __sub__(self, earlier: SentBytes) -> SentBytes:
        """Return what was sent since `earlier`."""
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(earlier)
        return SentBytes(*(now - before for now, before in zip(mine, theirs, strict=True)))

    @property
    def in_training(self) -> float:
        """All but `other`."""
        return self.ids + self.embeddings + self.gradients + self.dense_all_reduce + self.sync

    def over(self, count: float) -> SentBytes:
        """Return the bytes of one of `count` equal parts: steps, ranks."""
        return SentBytes(*(value / count for value in dataclasses.astuple(self)))
