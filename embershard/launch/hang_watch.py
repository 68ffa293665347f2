"""Whether ranks hang, from what the launcher sees of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: A rank that uses more than this share of a core works.
_WORKING_SHARE = 0.05
#: A step may take this many times longer while a rank works. Other ranks would wait for it no longer than that.
_WORKING_FACTOR = 5
#: Files in which a rank waits for other ranks, by parts of their paths.
_WAITING = ("/torch/distributed/", "/torchrec/distributed/", "/embershard/distributed/")
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
        moved = held or before.keys() != looks.keys() or any(_has_moved(before[r], look) for r, look in looks.items())
        works = moved or any(_works(before[r], look, seconds) for r, look in looks.items())
        self._seconds_idle = 0.0 if works else self._seconds_idle + seconds
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


def _has_moved(before: Look, now: Look) -> bool:
    return (before.beats, before.disk_bytes) != (now.beats, now.disk_bytes)


def _works(before: Look, now: Look, seconds: float) -> bool:
    return now.state == "disk-sleep" or now.cpu_seconds - before.cpu_seconds > _WORKING_SHARE * seconds


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
