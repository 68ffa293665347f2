"""The program of `planbench_ranks`' ranks: trains several plans of one run in turn, and times their steps."""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from embershard.cache import CacheGrowthWarning
from embershard.distributed import Ranks, process_group
from embershard.launch.screen import silence_libraries
from embershard.settings.decoding import decode
from embershard.sharding.config import ShardingConfig
from embershard.sharding.torchrec import cache_stats
from embershard.training.config import RunConfig
from embershard.training.trainer import Trainer

_LEAST_ROUNDS = 3
_BUSY = ("user", "system", "nice", "irq", "softirq", "steal")


class _Timed:
    """The trainer of one plan on this rank. Its methods are collective."""

    def __init__(self, config: RunConfig, plan: str, ranks: Ranks) -> None:
        self._ranks = ranks
        self._trainer = Trainer(dataclasses.replace(config, sharding=ShardingConfig(plan=plan)), ranks)
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.foreign: list[float] = []
        self.run(1)

    def segment(self, skip: int, steps: int) -> None:
        """Time one segment: the median step, processor time of all ranks per step, and the share of the machine's
        processor time that other programs took."""
        self.run(skip)
        self._ranks.barrier()
        began = time.perf_counter(), _busy_seconds(), time.process_time()
        self.wall.append(statistics.median(self.run(steps)))
        wall, busy, own = (b - a for a, b in zip(began, _now(), strict=True))
        of_all = sum(self._ranks.all_gather_objects(own))
        self.cpu.append(of_all / steps)
        self.foreign.append(max(0.0, (busy - of_all) / (wall * (psutil.cpu_count() or 1))))

    def run(self, steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            with self._trainer.upcoming.next() as batch:
                self._trainer.step(batch)
            seconds.append(time.perf_counter() - began)
        return seconds

    def close(self) -> dict[str, Any]:
        """End the trainer; return its figures."""
        growths = sum(table.overflow_growths for table in cache_stats(self._trainer.model))
        self._trainer.close()
        growths = sum(self._ranks.all_gather_objects(growths))
        return {"wall_seconds": self.wall, "cpu_seconds": self.cpu, "foreign": self.foreign, "growths": growths}


def _now() -> tuple[float, float, float]:
    return time.perf_counter(), _busy_seconds(), time.process_time()


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in _BUSY))


def train(job: dict[str, Any], ranks: Ranks) -> list[dict[str, Any]]:
    """Train the plans of a task in turn; return the figures of each. Collective."""
    config = decode(RunConfig, job["settings"])
    timed = [_Timed(config, plan, ranks) for plan in job["plans"]]
    ends = time.perf_counter() + job["seconds"]
    for turn in range(job["rounds"]):
        if turn >= _LEAST_ROUNDS and ranks.from_first(lambda: time.perf_counter() > ends):
            break
        for each in timed if turn % 2 == 0 else timed[::-1]:
            each.segment(job["skip"], job["steps"])
    return [each.close() for each in timed]


def main(argv: Sequence[str]) -> None:
    """Run `python -m benchmarks.planbench_steps JOBS`: path of a JSON file."""
    silence_libraries()
    warnings.filterwarnings("ignore", category=CacheGrowthWarning)
    with process_group("cpu") as ranks:
        for job in json.loads(Path(argv[0]).read_text()):
            found = train(job, ranks)
            gc.collect()  # a trainer is a cycle: its tables
            if ranks.is_first:
                Path(job["result"]).write_text(json.dumps(found))
                print(job["result"], [statistics.median(each["wall_seconds"]) for each in found], file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
