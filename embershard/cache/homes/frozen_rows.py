"""All rows of a home as they were at one moment, read block by block while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.cache import loops
from embershard.cache.homes.shape import PoolShape, RowViews
from embershard.cache.rows.memory import bytes_of
from embershard.cache.rows.transfer import row_copier
from embershard.errors import CacheError

#: Bytes of a block, in the widest payload tensor.
BLOCK_BYTES = 16 << 20
_GROUP_SHIFT = 5  # 32 rows to a chain of places
#: Most bytes put aside: a share of the rows, at least as much as the first number and at most as much as the second.
_ASIDE_SHARE, _LEAST_ASIDE, _MOST_ASIDE = 0.1, 16 << 20, 2 << 30


class Freezable(Protocol):
    """What frozen rows ask of a `Home`, which says what each means."""

    shape: PoolShape
    num_rows: int
    views: RowViews

    @property
    def version(self) -> int: ...

    def select(self, keys: Tensor) -> list[Tensor]: ...

    def read_block(self, first: int, stop: int, out: Sequence[Tensor]) -> None: ...

    def copier(self, out: Sequence[Tensor]) -> Callable[[Tensor, Tensor], None]: ...


class FrozenRows:
    """Rows of a home at the moment of the call, while training goes on. Another thread reads each block once, in
    the order of the rows. A row that changes before its block was read is put aside first, weights and states.

    The reader copies a block, declares it read, and then puts the rows that were put aside in their places. Nobody
    waits for the copy: a row that changes meanwhile was put aside before. Rows without initial weights get them in the
    reader's block only, so a save makes no row in the host tier.

    Args:
        home: the rows, that `Home.freeze` was called of.
        most_aside_bytes: rows put aside at one time; with more, `put_aside` waits for the reader. None: 10 % of the
            rows' bytes, but 16 MiB to 2 GiB.

    Attributes:
        block_rows: rows of a block.
        is_closed: nobody reads the rows any more.
        wait_seconds: time that `put_aside` waited for the reader.

    >>> from embershard.cache.homes.memory import MemoryRows
    >>> from embershard.cache.homes.shape import PoolShape
    >>> home = MemoryRows(PoolShape([4], dim=2))
    >>> _ = home.weights.copy_(torch.arange(8.0).reshape(4, 2))
    >>> frozen = home.freeze()
    >>> home.before_write(torch.tensor([2]))
    >>> home.weights.data[2] = 0.0  # as the cache writes; writes that torch counts are refused
    >>> frozen.read(home.weights).tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    """

    def __init__(self, home: Freezable, most_aside_bytes: int | None = None) -> None:
        self._home, self._version, self._num_rows = home, home.version, home.num_rows
        row_bytes = [rows[:1].nbytes for rows in home.views.tensors]
        self._row_bytes = sum(row_bytes)
        self.block_rows = max(1, BLOCK_BYTES // max(1, *row_bytes))
        if most_aside_bytes is None:
            share = int(_ASIDE_SHARE * self._row_bytes * self._num_rows)
            most_aside_bytes = min(max(share, _LEAST_ASIDE), _MOST_ASIDE)
        places = 1 + min(self._num_rows, max(1, most_aside_bytes // max(1, self._row_bytes)))
        self._heads = np.zeros((self._num_rows >> _GROUP_SHIFT) + 1, np.int32)
        self._next_places, self._kept = np.zeros(places, np.int32), np.zeros(places, np.int64)
        self._free = np.zeros(2, np.int64)
        self._blocks, self._in_block = home.shape.empty(min(self.block_rows, self._num_rows)), (0, 0)
        self._asides = home.shape.empty(places)  # no page yet
        self._copy_aside = home.copier(self._asides)
        self._from_aside = row_copier(self._asides, self._blocks)
        self._num_aside = 0
        self._lowest = 0  # rows from here on were not read
        self._changed = threading.Condition()
        self._is_whole = True
        self.is_closed = False
        self.wait_seconds = 0.0

    @property
    def aside_bytes(self) -> int:
        """Most bytes of rows that were put aside at one time."""
        return int(self._free[1]) * self._row_bytes

    @property
    def is_filling(self) -> bool:
        """True if more than half of the rows that may be put aside are: `put_aside` may soon wait for the reader."""
        return 2 * self._num_aside > self._kept.size

    def put_aside(self, keys: Tensor) -> None:
        """Keep the contents of rows `keys` (int64 [M]), which are about to change, where they are still needed."""
        numbers = keys.cpu().contiguous().numpy()
        places, placed = np.empty_like(numbers), np.empty_like(numbers)
        position = 0
        while position < numbers.size:
            with self._changed:
                if self.is_closed:
                    return
                self._is_whole = False  # until the copies are there: an interrupt must not leave places without rows
                position, count = loops.give_places(
                    numbers, position, self._lowest, _GROUP_SHIFT, self._heads, self._next_places, self._kept,
                    self._free, places, placed,
                )  # fmt: skip
                to, of = torch.from_numpy(places[:count]), torch.from_numpy(placed[:count])
                self._copy_aside(of, to)
                self._is_whole = True
                self._num_aside += count
                if position < numbers.size:
                    self._wait()

    def position(self, tensor: Tensor) -> int | None:
        """Return the number of the row that a view of the payload begins with; None for other memory."""
        found = self._home.views.place_of(tensor)
        return None if found is None else found[1]

    def read(self, part: Tensor) -> Tensor:
        """Return the contents that a view of the payload had, valid until the next call for other rows.

        Args:
            part: whole rows of one payload tensor, up to `block_rows`. Rows come in ascending order; the same rows may
                be read of every payload tensor in turn.

        Raises:
            CacheError: somebody else wrote to the rows, or putting rows aside was interrupted.
        """
        found = self._home.views.place_of(part)
        assert found is not None, "not a part of these rows"
        number, first = found
        stop = first + part.shape[0]
        if self._in_block != (first, stop):
            self._read_block(first, stop)
        # A tensor whose memory ends with it: torch would copy a view of more.
        data = self._blocks[number][: stop - first]
        return torch.frombuffer(bytes_of(data), dtype=data.dtype).view(part.shape)

    def select(self, keys: Tensor) -> list[Tensor]:
        """Return the contents that some rows had: of each payload tensor [k, ...].

        Args:
            keys: int64 [k], ascending, above those of the last call. Rows between them are not read any more. All of
                them have weights.

        Raises:
            CacheError: as `read`.

        >>> from embershard.cache.homes.memory import MemoryRows
        >>> from embershard.cache.homes.shape import PoolShape
        >>> home = MemoryRows(PoolShape([4], dim=2))
        >>> _ = home.weights.copy_(torch.arange(8.0).reshape(4, 2))
        >>> frozen = home.freeze()
        >>> home.before_write(torch.tensor([2]))
        >>> home.weights.data[2] = 0.0
        >>> frozen.select(torch.tensor([0, 2]))[0].tolist()
        [[0.0, 1.0], [4.0, 5.0]]
        """
        assert self._lowest <= int(keys[0]), "rows are read once, in ascending order"
        found = self._home.select(keys)
        places, placed = self._declare_read(int(keys[-1]) + 1)
        there = torch.searchsorted(keys, torch.from_numpy(placed)).clamp(max=len(keys) - 1)
        is_asked = keys[there] == torch.from_numpy(placed)
        row_copier(self._asides, found)(torch.from_numpy(places)[is_asked], there[is_asked])
        self._give_back(places)
        return found

    def close(self) -> None:
        """End: nothing is put aside any more, and who waits goes on."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def _read_block(self, first: int, stop: int) -> None:
        assert self._lowest <= first < stop <= first + self.block_rows, "rows are read once, in ascending order"
        while self._lowest < first:  # rows that nobody reads
            self._give_back(self._declare_read(min(first, self._lowest + self.block_rows))[0])
        self._home.read_block(first, stop, self._blocks)
        places, placed = self._declare_read(stop)
        self._from_aside(torch.from_numpy(places), torch.from_numpy(placed - first))
        self._give_back(places)
        self._in_block = (first, stop)

    def _declare_read(self, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Put no row below `stop` aside from now on; return places and keys of those that were."""
        size = stop - self._lowest + (1 << _GROUP_SHIFT)
        places, placed = np.empty(size, np.int64), np.empty(size, np.int64)
        with self._changed:
            if self.is_closed:
                raise CacheError("the rows are not kept any more: the save was given up")
            if not self._is_whole:
                raise CacheError("putting rows aside for a save was interrupted; save again")
            if self._home.version != self._version:
                raise CacheError(
                    "host rows were written to while a checkpoint was being saved, so it would mix two states. Wait "
                    "for the save before loading a state dict or writing to rows"
                )
            first, self._lowest = self._lowest, stop
            count = loops.take_places(
                first, stop, _GROUP_SHIFT, self._heads, self._next_places, self._kept, places, placed
            )
        return places[:count], placed[:count]

    def _give_back(self, places: NDArray[np.int64]) -> None:
        with self._changed:
            loops.free_places(places, self._next_places, self._free)
            self._num_aside -= places.size
            self._changed.notify_all()

    def _wait(self) -> None:
        started = time.perf_counter()
        self._changed.wait()
        self.wait_seconds += time.perf_counter() - started
