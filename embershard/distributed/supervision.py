"""What a rank and the process that started it tell each other: signs of life, and requests to stop."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # it loads torch, and a launcher needs it not
    from embershard.distributed.ranks import Ranks

#: Set by the launcher for its ranks: its process id, and descriptors of the pulses and of a file for stacks.
LAUNCHER_VARIABLE = "EMBERSHARD_LAUNCHER"
#: Makes a rank write the stacks of its threads to the launcher's file.
STACKS_SIGNAL = signal.SIGUSR1

#: Columns of `pulses`.
BEATS, WRITES_STACKS, FAILED_AT_NANOSECONDS, IS_FINAL = range(4)
_NUM_COLUMNS = 4
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # found here: behind a fork, the loader's lock may be another thread's for ever


def pulses(descriptor: int, num_ranks: int | None = None) -> Any:
    """Return signs of life that the ranks of a machine share with their launcher: int64 [num_ranks, 4].

    The columns are steps and batches done, whether the rank writes stacks when asked, the time at which it failed, and
    whether it would fail again. One machine, one clock.

    Args:
        descriptor: of a file in memory.
        num_ranks: sets the size of the file; None: it has its size.

    >>> pulses(os.memfd_create("pulses"), num_ranks=2).tolist()
    [[0, 0, 0, 0], [0, 0, 0, 0]]
    """
    if num_ranks is not None:
        os.ftruncate(descriptor, num_ranks * _NUM_COLUMNS * 8)
    return np.frombuffer(mmap.mmap(descriptor, 0), dtype=np.int64).reshape(-1, _NUM_COLUMNS)


class Supervision:
    """A rank's side: it beats after each step, and ends early when any rank was asked to.

    Args:
        pulse: this rank's row of `pulses`; None: nobody watches.

    Attributes:
        signal: the signal that asked this rank to stop; 0 for none.
        agreed: the largest `signal` of all ranks, as of the last collective that carried them.
        is_training: a signal ends the training after its step; before, it ends the process at once.
        notice: a line that a signal shows at once: torchrun ends a rank 30 s after it, perhaps within a save.

    >>> supervision = Supervision()
    >>> supervision.signal = signal.SIGTERM
    >>> supervision.note_agreed(supervision.signal)
    >>> supervision.must_stop
    True
    """

    def __init__(self, pulse: Any = None) -> None:
        self._pulse = np.zeros(_NUM_COLUMNS, np.int64) if pulse is None else pulse
        self.has_launcher = pulse is not None
        self.signal = self.agreed = 0
        self.is_training = False
        self.notice = ""

    @classmethod
    def of_this_process(cls) -> Supervision:
        """Return the supervision by the launcher that started this process, if one did; for the start of a rank.

        With our launcher or torchrun, the process ends when its launcher dies, from now on.
        """
        given = os.environ.pop(LAUNCHER_VARIABLE, None)  # not for processes that this one starts
        if given is None:
            if "TORCHELASTIC_RUN_ID" in os.environ:
                end_with_parent()
            return cls()
        launcher, beats, stacks = map(int, given.split())
        end_with_parent()
        if os.getppid() != launcher:  # it died before
            os._exit(1)
        supervision = cls(pulses(beats)[int(os.environ["LOCAL_RANK"])])
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        supervision._pulse[WRITES_STACKS] = 1
        return supervision

    def beat(self) -> None:
        """Tell the launcher that a step or a batch is done. It costs one write to memory."""
        self._pulse[BEATS] += 1

    def has_failed(self, is_final: bool) -> None:
        """Tell the launcher that this rank ends by an error; `is_final`: the same would happen again."""
        self._pulse[IS_FINAL] = is_final
        self._pulse[FAILED_AT_NANOSECONDS] = time.monotonic_ns()

    @property
    def must_stop(self) -> bool:
        """True on all ranks alike, once they know that one was asked to stop."""
        return self.agreed > 0

    def note_agreed(self, number: int) -> None:
        """Note the largest `signal` of all ranks, which came with another collective."""
        self.agreed = max(self.agreed, number)

    def agree(self, ranks: Ranks) -> bool:
        """Ask all ranks for their `signal`; return `must_stop`. Collective; not for every step."""
        import torch

        self.note_agreed(int(ranks.all_gather(torch.tensor(self.signal)).max()))
        return self.must_stop


def end_with_parent() -> None:
    """Have the system kill this process when its parent dies. May run between fork and exec."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
