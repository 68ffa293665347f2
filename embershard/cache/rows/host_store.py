"""Host tier of a pool: all rows of a rank's shard of some tables, weights and optimizer states, as plain tensors; and
the one copy of them that the ranks of a machine may share, with one writer per row and an order between the ranks.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embershard.cache.file.working_files import check_room, open_working_file
from embershard.cache.rows import memory
from embershard.cache.rows.frozen_rows import FrozenRows, RowsAway
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.cache.rows.lazy_rows import LazyRows
from embershard.cache.rows.sizes import MARK_BYTES, SmallType, small_row_bytes
from embershard.cache.rows.small_rows import SmallRows
from embershard.cache.rows.touched import TouchedKeys
from embershard.distributed.ranks import TIMEOUT
from embershard.errors import CacheError

#: With so small a part of the blocks unmade (one of 8), the system may use huge pages. So many writes per page, to
#: random rows, leave such a part of the pages untouched.
_HUGE_PAGES_FROM, _WRITES_PER_PAGE = 8, 2


class HostStore:
    """Rows of one pool of tables of the same dim: R rows in all, table after table.

    The payload of a row is its weights [D] and every per-row optimizer state ([] or [D]); they always move together.

    Args:
        rows_per_table: rows of each table on this rank.
        dim: D, columns of each row on this rank.
        dtype: of the weights.
        states: per-row optimizer states as (name, trailing shape, dtype); they start as zeros.
        host: plain memory, a file in `host_dir` mapped into memory, or what `away` says.
        host_dir: folder for mapped files.
        whole_pages: give every tensor pages of its own, so that they can be locked.
        fills_all: the caller writes all rows at once, before any other use.
        initial: initial weights of each table, made when a row of their block is first touched: call `make` before
            reading rows, `make_all` before handing the whole memory out. None: zeros, which the caller overwrites.
        share: this rank's share in one copy of the rows for all ranks of a machine. The initial weights of its own
            rows are made at once. None: all rows are this rank's.
        small_type: keep the weights as fp16 or int8; None: as `dtype`. Needs `initial`, and no share.
        full_keys: of int8, rows that stay float32 (int64 [K] ascending); None: none.
        away: the rows, if some are in a file (`FiledRows`); None: all are in memory.

    Attributes:
        flat_weights: [R * D], memory that TorchRec slices its parameters from. Of small rows, and of rows in a file,
            only its addresses count: they tell a row, and nobody reads or writes there.
        weights: [R, D], the same memory.
        small: the weights, if they are small.
        own_rows: of each table, the first row and the number of the rows that this rank writes and saves; all of them
            without a share.
        makes_weights: the rows have initial weights by themselves, or get them when they are touched.
        states: name -> [R, ...].
        row_bytes: payload of one row, in bytes, as it is here.
        slot_row_bytes: the same, as it is in a slot, with the mark of a slot of small rows.
        written: rows that were written to; None: they are not tracked (`track_writes`).

    >>> host = HostStore([3, 1], dim=4, dtype=torch.float32, states=[("momentum", torch.Size([]), torch.float32)])
    >>> host.num_rows, host.row_bytes, [tuple(tensor.shape) for tensor in host.payload]
    (4, 20, [(4, 4), (4,)])
    """

    small: SmallRows | None = None
    _frozen: FrozenRows | None = None
    _is_read_ahead = False
    written: TouchedKeys | None = None

    def __init__(
        self,
        rows_per_table: Sequence[int],
        dim: int,
        dtype: torch.dtype,
        states: Sequence[tuple[str, torch.Size, torch.dtype]],
        host: Literal["memory", "mmap", "file"] = "memory",
        host_dir: str | None = None,
        whole_pages: bool = False,
        fills_all: bool = False,
        initial: Sequence[ShardWeights] | None = None,
        share: NodeShare | None = None,
        small_type: SmallType | None = None,
        full_keys: Tensor | None = None,
        away: RowsAway | None = None,
    ) -> None:
        self._share, self.away = share, away
        self.rows_per_table = list(rows_per_table)
        self.own_rows = [(0, rows) for rows in rows_per_table] if share is None else list(share.own)
        self.dim, self.num_rows = dim, sum(self.rows_per_table)
        self.row_offsets = [sum(self.rows_per_table[:table]) for table in range(len(self.rows_per_table))]
        own = zip(self.row_offsets, self.own_rows, strict=True)
        bounds = torch.tensor([(offset + first, offset + first + count) for offset, (first, count) in own])
        self._first_own, self._end_own = bounds.view(-1, 2).unbind(1)
        self._table_ends = torch.tensor(self.rows_per_table).cumsum(0)
        state_bytes, slot_bytes = sum(math.prod(shape) * t.itemsize for _, shape, t in states), dim * dtype.itemsize
        weight_bytes = slot_bytes if small_type is None else small_row_bytes(small_type, dim)
        self.slot_row_bytes = slot_bytes + state_bytes + (0 if small_type is None else MARK_BYTES)
        self.row_bytes = weight_bytes + state_bytes
        # Where all is written at once, huge pages take less time; locking touches every page anyway. Elsewhere the
        # first write to a row would wait for the system to find and clear a huge one (decision 0057).
        self._has_small_pages = host == "memory" and share is None and not whole_pages and not fills_all
        self._num_written = 0
        allocate = self._allocator(host_dir if host == "mmap" else None, whole_pages)
        if small_type is not None:
            self.small = self._make_small(small_type, initial, full_keys, allocate)
        self.flat_weights = (allocate if self.is_memory else _addresses)(self.num_rows * dim, dtype)
        self.weights = self.flat_weights.view(self.num_rows, dim)
        self.states = self._make_states(
            states, allocate if away is None else _addresses, initial is None and host == "memory"
        )
        self._is_mapped = host == "mmap"
        for tensor in self.payload if self._is_mapped else ():
            memory.expect_random_reads(tensor)
        self.makes_weights = initial is not None
        is_lazy = initial is not None and share is None and self.is_memory
        self._lazy = LazyRows(self.weights, self.rows_per_table, initial or ()) if is_lazy else None
        if initial is not None and share is not None:
            for weights, rows in zip(initial, self.table_weights(), strict=True):
                weights.write(rows)

    def _make_small(
        self,
        small_type: SmallType,
        initial: Sequence[ShardWeights] | None,
        full_keys: Tensor | None,
        allocate: Callable[[int, torch.dtype], Tensor],
    ) -> SmallRows:
        assert initial is not None, "small rows are made from a counter"
        assert self._share is None, "small rows are one rank's"
        full_keys = torch.empty(0, dtype=torch.int64) if full_keys is None else full_keys
        return SmallRows(small_type, self.rows_per_table, initial, self.dim, full_keys, allocate)

    def _make_states(
        self,
        states: Sequence[tuple[str, torch.Size, torch.dtype]],
        allocate: Callable[[int, torch.dtype], Tensor],
        writes_at_once: bool,
    ) -> dict[str, Tensor]:
        writes_at_once = writes_at_once and self._share is None and not self._has_small_pages
        found = {}
        for name, shape, dtype in states:
            found[name] = allocate(self.num_rows * math.prod(shape), dtype).view(self.num_rows, *shape)
            if writes_at_once:
                found[name].zero_()  # allocates its pages now: the first write-backs would wait for huge ones
        return found

    def _allocator(self, folder: str | None, whole_pages: bool) -> Callable[[int, torch.dtype], Tensor]:
        """Return what makes zeroed tensors from a number of elements and a dtype; in files, unless `folder` is None."""
        if self._share is not None:
            return self._share.allocate
        if folder is not None:
            return _MappedFiles(folder, self.host_bytes)
        return functools.partial(memory.zeros, whole_pages=whole_pages, small_pages=self._has_small_pages)

    @property
    def payload(self) -> list[Tensor]:
        """Weights, then the states: [R, ...] each."""
        return [self.weights, *self.states.values()]

    @property
    def is_memory(self) -> bool:
        """True if the payload's memory holds the rows, rather than only saying by its addresses which they are."""
        return self.small is None and self.away is None

    def place_of(self, part: Tensor) -> tuple[int, int] | None:
        """Return the number of the payload tensor that a view is a part of, and the row that it begins with; None for
        other memory."""
        if part.is_cpu and part.numel():
            for number, rows in enumerate(self.payload):
                start = part.data_ptr() - rows.data_ptr()
                if 0 <= start < rows.nbytes:
                    return number, start // rows[:1].nbytes
        return None

    def read_part(self, part: Tensor) -> Tensor | None:
        """Return the contents of the rows that a view of the payload stands for, [n, ...]; None for other memory, and
        for memory that holds its rows. What is on the device must have been written back."""
        if self.is_memory or (place := self.place_of(part)) is None:
            return None
        number, first = place
        keys = torch.arange(first, first + len(part))
        if self.away is not None:
            return self.away.select(keys)[number]
        return self.read(keys) if number == 0 else None

    def put_away(self, first: int, rows: Sequence[Tensor]) -> None:
        """Write all parts of rows [first, first + n) in a file, [n, ...] each; slots do not change."""
        assert self.away is not None, "other rows are written as memory"
        parts = [part.to(own.dtype).contiguous() for part, own in zip(rows, self.payload, strict=True)]
        self.away.put_block(first, parts)

    @property
    def addressed(self) -> list[Tensor]:
        """The memory that kernels read and write: of the payload, or of small rows and the states."""
        return self.payload if self.small is None else [*self.small.tensors, *self.states.values()]

    @property
    def host_bytes(self) -> int:
        """Memory (or disk space) of all rows that are this rank's own, in bytes; of rows in a file, their memory."""
        if self.away is not None:
            return self.away.host_bytes
        full_bytes = 0 if self.small is None else self.small.full_bytes
        return sum(rows for _, rows in self.own_rows) * self.row_bytes + full_bytes

    @property
    def version(self) -> int:
        """Number that changes with every write to a tensor of the store in place, except through `.data`.

        The cache writes through `.data`, so a change means that somebody else loaded new contents.
        """
        return sum(t._version for t in self.payload)

    @property
    def is_made(self) -> bool:
        """True if all rows have their initial weights."""
        return self._lazy is None or not self._lazy.num_unmade

    @property
    def flag_bytes(self) -> int:
        """Memory of the flags of made blocks, in bytes; not part of `host_bytes`."""
        return 0 if self._lazy is None else self._lazy.flag_bytes

    def make(self, keys: Tensor) -> None:
        """Make the initial weights of rows `keys` (int64 [M]) that have none yet."""
        if self._lazy is not None and self._lazy.num_unmade:
            self._lazy.make(keys.cpu())
            if self._lazy.num_unmade * _HUGE_PAGES_FROM <= self._lazy.num_blocks:
                self._grow_pages()

    def read(self, keys: Tensor, pinned: bool = False) -> Tensor:
        """Return the weights of rows `keys` (int64 [M]): [M, D] in host memory, page-locked if asked for."""
        if self.away is not None:
            return self.away.read(keys.cpu())
        if self.small is not None:
            return self.small.read(keys.cpu(), torch.empty(keys.numel(), self.dim, pin_memory=pinned))
        self.make(keys)
        weights = self.weights.detach()
        rows = torch.empty(keys.numel(), self.dim, dtype=weights.dtype, pin_memory=pinned)
        return torch.index_select(weights, 0, keys.to(weights.device), out=rows)

    def read_ahead(self, keys: Tensor, out: Tensor, places: Tensor) -> None:
        """Write the weights of rows `keys` to rows `places` (both int64 [M]) of `out` [S, D] in host memory. Those that
        have no initial weights are made there, and here in a thread: their pages take longer than the rows."""
        assert self._lazy is not None, "all rows are made"
        self._lazy.read(keys, out, places)
        self._is_read_ahead = True
        self._lazy.make_later(keys)

    def begin_anew(self, keys: Tensor, ids: Tensor) -> None:
        """Give rows `keys` to `ids` (both int64 [M]): initial weights of the ids (`ShardWeights`), and states of 0.

        Raises:
            CacheError: the rows have no initial weights from a counter, or other ranks map them.
        """
        if self._lazy is None:
            raise CacheError(
                "rows begin anew with weights from a counter, in memory of one rank: give init_seed, and share no rows"
            )
        self.make(keys)  # first: a block that is made later would undo the change
        self.before_write(keys)
        self._lazy.begin_anew(keys, ids)
        for state in self.states.values():
            state.data.index_fill_(0, keys, 0)

    def _grow_pages(self) -> None:
        if self._has_small_pages:
            self._has_small_pages = False
            for tensor in self.payload:
                memory.use_huge_pages(tensor)

    def make_all(self) -> None:
        """Make the initial weights of all rows that have none yet: somebody is about to read the memory.

        Raises:
            CacheError: the rows are small, or in a file, and not there.
        """
        if not self.is_memory:
            kept = 'in a file (cache.host = "file")'
            fix = (
                "Save and load them with embershard.save_program and embershard.load_program, instead of state dicts; "
                "checkpoints of embershard train have them, too"
            )
            if self.small is not None:
                kept = f"as {self.small.small_type} (cache.host_dtype)"
                fix = (
                    "A checkpoint of embershard train has them as fp32, and embershard export writes them; with "
                    'cache.host_dtype = "fp32" state_dict has them'
                )
            raise CacheError(
                f"weights were asked for as memory, and rows are kept {kept}: they would read as zeros. {fix}"
            )
        if self._lazy is not None and self._lazy.num_unmade:
            if self._has_small_pages:
                self._has_small_pages = False
                memory.use_huge_pages(self.weights)  # not the states: nothing is written to them now
            self._lazy.make_all()

    def make_memory(self, address: int, num_bytes: int) -> None:
        """Make the rows in a part of the weights' memory; other memory is left alone."""
        if self.small is not None:
            self.small.make_memory(address, num_bytes)
        start = address - self.flat_weights.data_ptr()
        if self._lazy is not None and 0 <= start < self.flat_weights.nbytes:
            self._lazy.make_bytes(start, start + num_bytes)

    def is_own(self, keys: Tensor) -> Tensor | None:
        """Return which of the rows `keys` (int64 [M]) this rank writes back: bool [M]; None for all of them."""
        if self._share is None:
            return None
        tables = torch.bucketize(keys, self._table_ends, right=True)
        return (keys >= self._first_own[tables]) & (keys < self._end_own[tables])

    def meet(self, name: str, digest: int = 0) -> None:
        """With a share, wait until all ranks have come to this point with this digest; see `Meetings`."""
        if self._share is not None:
            self._share.meetings.meet(name, digest)

    def meet_at_writes(self, name: str, is_waiting: bool = True) -> None:
        """With a share, wait until all ranks have called this; rows may be written to, or have been.

        Args:
            name: of the pool, and what is done, for messages.
            is_waiting: False for a rank that has failed: the others go on, and it does not wait for them.
        """
        if self._share is not None:
            self._share.at_writes.meet(name, is_waiting=is_waiting)

    @property
    def is_shared(self) -> bool:
        """True if other ranks map the same rows."""
        return self._share is not None

    def freeze(self) -> FrozenRows:
        """Return all rows as they are now, to be read while training goes on; until they are closed, call
        `before_write` before rows change. Trained rows must have been written back."""
        assert self._frozen is None or self._frozen.is_closed, "the rows are being read already"
        lazy = None if self._lazy is None else self._lazy.freeze()
        self._frozen = FrozenRows(self.payload, lazy, is_mapped=self._is_mapped, small=self.small, away=self.away)
        return self._frozen

    def track_writes(self, device: torch.device) -> None:
        """Note in `written`, from now on, which rows are written to; on the device that their keys are on."""
        self.written = TouchedKeys(self.num_rows, device)

    def note_written(self, keys: Tensor | Sequence[range] | None = None) -> None:
        """Count rows `keys` (int64 [M], or ranges), or all, as written to, by somebody else than the cache."""
        if self.written is None:
            return
        if isinstance(keys, Tensor):
            self.written.add(keys)
        else:
            self.written.add_ranges([range(self.num_rows)] if keys is None else keys)

    def before_write(self, keys: Tensor) -> None:
        """Let a reader of frozen rows keep the contents of rows `keys` (int64 [M]), which are about to change."""
        self.note_written(keys)
        if self._is_read_ahead and not (self._lazy is not None and self._lazy.has_caught_up):
            self.make(keys)  # first: a block that is made later would undo the change
        if self._has_small_pages and self._lazy is None and self.away is None:
            self._num_written += keys.numel()
            if self._num_written * mmap.PAGESIZE > _WRITES_PER_PAGE * self.weights.nbytes:
                self._grow_pages()
        if self._frozen is not None:
            if self._frozen.is_closed:
                self._frozen = None
            else:
                self._frozen.put_aside(keys)

    @property
    def weights_version(self) -> int:
        """The part of `version` that counts writes to the weights."""
        return self.weights._version

    def table_weights(self) -> list[Tensor]:
        """Return the weights of this rank's own rows of each table: views [rows, D]."""
        return self._own_of_tables(self.weights)

    def table_states(self) -> list[list[Tensor]]:
        """Return the states of this rank's own rows of each table: views [rows, ...]."""
        split = [self._own_of_tables(state) for state in self.states.values()]
        return [[state[table] for state in split] for table in range(len(self.rows_per_table))]

    def _own_of_tables(self, rows: Tensor) -> list[Tensor]:
        own = zip(self.row_offsets, self.own_rows, strict=True)
        return [rows.detach()[offset + first : offset + first + count] for offset, (first, count) in own]


def _addresses(numel: int, dtype: torch.dtype) -> Tensor:
    """Return memory that takes no page, as long as nobody writes."""
    return memory.zeros(numel, dtype, small_pages=True)


class _MappedFiles:
    """Allocates zeroed tensors in unlinked files, which the system frees with the process.

    Their disk space is allocated at once: if the disk were full at the first write to a page of a sparse file, the
    system would kill the process.
    """

    def __init__(self, folder: str, total_bytes: int) -> None:
        self._folder = folder
        check_room(folder, total_bytes)

    def __call__(self, numel: int, dtype: torch.dtype) -> Tensor:
        if numel == 0:
            return torch.zeros(0, dtype=dtype)
        file = open_working_file(self._folder, numel * dtype.itemsize)
        try:
            return torch.frombuffer(mmap.mmap(file, numel * dtype.itemsize), dtype=dtype)
        finally:
            os.close(file)


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

    def meet(self, name: str, digest: int = 0, is_waiting: bool = True) -> None:
        """Wait until all ranks have come to this point, with the same `digest` of what they are about to do.

        Args:
            name: of the pool, for messages.
            digest: the same on all ranks.
            is_waiting: False to come to this point and go on at once; every digest must be 0 then.

        Raises:
            CacheError: a rank came with another digest, or did not come.
        """
        self._number = number = self._number + 1
        own, place = self._cells[self._rank], 1 + number % 2  # no rank is more than one meeting ahead of another
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
                    f"{name}: rank {rank} did not come to meeting {number} within {self._timeout_seconds:.0f} s (it "
                    f"is at {self._cells[rank, 0]}). It has ended, or waits for something else; look at its last lines"
                )
