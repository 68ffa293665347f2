"""The thread beside the training, when waiting for it is interrupted."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.pipeline.worker import CacheWorker, PrefetchDepth, WorkerTrial


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


def test_the_thread_works_on_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread starts on the first GPU, where every rank would take memory for a context."""
    chosen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread().name, device))
    )
    CacheWorker(torch.device("cuda", 3))
    CacheWorker(torch.device("cpu"))
    ((name, device),) = chosen
    assert name.startswith("embershard-cache")
    assert device == torch.device("cuda", 3)


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
        before = set(os.listdir("/proc/self/task"))  # of which threads of earlier tests may end meanwhile
        worker.start(lambda: found.append(torch.ones(2_000_000).add_(1.0).sum()))
        worker.join()
        assert set(os.listdir("/proc/self/task")) <= before, "a team of OpenMP threads was started"
    finally:
        torch.set_num_threads(threads)


def sides(trial: WorkerTrial, num_steps: int, with_worker: float, inline: float) -> list[bool]:
    """Train steps of these seconds; return whether each was planned by the worker."""
    found = []
    for _ in range(num_steps):
        found.append(trial.uses_worker)
        trial.add(with_worker if trial.uses_worker else inline)
    return found


def test_the_faster_side_is_used_after_a_trial_of_both():
    for with_worker, inline in ((0.02, 0.03), (0.03, 0.02)):
        trial = WorkerTrial()
        found = sides(trial, 32, with_worker, inline)
        assert not any(found[:8]), "the first steps are not representative"
        assert sum(found[8:]) == 12, "both sides equally often"
        assert len({found[n] for n in range(8, 32, 2)}) == 2, "not one side at every other step: both have neighbours"
        assert set(sides(trial, 200, with_worker, inline)) == {with_worker < inline}


def test_equal_sides_need_no_thread():
    trial = WorkerTrial()
    assert not any(sides(trial, 300, 0.02, 0.02)[32:256])


def test_a_change_is_found_by_a_later_trial_and_trials_become_rare():
    trial = WorkerTrial()
    sides(trial, 32, 0.03, 0.02)
    found = sides(trial, 256 + 24 + 100, 0.01, 0.02)
    assert not any(found[:256])
    assert sum(found[256:280]) == 12
    assert all(found[280:])
    found = sides(trial, 4000, 0.01, 0.02)
    assert found.count(False) == 12, "one more trial"


def test_a_few_slow_steps_do_not_decide():
    trial = WorkerTrial()
    sides(trial, 8, 0.02, 0.02)
    for number in range(24):
        trial.add((0.01 if trial.uses_worker else 0.02) + (1.0 if number in (3, 9, 14) else 0.0))
    assert trial.uses_worker


ROUND = 16


def run(ranks: list[PrefetchDepth], stall_at: Callable[[int, int], float], steps: int) -> list[int]:
    """Steps of one second on several ranks, which agree behind each; the depth after every step. ``stall_at``: how long
    a rank waits at a depth."""
    depths = []
    for _ in range(steps):
        for number, rank in enumerate(ranks):
            rank.add(1.0, stall_at(number, rank.depth))
        wish = max(rank.wish for rank in ranks)
        for rank in ranks:
            rank.agree(wish)
        assert len({rank.depth for rank in ranks}) == 1
        depths.append(ranks[0].depth)
    return depths


def test_one_batch_is_held_while_nothing_waits() -> None:
    assert set(run([PrefetchDepth(4, True)], lambda rank, depth: 0.0, 500)) == {1}


def test_more_are_held_until_nothing_waits() -> None:
    depths = run([PrefetchDepth(4, True)], lambda rank, depth: {1: 0.3, 2: 0.1}.get(depth, 0.0), 8 * ROUND)
    assert depths[-1] == max(depths) == 3
    assert sorted(set(depths)) == [1, 2, 3]


def test_never_more_than_the_most() -> None:
    assert max(run([PrefetchDepth(2, True)], lambda rank, depth: 1.0 / depth**4, 1000)) == 2


def test_what_does_not_help_is_taken_back_and_tried_ever_more_rarely() -> None:
    depths = run([PrefetchDepth(3, True)], lambda rank, depth: 0.5, 200 * ROUND)
    tries = [step for step in range(1, len(depths)) if depths[step - 1 : step + 1] == [1, 2]]
    assert max(depths) == 2
    assert depths.count(2) < 0.1 * len(depths)
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 4 * gaps[0]


def test_less_is_held_when_waiting_has_long_ended() -> None:
    depth = PrefetchDepth(4, True)
    assert run([depth], lambda rank, depth: 0.3 if depth < 2 else 0.0, 4 * ROUND)[-1] == 2
    assert run([depth], lambda rank, depth: 0.0, 20 * ROUND)[-1] == 1


def test_all_ranks_hold_what_one_of_them_needs() -> None:
    ranks = [PrefetchDepth(4, True) for _ in range(3)]
    depths = run(ranks, lambda rank, depth: 0.3 if rank == 1 and depth < 2 else 0.0, 4 * ROUND)
    assert depths[-1] == 2


def test_without_measurements_the_depth_is_the_most() -> None:
    depth = PrefetchDepth(3, False)
    assert set(run([depth], lambda rank, depth: 1.0, 100)) == {3}


@pytest.mark.slow
@given(st.integers(1, 5), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=400))
def test_the_depth_stays_between_one_and_the_most(most: int, stalls: list[float]) -> None:
    depth, waiting = PrefetchDepth(most, True), iter(stalls)
    assert all(1 <= each <= most for each in run([depth], lambda rank, depth: next(waiting), len(stalls)))
