"""Types in which rows travel between ranks as bytes.

Letters: N rows, D columns of a row, F features beside each other in a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

#: Of a row, in float32.
SCALE_BYTES = 4


class WireType(ABC):
    """A type of rows between ranks."""

    @abstractmethod
    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of so many columns."""

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Return rows [N, D] as bytes, uint8 [N, `row_bytes(D)`]."""

    @abstractmethod
    def decode(self, sent: Tensor) -> Tensor:
        """Return what was encoded, as float32 [N, D]."""

    def sum_bytes(self, dims: Sequence[int]) -> int:
        """Return the bytes of a row of features beside each other, with so many columns each."""
        return sum(map(self.row_bytes, dims))

    def encode_beside(self, rows: Tensor, dims: Sequence[int]) -> Tensor:
        """Return rows [N, sum of D] of F features beside each other as bytes, uint8 [N, `sum_bytes(dims)`]: each
        feature's row is encoded by itself."""
        if len(set(dims)) == 1:
            return self.encode(rows.reshape(-1, dims[0])).view(len(rows), self.sum_bytes(dims))
        parts = [self.encode(part) for part in rows.split(list(dims), dim=1)]
        return torch.cat(parts, dim=1) if parts else rows.new_empty(len(rows), 0, dtype=torch.uint8)

    def decode_beside(self, sent: Tensor, dims: Sequence[int]) -> Tensor:
        """Return what `encode_beside` encoded, as float32 [N, sum of D]."""
        if len(set(dims)) == 1:
            return self.decode(sent.reshape(-1, self.row_bytes(dims[0]))).view(len(sent), len(dims) * dims[0])
        parts = [self.decode(part) for part in sent.split([self.row_bytes(dim) for dim in dims], dim=1)]
        return torch.cat(parts, dim=1) if parts else sent.new_empty(len(sent), 0, dtype=torch.float32)


class CastType(WireType):
    """Each number in a float type. As in FBGEMM's codecs, what is too large becomes its largest number.

    >>> CastType(torch.float16).decode(CastType(torch.float16).encode(torch.tensor([[0.5, 1e9]])))
    tensor([[5.0000e-01, 6.5504e+04]])
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._largest = dtype, torch.finfo(dtype).max

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of so many columns."""
        return columns * self._dtype.itemsize

    def encode(self, rows: Tensor) -> Tensor:
        """Return rows [N, D] as bytes."""
        if self._dtype != torch.float32:
            rows = rows.clamp(-self._largest, self._largest)
        return rows.to(self._dtype).contiguous().view(torch.uint8)

    def decode(self, sent: Tensor) -> Tensor:
        """Return what was encoded, as float32 [N, D]."""
        return sent.clone(memory_format=torch.contiguous_format).view(self._dtype).float()


class ScaledType(WireType):
    """A byte for each number, and a scale for each row: a row's largest magnitude is the type's largest number, and
    others are rounded to the nearest one.

    A row that has a NaN or an infinite number comes out with a NaN or an infinite number, so that a training that
    diverged is noticed where the row is used. Rows below 1e-35 come out as zeros.

    Args:
        dtype: of a number, one byte: int8, or a float8.
        largest: its largest number.

    >>> int8 = ScaledType(torch.int8, 127)
    >>> int8.row_bytes(2), int8.decode(int8.encode(torch.tensor([[12.7, -0.16]])))
    (6, tensor([[12.7000, -0.2000]]))
    """

    def __init__(self, dtype: torch.dtype, largest: float) -> None:
        self._dtype, self._largest = dtype, largest
        self._least_scale = torch.finfo(torch.float32).tiny
        self._values = torch.arange(256, dtype=torch.uint8).view(dtype).float()  # of each byte

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of so many columns."""
        return columns + SCALE_BYTES

    def encode(self, rows: Tensor) -> Tensor:
        """Return rows [N, D] as bytes: its numbers, then its scale."""
        rows = rows.float()
        scales = rows.abs().amax(dim=1, keepdim=True).div_(self._largest)  # of a row with a NaN: NaN
        scales.masked_fill_(scales < self._least_scale, 0.0)
        numbers = rows / scales.masked_fill(scales == 0, 1.0)
        return torch.cat([self.rounded(numbers).view(torch.uint8), scales.view(torch.uint8)], dim=1)

    def rounded(self, numbers: Tensor) -> Tensor:
        """Return the nearest numbers of the type; to the even one of two."""
        return (numbers if self._dtype.is_floating_point else numbers.round_()).to(self._dtype)

    def decode(self, sent: Tensor) -> Tensor:
        """Return what was encoded, as float32 [N, D]."""
        numbers, scales = sent.split([sent.shape[1] - SCALE_BYTES, SCALE_BYTES], dim=1)
        scales = scales.clone(memory_format=torch.contiguous_format)  # aligned, as `view` needs it
        if numbers.is_cpu and self._dtype.is_floating_point:  # torch casts them in 5 ms a million, a look-up takes 1
            values = self._values.index_select(0, numbers.reshape(-1).int()).view(numbers.shape)
        else:
            values = numbers.view(self._dtype).float()
        return values * scales.view(torch.float32)


WIRE_TYPES: dict[str, WireType] = {
    "fp32": CastType(torch.float32),
    "fp16": CastType(torch.float16),
    "bf16": CastType(torch.bfloat16),
    "int8": ScaledType(torch.int8, 127.0),
    "fp8": ScaledType(torch.float8_e4m3fn, 448.0),
}
