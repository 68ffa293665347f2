"""Kernels for small rows: rounding in slots, and copies that narrow and widen. `loops/small.py` does the same on a CPU,
and says what the numbers are; both give the same bits.

So that they do, divisions round correctly (`div_rn`; Triton's `/` does not), no product is fused with a sum, no number
is flushed to zero (`_floor`; `tl.floor` does it), and the step is rounded to bfloat16 by its bits. A test reads all of
it in the compiled kernels (`tests/unit/cache/gpu/test_compiled.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from embershard.cache.gpu.launch import kernel, launch
from embershard.cache.homes.small_sizes import SmallType
from embershard.cache.rows.memory import on_device, record_stream
from embershard.errors import CacheError

_BLOCK_NUMBERS = 2048
_MOST_BLOCK_ROWS = 256
#: Programs of a copy: enough to fill the link, few enough to leave the device to training.
_MOST_PROGRAMS = 128


class RowsInMemory(Protocol):
    """What kernels ask of `SmallRows`."""

    small_type: SmallType
    dim: int
    tables: NDArray[Any]

    @property
    def tensors(self) -> list[Tensor]: ...

    def too_large(self, key: int, largest: float) -> CacheError: ...

    def not_rounded(self, which: str) -> CacheError: ...


class SmallSlots:
    """Slots of small rows on a GPU: rounds them, and moves rows between them and memory that kernels address, which is
    the host's, page-locked, or a buffer.

    The host waits for nothing here. What a kernel finds wrong it writes to page-locked memory, and `check` raises it,
    at the latest when rows are saved, which waits for the kernels.

    Args:
        small: the rows.
        device: of the slots.
    """

    def __init__(self, small: RowsInMemory, device: torch.device) -> None:
        self._small, self._device = small, device
        self._tables = on_device(small.tables.ravel().tolist(), device)
        on_gpu = device.type == "cuda"
        self._too_large, self._not_rounded = (torch.zeros(1, dtype=torch.int64, pin_memory=on_gpu) for _ in range(2))
        self._found = [each.numpy() for each in (self._too_large, self._not_rounded)]  # read without a wait
        self._marks, self._number = torch.zeros(0, dtype=torch.int32, device=device), 0
        columns = triton.next_power_of_2(small.dim)
        block = max(1, min(_MOST_BLOCK_ROWS, _BLOCK_NUMBERS // columns))
        #: A sum that is fused with its product has other bits.
        self._constants: dict[str, Any] = {"DIM": small.dim, "COLUMNS": columns, "enable_fp_fusion": False}
        self._constants["block"] = block
        num_tables = len(small.tables) - 1
        self._search = {"TABLES": num_tables, "STEPS": (num_tables - 1).bit_length()}

    def attach(self, rows: Tensor) -> None:
        """Use slots [S, D] from now on, on the current stream; the first ones are those that were there before."""
        if rows.shape[0] == self._marks.numel():
            return
        old, self._marks = self._marks, torch.zeros(rows.shape[0], dtype=torch.int32, device=self._device)
        self._marks[: old.numel()] = old
        record_stream(old)

    def round(self, rows: Tensor, places: Tensor, keys: Tensor) -> None:
        """Round the rows at `places` of [S, D], those of `keys` (both int64 [M], with repeats), but for full ones.

        Raises:
            CacheError: an earlier call met a weight that is NaN, infinite or too large; or `narrow` a row that was not
                rounded.
        """
        self.check()
        if self._number == _FULL.value - 1:
            self._marks.masked_fill_(self._marks != _FULL.value, 0)
            self._number = 0
        self._number += 1
        function = _round_to_halfs if self._small.small_type == "fp16" else _round_to_codes
        launch(
            function, keys.numel(), rows.data, places, keys, self._marks, self._tables, self._too_large, self._number,
            STRIDE=rows.stride(0), **self._search, **self._constants,
        )  # fmt: skip

    def widen(self, rows: Tensor, places: Tensor, of: Tensor | Sequence[Tensor]) -> None:
        """Write small rows to `places` (int64 [M]) of [S, D].

        Args:
            of: keys of rows in host memory, int64 [M]; or a buffer, in the form of `SmallRows.tensors`, whose first
                rows they are.
        """
        function = _widen_halfs if self._small.small_type == "fp16" else _widen_codes
        self._copy(function, rows, places, of)

    def narrow(self, to: Tensor | Sequence[Tensor], rows: Tensor, places: Tensor) -> None:
        """Do what `widen` does, the other way."""
        function = _narrow_to_halfs if self._small.small_type == "fp16" else _narrow_to_codes
        self._copy(function, rows, places, to, self._not_rounded)

    def _copy(
        self, function: Any, rows: Tensor, places: Tensor, other: Tensor | Sequence[Tensor], *more: Tensor
    ) -> None:
        by_key = isinstance(other, Tensor)
        parts, keys = list(self._small.tensors if by_key else other), other if by_key else places
        if self._small.small_type == "int8":
            parts.insert(1, parts[0].view(torch.int32))
        launch(
            function, places.numel(), rows.data, places, *parts, keys, self._marks, *more,
            BY_KEY=by_key, STRIDE=rows.stride(0), most_programs=_MOST_PROGRAMS, **self._constants,
        )  # fmt: skip

    def check(self) -> None:
        """Raise what kernels found that are done: `CacheError`."""
        bad, other = (int(each[0]) for each in self._found)
        if bad:
            raise self._small.too_large(bad >> 32, torch.tensor(bad & 0x7FFFFFFF).int().view(torch.float32).item())
        if other:
            raise self._small.not_rounded(f"row {other - 1} of the pool")


#: Mark of a slot whose row is full; others are the number of the last call that rounded them, which is smaller.
_FULL = tl.constexpr(2**31 - 1)
_FULL_STEP = tl.constexpr(-1)  # and as the step of a row in memory
_ONE_STEP = tl.constexpr(0x3F80)
_MOST_BITS = tl.constexpr(0x71800000)
_LEAST_STEP = tl.constexpr(2.0**-100)
_MOST_HALF_BITS, _NORMAL_HALF_BITS = tl.constexpr(0x477FE000), tl.constexpr(0x38800000)
_TURNED = tl.constexpr(0x7E00)


@triton.jit
def _mixed(bits):  # type: ignore[no-untyped-def]
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -2073254261
    return bits ^ ((bits >> 16) & 0xFFFF)


@triton.jit
def _random(own, key, inside, tables, column, TABLES: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Random bits for the weights with bits `own` [rows, columns]; of T tables one is found in STEPS steps."""
    low = tl.zeros_like(key)
    high = low + TABLES
    for _ in tl.static_range(STEPS):
        middle = (low + high) >> 1
        is_after = tl.load(tables + 4 * middle, mask=inside, other=0) <= key
        low, high = tl.where(is_after, middle, low), tl.where(is_after, high, middle)
    row = key + tl.load(tables + 4 * low + 1, mask=inside, other=0)
    seed = tl.load(tables + 4 * low + 2, mask=inside, other=0).to(tl.int32)
    first = tl.load(tables + 4 * low + 3, mask=inside, other=0).to(tl.int32)
    row_key = row.to(tl.int32) * -1640531527 + seed
    of_column = (column[None, :] + first[:, None]) * -2048144789
    return _mixed((own ^ row_key[:, None]) + of_column)


@triton.jit
def _bits(numbers):  # type: ignore[no-untyped-def]
    return numbers.to(tl.int32, bitcast=True)


@triton.jit
def _floor(numbers):  # type: ignore[no-untyped-def]
    """The next lower whole number, int32. Triton's floor takes negative numbers that are not normal for zero."""
    whole = numbers.to(tl.int32)
    return whole - (whole.to(tl.float32) > numbers).to(tl.int32)


@triton.jit
def _step(most):  # type: ignore[no-untyped-def]
    """The step of rows whose largest weights have the bits `most`."""
    bits = _bits(tl.div_rn(most.to(tl.float32, bitcast=True), 127.0))
    step = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where(step >= _LEAST_STEP, step, 0.0)


@triton.jit
def _claim(marks, place, number, inside):  # type: ignore[no-untyped-def]
    """True for the rows to round: small, and at the first of equal places. Nobody else may read one half rounded.

    One atomic decides, and its result alone: Triton gives a row to several warps where a program has fewer rows than
    threads, and each of them would load the mark by itself, before the exchange or behind it.
    """
    before = tl.atomic_max(marks + place, tl.zeros_like(place).to(tl.int32) + number, mask=inside, sem="relaxed")
    return inside & (before < number)


@triton.jit
def _tell(found, key, most, is_bad):  # type: ignore[no-untyped-def]
    tl.store(found + tl.zeros_like(key), (key << 32) | most.to(tl.int64), mask=is_bad)


@kernel("rows")
def _round_to_codes(  # type: ignore[no-untyped-def]
    rows, places, keys, marks, tables, found, number, count,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, TABLES: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place, key = tl.load(places + at, mask=at < count, other=0), tl.load(keys + at, mask=at < count, other=0)
    is_own = _claim(marks, place, number, at < count)
    column = tl.arange(0, COLUMNS)
    cells = rows + (place * STRIDE)[:, None] + column[None, :]
    inside = is_own[:, None] & (column < DIM)[None, :]
    weight = tl.load(cells, mask=inside, other=0.0)
    size = _bits(weight) & 0x7FFFFFFF
    most = tl.max(size, 1)
    is_bad = most >= _MOST_BITS
    _tell(found, key, most, is_own & is_bad)
    step = _step(tl.where(is_bad, 0, most))[:, None]
    part = (_random(_bits(weight), key, is_own, tables, column, TABLES, STEPS) & 0xFFFF).to(tl.float32) * 2.0**-16
    part = tl.where(size == most[:, None], 0.5, part)
    usable = tl.where(is_bad[:, None], 0.0, weight)
    code = _floor(tl.div_rn(usable, tl.where(step == 0.0, 1.0, step)) + part)
    code = tl.minimum(tl.maximum(code, -127), 127).to(tl.float32)
    tl.store(cells, tl.where(step == 0.0, 0.0, code * step), mask=inside & ~is_bad[:, None])


@kernel("rows")
def _round_to_halfs(  # type: ignore[no-untyped-def]
    rows, places, keys, marks, tables, found, number, count,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, TABLES: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place, key = tl.load(places + at, mask=at < count, other=0), tl.load(keys + at, mask=at < count, other=0)
    is_own = _claim(marks, place, number, at < count)
    column = tl.arange(0, COLUMNS)
    cells = rows + (place * STRIDE)[:, None] + column[None, :]
    inside = is_own[:, None] & (column < DIM)[None, :]
    weight = tl.load(cells, mask=inside, other=0.0)
    own = _bits(weight)
    size = own & 0x7FFFFFFF
    most = tl.max(size, 1)
    is_bad = most > _MOST_HALF_BITS
    _tell(found, key, most, is_own & is_bad)
    random = _random(own, key, is_own, tables, column, TABLES, STEPS) & 0x1FFF
    is_subnormal = size < _NORMAL_HALF_BITS
    magnitude = tl.where(is_subnormal, tl.abs(weight), 0.0)
    small = _floor(magnitude * 2.0**24 + random.to(tl.float32) * 2.0**-13).to(tl.float32) * 2.0**-24
    rounded = tl.where(is_subnormal, _bits(small) | (own & -(2**31)), (own + random) & -0x2000)
    tl.store(cells, rounded.to(tl.float32, bitcast=True), mask=inside & ~is_bad[:, None])


@kernel("rows", "codes", "full")
def _narrow_to_codes(  # type: ignore[no-untyped-def]
    rows, places, codes, words, steps, full, keys, marks, found, count,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, BY_KEY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < count
        place = tl.load(places + at, mask=inside, other=0)
        key = tl.load(keys + at, mask=inside, other=0) if BY_KEY else at.to(tl.int64)
        is_full = tl.load(marks + place, mask=inside, other=0) == _FULL
        number = tl.load(words + key * (DIM // 4), mask=inside & is_full, other=0).to(tl.int64)
        column = tl.arange(0, COLUMNS)
        of_row = inside[:, None] & (column < DIM)[None, :]
        weight = tl.load(rows + (place * STRIDE)[:, None] + column[None, :], mask=of_row, other=0.0)
        most = tl.max(_bits(weight) & 0x7FFFFFFF, 1)
        step = _step(most)
        divisor = tl.where(step == 0.0, 1.0, step)[:, None]
        usable = tl.where((most < _MOST_BITS)[:, None], weight, 0.0)
        code = tl.div_rn(usable, divisor).to(tl.int32)  # a whole number, if the row was rounded
        is_other = tl.max((code.to(tl.float32) * divisor != weight).to(tl.int32), 1) != 0
        step_bits = tl.where(step == 0.0, _ONE_STEP, _bits(step) >> 16).to(tl.int16)
        of_small, of_full = of_row & ~is_full[:, None], of_row & is_full[:, None]
        tl.store(codes + (key * DIM)[:, None] + column[None, :], code.to(tl.int8), mask=of_small)
        tl.store(steps + key, step_bits, mask=inside & ~is_full)
        tl.store(full + (number * DIM)[:, None] + column[None, :], weight, mask=of_full)
        tl.store(found + tl.zeros_like(key), key + 1, mask=inside & ~is_full & is_other)


@kernel("rows", "codes", "full")
def _widen_codes(  # type: ignore[no-untyped-def]
    rows, places, codes, words, steps, full, keys, marks, count,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, BY_KEY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < count
        place = tl.load(places + at, mask=inside, other=0)
        key = tl.load(keys + at, mask=inside, other=0) if BY_KEY else at.to(tl.int64)
        step_bits = tl.load(steps + key, mask=inside, other=0).to(tl.int32)
        is_full = step_bits == _FULL_STEP
        number = tl.load(words + key * (DIM // 4), mask=inside & is_full, other=0).to(tl.int64)
        column = tl.arange(0, COLUMNS)
        of_row = inside[:, None] & (column < DIM)[None, :]
        of_small, of_full = of_row & ~is_full[:, None], of_row & is_full[:, None]
        code = tl.load(codes + (key * DIM)[:, None] + column[None, :], mask=of_small, other=0)
        whole = tl.load(full + (number * DIM)[:, None] + column[None, :], mask=of_full, other=0.0)
        weight = code.to(tl.float32) * (step_bits << 16).to(tl.float32, bitcast=True)[:, None]
        cells = rows + (place * STRIDE)[:, None] + column[None, :]
        tl.store(cells, tl.where(is_full[:, None], whole, weight), mask=of_row)
        tl.store(marks + place, tl.where(is_full, _FULL, 0), mask=inside)


@kernel("rows", "halfs")
def _narrow_to_halfs(  # type: ignore[no-untyped-def]
    rows, places, halfs, keys, marks, found, count,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, BY_KEY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < count
        place = tl.load(places + at, mask=inside, other=0)
        key = tl.load(keys + at, mask=inside, other=0) if BY_KEY else at.to(tl.int64)
        column = tl.arange(0, COLUMNS)
        of_row = inside[:, None] & (column < DIM)[None, :]
        weight = tl.load(rows + (place * STRIDE)[:, None] + column[None, :], mask=of_row, other=0.0)
        is_large = (_bits(weight) & 0x7FFFFFFF) > _MOST_HALF_BITS
        half = tl.where(is_large, 0.0, weight).to(tl.float16)
        is_other = tl.max((half.to(tl.float32) != weight).to(tl.int32), 1) != 0
        turned = half.to(tl.int16, bitcast=True) ^ _TURNED
        tl.store(halfs + (key * DIM)[:, None] + column[None, :], turned.to(tl.int16), mask=of_row)
        tl.store(found + tl.zeros_like(key), key + 1, mask=inside & is_other)


@kernel("rows", "halfs")
def _widen_halfs(  # type: ignore[no-untyped-def]
    rows, places, halfs, keys, marks, count,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, BY_KEY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < count
        place = tl.load(places + at, mask=inside, other=0)
        key = tl.load(keys + at, mask=inside, other=0) if BY_KEY else at.to(tl.int64)
        column = tl.arange(0, COLUMNS)
        of_row = inside[:, None] & (column < DIM)[None, :]
        turned = tl.load(halfs + (key * DIM)[:, None] + column[None, :], mask=of_row, other=0)
        weight = (turned ^ _TURNED).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        tl.store(rows + (place * STRIDE)[:, None] + column[None, :], weight, mask=of_row)
        tl.store(marks + place, tl.zeros_like(place).to(tl.int32), mask=inside)
