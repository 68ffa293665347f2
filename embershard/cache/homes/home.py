"""`Home`: where the rows of a pool live while they are in no slot. Each kind is a class, chosen by `choose_home`. And
`FrozenRows`: all rows of a home as they were at one moment, read block by block while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.cache import loops
from embershard.cache.config import TransferKind
from embershard.cache.file.file_counts import FileCounts
from embershard.cache.homes.shape import PoolShape, RowViews
from embershard.cache.rows.memory import bytes_of
from embershard.cache.rows.transfer import MakeTransfer, row_copier
from embershard.errors import CacheError

#: Bytes of a block, in the widest payload tensor.
BLOCK_BYTES = 16 << 20
_GROUP_SHIFT = 5  # 32 rows to a chain of places
#: Most bytes put aside: a share of the rows, at least as much as the first number and at most as much as the second.
_ASIDE_SHARE, _LEAST_ASIDE, _MOST_ASIDE = 0.1, 16 << 20, 2 << 30


class Home:
    """Rows of one pool, wherever they are. Keys number them: int64.

    Callers ask a home, and never which kind it is. A new one overrides the methods that raise, and of the others those
    that say so (docs/architecture.md, "A tier of rows"); `tests/unit/cache/homes/test_contract.py` is what it keeps.

    Args:
        shape: of the pool.
        held: for each part of the rows, memory [R, ...] that holds it; None: it is held in another way.
        own_rows: of each table, the first row and the number of the rows that this rank writes and saves. None: all.

    Attributes:
        rows_per_table, num_rows, row_offsets, dim: of the shape.
        views: the rows as TorchRec refers to them.
        parts: the memory that transfers, page locks and kernels take.
    """

    #: Weights are rounded to what the home can hold: behind each update (`round`), and as they are loaded (`put`).
    rounds: ClassVar[bool] = False
    #: Other ranks map the same rows.
    is_shared: ClassVar[bool] = False
    #: Of a slot beside its row.
    mark_bytes: ClassVar[int] = 0
    parts: list[Tensor]
    _frozen: FrozenRows | None = None

    def __init__(
        self, shape: PoolShape, held: Sequence[Tensor | None], own_rows: Sequence[tuple[int, int]] | None = None
    ) -> None:
        self.shape, self.dim, self.num_rows = shape, shape.dim, shape.num_rows
        self.rows_per_table, self.row_offsets = list(shape.rows_per_table), shape.row_offsets
        self.own_rows = [(0, rows) for rows in shape.rows_per_table] if own_rows is None else list(own_rows)
        self.views = RowViews(shape, self.own_rows, held)

    # -- what a home answers

    def read(self, keys: Tensor, pinned: bool = False) -> Tensor:
        """Return the weights of rows `keys` ([M]): [M, D] in host memory, page-locked if asked for."""
        raise NotImplementedError

    def read_block(self, first: int, stop: int, out: Sequence[Tensor]) -> None:
        """Write all parts of rows [first, stop) to the first rows of `out` ([B, ...] each), as they were when `freeze`
        was called. From any thread; a row that changes meanwhile may be as before or after."""
        raise NotImplementedError

    def copier(self, out: Sequence[Tensor]) -> Callable[[Tensor, Tensor], None]:
        """Return what copies all parts of rows that were written to, or are about to be, to rows of `out`: called with
        their keys and the rows' numbers there, both [M]."""
        raise NotImplementedError

    def transfer(self, kind: TransferKind) -> MakeTransfer:
        """Return the maker of transfers between slots and this home, of a kind that the settings allow."""
        raise NotImplementedError

    @property
    def row_bytes(self) -> int:
        """Payload of a row as it is here, in bytes. Override it where that is not what a slot has."""
        return self.shape.row_bytes

    @property
    def host_bytes(self) -> int:
        """Memory (or disk space) of all rows that are this rank's own, in bytes. Override it where these are not the
        rows' own."""
        return sum(rows for _, rows in self.own_rows) * self.row_bytes

    @property
    def counts(self) -> FileCounts:
        """What was read from a file and written to it so far. Override it where there is one."""
        return FileCounts()

    def select(self, keys: Tensor) -> list[Tensor]:
        """Return all parts of rows `keys` ([M]), which have weights: [M, ...] each. Override it where `copier` knows
        fewer."""
        found = self.shape.empty(keys.numel())
        self.copier(found)(keys, torch.arange(keys.numel()))
        return found

    def check_views(self) -> None:
        """Do nothing, before somebody reads the views. Override it where they are addresses, with `no_memory`."""

    # -- what some homes do besides

    @property
    def is_made(self) -> bool:
        """True if all rows have their initial weights, or get them as they are read."""
        return True

    def make(self, keys: Tensor) -> None:
        """Make the initial weights of rows `keys` ([M]) that have none yet."""

    def make_all(self) -> None:
        """Make the initial weights of all rows that have none yet: somebody may read the views."""

    def make_memory(self, address: int, num_bytes: int) -> None:
        """Make the rows in a part of the memory of `parts`; other memory is left alone."""

    def read_ahead(self, keys: Tensor, out: Sequence[Tensor], places: Tensor) -> None:
        """Write rows `keys` to rows `places` (both [M]) of `out` ([S, ...] each), where not all rows are made."""
        raise NotImplementedError

    def reinitialise(self, keys: Tensor, numbers: Tensor) -> None:
        """Give rows `keys` the initial weights of `numbers` (both [M]; see `ShardWeights`), and states of 0.

        Raises:
            CacheError: this home cannot.
        """
        raise CacheError(
            "rows are reinitialised from a counter, in memory of one rank: give init_seed, and share no rows"
        )

    def put(self, keys: Tensor, rows: Tensor) -> None:
        """Write weights [M, D] of a checkpoint to rows `keys` ([M], distinct). Of homes that round."""
        raise NotImplementedError

    @property
    def takes_blocks(self) -> bool:
        """True where rows are loaded by `put_block`: the views are addresses alone, and the home rounds nothing."""
        return self.views.are_addresses and not self.rounds

    def put_block(self, first: int, rows: Sequence[Tensor]) -> None:
        """Write all parts of rows [first, first + n), [n, ...] each; slots do not change. Of homes that take blocks."""
        raise NotImplementedError

    def replace(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        """Write all parts [M, ...] of rows `keys` ([M], distinct), which have weights; slots do not change. Override it
        where the views are not the rows."""
        for part, values in zip(self.parts, rows, strict=True):
            part.data.index_copy_(0, keys, values)

    def round(self, rows: Tensor, places: Tensor, keys: Tensor) -> None:
        """Round the weights at `places` of [S, D], those of rows `keys` (both [M]). Of homes that round."""
        raise NotImplementedError

    @property
    def marked_keys(self) -> Tensor | None:
        """Rows ([K] ascending) that the home holds in another way than the others, which a checkpoint has; None: it
        has no two ways."""
        return None

    def mark(self, keys: Tensor) -> None:
        """Let these rows ([K] ascending) be the marked ones; before any row is written."""

    def is_own(self, keys: Tensor) -> Tensor | None:
        """Return which of the rows `keys` ([M]) this rank writes back: bool [M]; None for all of them."""
        return None

    def wait_for_ranks(self, name: str, digest: int = 0) -> None:
        """Where rows are shared, wait until all ranks have come to this point with this digest; see `Barriers`."""

    def meet_at_writes(self, name: str, is_waiting: bool = True) -> None:
        """Where rows are shared, wait until all ranks have called this; rows may be written to, or have been.

        Args:
            name: of the pool, and what is done, for messages.
            is_waiting: False for a rank that has failed: the others go on, and it does not wait for them.
        """

    # -- what is the same for all

    @property
    def makes_weights(self) -> bool:
        """True if the rows get initial weights by themselves."""
        return self.shape.initial is not None

    @property
    def slot_row_bytes(self) -> int:
        """Payload of a row in a slot, with the slot's mark, in bytes."""
        return self.shape.row_bytes + self.mark_bytes

    @property
    def version(self) -> int:
        """Number that changes with every write to a tensor of the views in place, except through `.data`.

        The cache writes through `.data`, so a change means that somebody else loaded new contents.
        """
        return sum(t._version for t in self.views.tensors)

    @property
    def weights_version(self) -> int:
        """The part of `version` that counts writes to the weights."""
        return self.views.tensors[0]._version

    def read_part(self, part: Tensor) -> Tensor | None:
        """Return the contents of the rows that a part of the views stands for, [n, ...]; None for other memory, and
        for memory that holds its rows. What is on the device must have been written back."""
        if self.views.are_rows or (place := self.views.place_of(part)) is None:
            return None
        number, first = place
        return self.select(torch.arange(first, first + len(part)))[number]

    def freeze(self) -> FrozenRows:
        """Return all rows as they are now, to be read while training goes on; until they are closed, call
        `before_write` before rows change. Trained rows must have been written back."""
        assert self._frozen is None or self._frozen.is_closed, "the rows are being read already"
        self._frozen = FrozenRows(self)
        return self._frozen

    def before_write(self, keys: Tensor) -> None:
        """Note that rows `keys` ([M]) are about to change; a reader of frozen rows keeps their contents."""
        if self._frozen is not None:
            if self._frozen.is_closed:
                self._frozen = None
            else:
                self._frozen.put_aside(keys)


def no_memory(kept: str, fix: str) -> CacheError:
    """Return the error of who reads the views of rows that are elsewhere."""
    return CacheError(f"weights were asked for as memory, and rows are kept {kept}: they would read as zeros. {fix}")


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
    >>> home = MemoryRows(PoolShape([4], dim=2))
    >>> _ = home.weights.copy_(torch.arange(8.0).reshape(4, 2))
    >>> frozen = home.freeze()
    >>> home.before_write(torch.tensor([2]))
    >>> home.weights.data[2] = 0.0  # as the cache writes; writes that torch counts are refused
    >>> frozen.read(home.weights).tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    """

    def __init__(self, home: Home, most_aside_bytes: int | None = None) -> None:
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
