"""Host memory as a cache in front of a file: a row of the host tier has a place in memory, or it is in the file, or it
was never written and has its initial weights.

A row keeps its place while it is on the device: its place is *pinned*. Places are chosen by what chooses slots (a map,
an index of next uses, a queue of victims), for batches that train several steps later. So their rows are in memory by
the time they are copied to the device, and no policy but one decides what leaves.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from embershard.cache import loops
from embershard.cache.config import TransferKind
from embershard.cache.file.file_counts import FileCounts
from embershard.cache.file.file_rows import FileRows, FileWork, PageIo
from embershard.cache.file.places import Claim, RowPlaces
from embershard.cache.homes.home import Home, no_memory
from embershard.cache.homes.shape import PoolShape
from embershard.cache.next_use import KnownBatch
from embershard.cache.rows import memory
from embershard.cache.rows.initial_weights import PoolWeights, ShardWeights, as_array
from embershard.cache.rows.transfer import MakeTransfer, PlainTransfer, StagedTransfer, Transfer, row_copier
from embershard.errors import CacheOverflowError, ConfigError


class FiledRows(Home):
    """Rows in a file, R in all, of which H are in memory. A save may read beside everything else.

    A batch becomes known (`know`), its rows get places (`file`, which begins to read those in the file), and they are
    pinned (`bring_in`) until the device evicts them (`unpin`). Keys number the pool's rows: int64, in
    host memory.

    Args:
        shape: of the pool, with initial weights.
        num_places: H.
        folder: for the file.
        io: reads and writes pages; None: as fast as can be.

    Attributes:
        parts: the rows in memory, [H + 1, ...] for each part. Place 0 is nobody's.

    >>> tables = [ShardWeights("clicks", 7, 4, -0.5, 0.5)]
    >>> rows = FiledRows(PoolShape([1000], 4, initial=tables), num_places=20, folder=".")
    >>> rows.bring_in(torch.tensor([500, 3]), None)
    >>> rows.parts[0][rows.places_of(torch.tensor([3]))] = 1.0  # as the device writes a row back
    >>> rows.unpin(torch.tensor([500, 3]))
    >>> for first in range(0, 400, 10):
    ...     some = torch.arange(first, first + 10)
    ...     rows.bring_in(some, None)
    ...     rows.unpin(some)
    >>> rows.read(torch.tensor([3])).tolist(), rows.counts.rows_written > 300
    ([[1.0, 1.0, 1.0, 1.0]], True)
    """

    def __init__(self, shape: PoolShape, num_places: int, folder: str, io: PageIo | None = None) -> None:
        dim, initial = shape.dim, shape.initial
        assert initial is not None, "rows in a file are made from a counter"
        if dim % 4 or any(shard.first_column % 4 for shard in initial):
            raise ConfigError(
                f'cache.host: got "file" for tables with {dim} columns on a rank, needed a multiple of 4. Change '
                'model.embedding_dim, cut fewer columns, or set cache.host = "memory"'
            )
        super().__init__(shape, [None] * len(shape.parts))
        self._initial = PoolWeights(shape.rows_per_table, initial, dim)
        self.places = RowPlaces(self.num_rows, num_places)
        count = self.places.num_places + 1
        self.parts = [memory.zeros(count * math.prod(size), dtype).view(count, *size) for size, dtype in shape.parts]
        names = partial(_names_of, shape.rows_per_table, initial)
        self._file = FileRows(folder, self.num_rows, shape.empty(0), io=io, name_rows=names)
        self._works: dict[KnownBatch, FileWork] = {}  # of claims
        self._reading: list[FileWork] = []  # what nobody has waited for, of any batch
        self._lock = threading.RLock()
        self._counts = FileCounts()
        none = torch.empty(0, dtype=torch.int64)
        self._make(none, self.parts, none)  # compiles, or loads what was compiled: not in the first step

    # -- training

    def know(self, keys: Tensor, feature_lengths: Tensor) -> KnownBatch:
        """Announce a batch that will be filed after all those known; arguments as for `RowCache.know`."""
        with self._lock:
            return self.places.know(keys, feature_lengths)

    def file(self, keys: Tensor, known: KnownBatch) -> bool:
        """Give the rows of the oldest known batch (`keys` int64 [N]) places, and begin to read those in the file; False
        if they do not fit beside those of the batches before it. A second call does nothing.

        Raises:
            CacheError: the file could not be read or written.
        """
        with self._lock:
            if self.places.has_claim(known):
                return True
            claim = self.places.claim(keys, known)
            if claim is None:
                return False
            if (work := self._bring(claim)) is not None:
                self._works[known] = work
            return True

    def bring_in(self, keys: Tensor, known: KnownBatch | None) -> None:
        """Wait until rows are in memory, and pin their places.

        Args:
            keys: int64 [M], distinct: the rows of a batch that the device has not.
            known: the batch, if it was filed; its other rows may leave memory from now on once they leave the device.

        Raises:
            CacheOverflowError: there are too few places.
            CacheError: the file could not be read or written.
        """
        with self._lock:
            if known is None or self.places.release(known) != 1:
                self._wait_all()  # any row may be on its way, for another batch
            elif (work := self._works.pop(known, None)) is not None:
                self._wait(work)
            if not self.places.pin(keys):  # not filed, or given away: there was too little room
                self._wait_all()
                claim = self.places.claim_now(keys)
                if claim is None:
                    raise CacheOverflowError(
                        f"a batch needs {keys.numel()} rows in host memory, which has {self.places.num_places} places, "
                        "and too many of them are of rows on the device; set a larger cache.host_bytes, or a smaller "
                        "batch"
                    )
                if (work := self._bring(claim)) is not None:
                    self._wait(work)
                is_pinned = self.places.pin(keys)
                assert is_pinned, "places were claimed just now"

    def unpin(self, keys: Tensor) -> None:
        """Take back the places of rows `keys` (int64 [M], distinct), which are not on the device any more and were
        written back if they had changed."""
        if keys.numel():
            with self._lock:
                self.places.unpin(keys)

    def skip(self, known: KnownBatch, keys: Tensor) -> None:
        """Take back the oldest known batch, with these keys (int64 [N]), which will not be brought in."""
        with self._lock:
            self._works.pop(known, None)
            self.places.skip(known, keys)
            self._wait_all()  # before places are given away, into which rows are read

    def forget(self) -> None:
        """Take back all known batches that were not brought in."""
        with self._lock:
            self._wait_all()  # before places are given away, into which rows are read
            self._works.clear()
            self.places.forget()

    def places_of(self, keys: Tensor) -> Tensor:
        """Return the places of rows that are pinned: int64, as `keys`."""
        with self._lock:
            places = self.places.of(keys)
        assert bool((places > 0).all()), "rows without a place in memory"
        return places

    # -- the rows, wherever they are

    def read(self, keys: Tensor, pinned: bool = False) -> Tensor:
        """As every home; not page-locked. No row moves."""
        return self.select(keys)[0]

    def select(self, keys: Tensor) -> list[Tensor]:
        """As every home. No row moves."""
        distinct, inverse = keys.cpu().unique(return_inverse=True)
        found = [part.new_zeros(distinct.numel(), *part.shape[1:]) for part in self.parts]
        here, of_here = self._of_memory(distinct)
        is_away = torch.ones(distinct.numel(), dtype=torch.bool)
        is_away[here] = False
        away = is_away.nonzero().flatten()
        is_written = self._file.is_written(distinct[away])
        self._file.read(distinct[away[is_written]], found, away[is_written]).wait()
        self._make(distinct[away[~is_written]], found, away[~is_written])
        for part, rows in zip(found, of_here, strict=True):
            part[here] = rows
        return [part[inverse] for part in found]

    def read_block(self, first: int, stop: int, out: Sequence[Tensor]) -> None:
        """As every home."""
        keys = torch.arange(first, stop)
        here, of_here = self._of_memory(keys)
        unmade = keys[~self._file.is_written(keys)]
        self._file.read_block(first, stop, out)
        for part in out:
            part[unmade - first] = 0
        self._make(unmade, out, unmade - first)
        for part, rows in zip(out, of_here, strict=True):
            part[here] = rows

    def put_block(self, first: int, rows: Sequence[Tensor]) -> None:
        """As every home. Slots on the device are fetched again after it."""
        with self._lock:
            self._wait_all()
            rows = [part.to(dtype).contiguous() for part, (_, dtype) in zip(rows, self.shape.parts, strict=True)]
            self._file.write_block(first, rows)
            places = self.places.of(torch.arange(first, first + rows[0].shape[0]))
            here = places.nonzero().flatten()
            for part, values in zip(self.parts, rows, strict=True):
                part.data[places[here]] = values[here]

    def replace(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        """As every home, of ascending keys: in memory where a row has a place, in the file where it has none."""
        with self._lock:
            self._wait_all()  # nothing that is being read comes later
            places = self.places.of(keys)
            here, away = (places > 0).nonzero().flatten(), (places == 0).nonzero().flatten()
            for part, values in zip(self.parts, rows, strict=True):
                part.data[places[here]] = values[here]
            self._file.write(keys[away], rows, away)

    def copier(self, out: Sequence[Tensor]) -> Callable[[Tensor, Tensor], None]:
        """As every home; rows that are not pinned take longer."""
        copy = row_copier(self.parts, out)

        def copy_all(keys: Tensor, to: Tensor) -> None:
            if self.places.are_pinned(keys):
                return copy(self.places_of(keys), to)
            return row_copier(self.select(keys), out)(torch.arange(len(keys)), to)

        return copy_all

    def transfer(self, kind: TransferKind) -> MakeTransfer:
        """As every home, between slots and the places of rows in memory."""
        return lambda slots, _: FiledTransfer(slots, self)

    def check_views(self) -> None:
        raise no_memory(
            'in a file (cache.host = "file")',
            "Save and load them with embershard.save_program and embershard.load_program, instead of state dicts; "
            "checkpoints of embershard train have them, too",
        )

    @property
    def counts(self) -> FileCounts:
        """What was read and written so far."""
        names = ("rows_read", "pages_read", "rows_written", "pages_written")
        return replace(self._counts, **{name: getattr(self._file, name) for name in names})

    @property
    def host_bytes(self) -> int:
        """Memory of the places, in bytes."""
        return sum(part.nbytes for part in self.parts)

    # -- the file

    def _bring(self, claim: Claim) -> FileWork | None:
        """Write what leaves, and begin to read the rows of a claim that are in the file; make the others. None if none
        is read."""
        if claim.leaving_keys.numel():
            self._file.write(claim.leaving_keys, self.parts, claim.leaving_places)
        is_written = self._file.is_written(claim.keys)
        unmade = (~is_written).nonzero().flatten()
        if unmade.numel():
            for part in self.parts[1:]:
                part.data.index_fill_(0, claim.places[unmade], 0)
            self._make(claim.keys[unmade], self.parts, claim.places[unmade])
        if unmade.numel() == claim.keys.numel():
            return None
        work = self._file.read(claim.keys[is_written], self.parts, claim.places[is_written])
        self._reading = [*(other for other in self._reading if not other.is_done), work]
        return work

    def _make(self, keys: Tensor, parts: Sequence[Tensor], places: Tensor) -> None:
        """Write the initial weights of rows `keys` to rows `places` (both int64 [M])."""
        none_made, out = np.zeros(1, np.bool_), as_array(parts[0].data)
        loops.read_rows(keys.numpy(), places.numpy(), none_made, 62, out[:0], out, self._initial.arrays)

    def _of_memory(self, keys: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the positions of those of `keys` that are in memory, and copies of their parts."""
        with self._lock:
            self._wait_all()
            places = self.places.of(keys)
            here = places.nonzero().flatten()
            return here, [part.data.index_select(0, places[here]) for part in self.parts]

    def _wait(self, work: FileWork) -> None:
        """Wait for reads that a batch needs now."""
        is_late, seconds = not work.is_done, work.wait()
        if is_late:
            late, waited = self._counts.late_batches + 1, self._counts.wait_seconds + seconds
            self._counts = replace(self._counts, late_batches=late, wait_seconds=waited)

    def _wait_all(self) -> None:
        works, self._reading = self._reading, []
        for work in works:
            work.wait()


def _names_of(rows_per_table: Sequence[int], shards: Sequence[ShardWeights], first: int, stop: int) -> str:
    """Return words for the pool's rows [first, stop): the tables, and their own row numbers."""
    found, start = list[str](), 0
    for num_rows, shard in zip(rows_per_table, shards, strict=True):
        low, high = max(first, start), min(stop, start + num_rows)
        if low < high:
            own = shard.first_row - start
            numbers = f"row {low + own}" if high == low + 1 else f"rows {low + own} to {high + own - 1}"
            found.append(f"{numbers} of table {shard.table!r}")
        start += num_rows
    return ", ".join(found)


class FiledTransfer:
    """Transfer between slots and the places of rows in host memory. The methods are those of `Transfer`.

    Args:
        slots: payload tensors by slot, [S + 1, ...] each.
        filed: the rows; those that move are pinned.
    """

    def __init__(self, slots: Sequence[Tensor], filed: FiledRows) -> None:
        kind = StagedTransfer if slots[0].is_cuda else PlainTransfer
        self._inner: Transfer = kind(slots, filed.parts)
        self._filed, self.key_device = filed, self._inner.key_device

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        self._inner.fill(self._filed.places_of(keys), slots)

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        self._inner.write_back(slots, self._filed.places_of(keys))

    def finish(self) -> None:
        self._inner.finish()

    def discard(self) -> int:
        return self._inner.discard()
