"""Rows in files that are larger than the memory, with and without the system's reading ahead (decision 0074).

    python -m benchmarks.mapped_rows --folder FOLDER

A host tier in FOLDER, on the disk to measure, in a control group (version 1 or 2; needs root) with less memory than the
rows take: its rows are written once, random rows are read, and a frozen state is read as a save does; in turn with the
advice of the host tier, and with the system's default. A row is read when its page has come from the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from unittest import mock

import torch

from benchmarks.common import machine, make_parser, report, settings_of
from embershard.cache.homes import memory
from embershard.cache.homes.mapped import MappedRows
from embershard.cache.homes.shape import PoolShape
from tests.limited_memory import limited_memory

_DIM = 16


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=33_000_000)
    parser.add_argument("--limit-bytes", type=int, default=700 << 20)
    parser.add_argument("--read", type=int, default=20_000, help="random rows")
    parser.add_argument("--seconds", type=float, default=10.0, help="most, for the random rows")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", default="/var/tmp", help="on the disk to measure")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"system's default": [], "advised": []}
    with limited_memory(options.limit_bytes) as group:
        group.enter()
        for _ in range(options.rounds):
            for name, measured in found.items():
                measured.append(passes(options, is_advised=name == "advised"))
    best = {name: {kind: max(each[kind] for each in runs) for kind in runs[0]} for name, runs in found.items()}
    settings = {name: value for name, value in settings_of(options).items() if name != "folder"}
    result = {"benchmark": "mapped_rows", "settings": settings, "best": best, "runs": found, "machine": machine()}
    report(result, options.output)


def passes(options: argparse.Namespace, is_advised: bool) -> dict[str, float]:
    """Write all rows, read random ones, and read all of them as a save does."""
    with contextlib.ExitStack() as stack:
        if not is_advised:
            stack.enter_context(mock.patch.object(memory, "expect_random_reads"))
            stack.enter_context(mock.patch.object(memory, "fetch_soon"))
        store = MappedRows(PoolShape([options.rows], _DIM), options.folder)
        started = time.perf_counter()
        for part in store.weights.split(1 << 18):
            part.uniform_(-1, 1)
        written = time.perf_counter()
        num_read = 0
        while num_read < options.read and time.perf_counter() - written < options.seconds:
            store.weights.index_select(0, torch.randint(0, options.rows, (100,)))
            num_read += 100
        read = time.perf_counter()
        frozen = store.freeze()
        for part in store.weights.split(frozen.block_rows):
            frozen.read(part)
        saved = time.perf_counter()
        return {
            "written_mib_per_second": round(store.host_bytes / (written - started) / 2**20, 1),
            "random_rows_per_second": round(num_read / (read - written), 1),
            "save_mib_per_second": round(store.host_bytes / (saved - read) / 2**20, 1),
        }


if __name__ == "__main__":
    main()
