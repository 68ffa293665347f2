"""The thread beside the training, when waiting for it is interrupted."""

from __future__ import annotations

import os
import threading
from unittest import mock

import pytest
import torch

from embershard.pipeline.worker import CacheWorker


def test_a_job_whose_end_was_not_waited_for_is_waited_for_later() -> None:
    worker, may_end, ended = CacheWorker(), threading.Event(), []

    def job() -> None:
        may_end.wait(10)
        ended.append(True)

    worker.start(job)
    with (
        mock.patch.object(type(worker._job), "result", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        worker.join()
    assert not ended
    may_end.set()
    worker.join()
    assert ended
    assert worker.join() < 1.0, "there is nothing left to wait for"


def test_what_a_job_raises_is_raised_once() -> None:
    worker = CacheWorker()

    def job() -> None:
        raise OSError("disk")

    worker.start(job)
    worker.join()
    with pytest.raises(OSError, match="disk"):
        worker.check()
    worker.check()
    worker.start(lambda: None)
    worker.join()


def test_the_thread_keeps_to_one_core_and_leaves_the_others_alone() -> None:
    """It takes the process's number of threads unless it is told otherwise in the right order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        worker, found = CacheWorker(), []
        worker.start(lambda: found.append(torch.get_num_threads()))
        worker.join()
        assert found == [1]
        assert torch.get_num_threads() == 2
        num_tasks = len(os.listdir("/proc/self/task"))
        worker.start(lambda: found.append(torch.ones(2_000_000).add_(1.0).sum()))
        worker.join()
        assert len(os.listdir("/proc/self/task")) == num_tasks, "a team of OpenMP threads was started"
    finally:
        torch.set_num_threads(threads)
