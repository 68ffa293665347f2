"""Where planning runs follows the measured steps, and is asked again later."""

from __future__ import annotations

from embershard.pipeline.worker_trial import WorkerTrial


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
