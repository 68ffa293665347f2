"""Runs with rows in a file, killed (SIGKILL) at pages that are read or written, and at file operations of saves; what
is left must be valid, equal a run with all rows in memory bit for bit, and go on with it through more kills to the end.
`python -m tests.faults.file_kills [--schedules N] [--seed N]`.
"""

from __future__ import annotations

import argparse
import importlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from embershard.distributed import complete_checkpoints
from embershard.distributed.checkpoint.load import verify_alone
from embershard.sharding.torchrec import cached_embeddings
from embershard.training.checkpoint.resume import resume_run
from embershard.training.config import RunConfig
from embershard.training.trainer import Trainer
from tests.faults.save_chains import config_of, different_rows, killed
from tests.ranks import resharding
from tests.ranks.planned import here
from tests.ranks.resharding import Layout

LAYOUT = Layout("table_wise", ratio=0.15, policy="lookahead", lookahead=12, steps=21)
#: What lives import late: once here, not in each of them.
_LATE = ("embershard.cache.loops.compiled",)
_ROW_BYTES, _ROWS_IN_MEMORY = 36, 260
_LIVES = 5  # that are killed, of a run


def plain_config(samples: Path) -> RunConfig:
    return config_of(LAYOUT, samples, full_every=1, keep_last=99)


def filed_config(samples: Path) -> RunConfig:
    config = config_of(LAYOUT, samples)
    config = replace(config, train=replace(config.train, log_every=100))
    of_file = {"host": "file", "host_dir": str(samples / "rows"), "host_bytes": _ROWS_IN_MEMORY * _ROW_BYTES}
    return replace(config, cache=replace(config.cache, **of_file))


def live(config: RunConfig, checkpoints: Path, counts: Path) -> None:
    """Train to the end, from the newest valid checkpoint on; write the rows that were read and written to a file."""
    trainer = Trainer(config, here(), checkpoints)
    resume_run(trainer)
    for _ in trainer.train():
        pass
    found = [pool.host.counts for pool in cached_embeddings(trainer.model)]
    trainer.close()
    counts.write_text(f"{sum(each.rows_read for each in found)} {sum(each.rows_written for each in found)}")


class FileKills:
    """Kills of runs with rows in a file, beside a run with all rows in memory that was not killed.

    Args:
        root: an empty folder.

    Attributes:
        num_operations: of a run that is not killed, about: threads may find rows that are still on their way.
        rows_read, rows_written: by that run.
        num_kills: so far.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._samples, self._reference = root, root / "samples", root / "reference"
        for name in _LATE:
            importlib.import_module(name)
        self._samples.mkdir()
        resharding.write_samples(self._samples / "samples.parquet")
        status, _ = killed(self._reference, lambda: self._live(plain_config, "reference"))
        assert status == 0, f"the run in memory ended with status {status}"
        folder, self.num_kills = self._new(), 0
        status, self.num_operations = killed(folder, lambda: self._live(filed_config))
        assert status == 0, f"the run with a file ended with status {status}"
        assert self._wrong(folder, is_ended=True) == ""
        self.rows_read, self.rows_written = map(int, (root / "counts").read_text().split())

    def try_all(self, points: Sequence[int]) -> str:
        """Kill at an operation of each life of a run, and then let it live to its end; return what is wrong, or
        nothing. After a life that ends before its kill, the run begins anew."""
        folder = self._new()
        for at in (*points, None):
            status, _ = killed(folder, lambda: self._live(filed_config), at)
            if status not in (0, signal.SIGKILL) or (at is None and status):
                return f"killed at {points}: at {at} it ended with status {status}"
            if problem := self._wrong(folder, is_ended=not status):
                return f"killed at {points}: after {at}: {problem}"
            self.num_kills += status != 0
            if at is not None and not status:
                self._new()
        return ""

    def _live(self, make_config: Callable[[Path], RunConfig], checkpoints: str = "run") -> None:
        live(make_config(self._samples), self._root / checkpoints, self._root / "counts")

    def _wrong(self, folder: Path, is_ended: bool) -> str:
        """Verify all that is complete, and compare the newest; nothing may be left of the rows' files."""
        found = complete_checkpoints(folder)
        last = f"step_{LAYOUT.steps}"
        if is_ended and (not found or found[-1].name != last):
            return f"{last} is missing"
        try:
            for path in found:
                verify_alone(path)
            if found and (different := different_rows(found[-1], self._reference / found[-1].name)):
                return f"{found[-1].name}: {different} differ"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        left = [path.name for path in (self._samples / "rows").iterdir()]
        return f"{left} are left" if left else ""

    def _new(self) -> Path:
        folder = self._root / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.file_kills", description=__doc__)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    problems, started = list[str](), time.perf_counter()
    chooser = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        kills = FileKills(Path(folder))
        print(
            f"{kills.num_operations} operations, {kills.rows_read} rows read, {kills.rows_written} written", flush=True
        )
        for _ in range(0, arguments.schedules, _LIVES):
            points = [chooser.randrange(kills.num_operations // 2) for _life in range(_LIVES)]
            if problem := kills.try_all(points):
                problems.append(problem)
                print(problem, flush=True)
            print(f"{kills.num_kills} kills, {time.perf_counter() - started:.0f} s", flush=True)
    print(f"{time.perf_counter() - started:.0f} s; wrong: {problems or 'nothing'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
