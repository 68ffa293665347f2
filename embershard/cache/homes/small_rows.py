"""Host rows of a small type (fp16 or int8) under slots that are float32: precision belongs to the row.

After each update a row's weights are rounded, in their slot, to what the host holds (`SmallRows.round`). So write-backs
and fills change no number, and what a run learns depends on no cache, look-ahead or save (decision 0099).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.cache import loops
from embershard.cache.homes.small_sizes import SmallType, small_row_bytes
from embershard.cache.rows import memory
from embershard.cache.rows.initial_weights import PoolWeights, ShardWeights, as_array
from embershard.errors import CacheError, ConfigError

if TYPE_CHECKING:
    from embershard.cache.gpu.small_rows import SmallSlots

#: Rows that `make_memory` makes in one go, a few milliseconds, and its pause after them, in which others make theirs.
_MADE_AT_ONCE, _PAUSE_SECONDS = 8192, 1e-3
_NO_MARKS = np.empty(0, np.int32)
_COLUMNS = 4  # the number of a full row takes the place of so many codes


class SmallRows:
    """Weights of a pool's rows in host memory: R rows, of which those of `full_keys` stay float32.

    A row that was never written has its initial weights, rounded; it takes no memory.

    Args:
        small_type: "fp16", without full rows; or "int8", with a step per row.
        rows_per_table: rows of each table's shard.
        initial: initial weights of each table; rounding also takes its random bits by their seed and places.
        dim: D, columns of each row on this rank.
        full_keys: int64 [K] ascending, rows that are not rounded.
        allocate: gives zeroed memory for a number of elements and a dtype.

    Attributes:
        tables: as the loops of `embershard/cache/loops/small.py` take them.
        full_keys: as the argument.

    Raises:
        ConfigError: the tables have too few columns.

    >>> tables = [ShardWeights("clicks", 7, 4, -0.5, 0.5)]
    >>> full = torch.tensor([3])
    >>> rows = SmallRows("int8", [100], tables, 4, full, lambda numel, dtype: torch.zeros(numel, dtype=dtype))
    >>> rows.write(torch.tensor([3, 8]), torch.tensor([[1.0, 0.1, 0.0, 0.0], [127.0, 5.0, 0.0, -2.0]]))
    >>> rows.read(torch.tensor([8, 3])).tolist()
    [[127.0, 5.0, 0.0, -2.0], [1.0, 0.10000000149011612, 0.0, 0.0]]
    """

    def __init__(
        self,
        small_type: SmallType,
        rows_per_table: Sequence[int],
        initial: Sequence[ShardWeights],
        dim: int,
        full_keys: Tensor,
        allocate: Callable[[int, torch.dtype], Tensor],
    ) -> None:
        if dim % _COLUMNS or any(shard.first_column % _COLUMNS for shard in initial):
            raise ConfigError(
                f'cache.host_dtype: got "{small_type}" for tables with {dim} columns on a rank, needed a multiple of '
                f'{_COLUMNS}. Change model.embedding_dim, cut fewer columns, or keep these tables in "fp32"'
            )
        self.small_type, self.num_rows, self.dim = small_type, sum(rows_per_table), dim
        self._initial = PoolWeights(rows_per_table, initial, dim)
        firsts = np.cumsum([0, *rows_per_table], dtype=np.int64)
        seeds = [np.uint32(shard.key[0] ^ shard.key[1]).view(np.int32) for shard in initial]
        places = [
            (first, shard.first_row - first, seed, shard.first_column)
            for first, shard, seed in zip(firsts, initial, seeds, strict=False)
        ]
        self.tables = np.array([*places, (firsts[-1], 0, 0, 0)], np.int64)
        self._names = [shard.table for shard in initial]
        self._seen, self._number = np.zeros(0, np.int32), 0
        self._on_gpu: SmallSlots | None = None
        self._turns: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        shape = (self.num_rows, dim)
        if small_type == "fp16":
            self.parts = [allocate(self.num_rows * dim, torch.int16).view(shape)]
            self._halfs = _unsigned(self.parts[0])
        else:
            self.parts = [allocate(self.num_rows * dim, torch.int8).view(shape), allocate(self.num_rows, torch.int16)]
            self._codes, self._steps = self.parts[0].numpy(), _unsigned(self.parts[1])
            self._words = self.parts[0].view(torch.int32).numpy()
        self.full_keys = torch.empty(0, dtype=torch.int64)
        self.keep_full(full_keys)
        none = self.full_keys[:0], torch.empty(0, dim)  # compiles, or loads what was compiled: not in the first step
        self.read(*none)
        self.write(*none)
        self._round(none[1].numpy(), *2 * (none[0].numpy(),), _NO_MARKS, 0)
        self._write_initial(none[0].numpy(), none[1], none[0].numpy())

    def keep_full(self, keys: Tensor) -> None:
        """Let these rows (int64 [K] ascending; of int8 only) be the full ones, with their initial weights; before any
        row is written."""
        if self.small_type == "fp16":
            assert not keys.numel(), "only int8 has full rows"
            return
        # One row at least: kernels want an address. With pages of its own, so that they can be locked.
        num_rows = max(1, keys.numel())
        self._full = memory.zeros(num_rows * self.dim, torch.float32, whole_pages=True).view(num_rows, self.dim)
        self._steps[self.full_keys.numpy()] = 0
        self.full_keys = keys
        self._write_initial(keys.numpy(), self._full, np.arange(keys.numel()))
        loops.mark_full(self._words, self._steps, keys.numpy())

    @property
    def tensors(self) -> list[Tensor]:
        """What kernels address: codes int8 [R, D], steps int16 [R] and full rows float32 [K, D]; or halfs int16
        [R, D]. Kernels know no unmade rows: `make` them before."""
        return self.parts if self.small_type == "fp16" else [*self.parts, self._full]

    def slots_on(self, device: torch.device) -> SmallSlots:
        """Return the kernels' work on these rows in slots on a GPU; from the first call on, threads may make rows."""
        if self._on_gpu is None:
            from embershard.cache.gpu.small_rows import SmallSlots  # triton is not installed everywhere

            self._on_gpu, self._turns = SmallSlots(self, device), threading.RLock()
        return self._on_gpu

    @property
    def row_bytes(self) -> int:
        """Bytes of a small row."""
        return small_row_bytes(self.small_type, self.dim)

    @property
    def full_bytes(self) -> int:
        """Bytes of the full rows beside those that every row has."""
        return self.full_keys.numel() * self.dim * 4

    def read(self, keys: Tensor, out: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        """Return the weights of rows `keys` (int64 [M]): float32 [M, D], or rows `places` (int64 [M]) of `out` [S, D].
        Memory is on the CPU."""
        numbers = np.ascontiguousarray(keys.numpy())
        out = torch.empty(numbers.size, self.dim) if out is None else out
        to = np.arange(numbers.size) if places is None else np.ascontiguousarray(places.numpy())
        rows, unmade = out.detach().numpy(), np.empty(numbers.size, np.int64)
        with self._turns:
            if self.small_type == "fp16":
                count = loops.widen_halfs(self._halfs, numbers, rows, rows.view(np.int32), to, unmade)
            else:
                count = loops.widen_codes(
                    self._codes, self._words, self._steps, self._full.numpy(), numbers, rows, to, unmade
                )
            if count:
                some = unmade[:count]
                self._write_initial(numbers[some], out, to[some])
                self._round(rows, to[some], numbers[some], _NO_MARKS, 0)
        return out

    def write(self, keys: Tensor, rows: Tensor, places: Tensor | None = None) -> None:
        """Write rounded rows, [M, D] or those at `places` of [S, D], to host rows `keys` (int64 [M]).

        Raises:
            CacheError: some are not rounded, and would lose what they are.
        """
        numbers, values = np.ascontiguousarray(keys.numpy()), rows.detach().numpy()
        of = np.arange(numbers.size) if places is None else np.ascontiguousarray(places.numpy())
        with self._turns:
            if self.small_type == "fp16":
                inexact = loops.narrow_to_halfs(self._halfs, numbers, values, values.view(np.int32), of)
            else:
                inexact = loops.narrow_to_codes(
                    self._codes, self._words, self._steps, self._full.numpy(), numbers, values, of
                )
        if inexact:
            raise self.not_rounded(f"{inexact} of {numbers.size} rows")

    def not_rounded(self, which: str) -> CacheError:
        """Return the error of rows in slots that hold what no row of this type does."""
        return CacheError(
            f"{which} of the tables {self._names[:5]} in slots are not what an update leaves: they hold numbers that "
            f"{self.small_type} does not. Something else wrote to the slots; resume from the last checkpoint, or train "
            'with cache.host_dtype = "fp32"'
        )

    def make(self, keys: Tensor) -> None:
        """Write rows `keys` (int64 [M], no repeats) that were never written: initial weights, rounded."""
        with self._turns:
            some = keys[self.parts[-1].view(self.num_rows, -1)[keys, 0] == 0]  # no step, or no first half
            if some.numel():
                self.write(some, self.read(some))

    def make_memory(self, address: int, num_bytes: int) -> None:
        """Make the rows in a part of the memory of `tensors`; other memory is left alone. While it takes turns with
        other threads, none waits long."""
        row_bytes = self.parts[0][:1].nbytes
        first = address - self.parts[0].data_ptr()
        if 0 <= first < self.parts[0].nbytes:
            stop = min(-(-(first + num_bytes) // row_bytes), self.num_rows)
            for some in torch.arange(first // row_bytes, stop).split(_MADE_AT_ONCE):
                self.make(some)
                time.sleep(_PAUSE_SECONDS)

    def gather(self, keys: Tensor, buffer: Sequence[Tensor]) -> None:
        """Copy rows `keys` (int64 [M]) to the first rows of a buffer, where full ones are numbered anew."""
        self.make(keys)
        for own, part in zip(self.parts, buffer, strict=False):
            torch.index_select(own, 0, keys, out=part[: keys.numel()])
        if self.small_type == "int8":
            at, numbers = self._full_of(buffer, keys.numel())
            torch.index_select(self._full, 0, numbers[at], out=buffer[2][: at.numel()])
            numbers[at] = torch.arange(at.numel(), dtype=torch.int32)

    def expect(self, keys: Tensor, buffer: Sequence[Tensor]) -> None:
        """Mark the full ones of rows `keys` (int64 [M]), which a kernel is about to write to a buffer."""
        if self.small_type == "int8":
            torch.index_select(self.parts[1], 0, keys, out=buffer[1][: keys.numel()])
            at, numbers = self._full_of(buffer, keys.numel())
            numbers[at] = torch.arange(at.numel(), dtype=torch.int32)

    def scatter(self, keys: Tensor, buffer: Sequence[Tensor]) -> None:
        """Copy the first rows of a buffer, where `expect` was told of them, to rows `keys` (int64 [M])."""
        if self.small_type == "int8":
            at, numbers = self._full_of(buffer, keys.numel())
            own = self.parts[0].view(torch.int32)[keys[at], 0]
            self._full[own.long()] = buffer[2][: at.numel()]
            numbers[at] = own
        for rows, part in zip(self.parts, buffer, strict=False):
            rows[keys] = part[: keys.numel()]

    @staticmethod
    def _full_of(buffer: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
        """Return the positions of full rows in a buffer, and a view of all rows' numbers among the full ones."""
        return (buffer[1][:count] == -1).nonzero().flatten(), buffer[0].view(torch.int32)[:, 0]

    def put(self, keys: Tensor, rows: Tensor) -> None:
        """Write weights [M, D] that are no update's, as of a checkpoint, to host rows `keys` (int64 [M], distinct),
        rounded; those of this type and seed are already, and stay as they are.

        Raises:
            CacheError: a weight is no number, or too large.
        """
        rows = rows.to(torch.float32, copy=True)
        self.round(rows, torch.arange(rows.shape[0]), keys, are_distinct=True)
        self.write(keys, rows)

    def round(self, rows: Tensor, places: Tensor, keys: Tensor, are_distinct: bool = False) -> None:
        """Round the rows at `places` of [S, D], those of `keys` (both int64 [M], with repeats), but for full ones.

        On a GPU a kernel does it, on the current stream, and what it finds wrong is raised later
        (`SmallSlots.check`); full are there the rows that came as full ones from the host.

        Args:
            are_distinct: no place repeats. Else only one thread at a time may call it.

        Raises:
            CacheError: a weight is NaN, infinite or too large for the type.
        """
        if rows.is_cuda:
            slots = self.slots_on(rows.device)
            slots.attach(rows)
            slots.round(rows, places, keys)
            return
        values = rows.detach().numpy()
        marks = (_NO_MARKS, 0) if are_distinct else self._next_marks(values.shape[0])
        numbers, to = np.ascontiguousarray(keys.numpy()), np.ascontiguousarray(places.numpy())
        bad = self._round(values, to, numbers, *marks)
        if bad >= 0:
            raise self.too_large(int(numbers[bad]), float(np.abs(values[to[bad]]).max()))

    def too_large(self, key: int, largest: float) -> CacheError:
        """Return the error of a row whose largest weight is no number, or too large."""
        table = int(np.searchsorted(self.tables[:, 0], key, side="right")) - 1
        return CacheError(
            f"table {self._names[table]!r}, row {key + self.tables[table, 1]}: its largest weight is {largest}, and "
            f"{self.small_type} rows hold numbers up to {'65504' if self.small_type == 'fp16' else '1e30'}. The "
            "training has diverged: lower embedding_optimizer.lr, and go on from, or begin with, an earlier checkpoint"
        )

    def _round(self, rows: NDArray[Any], places: Any, keys: Any, seen: Any, number: int) -> int:
        bits = rows.view(np.int32)
        if self.small_type == "fp16":
            return int(loops.round_to_halfs(rows, bits, places, keys, self.tables, seen, number))
        return int(loops.round_to_codes(rows, bits, places, keys, self.tables, self._steps, seen, number))

    def _write_initial(self, keys: NDArray[np.int64], out: Tensor, places: NDArray[np.int64]) -> None:
        none_made, nothing = np.zeros(1, np.bool_), np.empty(0, np.float32)
        loops.read_rows(keys, places, none_made, 62, nothing, as_array(out), self._initial.arrays)

    def _next_marks(self, num_places: int) -> tuple[NDArray[np.int32], int]:
        if self._seen.size != num_places or self._number == np.iinfo(np.int32).max:
            self._seen, self._number = np.zeros(num_places, np.int32), 0
        self._number += 1
        return self._seen, self._number


def _unsigned(tensor: Tensor) -> NDArray[np.uint16]:
    return tensor.numpy().view(np.uint16)
