"""The runs of a sweep as jobs of a Slurm cluster, through submitit."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from embershard.errors import ConfigError, SetupError
from embershard.sweeps.clusters import job_name, jobs_outlive_errors
from embershard.sweeps.experiments import Experiment, Sweep
from embershard.sweeps.outcomes import Begin, End, find_outcome, make_outcome
from embershard.sweeps.run import run_once

_POLL_SECONDS = 2.0
#: What a job wrote may take as long to be seen here, on a network file system.
_SETTLE_SECONDS = 30.0
#: A run ends itself at its time limit; a job's limit is later, so that the run can say so.
_EXTRA_MINUTES = 5


def run_on_slurm(sweep: Sweep, experiments: Sequence[Experiment], folder: Path, begin: Begin, end: End) -> None:
    """Run experiments of a sweep as Slurm jobs, a job each.

    A run takes `slurm.cpus_per_rank` CPUs and `slurm.gpus_per_rank` GPUs for each of its ranks, all on one machine. The
    sweep's folder, the settings and the data must be at the same paths on all machines. Ctrl-C cancels the jobs; when
    this ends in another way they go on, and those of the next sweep wait for them: they have the same names, and Slurm
    runs one job of a name at a time. A job that Slurm requeues starts its run again.

    Raises:
        SetupError: submitit is not installed, or there is no Slurm.
        ConfigError: the sweep has no time limit, or Slurm refuses a job.
    """
    executor = _executor(sweep, folder)
    common = (folder.absolute(), sweep.time_limit_seconds, Path.cwd())
    threads = os.environ.get("OMP_NUM_THREADS", str(sweep.slurm.cpus_per_rank))
    jobs: dict[str, tuple[Experiment, Any]] = {}
    with jobs_outlive_errors(jobs, lambda number: jobs[number][1].cancel(), "scancel"):
        for experiment in experiments:
            begin(experiment)
            executor.update_parameters(**_parameters(experiment, sweep, folder))
            try:
                job = executor.submit(run_once, experiment, *common, threads)
            except Exception as error:  # submitit's own class, of whatever sbatch says
                raise ConfigError(f"Slurm refused a job: {error}. Check the section [slurm] of the sweep.") from error
            jobs[job.job_id] = experiment, job
        left_at: dict[str, float] = {}
        while jobs:
            queued = _queued_ids(jobs.keys())
            for number in [number for number in jobs if number not in queued]:
                waited = time.monotonic() - left_at.setdefault(number, time.monotonic())
                outcome = find_outcome(jobs[number][0], folder)
                if outcome is not None or waited > _SETTLE_SECONDS:
                    experiment, job = jobs.pop(number)
                    last = ["it printed nothing", *(job.stderr() or "").strip().splitlines()][-1]
                    reason = f"Slurm's job {number} ended without a result: {last}"
                    lost = make_outcome(
                        experiment, "interrupted", reason, started_at=time.time(), seconds=0.0, attempt=1
                    )
                    end(outcome or lost)
            time.sleep(_POLL_SECONDS if jobs else 0)


def _executor(sweep: Sweep, folder: Path) -> Any:
    try:
        import submitit
    except ImportError as error:
        raise SetupError(
            '--on slurm needs submitit, which is not installed. Try: pip install "submitit>=1.5"'
        ) from error
    if shutil.which("sbatch") is None:
        raise SetupError("--on slurm needs the commands of Slurm (sbatch, squeue) on this machine.")
    if sweep.time_limit_seconds is None:
        raise ConfigError("--on slurm needs time_limit_seconds in the sweep's file: Slurm limits every job.")
    return submitit.AutoExecutor(folder=folder / "jobs", cluster="slurm")


def _parameters(experiment: Experiment, sweep: Sweep, folder: Path) -> Mapping[str, Any]:
    """Return what a job asks Slurm for, in submitit's names."""
    assert sweep.time_limit_seconds is not None
    jobs = sweep.slurm
    options = {"dependency": "singleton", **jobs.options}
    if jobs.gpus_per_rank:
        options["gpus_per_node"] = jobs.gpus_per_rank * experiment.ranks
    return {
        "name": job_name(experiment.name, folder),
        "timeout_min": math.ceil(sweep.time_limit_seconds / 60) + _EXTRA_MINUTES,
        "nodes": 1,
        "tasks_per_node": 1,
        "cpus_per_task": jobs.cpus_per_rank * experiment.ranks,
        "slurm_additional_parameters": options,
    }


def _queued_ids(jobs: Set[str]) -> Set[str]:
    """Return the jobs that wait or run; all `jobs` while Slurm does not answer.

    (submitit asks `sacct`, which needs a database that small clusters lack.)
    """
    command = ["squeue", "--me", "--noheader", "--format=%i"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return jobs if done.returncode else set(done.stdout.split())
