"""A rank's process, as its launcher sees it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from embershard.distributed.supervision import (
    BEATS,
    FAILED_AT_NANOSECONDS,
    IS_FINAL,
    LAUNCHER_VARIABLE,
    STACKS_SIGNAL,
    WRITES_STACKS,
)
from embershard.launch.ranks.hang_watch import Look


class RankProcess:
    """One rank: started by the constructor, in a process group of its own, so that Ctrl-C reaches the launcher alone.

    Args:
        command: the program and its arguments.
        environment: its variables, LOCAL_RANK included.
        descriptor: of the file in memory with the ranks' `pulses`.
        pulse: this rank's row of them.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], descriptor: int, pulse: Any) -> None:
        self._pulse = pulse
        self._stacks = os.memfd_create("stacks")
        variables = {**environment, LAUNCHER_VARIABLE: f"{os.getpid()} {descriptor} {self._stacks}"}
        self._process = subprocess.Popen(
            command, env=variables, pass_fds=(descriptor, self._stacks), start_new_session=True
        )
        self._seen = psutil.Process(self._process.pid)

    @property
    def code(self) -> int | None:
        """The exit code: None while the rank runs, negative after a signal."""
        return self._process.poll()

    @property
    def has_trained(self) -> bool:
        """True after the first step."""
        return bool(self._pulse[BEATS])

    @property
    def failed_at_nanoseconds(self) -> int | None:
        """When an error ended the rank; None: it did not say."""
        return int(self._pulse[FAILED_AT_NANOSECONDS]) or None

    @property
    def is_final(self) -> bool:
        """True if the rank would fail by the same error again."""
        return bool(self._pulse[IS_FINAL])

    def look(self) -> Look | None:
        """Return what the process does; None when it has ended."""
        try:
            with self._seen.oneshot():
                times, disk, state = self._seen.cpu_times(), self._seen.io_counters(), self._seen.status()
        except psutil.Error:
            return None
        beats = int(self._pulse[BEATS])
        return Look(beats, times.user + times.system, disk.read_bytes + disk.write_bytes, state)

    def ask_to_stop(self) -> None:
        """Ask for the end of the training after its step."""
        self._process.send_signal(signal.SIGTERM)

    def ask_for_stacks(self) -> None:
        """Have the rank write the stacks of its threads, even if it is stopped or waits in C++."""
        if self._pulse[WRITES_STACKS]:
            self._process.send_signal(STACKS_SIGNAL)
            self._process.send_signal(signal.SIGCONT)

    def stacks(self) -> str:
        """Return the stacks that the rank wrote."""
        return os.pread(self._stacks, os.fstat(self._stacks).st_size, 0).decode(errors="replace")

    def kill(self) -> None:
        """End the rank and all processes that it started, at once; wait for its end."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Free what the launcher holds for the rank, after its end."""
        os.close(self._stacks)
