"""A thread that works on the caches while a step trains on the CPU; whether it is used, and how far ahead it works."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from embershard.distributed.ranks import keep_to_one_core


class CacheWorker:
    """Runs one job at a time, beside the calling thread.

    Planning and row copies are many small operations, most of them single-threaded, so on a CPU other cores are idle
    while they run. This thread uses them. It keeps to one core: a thread team of its own would spin on cores that the
    training needs.

    Args:
        device: of the rank; a new thread would set up the first GPU.

    >>> worker = CacheWorker()
    >>> worker.start(lambda: print("planned"))
    >>> stall_seconds = worker.join()
    planned

    Attributes:
        is_awaited: the calling thread waits for the job: work that can wait should.
        failure: what a joined job raised, until :meth:`check` raises it.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._thread = ThreadPoolExecutor(1, "embershard-cache")
        if device is not None and device.type == "cuda":
            self._thread.submit(torch.cuda.set_device, device).result()
        self._job: Future[None] | None = None
        self.failure: Exception | None = None
        self.is_awaited = False
        threads = torch.get_num_threads()
        self._thread.submit(keep_to_one_core).result()
        torch.set_num_threads(threads)  # the call above also told MKL, which has one number for all threads

    def start(self, job: Callable[[], None]) -> None:
        """Run `job` in the thread. The previous job must be joined."""
        assert self._job is None, "the previous job is not joined"
        self._job = self._thread.submit(job)

    def join(self) -> float:
        """Wait for the job, if there is one; return the seconds waited. :meth:`check` raises what the job raised."""
        started = time.perf_counter()
        if self._job is not None:
            self.is_awaited = True
            try:
                self._job.result()
            except Exception as error:
                self.failure = error
            finally:
                self.is_awaited = False
                if self._job.done():  # else an interrupt ended the waiting: the next call waits again
                    self._job = None
        return time.perf_counter() - started

    def check(self) -> None:
        """Raise what a joined job raised, once."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure


_SETTLING_STEPS = 8  # before the first trial
_TRIAL_STEPS = 24
_FIRST_REPEAT = 256  # steps from one trial to the next; then eight times as many, and so on
_REPEAT_FACTOR = 8


class WorkerTrial:
    """Tries both during some of the steps, and uses the faster one in the others.

    Beside the training, planning uses cores that the training leaves idle, but takes turns with it for Python's
    interpreter and, where there is no idle core, for a core. Which of the two weighs more depends on the model, the
    batch and the machine, so it is measured (decision 0022). It decides neither what is trained nor which rows
    are cached.

    Attributes:
        uses_worker: plan the next step's batches beside its training.

    >>> trial = WorkerTrial()
    >>> for _ in range(32):
    ...     trial.add(step_seconds=0.030 if trial.uses_worker else 0.020)
    >>> trial.uses_worker
    False
    """

    def __init__(self) -> None:
        self.uses_worker = self._chosen = False
        self._seconds: dict[bool, list[float]] = {False: [], True: []}
        self._steps_to_trial, self._pause = _SETTLING_STEPS, _FIRST_REPEAT

    def add(self, step_seconds: float) -> None:
        """Count a step that trained."""
        if self._steps_to_trial:
            self._steps_to_trial -= 1
            self.uses_worker = self._chosen and self._steps_to_trial > 0  # a trial starts inline
            return
        self._seconds[self.uses_worker].append(step_seconds)
        num_steps = sum(map(len, self._seconds.values()))
        if num_steps < _TRIAL_STEPS:
            self.uses_worker = num_steps % 4 in (1, 2)  # neither side always comes first
            return
        medians = {side: statistics.median(seconds) for side, seconds in self._seconds.items()}
        self.uses_worker = self._chosen = medians[True] < medians[False]
        self._seconds = {False: [], True: []}
        self._steps_to_trial, self._pause = self._pause, self._pause * _REPEAT_FACTOR


_STEPS = 16  # of one measurement
_MUCH = 0.02  # share of a step's time: a rank that waits longer asks for more
_LITTLE = 0.002
_GAIN = 0.7  # waiting must fall to this share of what it was for a deeper prefetch to stay
_QUIET_ROUNDS = 8  # measurements without waiting before a rank tries a smaller depth


class PrefetchDepth:
    """The fewest batches for which no step waits, between 1 and `most`.

    Every batch held early pins slots and so costs fills (decision 0018). It pays only where the caches' thread is
    sometimes late. So the depth starts at 1 and follows the time that steps waited:

    * more than 2 % of the time: one deeper. If waiting does not fall, back, and twice as long until the next try;
    * hardly any for a long time: one less, and back if waiting returns.

    Each rank has a `wish`. The ranks agree on the largest, so all of them hold equally many.

    Args:
        most: the limit.
        is_adaptive: follow the waiting; otherwise the depth is `most`.

    Attributes:
        depth: in force.
        wish: the depth that this rank asks for.

    >>> depth = PrefetchDepth(most=2, is_adaptive=True)
    >>> for _ in range(16):
    ...     depth.add(step_seconds=1.0, stall_seconds=0.1)
    >>> depth.depth, depth.wish
    (1, 2)
    """

    def __init__(self, most: int, is_adaptive: bool) -> None:
        self.is_adaptive = is_adaptive and most > 1
        self.depth = self.wish = 1 if self.is_adaptive else most
        self._most = most
        self._before: float | None = None  # share of waiting before the change on trial
        self._rounds_left = self._quiet_rounds = 0
        self._patience = 2
        self._clear()

    def agree(self, depth: int) -> None:
        """Take the largest wish of all ranks as the depth."""
        if self.is_adaptive and depth != self.depth:
            self.depth = depth
            self._clear()

    def add(self, step_seconds: float, stall_seconds: float) -> None:
        """Count a step and the part of it that waited."""
        if not self.is_adaptive:
            return
        self._num_steps += 1
        self._step_seconds += step_seconds
        self._stall_seconds += stall_seconds
        if self._num_steps == _STEPS:
            if self.wish <= self.depth:  # else the ranks have not agreed yet
                self._judge(self._stall_seconds / max(self._step_seconds, 1e-9))
            self._clear()

    def _clear(self) -> None:
        self._num_steps = 0
        self._step_seconds = self._stall_seconds = 0.0

    def _judge(self, share: float) -> None:
        before, self._before = self._before, None
        self._quiet_rounds = self._quiet_rounds + 1 if share < _LITTLE else 0
        if before is not None and share > _GAIN * before:  # the deeper prefetch did not help
            self.wish = max(1, self.wish - 1)
            self._rounds_left, self._patience = self._patience, 2 * self._patience
        elif self._rounds_left:
            self._rounds_left -= 1
        elif share > _MUCH and self.depth < self._most:
            self._before, self.wish = share, self.depth + 1
        elif self._quiet_rounds >= _QUIET_ROUNDS and self.wish > 1:
            self.wish -= 1
            self._quiet_rounds, self._rounds_left = 0, 0
