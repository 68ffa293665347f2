"""The ranks of a run on this machine: one attempt, from their start to the end of the last one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from embershard.distributed.supervision import pulses
from embershard.launch.config import run_folder_of
from embershard.launch.ranks.hang_watch import HangWatch, hanging_ranks
from embershard.launch.ranks.rank_process import RankProcess
from embershard.launch.ranks.stop_signals import StopAsked, stop_code

_POLL_SECONDS = 0.1
_LOOK_SECONDS = 1.0
_STACKS_SECONDS = 2.0  # for ranks to write them
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
        address: host and port of their store.
        asked: the user's requests to stop.
        hang_seconds: see `HangWatch`; None: ranks may hang.
        stacks: file for the stacks of ranks that hang.
    """

    def __init__(
        self,
        num_ranks: int,
        command: Sequence[str],
        address: tuple[str, int],
        asked: StopAsked,
        hang_seconds: float | None,
        stacks: Path | None,
    ) -> None:
        self._asked, self._stacks_file = asked, stacks
        self._watch = None if hang_seconds is None else HangWatch(hang_seconds)
        self._descriptor = os.memfd_create("pulses")
        board = pulses(self._descriptor, num_ranks)
        self._ranks: list[RankProcess] = []
        for rank in range(num_ranks):
            environment = _environment(rank, num_ranks, address)
            self._ranks.append(RankProcess(command, environment, self._descriptor, board[rank]))

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
            os.close(self._descriptor)

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
            _collect_stacks([living[number] for number in numbers])
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


def _collect_stacks(ranks: Sequence[RankProcess]) -> None:
    """Have ranks write their stacks, thread after thread, and wait until all wrote and none writes more."""
    for rank in ranks:
        rank.ask_for_stacks()
    ends_at = time.monotonic() + _STACKS_SECONDS
    before, now = [""], [rank.stacks() for rank in ranks]
    while time.monotonic() < ends_at and not (all(now) and now == before):
        time.sleep(_POLL_SECONDS)
        before, now = now, [rank.stacks() for rank in ranks]


def _environment(rank: int, num_ranks: int, address: tuple[str, int]) -> dict[str, str]:
    """Return a rank's variables, those that torchrun sets.

    Inside of a run's folder, which others may have written, Python imports nothing from the folder that it is started
    in (Python 3.10 knows no such option).
    """
    host, port = address
    is_safe = {"PYTHONSAFEPATH": "1"} if run_folder_of(Path.cwd()) else {}
    return {
        **os.environ,
        **is_safe,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank makes the store: this process has it
    }
