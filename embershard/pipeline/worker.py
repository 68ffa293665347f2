"""A thread that works on the caches while a step trains on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch


class CacheWorker:
    """Runs one job at a time, beside the calling thread.

    Planning and row copies are many small operations, most of them single-threaded, so on a CPU other cores are idle
    while they run. In this thread they fill the gaps that the training leaves. The thread keeps to one core: a team of
    its own would spin on cores that the training needs.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "embershard-cache")
        self._job: Future[None] | None = None
        threads = torch.get_num_threads()
        self._thread.submit(torch.set_num_threads, 1).result()
        torch.set_num_threads(threads)  # the call above also told MKL, which has one number for all threads

    def start(self, job: Callable[[], None]) -> None:
        """Run ``job`` in the thread. The one before must be joined."""
        assert self._job is None, "the job before is not joined"
        self._job = self._thread.submit(job)

    def join(self) -> float:
        """Wait for the job, if there is one; how long it took to wait, in seconds.

        Raises:
            Exception: what the job raised.
        """
        started = time.perf_counter()
        if self._job is not None:
            try:
                self._job.result()
            finally:
                if self._job.done():  # else the waiting was interrupted: the next call waits again
                    self._job = None
        return time.perf_counter() - started
