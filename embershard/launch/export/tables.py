"""Files of tables, written some rows at a time: safetensors or Parquet."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from embershard.errors import naming_file

TableDtype = Literal["fp32", "fp16", "int8", "int4"]
#: The data of a file begin at a multiple of this, so that it can be mapped into memory as numbers.
_ALIGNMENT = 64
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.uint8: "U8"}


def stored(rows: Tensor, dtype: TableDtype) -> Tensor:
    """Return rows [R, dim] as they are stored.

    int8: [R, dim + 8] bytes, a number each and the row's scale and offset as float32. int4: [R, dim / 2 + 4] bytes, two
    numbers each (the first in the low bits), and scale and offset as float16. The numbers are those of torch's
    `embedding_bag_byte_prepack` and `embedding_bag_4bit_prepack`.

    >>> stored(torch.zeros(3, 16), "int4").shape
    torch.Size([3, 12])
    """
    if dtype == "int8":
        return torch.ops.quantized.embedding_bag_byte_prepack(rows.float())
    if dtype == "int4":
        return torch.ops.quantized.embedding_bag_4bit_prepack(rows.float())
    return rows.to(torch.float16 if dtype == "fp16" else torch.float32)


def write_safetensors(path: Path, blocks: Iterable[Tensor], num_rows: int, dtype: TableDtype) -> None:
    """Write a table of `num_rows` rows as the tensor "rows" of a safetensors file (https://github.com/huggingface/
    safetensors#format): a header in JSON, then the data.

    Args:
        blocks: its rows in order, [r, dim].
    """
    iterator = iter(blocks)
    first = stored(next(iterator), dtype)
    num_bytes = num_rows * first.shape[1] * first.element_size()
    entry = {"dtype": _NAMES[first.dtype], "shape": [num_rows, first.shape[1]], "data_offsets": [0, num_bytes]}
    header = json.dumps({"rows": entry}).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    with naming_file(path), path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.write(first.contiguous().numpy().data)
        for rows in iterator:
            file.write(stored(rows, dtype).contiguous().numpy().data)


def write_parquet(path: Path, blocks: Iterable[Tensor]) -> None:
    """Write a table as a Parquet file with the columns `row` (int64) and `embedding` (a list of dim numbers, fp32).

    Args:
        blocks: its rows in order, [r, dim].
    """
    first_row, writer = 0, None
    try:
        for rows in blocks:
            numbers = pa.FixedSizeListArray.from_arrays(pa.array(rows.float().reshape(-1).numpy()), rows.shape[1])
            numbered = pa.array(range(first_row, first_row + len(rows)), pa.int64())
            table = pa.table({"row": numbered, "embedding": numbers})
            with naming_file(path):
                writer = writer or pq.ParquetWriter(path, table.schema, write_page_checksum=True)
                writer.write_table(table)
            first_row += len(rows)
    finally:
        if isinstance(writer, AbstractContextManager):
            writer.__exit__(None, None, None)


class KeptRows:
    """Keeps some rows of a table that passes by in blocks.

    >>> kept = KeptRows(torch.tensor([1, 4]))
    >>> for block in kept.watch(torch.arange(10.0).view(5, 2).split(3)): pass
    >>> kept.rows.tolist()
    [[2.0, 3.0], [8.0, 9.0]]

    Args:
        wanted: row numbers [n], sorted, each once.

    Attributes:
        rows: [n, dim], once all blocks passed.
    """

    def __init__(self, wanted: Tensor) -> None:
        self.wanted, self._parts = wanted, list[Tensor]()

    def watch(self, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the blocks."""
        first_row = 0
        for rows in blocks:
            start, stop = torch.searchsorted(self.wanted, torch.tensor([first_row, first_row + len(rows)])).tolist()
            self._parts.append(rows[self.wanted[start:stop] - first_row])
            first_row += len(rows)
            yield rows

    @property
    def rows(self) -> Tensor:
        return torch.cat(self._parts)
