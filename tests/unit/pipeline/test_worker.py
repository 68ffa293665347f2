"""The thread beside the training, when waiting for it is interrupted."""

from __future__ import annotations

import threading
from unittest import mock

import pytest

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
