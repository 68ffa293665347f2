"""A thread that works on the caches while a step trains on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from embershard.distributed.one_core import keep_to_one_core


class CacheWorker:
    """Runs one job at a time, beside the calling thread.

    Planning and row copies are many small operations, most of them single-threaded, so on a CPU other cores are idle
    while they run. This thread uses them. It keeps to one core: a thread team of its own would spin on cores that the
    training needs.

    >>> worker = CacheWorker()
    >>> worker.start(lambda: print("planned"))
    >>> stall_seconds = worker.join()
    planned

    Attributes:
        is_awaited: the calling thread waits for the job: work that can wait should.
        failure: what a joined job raised, until :meth:`check` raises it.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "embershard-cache")
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
