"""One run of a sweep on this machine: started, limited in time, and what became of it kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from embershard.distributed.supervision import end_with_parent
from embershard.launch.stop_signals import STOP_SIGNALS
from embershard.run_result import RunResult
from embershard.sweeps.experiments import Experiment, Sweep
from embershard.sweeps.outcomes import (
    Begin,
    End,
    Outcome,
    Status,
    begin_attempt,
    find_outcome,
    keep_outcome,
    make_outcome,
    output_of,
    run_folder,
)

_STOPPED = {0, *(128 + number for number in STOP_SIGNALS)}  # in order, or at once, by a signal
_GRACE_SECONDS = 30.0


def run_experiment(experiment: Experiment, sweep: Path, time_limit_seconds: float | None) -> Outcome:
    """Train in a process of its own, which dies with this one, and keep the outcome. Called in the main thread.

    What an earlier attempt left is set aside, never overwritten.
    """
    folder, output = run_folder(sweep, experiment.name), output_of(sweep, experiment.name)
    attempt = begin_attempt(sweep, experiment.name)
    started, started_at = time.monotonic(), time.time()
    with output.open("wb") as file:
        process = subprocess.Popen(
            _command(experiment, folder),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            code = process.wait(time_limit_seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    status: Status = "finished"
    reason = ""
    if RunResult.find(folder) is None:
        if code is None:
            status, reason = "timed out", f"took longer than {time_limit_seconds:g} s"
        else:
            status, reason = "interrupted" if code in _STOPPED else "failed", _reason(output, code)
    seconds = time.monotonic() - started
    outcome = make_outcome(experiment, status, reason, started_at=started_at, seconds=seconds, attempt=attempt)
    keep_outcome(outcome, sweep)
    return outcome


def run_once(
    experiment: Experiment, sweep: Path, time_limit_seconds: float | None, started_in: Path, num_threads: str
) -> Outcome:
    """Run an experiment on a machine of a cluster, unless it has ended: an earlier worker may have died behind its end.

    Args:
        sweep: its folder, absolute.
        started_in: the folder that paths in the settings are relative to.
        num_threads: of each rank, OMP_NUM_THREADS.
    """
    os.chdir(started_in)
    os.environ["OMP_NUM_THREADS"] = num_threads
    return find_outcome(experiment, sweep) or run_experiment(experiment, sweep, time_limit_seconds)


def _command(experiment: Experiment, folder: Path) -> Sequence[str]:
    return [sys.executable, "-m", experiment.program, "train", *experiment.arguments, "--run-dir", str(folder)]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run that is not over: in order, and then at once."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # its ranks die with it
            process.wait()


def _reason(output: Path, code: int) -> str:
    """Return the line of the output that says why the run did not finish."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in output.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line]
    return errors[0] if errors else lines[-1] if lines else f"exit code {code}"


def run_here(sweep: Sweep, experiments: Sequence[Experiment], folder: Path, begin: Begin, end: End) -> None:
    """Run experiments of a sweep one after another on this machine."""
    for experiment in experiments:
        begin(experiment)
        end(run_experiment(experiment, folder, sweep.time_limit_seconds))
