"""What launches hand to compiled kernels, without a GPU: run in a process of its own, and printed as JSON.

python -m tests.unit.cache.gpu.launched
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver

from benchmarks.launches import NoDriver
from embershard.cache.gpu import launch as launching
from embershard.cache.rows import uva_transfer

FACTORS = (3, 5)


@launching.kernel("cells")
def scale(cells, values, number, count, FACTORS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A kernel with all that a launch tells apart."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(cells + at, mask=at < count) * FACTORS[0] * FACTORS[1] + number
    tl.store(values + at, found, mask=at < count)


def _address(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return [_address(each) for each in argument]
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def main() -> None:
    """Launch twice for each difference, and once more without what is kept."""
    launched: list[list[Any]] = []

    def run(self: CompiledKernel) -> Any:
        def note(*given: Any) -> None:
            grid, stream, arguments = given[:3], given[3], given[9:]
            named = [_address(each) for each in arguments]
            launched.append([grid, stream, self.src.signature, str(self.src.attrs), named])

        return note

    cells, values = torch.zeros(1024, dtype=torch.int32), torch.zeros(1000, dtype=torch.int64)
    cases = {
        "as at first": (cells, values, 5, {}),
        "another number": (cells, values, 2**31 - 1, {}),
        "a number of 64 bits": (cells, values, 2**31, {}),
        "a negative one": (cells, values, -(2**31) - 1, {}),
        "cells that begin elsewhere": (cells[1:], values, 5, {}),
        "values that begin elsewhere": (cells, values[1:], 5, {}),
        "values of 32 bits": (cells, values.to(torch.int32), 5, {}),
        "other constants": (cells, values, 5, {"block": 256, "FACTORS": (3, 7)}),
        "an option of the compiler": (cells, values, 5, {"num_warps": 8}),
    }
    driver.set_active(NoDriver())
    found = {}
    with (
        mock.patch.object(CompiledKernel, "run", property(run)),
        mock.patch.object(CompiledKernel, "_init_handles", return_value=None),
    ):
        for turn in range(2):
            for name, (cells_, values_, number, more) in cases.items():
                given = (scale, 900, cells_, values_, number)
                constants = {"FACTORS": FACTORS, **more}
                launching.launch(*given, **constants)
                if turn:
                    with mock.patch.dict(launching._compiled, clear=True):
                        launching.launch(*given, **constants)
                    found[name] = launched[-2:]
        slots, host = torch.zeros(9, 64), torch.zeros(99, 64)
        kernel = uva_transfer.RowKernel([slots], [host])
        at, keys = torch.arange(3), torch.arange(3, 6)
        for name, copy in (("rows to slots", kernel.to_tables), ("rows to the host", kernel.to_others)):
            for _ in range(2):
                copy(at, keys)
            kernel._compiled.clear()
            copy(at, keys)
            found[name] = launched[-2:]
    print(json.dumps({"compiled": len(launching._compiled), "launched": found}, default=str))


if __name__ == "__main__":
    main()
