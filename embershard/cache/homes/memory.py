"""`MemoryRows`: rows in memory as they are in slots; and the pages of memory that rows are on."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from embershard.cache.config import TransferKind
from embershard.cache.homes.home import FrozenRows, Home
from embershard.cache.homes.shape import PoolShape
from embershard.cache.rows import memory
from embershard.cache.rows.lazy_rows import FrozenLazyRows, LazyRows
from embershard.cache.rows.memory import copy_block
from embershard.cache.rows.transfer import MakeTransfer, PlainTransfer, StagedTransfer, row_copier

#: With so small a part of the blocks unmade (one of 8), the system may use huge pages. So many writes per page, to
#: random rows, leave such a part of the pages untouched.
_HUGE_PAGES_FROM, _WRITES_PER_PAGE = 8, 2


class RowPages:
    """Gives zeroed memory of this process.

    Args:
        whole_pages: give every tensor pages of its own, so that they can be locked.
        are_small: let them be small, until about all of them were written: the first write to a row would wait for the
            system to find and clear a huge one (decision 0057).
    """

    def __init__(self, whole_pages: bool = False, are_small: bool = False) -> None:
        self._whole_pages, self.are_small = whole_pages, are_small
        self._num_written = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed tensor [numel]."""
        return memory.zeros(numel, dtype, whole_pages=self._whole_pages, small_pages=self.are_small)

    def states_of(self, shape: PoolShape) -> list[Tensor]:
        """Return memory for the states of a pool's rows, [R, ...] each."""
        found = []
        for size, dtype in shape.parts[1:]:
            found.append(self.allocate(shape.num_rows * math.prod(size), dtype).view(shape.num_rows, *size))
            if self._writes_at_once(shape):
                found[-1].zero_()  # allocates its pages now: the first write-backs would wait for huge ones
        return found

    def _writes_at_once(self, shape: PoolShape) -> bool:
        return shape.initial is None and not self.are_small

    def count_writes(self, num_rows: int, rows: Sequence[Tensor]) -> None:
        """Count writes to random rows of these tensors."""
        if self.are_small:
            self._num_written += num_rows
            if self._num_written * mmap.PAGESIZE > _WRITES_PER_PAGE * rows[0].nbytes:
                self.grow(rows)

    def grow(self, rows: Sequence[Tensor]) -> None:
        """Let the system use huge pages for these tensors from now on."""
        if self.are_small:
            self.are_small = False
            for tensor in rows:
                memory.use_huge_pages(tensor)

    def fetch(self, rows: Tensor) -> None:
        """Do nothing: the rows are there. Elsewhere, let the system read rows that are about to be read whole."""


class MemoryRows(Home):
    """Rows in memory, as they are in slots. With initial weights, blocks of them are made when a row is first touched.

    Args:
        shape: of the pool.
        whole_pages: for memory that is locked.
        fills_all: the caller writes all rows at once, before any other use.
        pages: for the rows; None: this process's own.
        own_rows: see `Home`.

    >>> shape = PoolShape([3, 1], dim=4, states=[("momentum", torch.Size([]), torch.float32)])
    >>> host = MemoryRows(shape)
    >>> host.num_rows, host.row_bytes, [tuple(tensor.shape) for tensor in host.parts]
    (4, 20, [(4, 4), (4,)])
    """

    _is_read_ahead = False
    _unmade: FrozenLazyRows | None = None  # of the frozen rows

    def __init__(
        self,
        shape: PoolShape,
        *,
        whole_pages: bool = False,
        fills_all: bool = False,
        pages: RowPages | None = None,
        own_rows: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        # Where all is written at once, huge pages take less time; locking touches every page anyway.
        self._pages = pages or RowPages(whole_pages, are_small=not whole_pages and not fills_all)
        weights = self._pages.allocate(shape.num_rows * shape.dim, shape.dtype).view(shape.num_rows, shape.dim)
        self.parts = [weights, *self._pages.states_of(shape)]
        super().__init__(shape, self.parts, own_rows)
        self._lazy = self._make_lazy()

    def _make_lazy(self) -> LazyRows | None:
        shape = self.shape
        return None if shape.initial is None else LazyRows(self.weights, self.rows_per_table, shape.initial)

    @property
    def weights(self) -> Tensor:
        """[R, D]."""
        return self.parts[0]

    @property
    def states(self) -> dict[str, Tensor]:
        """Name -> [R, ...]."""
        return dict(zip((name for name, *_ in self.shape.states), self.parts[1:], strict=True))

    @property
    def is_made(self) -> bool:
        return self._lazy is None or not self._lazy.num_unmade

    @property
    def flag_bytes(self) -> int:
        """Memory of the flags of made blocks, in bytes; not part of `host_bytes`."""
        return 0 if self._lazy is None else self._lazy.flag_bytes

    def make(self, keys: Tensor) -> None:
        if self._lazy is not None and self._lazy.num_unmade:
            self._lazy.make(keys.cpu())
            if self._lazy.num_unmade * _HUGE_PAGES_FROM <= self._lazy.num_blocks:
                self._pages.grow(self.parts)

    def make_all(self) -> None:
        if self._lazy is not None and self._lazy.num_unmade:
            self._pages.grow([self.weights])  # not the states: nothing is written to them now
            self._lazy.make_all()

    def make_memory(self, address: int, num_bytes: int) -> None:
        start = address - self.weights.data_ptr()
        if self._lazy is not None and 0 <= start < self.weights.nbytes:
            self._lazy.make_bytes(start, start + num_bytes)

    def read(self, keys: Tensor, pinned: bool = False) -> Tensor:
        self.make(keys)
        weights = self.weights.detach()
        rows = torch.empty(keys.numel(), self.dim, dtype=weights.dtype, pin_memory=pinned)
        return torch.index_select(weights, 0, keys.to(weights.device), out=rows)

    def read_ahead(self, keys: Tensor, out: Sequence[Tensor], places: Tensor) -> None:
        """As every home. Rows that have no initial weights are made there, and here in a thread: their pages take
        longer than the rows."""
        assert self._lazy is not None, "all rows are made"
        self._lazy.read(keys, out[0], places)
        self._is_read_ahead = True
        self._lazy.make_later(keys)
        PlainTransfer(out[1:], self.parts[1:]).fill(keys, places)

    def reinitialise(self, keys: Tensor, numbers: Tensor) -> None:
        if self._lazy is None:
            super().reinitialise(keys, numbers)
            return
        self.make(keys)  # first: a block that is made later would undo the change
        self.before_write(keys)
        self._lazy.reinitialise(keys, numbers)
        for state in self.parts[1:]:
            state.data.index_fill_(0, keys, 0)

    def before_write(self, keys: Tensor) -> None:
        if self._is_read_ahead and not (self._lazy is not None and self._lazy.has_caught_up):
            self.make(keys)  # first: a block that is made later would undo the change
        if self._lazy is None:
            self._pages.count_writes(keys.numel(), self.parts)
        super().before_write(keys)

    def freeze(self) -> FrozenRows:
        self._unmade = None if self._lazy is None else self._lazy.freeze()
        return super().freeze()

    def read_block(self, first: int, stop: int, out: Sequence[Tensor]) -> None:
        for number, (rows, block) in enumerate(zip(self.parts, out, strict=True)):
            self._pages.fetch(rows[first:stop])
            if number == 0 and self._unmade is not None:
                self._unmade.read(first, stop, block)
            else:
                copy_block(rows, first, stop, block)

    def copier(self, out: Sequence[Tensor]) -> Callable[[Tensor, Tensor], None]:
        return row_copier(self.parts, out)

    def transfer(self, kind: TransferKind) -> MakeTransfer:
        if kind == "plain":
            return PlainTransfer
        if kind == "staged":
            return StagedTransfer
        from embershard.cache.rows.uva_transfer import UvaTransfer  # triton is not installed everywhere

        return UvaTransfer
