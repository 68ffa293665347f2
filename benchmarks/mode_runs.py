"""Ranks that stay for many training runs, so that a run costs no start of Python: `benchmarks.modes` uses them.

    python -m benchmarks.mode_runs

is one rank. For every line on standard input, which is JSON with the fields of `Job`, it trains, and prints the CPU
seconds that it took.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from select import select
from typing import Any

from embershard.commands.train.run import train_run
from embershard.distributed import Supervision, process_group
from embershard.launch.screen import silence_libraries
from embershard.run_result import RunResult
from embershard.settings.files import load_config
from embershard.training.config import RunConfig


@dataclass(frozen=True)
class Job:
    """A run: its file of settings, the values of `--set`, and its folder."""

    config: str
    overrides: Sequence[str]
    run_dir: str


class RunFailedError(Exception):
    """A run that did not end as it should; the message has the last line of what its ranks wrote."""


class RankServers:
    """Ranks on this machine. After a failed run they are started again.

    Args:
        num_ranks: of a run.
        log: what the ranks write.
    """

    def __init__(self, num_ranks: int, log: Path) -> None:
        self._num_ranks, self._log = num_ranks, log
        self._processes: list[subprocess.Popen[str]] = []

    def run(self, job: Job, timeout_seconds: float) -> dict[str, Any]:
        """Train, and return the contents of result.json with "cpu_seconds" of all ranks.

        Raises:
            RunFailedError: a rank failed, or the time was up.
        """
        try:
            if not self._processes:
                self._start()
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(json.dumps(asdict(job)) + "\n")
                process.stdin.flush()
            until = time.monotonic() + timeout_seconds
            cpu_seconds = [float(self._line_of(process, until)) for process in self._processes]
            result = RunResult.read(Path(job.run_dir)).to_dict()
        except (RunFailedError, OSError, ValueError) as error:
            self.close()
            lines = self._log.read_text(errors="replace").strip().splitlines()
            raise RunFailedError(f"{error}; {lines[-1] if lines else 'nothing was written'}") from error
        return {**result, "cpu_seconds": sum(cpu_seconds)}

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        threads = max(1, len(os.sched_getaffinity(0)) // self._num_ranks)
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        common |= {"WORLD_SIZE": str(self._num_ranks), "LOCAL_WORLD_SIZE": str(self._num_ranks)}
        common |= {"OMP_NUM_THREADS": str(threads)}
        with self._log.open("w") as log:
            self._processes = [
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.mode_runs"],
                    env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
                for rank in range(self._num_ranks)
            ]
        until = time.monotonic() + 300
        for process in self._processes:
            self._line_of(process, until)

    def _line_of(self, process: subprocess.Popen[str], until: float) -> str:
        """Return a rank's next line; a line comes when a rank has done all that it was told."""
        assert process.stdout is not None
        if not select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            raise RunFailedError("the time was up")
        line = process.stdout.readline()
        if not line:
            raise RunFailedError("a rank has ended")
        return line

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
            process.communicate()
        self._processes = []


def main() -> None:
    """Be one rank, until the end of standard input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what training prints is no answer
    silence_libraries()
    with process_group() as ranks:
        answers.write("ready\n")
        for line in sys.stdin:
            job = Job(**json.loads(line))
            started = time.process_time()
            train_run(
                load_config(RunConfig, Path(job.config), list(job.overrides)),
                ranks,
                Path(job.run_dir),
                resume=None,
                unverified=False,
                changes=(),
                same_run="",
                go_on="",
                supervision=Supervision.of_this_process(),
            )
            gc.collect()
            answers.write(f"{time.process_time() - started}\n")


if __name__ == "__main__":
    main()
