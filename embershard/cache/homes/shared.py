"""`SharedRows`: one copy of the rows that all ranks of a machine map, with one writer per row and an order between the
ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embershard.cache.homes.memory import MemoryRows, RowPages
from embershard.cache.homes.shape import PoolShape
from embershard.cache.rows import memory
from embershard.cache.rows.lazy_rows import LazyRows
from embershard.distributed.ranks import TIMEOUT
from embershard.errors import CacheError


class SharedRows(MemoryRows):
    """Rows in memory that other ranks map, too. This rank writes its own. Their initial weights are made at once.

    Args:
        shape: of the pool; its initial weights are those of this rank's own rows.
        share: this rank's.
    """

    is_shared = True

    def __init__(self, shape: PoolShape, share: NodeShare) -> None:
        self._share = share
        super().__init__(shape, pages=_SharedPages(share), own_rows=share.own)
        own = list(zip(self.row_offsets, self.own_rows, strict=True))
        bounds = torch.tensor([(offset + first, offset + first + count) for offset, (first, count) in own])
        self._first_own, self._end_own = bounds.view(-1, 2).unbind(1)
        self._table_ends = torch.tensor(self.rows_per_table).cumsum(0)

    def _make_lazy(self) -> LazyRows | None:
        for weights, rows in zip(self.shape.initial or (), self.views.table_weights(), strict=False):
            weights.write(rows)
        return None

    def is_own(self, keys: Tensor) -> Tensor | None:
        tables = torch.bucketize(keys, self._table_ends, right=True)
        return (keys >= self._first_own[tables]) & (keys < self._end_own[tables])

    def wait_for_ranks(self, name: str, digest: int = 0) -> None:
        self._share.barriers.wait(name, digest)

    def meet_at_writes(self, name: str, is_waiting: bool = True) -> None:
        self._share.at_writes.wait(name, is_waiting=is_waiting)


class _SharedPages(RowPages):
    """Gives memory that the ranks of a machine share."""

    def __init__(self, share: NodeShare) -> None:
        super().__init__()
        self._share = share

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        found = self._share.allocate(numel, dtype)
        if self._share.is_mapped:
            memory.expect_random_reads(found)
        return found

    def _writes_at_once(self, shape: PoolShape) -> bool:
        return False

    def fetch(self, rows: Tensor) -> None:
        if self._share.is_mapped:
            memory.fetch_soon(rows)


_SPINS, _PAUSE_SECONDS = 200, 5e-5
#: int64 numbers of a rank in `Barriers`: a cache line, so that ranks do not slow each other down.
CELLS_PER_RANK = 8


@dataclass(frozen=True)
class NodeShare:
    """This rank's share in host rows that all ranks of its machine map.

    Attributes:
        allocate: gives zeroed memory, the same on all ranks, for a number of elements and a dtype. Collective.
        own: of each table, the first row and the number of the rows that this rank alone writes.
        barriers: of the ranks, at their plans and loads.
        at_writes: the same, before and after somebody writes to rows himself: in whichever thread plans are made.
        is_mapped: the memory is files, of which the system reads what is not there.
    """

    allocate: Callable[[int, torch.dtype], Tensor]
    own: Sequence[tuple[int, int]]
    barriers: Barriers
    at_writes: Barriers
    is_mapped: bool = False


class Barriers:
    """Points that no rank passes before all ranks have reached them, in memory that they all map.

    A plan of a cache is such a point: its write-backs come before, its fills after. So a row that was evicted by any
    plan is in the host tier before a rank fills it again.

    Args:
        cells: int64 [W, CELLS_PER_RANK], zeroed, the same memory on all ranks.
        rank: the calling rank.
        timeout_seconds: to wait for another rank.

    >>> Barriers(torch.zeros(1, CELLS_PER_RANK, dtype=torch.int64), rank=0).wait("tables clicks", digest=5)
    """

    def __init__(self, cells: Tensor, rank: int, timeout_seconds: float = TIMEOUT.total_seconds()) -> None:
        self._cells, self._rank, self._timeout_seconds = cells.numpy(), rank, timeout_seconds
        self._number = 0

    def wait(self, name: str, digest: int = 0, is_waiting: bool = True) -> None:
        """Wait until all ranks have come to this point, with the same `digest` of what they are about to do.

        Args:
            name: of the pool, for messages.
            digest: the same on all ranks.
            is_waiting: False to come to this point and go on at once; every digest must be 0 then.

        Raises:
            CacheError: a rank came with another digest, or did not come.
        """
        self._number = number = self._number + 1
        own, place = self._cells[self._rank], 1 + number % 2  # no rank is more than one barrier ahead of another
        own[place] = digest
        own[0] = number
        if not is_waiting:
            return
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
                    f"{name}: rank {rank} did not come to barrier {number} within {self._timeout_seconds:.0f} s (it "
                    f"is at {self._cells[rank, 0]}). It has ended, or waits for something else; look at its last lines"
                )
