"""One copy of a pool's host rows for all ranks of a machine: one writer per row, and an order between the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embershard.distributed.ranks import TIMEOUT
from embershard.errors import CacheError

_SPINS, _PAUSE_SECONDS = 200, 5e-5
#: int64 numbers of a rank in `Meetings`: a cache line, so that ranks do not slow each other down.
CELLS_PER_RANK = 8


@dataclass(frozen=True)
class NodeShare:
    """This rank's share in host rows that all ranks of its machine map.

    Attributes:
        allocate: gives zeroed memory, the same on all ranks, for a number of elements and a dtype. Collective.
        own: of each table, the first row and the number of the rows that this rank alone writes.
        meetings: of the ranks, at their plans and loads.
        at_writes: the same, before and after somebody writes to rows himself: in whichever thread plans are made.
    """

    allocate: Callable[[int, torch.dtype], Tensor]
    own: Sequence[tuple[int, int]]
    meetings: Meetings
    at_writes: Meetings


class Meetings:
    """Points that no rank passes before all ranks have reached them, in memory that they all map.

    A plan of a cache is such a point: its write-backs come before, its fills after. So a row that was evicted by any
    plan is in the host tier before a rank fills it again.

    Args:
        cells: int64 [W, CELLS_PER_RANK], zeroed, the same memory on all ranks.
        rank: the calling rank.
        timeout_seconds: to wait for another rank.

    >>> Meetings(torch.zeros(1, CELLS_PER_RANK, dtype=torch.int64), rank=0).meet("tables clicks", digest=5)
    """

    def __init__(self, cells: Tensor, rank: int, timeout_seconds: float = TIMEOUT.total_seconds()) -> None:
        self._cells, self._rank, self._timeout_seconds = cells.numpy(), rank, timeout_seconds
        self._number = 0

    def meet(self, name: str, digest: int = 0) -> None:
        """Wait until all ranks have come to this point, with the same `digest` of what they are about to do.

        Args:
            name: of the pool, for messages.

        Raises:
            CacheError: a rank came with another digest, or did not come.
        """
        self._number = number = self._number + 1
        own, place = self._cells[self._rank], 1 + number % 2  # no rank is more than one meeting ahead of another
        own[place] = digest
        own[0] = number
        for rank, cells in enumerate(self._cells):
            if rank == self._rank:
                continue
            self._wait(name, rank, number)
            if cells[place] != digest:
                raise CacheError(
                    f"{name}: rank {rank} and rank {self._rank} planned batch {number} differently, so their caches "
                    "are no longer equal. Give all ranks the same settings and call flush, load_state_dict and the "
                    "pipeline on all of them in the same order; resume from the last checkpoint"
                )

    def _wait(self, name: str, rank: int, number: int) -> None:
        give_up = time.monotonic() + self._timeout_seconds
        spins = 0
        while self._cells[rank, 0] < number:
            time.sleep(0 if spins < _SPINS else _PAUSE_SECONDS)
            spins += 1
            if spins % 1000 == 0 and time.monotonic() > give_up:
                raise CacheError(
                    f"{name}: rank {rank} did not come to meeting {number} within {self._timeout_seconds:.0f} s (it "
                    f"is at {self._cells[rank, 0]}). It has ended, or waits for something else; look at its last lines"
                )
