"""Microseconds of Python in a launch of a planning kernel: by what is kept of an earlier launch, and by Triton's search
for it.

    python -m benchmarks.launches

No GPU needed: kernels are compiled for one (sm_90), and CUDA's driver, which takes 2 to 4 us more, is replaced by one
that does nothing. Both ways launch in turn; the processor time of the thread counts.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver

from benchmarks.common import machine, make_parser, report, settings_of
from embershard.cache.gpu import launch as launching
from embershard.cache.gpu import next_use, slot_map, victim_kernels
from embershard.cache.gpu.key_map import SPILL_CELLS
from embershard.cache.key_map import BUCKET, HASHES


class NoDriver:
    """In place of CUDA's."""

    def get_current_device(self) -> int:
        """The first GPU."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Not the default one."""
        return 7

    def get_current_target(self) -> GPUTarget:
        """An H100."""
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors are."""
        return torch.device("cpu")


def cases() -> dict[str, tuple[Any, int, tuple[Any, ...], dict[str, Any]]]:
    """Return kernels with the arguments of `launch`, by name."""
    hashed = {"FACTORS": HASHES, "BUCKET": BUCKET, "SPILL": SPILL_CELLS, "block": 128}
    of_slots, of_ids, one = _numbers(torch.int32), _numbers(torch.int64), torch.zeros(9, dtype=torch.int64)
    table = (_numbers(torch.int32), of_slots, of_ids, 100, 1000)
    appended = (of_ids, of_ids, one, *table, of_slots, of_slots, of_slots, 900, 0, 3, 7, 1023)
    ranked = (of_ids, of_ids, of_ids, of_slots, of_ids, of_ids, of_slots, of_slots, one, one, of_ids)
    return {
        "_find": (slot_map._find, 1000, (of_ids, *table, of_ids, one, of_ids, 5 << 32, 900), hashed),
        "_append": (next_use._append, 1000, appended, hashed),
        "_number_fills": (
            slot_map._number_fills, 1000, (of_slots, of_ids, of_slots, of_ids, of_slots, one), {"block": 1024},
        ),
        "rank_candidates": (
            victim_kernels.rank_candidates, 1000, (*ranked, 1000, 3, 0, 500, 0), {"USES": True, "SCORES": True},
        ),
    }  # fmt: skip


def _numbers(dtype: torch.dtype) -> Tensor:
    return torch.zeros(4096, dtype=dtype)


def _nothing(*_: Any) -> None: ...


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--launches", type=int, default=200, help="of a turn")
    parser.add_argument("--turns", type=int, default=30)
    options = parser.parse_args()
    driver.set_active(NoDriver())
    result: dict[str, Any] = {"benchmark": "launches", "settings": settings_of(options), "machine": machine()}
    result["microseconds"] = {}
    with (
        mock.patch.object(CompiledKernel, "run", property(lambda self: _nothing)),
        mock.patch.object(CompiledKernel, "_init_handles", _nothing),
    ):
        for name, case in cases().items():
            result["microseconds"][name] = compared(*case, options.launches, options.turns)
    report(result, options.output)


def compared(
    kernel: Any, count: int, arguments: tuple[Any, ...], constants: dict[str, Any], launches: int, turns: int
) -> dict[str, float]:
    """Return medians of a launch, of both ways, and the ratio."""
    took: dict[str, list[float]] = {"kept": [], "by_triton": []}
    ways = {"kept": launching._run, "by_triton": lambda kernel, grid, given, more: kernel[grid](*given, **more)}
    launching.launch(kernel, count, *arguments, **constants)
    for turn in range(turns):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            with mock.patch.object(launching, "_run", ways[name]):
                started = time.thread_time()
                for _ in range(launches):
                    launching.launch(kernel, count, *arguments, **constants)
                took[name].append((time.thread_time() - started) / launches * 1e6)
    found = {name: round(median(each), 2) for name, each in took.items()}
    return {**found, "ratio": round(median(map(lambda a, b: a / b, took["kept"], took["by_triton"])), 3)}


if __name__ == "__main__":
    main()
