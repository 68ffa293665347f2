"""Host memory in front of a file: rows read beside the optimum, and steps under a limit of memory.

    python -m benchmarks.file_tier --replay [--path FILE_OR_FOLDER]
    python -m benchmarks.file_tier --limit [--folder FOLDER]
    python -m benchmarks.file_tier --sums [--folder FOLDER]

`--replay` replays streams (clicks at --path; generated ones, Zipf 1.05 and 0.7, and one whose popularity moves) through
slots on the device and places in host memory (benchmarks/two_levels.py), with windows of 0.5 to 24
and with LRU, and sets the rows read beside the optimum's (MIN: it knows everything, and holds one batch). Sizes are
shares of the rows that occur. A *window* is the look-ahead in batches, times the distinct rows of a batch, over the
places. Target: at most 1.3 at a window of 6.

More references explain the difference, at that window: `holds` is the optimum that has the rows of so many batches
ahead, as the replay does; `rule` is the rule for victims with the newest ranking for each of them, which holds them,
too; `counts` is that rule when it knows how often the whole stream uses each row, as no profile does. What the replay
reads beyond the rule is due to evictions in bulk, and to rows on the device.

`--limit` trains on tables of 4 times the memory of a control group (needs root): `file` and `mmap` in it, `memory`
without it, in turn; and `memory` in it, which must be ended by the system.

`--sums` trains with checksums of pages and without them, 20 steps of each in turn: seconds of a step on the clock and
of the process's CPU time, and the ratios of their medians; and the share of that CPU time which the sums take.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.common import machine, make_parser, report, settings_of
from benchmarks.fill_optimality import Stream, read_stream
from benchmarks.two_levels import replay_two_levels
from embershard.cache.config import CachePolicy
from embershard.cache.file import filed_rows
from embershard.cache.file.file_rows import FileRows
from embershard.data import CriteoConfig, DataConfig, SyntheticConfig
from embershard.extras.profile_picture.hit_rate_curve import look_ahead_rule, offline_optimum
from embershard.planning.simulate.file_tier import FileTraffic, Levels
from embershard.sharding.run_shape import ReplaySettings
from tests.limited_memory import limited_memory

WINDOWS = (0.5, 1.5, 3, 6, 12, 24)
HOST_SHARES = (0.05, 0.1)
DEVICE_SHARE = 0.02
TARGET, TARGET_WINDOW = 1.3, 6
READ_AHEAD, PREFETCH = 8, 2
_TURN_STEPS = 20
ROWS_PER_PAGE = 4096 // 68  # of 16 columns, with the state of row-wise Adagrad
_ROOT = Path(__file__).parents[1]


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--replay", action="store_true")
    what.add_argument("--limit", action="store_true")
    what.add_argument("--sums", action="store_true")
    what.add_argument("--train", metavar="JSON", help=argparse.SUPPRESS)
    parser.add_argument("--path", help="a file or a folder of Criteo click logs; without it, no real clicks")
    parser.add_argument("--batches", type=int, default=2000, help="of each generated stream")
    parser.add_argument("--limit-bytes", type=int, default=1280 << 20)
    parser.add_argument("--host-bytes", type=int, default=320 << 20, help="rows in memory, with host = file")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--locality", type=float, default=0.5, help="share of the lookups that follow the popularity")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default="/var/tmp/embershard_file_tier", help="on the disk to measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.train:
        print(json.dumps(train(json.loads(options.train))))
        return
    found = replays(options) if options.replay else sums(options) if options.sums else limits(options)
    settings = {name: value for name, value in settings_of(options).items() if name not in ("train", "folder")}
    report({"benchmark": "file_tier", "settings": settings, **found, "machine": machine()}, options.output)


# -- rows read over the optimum


@dataclass
class Point:
    """The figures of one stream and share of its rows in host memory; by look-ahead, or "lru"."""

    stream: str
    batch_size: int
    batches: int
    mean_unique_ids: float
    distinct_rows: int
    host_share: float
    places: int
    slots: int
    optimum_rows_read: int
    target_lookahead: int
    """Batches known at a window of 6."""
    holds_over_optimum: float | None = None
    rule_over_optimum: float | None = None
    counts_over_optimum: float | None = None
    windows: dict[str, float] = field(default_factory=dict)
    over_optimum: dict[str, float] = field(default_factory=dict)
    traffic: dict[str, dict[str, int]] = field(default_factory=dict)
    reached: bool | None = None


def replays(options: argparse.Namespace) -> dict[str, Any]:
    """Replay all streams."""
    points = []
    for stream in open_streams(options):
        for share in HOST_SHARES:
            points.append(measure(stream, share))
            print(_line(points[-1]), file=sys.stderr, flush=True)
    target = f"over_optimum <= {TARGET} with target_lookahead"
    return {"target": target, "points": [asdict(point) for point in points]}


def open_streams(options: argparse.Namespace) -> Iterator[Stream]:
    """Yield the streams. Batches are so small that a host tier of a tenth of the rows holds 30 to 85 of them, as host
    memory does of a real run: the nine that have their places are then few."""
    config = DataConfig(eval_fraction=0.0, shuffle=False, num_workers=0)
    if options.path:
        yield read_stream("criteo", 2, replace(config, kind="criteo", path=options.path, criteo=CriteoConfig(20_000)))
    yield zipf(1.05, options.batches)
    yield zipf(0.7, options.batches)
    yield read_stream("drift", 8, replace(config, synthetic=SyntheticConfig(8 * options.batches, 0.01, drift=0.5)))


def zipf(exponent: float, num_batches: int, num_rows: int = 200_000, batch_size: int = 16, bag: int = 8) -> Stream:
    """Return lookups in one table, whose rows' frequencies fall with a power of their rank."""
    generator = np.random.default_rng(0)
    frequency = np.cumsum(1.0 / np.arange(1, num_rows + 1) ** exponent)
    drawn = np.searchsorted(frequency, generator.random((num_batches, batch_size * bag)) * frequency[-1])
    rows = torch.from_numpy(generator.permutation(num_rows)[np.minimum(drawn, num_rows - 1)])
    lengths = [torch.tensor([batch_size * bag])] * num_batches
    return Stream(f"zipf {exponent:g}", batch_size, [num_rows], list(rows), lengths)


def measure(stream: Stream, host_share: float) -> Point:
    """Replay a stream with places for a share of the rows that occur, with all look-aheads and with LRU."""
    batches = [batch.unique().numpy() for batch in stream.batches]
    distinct_rows, unique = int((stream.uses() > 0).sum()), float(np.mean([batch.size for batch in batches]))
    places, slots = round(host_share * distinct_rows), round(DEVICE_SHARE * distinct_rows)
    target_lookahead = round(TARGET_WINDOW * places / unique)

    def read(fills: int | None) -> int:
        assert fills is not None, "a batch does not fit the places"
        return fills - distinct_rows  # a row's first fill is none

    optimum = read(offline_optimum(batches, places))
    sizes = (places, slots, optimum, target_lookahead)
    point = Point(stream.name, stream.batch_size, len(batches), round(unique, 1), distinct_rows, host_share, *sizes)
    if (held := offline_optimum(batches, places, READ_AHEAD)) is not None:
        rule, counts = (
            look_ahead_rule(batches, places, target_lookahead, READ_AHEAD, counts_known)
            for counts_known in (False, True)
        )
        point.holds_over_optimum, point.rule_over_optimum, point.counts_over_optimum = (
            round(read(fills) / max(1, optimum), 3) for fills in (held, rule, counts)
        )
    for lookahead in sorted({min(round(window * places / unique), len(batches)) for window in WINDOWS}):
        _add(point, str(lookahead), replayed(stream, places, slots, lookahead, CachePolicy()))
        point.windows[str(lookahead)] = round(lookahead * unique / places, 2)
    _add(point, "lru", replayed(stream, places, slots, READ_AHEAD, CachePolicy("lru", by_next_use=False)))
    point.reached = point.over_optimum[str(target_lookahead)] <= TARGET
    return point


def replayed(stream: Stream, places: int, slots: int, lookahead: int, policy: CachePolicy) -> FileTraffic:
    """Replay a stream through both levels."""
    levels = Levels(slots, places, ROWS_PER_PAGE, READ_AHEAD)
    settings = ReplaySettings(policy, lookahead, PREFETCH)
    return replay_two_levels(stream, stream.rows_per_table, levels, settings)


def _add(point: Point, name: str, traffic: FileTraffic) -> None:
    point.traffic[name] = asdict(traffic)
    point.over_optimum[name] = round(traffic.rows_read / max(1, point.optimum_rows_read), 3)


def _line(point: Point) -> str:
    curve = ", ".join(f"{point.windows.get(name, name)}: {ratio}" for name, ratio in point.over_optimum.items())
    references = f"holds {point.holds_over_optimum}, rule {point.rule_over_optimum}, counts {point.counts_over_optimum}"
    verdict = "reached" if point.reached else "not reached"
    return (
        f"{point.stream}, {point.host_share:.0%}: optimum {point.optimum_rows_read:,} rows; over it, by window: "
        f"{curve}; {references}; target {verdict}"
    )


# -- steps under a limit of memory


def limits(options: argparse.Namespace) -> dict[str, Any]:
    """Train all kinds in turn, under the limit or without one."""
    runs: dict[str, list[dict[str, Any]]] = {"file": [], "mmap": [], "memory without a limit": []}
    for turn in range(options.rounds):
        for name in list(runs) if turn % 2 == 0 else list(runs)[::-1]:
            runs[name].append(limited_run(options, name.partition(" ")[0], is_limited="without" not in name))
            print(name, runs[name][-1], file=sys.stderr, flush=True)
    control = limited_run(options, "memory", is_limited=True)
    medians = {
        name: {key: statistics.median(each[key] for each in done) for key in ("median_step_seconds", "peak_bytes")}
        for name, each_run in runs.items()
        if (done := [run for run in each_run if run["exit_code"] == 0])
    }
    return {"medians": medians, "runs": runs, "memory under the limit": control}


def _case(options: argparse.Namespace, host: str) -> dict[str, Any]:
    return {
        "host": host,
        "dim": options.dim,
        "rows": 4 * options.limit_bytes // (4 * options.dim + 4),
        "host_bytes": options.host_bytes,
        "batch_size": options.batch_size,
        "steps": options.steps,
        "locality": options.locality,
        "folder": options.folder,
    }


def limited_run(options: argparse.Namespace, host: str, is_limited: bool) -> dict[str, Any]:
    """Train with rows kept in one way; return what it printed, its exit code, and the most memory it had."""
    case = _case(options, host)
    command = [sys.executable, "-m", "benchmarks.file_tier", "--train", json.dumps(case)]
    with limited_memory(options.limit_bytes if is_limited else 1 << 40) as group:
        done = group.run(command, cwd=_ROOT)
        lines = done.stdout.splitlines()
        found = json.loads(lines[-1]) if done.returncode == 0 else {"error": done.stderr[-500:]}
        return {"exit_code": done.returncode, "peak_bytes": group.peak_bytes, **found}


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train a case in this process; return the median of its steps, without the first ten, and what was read late."""
    from embershard.distributed import process_group
    from embershard.launch.screen import silence_libraries
    from embershard.sharding.torchrec import cached_embeddings
    from embershard.training.trainer import Trainer

    silence_libraries()
    with process_group("cpu") as ranks:
        trainer = Trainer(_config(case), ranks)
        for _ in trainer.train():
            pass
        filed = [getattr(pool, "filed", None) for pool in cached_embeddings(trainer.model)]
        counts = [asdict(rows.counts) for rows in filed if rows is not None]
        trainer.close()
    seconds = sorted(list(trainer.step_seconds)[10:])
    return {
        "median_step_seconds": round(statistics.median(seconds), 5),
        "p90_step_seconds": round(seconds[len(seconds) * 9 // 10], 5),
        "files": counts,
    }


class _TimedSums(FileRows):
    seconds = 0.0  # of CPU time, of all files; a lost addition of two threads changes little

    def _sums_of(self, memory: Any, places: Any) -> Any:
        started = time.thread_time()
        found = super()._sums_of(memory, places)
        _TimedSums.seconds += time.thread_time() - started
        return found


class _WithoutSums(FileRows):
    def _sums_of(self, memory: Any, places: Any) -> Any:
        return np.int32(0)


def sums(options: argparse.Namespace) -> dict[str, Any]:
    """Train two models in turn, one of them without checksums."""
    from embershard.distributed import process_group
    from embershard.launch.screen import silence_libraries
    from embershard.sharding.torchrec import cached_embeddings
    from embershard.training.trainer import Trainer

    silence_libraries()
    config = _config(_case(options, "file"))
    config = replace(config, train=replace(config.train, log_every=_TURN_STEPS))
    found: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}  # seconds, and of the CPU, of a step
    with process_group("cpu") as ranks:
        trainers, runs = {}, {}
        for name, kind in (("with", _TimedSums), ("without", _WithoutSums)):
            with mock.patch.object(filed_rows, "FileRows", kind):
                trainers[name] = Trainer(config, ranks)
            runs[name] = trainers[name].train()
        for turn in range(options.steps // _TURN_STEPS):
            for name in list(runs) if turn % 2 == 0 else list(runs)[::-1]:
                began, steps = (time.perf_counter(), time.process_time()), trainers[name].steps
                while trainers[name].steps < steps + _TURN_STEPS:
                    next(runs[name])
                seconds = (time.perf_counter() - began[0]) / _TURN_STEPS, (time.process_time() - began[1]) / _TURN_STEPS
                found[name].append(seconds)
        files = [asdict(pool.host.counts) for pool in cached_embeddings(trainers["with"].model)]
        for trainer in trainers.values():
            trainer.close()
    medians = {name: [statistics.median(each) for each in zip(*turns, strict=True)] for name, turns in found.items()}
    ratios = [one / other for one, other in zip(medians["with"], medians["without"], strict=True)]
    names = ("step_seconds", "cpu_seconds")
    return {
        **{name: dict(zip(names, values, strict=True)) for name, values in medians.items()},
        "ratios": dict(zip(names, ratios, strict=True)),
        "share_of_cpu": _TimedSums.seconds / (_TURN_STEPS * sum(cpu for _, cpu in found["with"])),
        "files": files,
        "turns": found,
    }


def _config(case: dict[str, Any]) -> Any:
    from embershard.settings.decoding import decode
    from embershard.training.config import RunConfig

    cache: dict[str, Any] = {"ratio": 0.01, "host": case["host"]}
    if case["host"] != "memory":
        cache["host_dir"] = case["folder"]
    if case["host"] == "file":
        cache["host_bytes"] = case["host_bytes"]
    criteo_rows, steps = 33_762_577, case["steps"]  # rows of `scale` 1
    synthetic = {
        "scale": case["rows"] / criteo_rows,
        "num_samples": case["batch_size"] * (steps + 200),
        "locality": case["locality"],
    }
    sections = {
        "data": {"synthetic": synthetic, "num_workers": 0},
        "model": {"embedding_dim": case["dim"], "dense_arch_layer_sizes": [64, case["dim"]]},
        "cache": cache,
        "look_ahead": {"lookahead": 64},
        "train": {
            "batch_size": case["batch_size"],
            "max_steps": case["steps"],
            "log_every": case["steps"],
            "device": "cpu",
        },
    }
    return decode(RunConfig, sections)


if __name__ == "__main__":
    main()
