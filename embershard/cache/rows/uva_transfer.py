"""Transfer of rows straight between page-locked host memory and slots, by a Triton kernel that addresses both.

Row numbers stay on the device, and no buffer is in between. With `TRITON_INTERPRET=1` the kernel runs on a CPU, for
tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


class UvaTransfer:
    """Transfer by one kernel launch per direction, for weights and optimizer states. Neither row numbers nor rows pass
    through the CPU. The methods are those of `Transfer`.

    Args:
        device: payload tensors by slot, [S + 1, ...] each.
        host: payload tensors by key, [R, ...] each, in the same order; on a GPU in page-locked memory.
            A subclass gives only the last ones.

    Copies run on the current stream in the order of the calls: a slot is read before it is filled again, and a row is
    written before it is read again.
    """

    def __init__(self, device: Sequence[Tensor], host: Sequence[Tensor]) -> None:
        self._kernel = RowKernel(device[len(device) - len(host) :], host)
        self._device = self.key_device = device[0].device
        self._written: torch.cuda.Event | None = None

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        self._kernel.to_tables(slots, keys)

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        self._kernel.to_others(keys, slots)
        if self._device.type == "cuda" and keys.numel():
            self._written = torch.cuda.current_stream(self._device).record_event()

    def discard(self) -> int:
        self.finish()  # the kernels write to the host tier itself, so nothing can be dropped
        return 0

    def finish(self) -> None:
        if self._written is not None:
            self._written.synchronize()
            self._written = None


#: Words that a program copies at once; with 8 bytes each, enough to hide the latency of PCIe.
_BLOCK_WORDS = 2048
_MOST_BLOCK_ROWS = 256
#: Programs of a launch: enough to fill the link, few enough to leave the device to training.
_MOST_PROGRAMS = 128
_WORD_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8)


@triton.jit
def _copy_part(  # type: ignore[no-untyped-def]
    target, source, target_starts, source_starts, inside, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    for first in tl.static_range(0, WORDS, BLOCK):
        word = first + tl.arange(0, BLOCK)
        mask = inside[:, None] & (word < WORDS)[None, :]
        values = tl.load(source + source_starts[:, None] + word[None, :], mask=mask)
        tl.store(target + target_starts[:, None] + word[None, :], values, mask=mask)


# One kernel for all batches: by default triton compiles others for one row, multiples of 16, and each alignment.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["target_rows", "source_rows"])
def _copy_rows(  # type: ignore[no-untyped-def]
    targets, sources, target_rows, source_rows, num_rows,
    TARGET_STRIDES: tl.constexpr, SOURCE_STRIDES: tl.constexpr, WORDS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    for first in range(tl.program_id(0) * BLOCK_ROWS, num_rows, tl.num_programs(0) * BLOCK_ROWS):
        place = first + tl.arange(0, BLOCK_ROWS)
        inside = place < num_rows
        to = tl.load(target_rows + place, mask=inside, other=0).to(tl.int64)
        of = tl.load(source_rows + place, mask=inside, other=0).to(tl.int64)
        for part in tl.static_range(len(WORDS)):
            target_starts, source_starts = to * TARGET_STRIDES[part], of * SOURCE_STRIDES[part]
            _copy_part(targets[part], sources[part], target_starts, source_starts, inside, WORDS[part], BLOCKS[part])


def block_shape(words: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return how many words of each table, and how many rows, a program copies at once.

    Args:
        words: of a row of each table.
    """
    blocks = tuple(min(_BLOCK_WORDS, triton.next_power_of_2(each)) for each in words)
    return blocks, max(1, min(_MOST_BLOCK_ROWS, _BLOCK_WORDS // max(blocks, default=1)))


class RowKernel:
    """Copies rows between two sets of tables, all tables in one launch.

    Args:
        tables: [any number of rows, ...] each, every row contiguous.
        others: of the same row shapes and types, in the same order.
    """

    def __init__(self, tables: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        pairs = [_as_words(*pair) for pair in zip(tables, others, strict=True)]
        self.tables = tuple(table for table, _ in pairs)
        self.others = tuple(other for _, other in pairs)
        words = tuple(table.shape[1] for table in self.tables)
        blocks, self._block_rows = block_shape(words)
        strides = [tuple(each.stride(0) for each in side) for side in (self.tables, self.others)]
        sizes = (words, blocks, self._block_rows)
        self._constants = {True: (*strides, *sizes), False: (*strides[::-1], *sizes)}  # whether to the tables
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def to_tables(self, rows: Tensor, of_others: Tensor) -> None:
        """Do `tables[rows] = others[of_others]`, both int64 [M] on the device."""
        self._launch(self.tables, self.others, rows, of_others)

    def to_others(self, rows: Tensor, of_tables: Tensor) -> None:
        """Do `others[rows] = tables[of_tables]`, both int64 [M] on the device."""
        self._launch(self.others, self.tables, rows, of_tables)

    def _launch(
        self, targets: tuple[Tensor, ...], sources: tuple[Tensor, ...], target_rows: Tensor, source_rows: Tensor
    ) -> None:
        num_rows = target_rows.numel()
        if not num_rows or not targets:
            return
        grid = (min(_MOST_PROGRAMS, triton.cdiv(num_rows, self._block_rows)), 1, 1)
        is_to_tables = targets is self.tables
        given = (targets, sources, target_rows, source_rows, num_rows, *self._constants[is_to_tables])
        way = (is_to_tables, target_rows.dtype, source_rows.dtype)
        if (compiled := self._compiled.get(way)) is not None:  # Triton's search for it takes most of a launch
            compiled[grid](*given)
        else:
            self._compiled[way] = _copy_rows[grid](*given)


def _as_words(table: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as views of the widest words that both allow: [rows, words] each."""
    rows = [_flat_rows(table), _flat_rows(other)]
    row_bytes = rows[0].shape[1] * table.element_size()
    for word in _WORD_TYPES:
        starts = [at for each in rows for at in (each.data_ptr(), each.stride(0) * each.element_size())]
        if all(number % word.itemsize == 0 for number in (row_bytes, *starts)):
            return _in_words(rows[0], word), _in_words(rows[1], word)
    raise AssertionError("every row is whole bytes")


def _flat_rows(table: Tensor) -> Tensor:
    """Return a view [R, numbers of a row]."""
    rows = table.data.unsqueeze(-1).flatten(1)
    is_whole = rows.data_ptr() == table.data_ptr() and rows.stride(1) == 1
    assert is_whole or not rows.numel(), f"rows of strides {table.stride()} have gaps"
    return rows


def _in_words(rows: Tensor, word: torch.dtype) -> Tensor:
    num_rows, row_bytes = rows.shape[0], rows.shape[1] * rows.element_size()
    stride = rows.stride(0) * rows.element_size() // word.itemsize
    if not num_rows:
        return rows.new_empty((0, row_bytes // word.itemsize), dtype=word)
    words = rows.as_strided((rows.stride(0) * (num_rows - 1) + rows.shape[1],), (1,)).view(word)
    return words.as_strided((num_rows, row_bytes // word.itemsize), (stride, 1))
