"""First touches of host rows, by what the system does for them (decision 0057).

    python -m benchmarks.first_touch

Two pairs, each on new rows, in turn: writes of random rows to a host tier on small or on huge pages, the first one and
those that follow; and a warm-up (the most frequent rows, sorted) by which the host rows are made later or first, and
then write-backs of trained rows. Times are of the calling thread: wall time, and CPU time, which others beside it
change less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.common import machine, make_parser, report, settings_of
from embershard.cache import MemoryRows
from embershard.cache.homes.shape import PoolShape
from embershard.cache.rows.copies import RowCopies
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.cache.rows.transfer import PlainTransfer

_DIM = 16
_STATES = [("momentum", torch.Size([]), torch.float32)]
_STEPS = 100

#: Wall and CPU milliseconds: of the first call, and the medians of those that follow.
Times = tuple[float, float, float, float]


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=33_760_000)
    parser.add_argument("--written", type=int, default=8_000, help="random rows per write")
    parser.add_argument("--warm", type=int, default=580_000, help="rows of the warm-up")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for later in (True, False):  # loops are compiled or loaded before
        warm_up(argparse.Namespace(rows=20_000, written=10, warm=10_000), later)
    cases: dict[str, Callable[[], Times]] = {
        "writes, small pages": lambda: writes(options, fills_all=False),
        "writes, huge pages": lambda: writes(options, fills_all=True),
        "warm-up, host rows later": lambda: warm_up(options, later=True),
        "warm-up, host rows first": lambda: warm_up(options, later=False),
    }
    found: dict[str, list[Times]] = {name: [] for name in cases}
    for number in range(options.rounds):
        for name, measure in list(cases.items())[:: -1 if number % 2 else 1]:
            found[name].append(measure())
    names = ("first_wall_ms", "first_cpu_ms", "next_wall_ms", "next_cpu_ms")
    medians = {
        name: {
            kind: round(statistics.median(values), 2)
            for kind, values in zip(names, zip(*runs, strict=True), strict=True)
        }
        for name, runs in found.items()
    }
    result = {"benchmark": "first_touch", "settings": settings_of(options), "ms": medians, "machine": machine()}
    report(result, options.output)


def writes(options: argparse.Namespace, fills_all: bool) -> Times:
    """Write random rows to new ones, whose weights nobody has written."""
    store = MemoryRows(PoolShape([options.rows], _DIM, torch.float32, _STATES), fills_all=fills_all)
    values = torch.randn(options.written, _DIM)

    def write(_: int) -> None:
        store.weights.index_copy_(0, torch.randint(0, options.rows, (options.written,)), values)

    return _timed(write, write)


def warm_up(options: argparse.Namespace, later: bool) -> Times:
    """Fill slots with many rows that nobody used, then write some of them back in each step."""
    initial = [ShardWeights("t", 0, _DIM, -0.01, 0.01)]
    store = MemoryRows(PoolShape([options.rows], _DIM, torch.float32, _STATES, initial=initial))
    keys = (options.rows ** torch.rand(4 * options.warm, dtype=torch.float64)).long() % options.rows
    keys = keys.unique()[: options.warm]
    slots = 1 + torch.arange(keys.numel())
    copies = RowCopies(torch.device("cpu"), store, PlainTransfer)
    copies.attach([torch.zeros(keys.numel() + 1, _DIM), torch.zeros(keys.numel() + 1)])

    def write_back(_: int) -> None:
        some: Tensor = torch.randint(0, keys.numel(), (options.written // 4,)).unique()
        copies.write_back(slots[some], keys[some])

    return _timed(lambda _: (copies.preload if later else copies.fill)(keys, slots), write_back)


def _timed(first: Callable[[int], None], following: Callable[[int], None]) -> Times:
    measured = []
    for step in range(_STEPS):
        wall, cpu = time.perf_counter(), time.thread_time()
        (following if step else first)(step)
        measured.append(((time.perf_counter() - wall) * 1e3, (time.thread_time() - cpu) * 1e3))
    after = [statistics.median(values) for values in zip(*measured[1:], strict=True)]
    return (*measured[0], after[0], after[1])


if __name__ == "__main__":
    main()
