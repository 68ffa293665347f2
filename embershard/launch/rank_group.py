"""The ranks of a run on this machine: one attempt, from their start to their end; and whether they hang."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from embershard.distributed.supervision import (
    BEATS,
    FAILED_AT_NANOSECONDS,
    IS_FINAL,
    LAUNCHER_VARIABLE,
    STACKS_SIGNAL,
    WRITES_STACKS,
    pulses,
)
from embershard.launch.rank import hand_over
from embershard.launch.stop_signals import StopAsked, stop_code
from embershard.machine import OWN_THREADS_VARIABLE, THREADS_VARIABLE, cores_of_a_rank
from embershard.settings.files import run_folder_of

_POLL_SECONDS = 0.1
_LOOK_SECONDS = 1.0
_STACKS_SECONDS = 2.0  # for ranks to write them
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
_GRACE_SECONDS = 5.0  # after a rank failed, the others end by themselves: their collectives fail


@dataclass(frozen=True)
class Ended:
    """How the ranks ended.

    Attributes:
        code: exit code of the command.
        message: what the user should know besides what the ranks said; may be empty.
        may_restart: a new start may help.
    """

    code: int
    message: str = ""
    may_restart: bool = False


class RankGroup:
    """Ranks that were started together.

    Args:
        num_ranks: all of them on this machine.
        command: the program of each and its arguments.
        address: host and port of their store; None for one rank, which has its own.
        asked: the user's requests to stop.
        hang_seconds: see `HangWatch`; None: ranks may hang.
        stacks: file for the stacks of ranks that hang.
        job: what each rank is to do.
    """

    def __init__(
        self,
        num_ranks: int,
        command: Sequence[str],
        address: tuple[str, int] | None,
        asked: StopAsked,
        hang_seconds: float | None,
        stacks: Path | None,
        job: object = None,
    ) -> None:
        self._asked, self._stacks_file = asked, stacks
        self._watch = None if hang_seconds is None else HangWatch(hang_seconds)
        self._pulses = os.memfd_create("pulses")
        board = pulses(self._pulses, num_ranks)
        self._job, job_variables = hand_over(job)
        self._ranks: list[RankProcess] = []
        for rank in range(num_ranks):
            environment = {**_environment(rank, num_ranks, address), **job_variables}
            self._ranks.append(RankProcess(command, environment, self._pulses, self._job, board[rank]))

    @property
    def has_trained(self) -> bool:
        """True after the first step."""
        return any(rank.has_trained for rank in self._ranks)

    def run(self) -> Ended:
        """Wait for the end of all ranks; end them where one failed, or where they hang. Called once."""
        try:
            return self._run()
        finally:
            for rank in self._ranks:
                rank.kill()
                rank.close()
            os.close(self._pulses)
            os.close(self._job)

    def _run(self) -> Ended:
        looked_at, failed_at, is_told = time.monotonic(), None, False
        while any(rank.code is None for rank in self._ranks):
            now = time.monotonic()
            if self._asked.is_at_once:
                return Ended(128 + self._asked.number, "stopped at once. Steps that are in no checkpoint are lost.")
            if self._asked.number and not is_told:
                is_told = True
                for rank in self._ranks:
                    rank.ask_to_stop()
            if failed_at is None and self._first_failed() is not None:
                failed_at = now
            if failed_at is not None and now - failed_at > _GRACE_SECONDS:
                break
            if now - looked_at > _LOOK_SECONDS:
                # A pause of this process is not one of the ranks.
                if why := self._hang(min(now - looked_at, 2 * _LOOK_SECONDS)):
                    return Ended(1, self._explain_hang(why), may_restart=not self._asked.number)
                looked_at = now
            time.sleep(_POLL_SECONDS)
        first = self._first_failed()  # only now: a cause may be seen after what it caused
        if first is not None and not self._lost_those_that_stopped(first):
            return self._failure(first)
        if self._asked.number:
            message = "" if self.has_trained else "stopped before the first step. Nothing was trained."
            return Ended(stop_code(self._asked.number), message)
        return Ended(max(rank.code or 0 for rank in self._ranks))  # 130 after a signal to a rank itself

    def _first_failed(self) -> int | None:
        """Return the rank whose failure ended the others: one that was killed, else the one that failed first."""
        fine = {None, 0, 130} | ({-signal.SIGTERM} if self._asked.number else set())
        failed = [number for number, rank in enumerate(self._ranks) if rank.code not in fine]

        def order(number: int) -> tuple[bool, float]:
            rank = self._ranks[number]
            assert rank.code is not None
            is_killed = rank.code < 0 and rank.code != -signal.SIGABRT  # libraries abort when others have gone
            return not is_killed, rank.failed_at_nanoseconds or float("inf")

        return min(failed, key=order, default=None)

    def _lost_those_that_stopped(self, first: int) -> bool:
        """Return whether the first to fail lost the connection: before the first step, ranks that are asked to stop end
        one after another."""
        rank = self._ranks[first]
        is_lost = rank.failed_at_nanoseconds is None and rank.code in (1, -signal.SIGABRT)
        return is_lost and bool(self._asked.number) and not self.has_trained

    def _failure(self, number: int) -> Ended:
        rank = self._ranks[number]
        assert rank.code is not None
        how = f"exit code {rank.code}"
        if rank.code < 0:
            how = f"killed by {signal.Signals(-rank.code).name}"
            if rank.code == -signal.SIGKILL:
                how += ", as the system does when memory runs out"
        may_restart = not rank.is_final and not self._asked.number
        return Ended(1, f"rank {number} failed first ({how}).", may_restart)

    def _hang(self, seconds: float) -> str:
        if self._watch is None:
            return ""
        looks = {number: look for number, rank in enumerate(self._ranks) if (look := rank.look()) is not None}
        return self._watch.add(seconds, looks) if looks else ""

    def _explain_hang(self, why: str) -> str:
        """Return which ranks hang and why they are taken to, and write all stacks to the file."""
        living = {number: rank for number, rank in enumerate(self._ranks) if rank.code is None}
        looks = {number: look for number, rank in living.items() if (look := rank.look()) is not None}
        stopped = {number for number, look in looks.items() if look.state == "stopped"}
        for numbers in (living.keys() - stopped, stopped):  # a stopped rank goes on for a moment to write its own
            ranks = [living[number] for number in numbers]
            for rank in ranks:
                rank.ask_for_stacks()
            ends_at, before, now = time.monotonic() + _STACKS_SECONDS, [""], [rank.stacks() for rank in ranks]
            while time.monotonic() < ends_at and not (all(now) and now == before):  # all wrote, and none writes more
                time.sleep(_POLL_SECONDS)
                before, now = now, [rank.stacks() for rank in ranks]
        stacks = {number: rank.stacks() for number, rank in living.items()}
        where = self._write_stacks(stacks)
        hanging = hanging_ranks(looks, stacks) if looks else []
        if not hanging:
            what = "all ranks wait for each other" if len(living) > 1 else "rank 0 hangs"
        else:
            names = " and ".join(map(str, hanging))
            what = f"rank {names} hangs" if len(hanging) == 1 else f"ranks {names} hang"
            if stopped:
                what += " (stopped by a signal)"
        return f"{what}: {why}, so all were ended.{where}"

    def _write_stacks(self, stacks: Mapping[int, str]) -> str:
        text = "".join(f"rank {number}\n{text or 'It wrote no stacks.'}\n\n" for number, text in stacks.items())
        if self._stacks_file is None:
            return ""
        try:
            self._stacks_file.parent.mkdir(parents=True, exist_ok=True)  # ranks that hang early made none
            self._stacks_file.write_text(text)
        except OSError as error:
            return f" Their stacks could not be written to {self._stacks_file} ({error.strerror})."
        return f" Their stacks are in {self._stacks_file}."


def _environment(rank: int, num_ranks: int, address: tuple[str, int] | None) -> dict[str, str]:
    """Return a rank's variables, those that torchrun sets. A rank that is alone gets no address. Libraries get a rank's
    share of the cores as their number of threads; those of torch are chosen in the rank.

    Inside of a run's folder, which others may have written, Python imports nothing from the folder that it is started
    in (Python 3.10 knows no such option).
    """
    place = {}
    if address is not None:  # no rank makes the store: this process has it
        place = dict(zip(_ADDRESS, (address[0], str(address[1]), "True"), strict=True))
    is_safe = {"PYTHONSAFEPATH": "1"} if run_folder_of(Path.cwd()) else {}
    cores = str(cores_of_a_rank(num_ranks))
    threads = {} if THREADS_VARIABLE in os.environ else dict.fromkeys((THREADS_VARIABLE, OWN_THREADS_VARIABLE), cores)
    loopback = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
    return {
        **(loopback if os.path.exists("/sys/class/net/lo") else {}),
        **{name: value for name, value in os.environ.items() if name not in _ADDRESS},
        **threads,
        **is_safe,
        **place,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }


class RankProcess:
    """One rank: started by the constructor, in a process group of its own, so that Ctrl-C reaches the launcher alone.

    Args:
        command: the program and its arguments.
        environment: its variables, LOCAL_RANK included.
        pulses, job: descriptors of the files in memory with the ranks' `pulses` and their job.
        pulse: this rank's row of the pulses.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], pulses: int, job: int, pulse: Any
    ) -> None:
        self._pulse = pulse
        self._stacks = os.memfd_create("stacks")
        variables = {**environment, LAUNCHER_VARIABLE: f"{os.getpid()} {pulses} {self._stacks}"}
        self._process = subprocess.Popen(
            command, env=variables, pass_fds=(pulses, job, self._stacks), start_new_session=True
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


#: A rank that uses more than this share of a core works.
_WORKING_SHARE = 0.05
#: A step may take this many times longer while a rank works. Other ranks would wait for it no longer than that.
_WORKING_FACTOR = 5
#: Files in which a rank waits for other ranks, by parts of their paths.
_WAITING = (
    *("/torch/distributed/", "/torchrec/distributed/", "/embershard/distributed/"),
    # These wait for a process group without a call of torch's in between.
    *("/torchrec/modes/routes.py", "/training/dense_call.py", "/wire_types/exchange.py", "/data_parallel/mode.py"),
)
_STEP = "_engine_run_backward"  # gradients are reduced inside it
_JOIN = ("in join", "in _wait_for_tstate_lock")  # of another thread, as of a save beside the training


@dataclass(frozen=True)
class Look:
    """What the launcher sees of a rank at one time.

    Attributes:
        beats: steps and batches done.
        cpu_seconds: used so far, by all threads.
        disk_bytes: read and written so far.
        state: of the process, as `psutil` names it.
    """

    beats: int
    cpu_seconds: float
    disk_bytes: int
    state: str


class HangWatch:
    """Decides from looks at the ranks whether they hang.

    They hang when for `hang_seconds`

    * a rank is stopped by a signal, or
    * no rank did anything: no step, no processor time, no bytes to or from a disk, no wait for one;

    or when for 5 times as long no rank that works (an endless loop, collectives that spin) did a step or moved a byte
    on a disk. The latter begins with the first step: set-up may take any time. A debugger that holds a rank stops the
    clock, and so does a pause of the launcher itself.

    >>> watch, idle = HangWatch(hang_seconds=2.0), {0: Look(3, 1.5, 0, "sleeping")}
    >>> [watch.add(1.0, idle) for _ in range(4)]
    ['', '', '', 'for 2 s no rank made progress (--hang-seconds)']
    """

    def __init__(self, hang_seconds: float) -> None:
        self._hang_seconds = hang_seconds
        self._before: Mapping[int, Look] = {}
        self._seconds_idle = self._seconds_without_step = 0.0
        self._seconds_stopped: dict[int, float] = {}

    def add(self, seconds: float, looks: Mapping[int, Look]) -> str:
        """Add a look at every rank that lives, `seconds` after the one before; return why they are taken to hang, or an
        empty string."""
        before, self._before = self._before, looks
        held = any(look.state == "tracing-stop" for look in looks.values())
        pairs = [(before[rank], now) for rank, now in looks.items() if rank in before]
        moved = held or before.keys() != looks.keys()
        moved = moved or any((was.beats, was.disk_bytes) != (now.beats, now.disk_bytes) for was, now in pairs)
        least = _WORKING_SHARE * seconds
        works = any(now.state == "disk-sleep" or now.cpu_seconds - was.cpu_seconds > least for was, now in pairs)
        self._seconds_idle = 0.0 if moved or works else self._seconds_idle + seconds
        has_begun = any(look.beats for look in looks.values())
        self._seconds_without_step = 0.0 if moved or not has_begun else self._seconds_without_step + seconds
        self._seconds_stopped = {
            rank: self._seconds_stopped.get(rank, 0.0) + seconds
            for rank, look in looks.items()
            if look.state == "stopped"
        }
        if max([self._seconds_idle, *self._seconds_stopped.values()]) > self._hang_seconds:
            return f"for {self._hang_seconds:g} s no rank made progress (--hang-seconds)"
        most = _WORKING_FACTOR * self._hang_seconds
        if self._seconds_without_step > most:
            return f"for {most:g} s a rank worked, and none ended a step ({_WORKING_FACTOR} times --hang-seconds)"
        return ""


def hanging_ranks(looks: Mapping[int, Look], stacks: Mapping[int, str]) -> list[int]:
    """Return the ranks that others wait for: those stopped by a signal, else those that wait for no other rank.

    A rank waits for others when its main thread is in a collective. Where all do, the ranks with the fewest steps are
    the answer, and none if all have done as many.

    Args:
        looks: at every rank that lives.
        stacks: of their threads, as `faulthandler` writes them; empty for a rank that could not.
    """
    stopped = [rank for rank, look in looks.items() if look.state == "stopped"]
    if stopped:
        return stopped
    apart = [rank for rank in looks if not waits_for_others(stacks[rank])]
    if 0 < len(apart) < len(looks):
        return apart
    least = min(look.beats for look in looks.values())
    behind = [rank for rank, look in looks.items() if look.beats == least]
    return behind if len(behind) < len(looks) else []


def waits_for_others(stacks: str) -> bool:
    """Return whether a rank's main thread, the last one in its stacks, is in a collective, or joins a thread that is.

    >>> waits_for_others('Current thread 0x01 (most recent call first):\\n  File "a.py", line 3 in read_batch')
    False
    """
    threads = stacks.split("(most recent call first):")[1:]
    frames = ([line for line in thread.splitlines() if line.strip().startswith("File ")] for thread in threads)
    *others, top = [each[0] if each else "" for each in frames] or [""]
    return top.endswith(_STEP) or any(
        part in each for each in (others if top.endswith(_JOIN) else [top]) for part in _WAITING
    )
