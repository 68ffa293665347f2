"""The runs of a sweep on a Ray cluster: as many at a time as there is room for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from embershard.errors import SetupError
from embershard.launch.sweep.experiments import Experiment
from embershard.launch.sweep.run import Outcome, find_outcome, run_experiment

_RETRIES = 3  # of a run whose worker or machine died


def run_on_ray(
    experiments: Sequence[Experiment],
    sweep: Path,
    time_limit_seconds: float | None,
    begin: Callable[[Experiment], None],
) -> Iterator[Outcome]:
    """Run experiments on the Ray cluster of RAY_ADDRESS, or on one started here; yield each outcome as it ends.

    A run takes a CPU, and where the cluster has GPUs a GPU, for each of its ranks, all on one machine. The sweep's
    folder, the settings and the data must be at the same paths on all machines. Ray starts a run again whose worker
    died; what that one left is set aside.

    Args:
        begin: called when an experiment is handed to Ray.

    Raises:
        SetupError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise SetupError('--on ray needs Ray, which is not installed. Try: pip install "ray>=2.40"') from error
    ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=False, include_dashboard=None)
    try:
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        folder, started_in = sweep.absolute(), Path.cwd()

        @ray.remote(max_retries=_RETRIES)
        def run(experiment: Experiment) -> Outcome:
            os.chdir(started_in)  # settings may have relative paths
            done = find_outcome(experiment, folder)  # of a worker that died when it had ended the run
            return done or run_experiment(experiment, folder, time_limit_seconds)

        pending = []
        for experiment in experiments:
            begin(experiment)
            gpus = {"num_gpus": experiment.ranks} if has_gpus else {}
            pending.append(run.options(num_cpus=experiment.ranks, **gpus).remote(experiment))
        while pending:
            ready, pending = ray.wait(pending)
            yield from ray.get(ready)
    finally:
        ray.shutdown()
