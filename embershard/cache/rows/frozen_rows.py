"""All rows of a pool as they were at one moment, read block by block while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.cache import loops
from embershard.cache.rows.lazy_rows import FrozenLazyRows
from embershard.cache.rows.memory import fetch_soon, widest_views
from embershard.cache.rows.small_rows import SmallRows
from embershard.cache.rows.transfer import RowTable
from embershard.errors import CacheError

#: Bytes of a block, in the widest payload tensor.
BLOCK_BYTES = 16 << 20
_GROUP_SHIFT = 5  # 32 rows to a chain of places
#: Most bytes put aside: a share of the rows, at least as much as the first number and at most as much as the second.
_ASIDE_SHARE, _LEAST_ASIDE, _MOST_ASIDE = 0.1, 16 << 20, 2 << 30


class RowsAway(Protocol):
    """Rows of a host tier that are not all in memory: `FiledRows` has them, and says what each method does."""

    @property
    def host_bytes(self) -> int:
        """Memory of the rows that are there, in bytes."""

    def read(self, keys: Tensor) -> Tensor:
        """Return the weights of rows."""

    def select(self, keys: Tensor) -> list[Tensor]:
        """Return all parts of rows."""

    def read_block(self, first: int, stop: int, out: Sequence[Tensor]) -> None:
        """Write all parts of consecutive rows to the first rows of `out`."""

    def put_block(self, first: int, rows: Sequence[Tensor]) -> None:
        """Write all parts of consecutive rows."""

    def copy_lent(self, keys: Tensor, out: Sequence[Tensor], to: Tensor) -> None:
        """Copy all parts of rows that are in slots, too."""


class FrozenRows:
    """Rows of a host tier at the moment of the call, while training goes on. Another thread reads each block once, in
    the order of the rows. A row that changes before its block was read is put aside first, weights and states.

    The reader copies a block, declares it read, and then puts the rows that were put aside in their places. Nobody
    waits for the copy: a row that changes meanwhile was put aside before. Rows without initial weights get them in the
    reader's block only, so a save makes no row in the host tier.

    Args:
        payload: weights [R, D] and states [R, ...], in host memory.
        lazy: the weights, if some of the rows have no initial weights.
        most_aside_bytes: rows put aside at one time; with more, `put_aside` waits for the reader. None: 10 % of the
            rows' bytes, but 16 MiB to 2 GiB.
        is_mapped: the payload is in files, whose blocks the system fetches only when it is told to.
        small: the weights, if they are small; the memory of `payload` then only says which row a view begins with.
        away: all parts of the rows, if some are not in memory; the same holds for all of `payload` then.

    Attributes:
        block_rows: rows of a block.
        is_closed: nobody reads the rows any more.
        wait_seconds: time that `put_aside` waited for the reader.

    >>> weights = torch.arange(8.0).reshape(4, 2)
    >>> frozen = FrozenRows([weights], None)
    >>> frozen.put_aside(torch.tensor([2]))
    >>> weights.data[2] = 0.0  # as the cache writes; writes that torch counts are refused
    >>> frozen.read(weights).tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    """

    def __init__(
        self,
        payload: Sequence[Tensor],
        lazy: FrozenLazyRows | None,
        most_aside_bytes: int | None = None,
        is_mapped: bool = False,
        small: SmallRows | None = None,
        away: RowsAway | None = None,
    ) -> None:
        self._is_mapped, self._small, self._away = is_mapped, small, away
        self._payload, self._lazy = [tensor.data for tensor in payload], lazy
        self._watched, self._version = list(payload), sum(tensor._version for tensor in payload)
        self._num_rows = payload[0].shape[0]
        row_bytes = [tensor[:1].nbytes for tensor in self._payload]
        self._row_bytes = sum(row_bytes)
        self.block_rows = max(1, BLOCK_BYTES // max(1, *row_bytes))
        if most_aside_bytes is None:
            share = int(_ASIDE_SHARE * self._row_bytes * self._num_rows)
            most_aside_bytes = min(max(share, _LEAST_ASIDE), _MOST_ASIDE)
        places = 1 + min(self._num_rows, max(1, most_aside_bytes // max(1, self._row_bytes)))
        self._heads = np.zeros((self._num_rows >> _GROUP_SHIFT) + 1, np.int32)
        self._following, self._kept = np.zeros(places, np.int32), np.zeros(places, np.int64)
        self._free = np.zeros(2, np.int64)
        blocks = [torch.empty(min(self.block_rows, self._num_rows), *t.shape[1:], dtype=t.dtype) for t in payload]
        self._asides = asides = [
            torch.empty(places, *tensor.shape[1:], dtype=tensor.dtype) for tensor in payload
        ]  # no page yet
        self._tables = [
            [RowTable(view) for view in widest_views(*tensors)]
            for tensors in zip(self._payload, asides, blocks, strict=True)
        ]
        self._first_copied = len(payload) if away is not None else 0 if small is None else 1
        self._blocks, self._in_block = blocks, (0, 0)
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
                    numbers, position, self._lowest, _GROUP_SHIFT, self._heads, self._following, self._kept,
                    self._free, places, placed,
                )  # fmt: skip
                to, of = torch.from_numpy(places[:count]), torch.from_numpy(placed[:count])
                for rows, aside, _ in self._tables[self._first_copied :]:
                    aside.copy(to, rows, of)
                if self._away is not None:
                    self._away.copy_lent(of, self._asides, to)
                elif self._small is not None:
                    self._small.read(of, self._asides[0], to)
                self._is_whole = True
                self._num_aside += count
                if position < numbers.size:
                    self._wait()

    def position(self, tensor: Tensor) -> int | None:
        """Return the number of the row that a view of the payload begins with; None for other memory."""
        found = self._find(tensor)
        return None if found is None else found[1]

    def read(self, part: Tensor) -> Tensor:
        """Return the contents that a view of the payload had, valid until the next call for other rows.

        Args:
            part: whole rows of one payload tensor, up to `block_rows`. Rows come in ascending order; the same rows may
                be read of every payload tensor in turn.

        Raises:
            CacheError: somebody else wrote to the rows, or putting rows aside was interrupted.
        """
        found = self._find(part)
        assert found is not None, "not a part of these rows"
        number, first, stop = found
        if self._in_block != (first, stop):
            self._read_block(first, stop)
        # A tensor whose memory ends with it: torch would copy a view of more.
        data = self._blocks[number][: stop - first]
        return torch.frombuffer(_bytes_of(data), dtype=data.dtype).view(part.shape)

    def select(self, keys: Tensor) -> list[Tensor]:
        """Return the contents that some rows had: of each payload tensor [k, ...].

        Args:
            keys: int64 [k], ascending, above those of the last call. Rows between them are not read any more. All of
                them have weights.

        Raises:
            CacheError: as `read`.

        >>> frozen = FrozenRows([weights := torch.arange(8.0).reshape(4, 2)], None)
        >>> frozen.put_aside(torch.tensor([2]))
        >>> weights.data[2] = 0.0
        >>> frozen.select(torch.tensor([0, 2]))[0].tolist()
        [[0.0, 1.0], [4.0, 5.0]]
        """
        assert self._lowest <= int(keys[0]), "rows are read once, in ascending order"
        found = self._now(keys)
        tables = [[RowTable(view) for view in widest_views(*pair)] for pair in zip(found, self._asides, strict=True)]
        places, placed = self._declare_read(int(keys[-1]) + 1)
        there = torch.searchsorted(keys, torch.from_numpy(placed)).clamp(max=len(keys) - 1)
        is_asked = keys[there] == torch.from_numpy(placed)
        for own, put_aside in tables:
            own.copy(there[is_asked], put_aside, torch.from_numpy(places)[is_asked])
        self._give_back(places)
        return found

    def _now(self, keys: Tensor) -> list[Tensor]:
        """Return all parts of rows as they are now: [k, ...] each."""
        if self._away is not None:
            return self._away.select(keys)
        found, everything = [], torch.arange(len(keys))
        for number, tensor in enumerate(self._payload):
            found.append(torch.empty(len(keys), *tensor.shape[1:], dtype=tensor.dtype))
            if number == 0 and self._small is not None:
                self._small.read(keys, found[0], everything)
            else:
                rows, own = (RowTable(view) for view in widest_views(tensor, found[-1]))
                own.copy(everything, rows, keys)
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
        if self._away is not None:
            self._away.read_block(first, stop, self._blocks)
        in_memory = [] if self._away is not None else zip(self._payload, self._blocks, strict=True)
        for number, (tensor, block) in enumerate(in_memory):
            if self._is_mapped:
                fetch_soon(tensor[first:stop])
            if number == 0 and self._small is not None:
                self._small.read_block(first, stop, block)
            elif number == 0 and self._lazy is not None:
                self._lazy.read(first, stop, block)
            else:
                np.copyto(_bytes_of(block[: stop - first]), _bytes_of(tensor[first:stop]))
        places, placed = self._declare_read(stop)
        for _, aside, block_rows in self._tables:
            block_rows.copy(torch.from_numpy(placed - first), aside, torch.from_numpy(places))
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
            if sum(tensor._version for tensor in self._watched) != self._version:
                raise CacheError(
                    "host rows were written to while a checkpoint was being saved, so it would mix two states. Wait "
                    "for the save before loading a state dict or writing to rows"
                )
            first, self._lowest = self._lowest, stop
            count = loops.take_places(
                first, stop, _GROUP_SHIFT, self._heads, self._following, self._kept, places, placed
            )
        return places[:count], placed[:count]

    def _give_back(self, places: NDArray[np.int64]) -> None:
        with self._changed:
            loops.free_places(places, self._following, self._free)
            self._num_aside -= places.size
            self._changed.notify_all()

    def _wait(self) -> None:
        started = time.perf_counter()
        self._changed.wait()
        self.wait_seconds += time.perf_counter() - started

    def _find(self, tensor: Tensor) -> tuple[int, int, int] | None:
        """Return the number of the payload tensor, the first row and the one after the last; None for other memory."""
        if not tensor.is_cpu or not tensor.numel():
            return None
        for number, rows in enumerate(self._payload):
            start, row_bytes = tensor.data_ptr() - rows.data_ptr(), rows[:1].nbytes
            if 0 <= start < rows.nbytes:
                assert tensor.is_contiguous(), "no whole rows"
                assert start % row_bytes == tensor.nbytes % row_bytes == 0, "no whole rows"
                first = start // row_bytes
                return number, first, first + tensor.nbytes // row_bytes
        return None


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
