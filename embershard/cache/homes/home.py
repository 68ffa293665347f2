"""`Home`: where the rows of a pool live while they are in no slot. Each kind is a class, chosen by `choose_home`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from embershard.cache.config import TransferKind
from embershard.cache.file.file_counts import FileCounts
from embershard.cache.homes.frozen_rows import FrozenRows
from embershard.cache.homes.shape import PoolShape, RowViews
from embershard.cache.rows.transfer import MakeTransfer
from embershard.errors import CacheError


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
