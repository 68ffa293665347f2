"""The choice where planning runs: in the training thread, or in a thread beside it."""

from __future__ import annotations

import statistics

_SETTLING_STEPS = 8  # before the first trial
_TRIAL_STEPS = 24
_FIRST_REPEAT = 256  # steps from one trial to the next; then eight times as many, and so on
_REPEAT_FACTOR = 8


class WorkerTrial:
    """Tries both during some of the steps, and uses the faster one in the others.

    Beside the training, planning uses cores that the training leaves idle, but takes turns with it for Python's
    interpreter and, where there is no idle core, for a core. Which of the two weighs more depends on the model, the
    batch and the machine, so it is measured (docs/decisions/0022). It decides neither what is trained nor which rows
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
