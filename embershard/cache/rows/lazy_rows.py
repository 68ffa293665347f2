"""Initial weights of a pool's rows, made when a row of their block is first touched."""

# mypy: disable-error-code="no-untyped-call, untyped-decorator"
from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.cache import loops
from embershard.cache.rows.initial_weights import PoolWeights, ShardWeights, as_array

#: Weights of a block: about a page of memory, which is allocated when the block is made (decision 0024).
BLOCK_BYTES = 4096
_CHUNK_BYTES = 8 << 20  # made in one go by each thread of `make_all`, and by `make_bytes`
_LOWEST_PRIORITY = 19  # "niceness"
#: Rows that `make_later` makes in one go, about a millisecond, and its pause after them, in which others make theirs.
_PART, _PAUSE_SECONDS = 256, 1e-3


class LazyRows:
    """Makes the initial weights of a pool block by block. A block is a power of two of consecutive rows.

    Blocks that are made are never made again, so rows in them may be trained. Threads may make rows at once.

    Args:
        weights: [R, D] in host memory, where the rows are made; D is a multiple of 4.
        rows_per_table: rows of each table.
        shards: initial weights of each table.

    Attributes:
        num_unmade: blocks that are left.

    >>> weights = torch.zeros(1000, 16)
    >>> rows = LazyRows(weights, [1000], [ShardWeights("clicks", 7, 16, -0.5, 0.5)])
    >>> rows.make(torch.tensor([70]))  # and the other 63 rows of its page
    >>> rows.num_unmade, int((weights != 0).any(1).sum())
    (15, 64)
    """

    def __init__(self, weights: Tensor, rows_per_table: Sequence[int], shards: Sequence[ShardWeights]) -> None:
        self._num_rows, columns = weights.shape
        self._row_bytes = columns * weights.element_size()
        self._shift = max(0, (BLOCK_BYTES // max(1, self._row_bytes)).bit_length() - 1)
        self._made = np.zeros(-(-self._num_rows >> self._shift), np.bool_)
        self._out, self._pool = as_array(weights), PoolWeights(rows_per_table, shards, columns)
        self._lock = threading.Lock()
        self.num_unmade = self._made.size
        self._num_asked = self._num_done = 0  # calls of `make_later`, and those whose rows are all made
        self._make(np.empty(0, np.int64))  # compiles, or loads what was compiled: not in the first step

    @property
    def has_caught_up(self) -> bool:
        """True once all rows that `make_later` was asked for are made."""
        return 0 < self._num_asked == self._num_done

    @property
    def flag_bytes(self) -> int:
        """Memory of the flags of made blocks, in bytes."""
        return self._made.nbytes

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self._made.size

    def make(self, keys: Tensor) -> None:
        """Make the rows `keys` (int64 [M], in host memory) and those of their blocks, where they are missing."""
        self._make(keys.numpy())

    def _make(self, keys: NDArray[np.int64]) -> None:
        if self.num_unmade:
            with self._lock:
                self.num_unmade -= loops.make_blocks_of(
                    keys, self._made, self._shift, self._out, self._num_rows, self._pool.arrays
                )

    def read(self, keys: Tensor, out: Tensor, places: Tensor) -> None:
        """Write the weights of rows `keys` to rows `places` (both int64 [M]) of `out` [S, D], all in host memory. Rows
        that are missing stay so."""
        with self._lock:
            which = (keys.numpy(), places.numpy(), self._made, self._shift)
            loops.read_rows(*which, self._out, as_array(out), self._pool.arrays)

    def reinitialise(self, keys: Tensor, numbers: Tensor) -> None:
        """Write the initial weights of `numbers` to rows `keys` (both int64 [M], on a CPU), whose blocks are made."""
        loops.write_rows_of_ids(keys.numpy(), numbers.numpy(), self._out, self._pool.arrays)

    def make_later(self, keys: Tensor) -> None:
        """Make the rows `keys`, as `make` does, in a thread of the lowest priority."""
        with self._lock:
            self._num_asked += 1
        arguments = (weakref.ref(self), keys.numpy())
        threading.Thread(target=_make_later, args=arguments, name="embershard-rows").start()

    def make_all(self) -> None:
        """Make all rows that are missing, with as many threads as torch uses.

        Other threads get their turn between two chunks per thread.
        """
        if not self.num_unmade:
            return
        step = max(1, _CHUNK_BYTES // (self._row_bytes << self._shift))
        starts, num_threads = iter(range(0, self._made.size, step)), torch.get_num_threads()
        while some := list(itertools.islice(starts, num_threads)):
            with self._lock, ThreadPoolExecutor(num_threads) as threads:  # after an interrupt, too, all end first
                self.num_unmade -= sum(threads.map(self._make_blocks, some, (start + step for start in some)))
        with self._lock:
            self.num_unmade = int(self._made.size - np.count_nonzero(self._made))  # exact after an interrupt, too

    def make_bytes(self, start: int, stop: int) -> None:
        """Make the rows in bytes [start, stop) of the weights, in parts with pauses, in which others make theirs: a
        plan waits for one part at most."""
        block_bytes = self._row_bytes << self._shift
        step, end = max(1, _CHUNK_BYTES // block_bytes), -(-stop // block_bytes)
        for first in range(start // block_bytes, end, step):
            with self._lock:
                num_made = self._make_blocks(first, min(first + step, end))
                self.num_unmade -= num_made
            if num_made and first + step < end:
                time.sleep(_PAUSE_SECONDS)

    def freeze(self) -> FrozenLazyRows | None:
        """Return the weights as they are now, for rows that nobody changes; None if all of them are made."""
        if not self.num_unmade:
            return None
        with self._lock:
            frozen = FrozenLazyRows(self._out, self._made.copy(), self._shift, self._pool)
        # Compiles: the reader may be a thread of the lowest priority, and others would wait for Numba's lock.
        loops.read_blocks(0, 0, frozen.made, self._shift, self._out, self._out[:0], self._pool.arrays)
        return frozen

    def _make_blocks(self, first: int, stop: int) -> int:
        """Make blocks [first, stop) where they are missing; return how many were."""
        end = min(stop, self._made.size)
        return loops.make_blocks(first, end, self._made, self._shift, self._out, self._num_rows, self._pool.arrays)


def _make_later(reference: weakref.ref[LazyRows], keys: NDArray[np.int64]) -> None:
    with contextlib.suppress(OSError):  # a system that forbids it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    for start in range(0, keys.size, _PART):
        rows = reference()
        if rows is None or not threading.main_thread().is_alive():
            return
        rows._make(keys[start : start + _PART])
        del rows
        time.sleep(_PAUSE_SECONDS)
    if (rows := reference()) is not None:
        with rows._lock:
            rows._num_done += 1


@dataclass(frozen=True)
class FrozenLazyRows:
    """The weights of `LazyRows` at one moment. Rows that had no initial weights get them in the reader's memory only.

    Attributes:
        weights: [R * D], the pool's.
        made: flags of the blocks, at that moment.
        shift: logarithm of a block's rows.
        pool: initial weights of the tables.
    """

    weights: NDArray[Any]
    made: NDArray[np.bool_]
    shift: int
    pool: PoolWeights

    def read(self, first: int, stop: int, out: Tensor) -> None:
        """Write the weights of rows [first, stop) to `out` [stop - first, D]."""
        loops.read_blocks(first, stop, self.made, self.shift, self.weights, as_array(out), self.pool.arrays)
