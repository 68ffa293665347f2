"""The runs of a sweep on a Ray cluster: as many at a time as there is room for."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from embershard.sweeps.experiments import Experiment, Sweep
from embershard.sweeps.outcomes import Outcome, make_outcome
from embershard.sweeps.ray_cluster import RETRIES, ray_cluster
from embershard.sweeps.run import run_once


def run_on_ray(
    sweep: Sweep,
    experiments: Sequence[Experiment],
    folder: Path,
    begin: Callable[[Experiment], None],
    end: Callable[[Outcome], None],
) -> None:
    """Run experiments of a sweep on a Ray cluster (`ray_cluster`).

    A run takes a CPU, and where the cluster has GPUs a GPU, for each of its ranks, all on one machine. The sweep's
    folder, the settings and the data must be at the same paths on all machines. Ray starts a run again whose worker or
    machine died; what that one left is set aside. A run that cannot even begin, or keep its outcome, ends alone: all
    tasks end with this function, so it waits for the others.

    Args:
        folder: of the sweep.
        begin: called when an experiment is handed to Ray.
        end: called with each outcome.

    Raises:
        SetupError: Ray is not installed, or no cluster can be reached.
    """
    with ray_cluster() as ray:
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        _warn_of_size(ray.nodes(), experiments)
        run = ray.remote(max_retries=RETRIES)(run_once)
        common = (folder.absolute(), sweep.time_limit_seconds, Path.cwd(), os.environ.get("OMP_NUM_THREADS", "1"))
        pending = {}
        for experiment in experiments:
            begin(experiment)
            gpus = {"num_gpus": experiment.ranks} if has_gpus else {}
            pending[run.options(num_cpus=experiment.ranks, **gpus).remote(experiment, *common)] = experiment
        while pending:
            for task in ray.wait(list(pending))[0]:
                end(_outcome(ray, task, pending.pop(task)))


def _outcome(ray: Any, task: Any, experiment: Experiment) -> Outcome:
    """Return the outcome of a task that has ended, also where it has none of its own."""
    try:
        found: Outcome = ray.get(task)
        return found
    except ray.exceptions.RayTaskError as error:  # the run never began, or its outcome could not be kept
        reason, attempt = f"{type(error.cause).__name__}: {error.cause}", 1
    except ray.exceptions.RayError as error:
        reason, attempt = f"Ray gave it up after {RETRIES} retries: {str(error).splitlines()[0]}", 1 + RETRIES
    return make_outcome(experiment, "interrupted", reason, started_at=time.time(), seconds=0.0, attempt=attempt)


def _warn_of_size(nodes: Sequence[dict], experiments: Sequence[Experiment]) -> None:  # type: ignore[type-arg]
    """Tell of runs that no machine has room for: Ray lets them wait, since one that has may join."""
    largest = max((node["Resources"].get("CPU", 0) for node in nodes if node["Alive"]), default=0)
    ranks = max((experiment.ranks for experiment in experiments), default=0)
    if ranks > largest:
        print(
            f"embershard: a run of {ranks} ranks needs a machine with {ranks} CPUs; the largest of the Ray cluster has "
            f"{largest:g}. Such runs wait until a larger one joins.",
            file=sys.stderr,
        )
