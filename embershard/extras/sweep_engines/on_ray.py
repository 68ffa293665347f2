"""Work on a Ray cluster: runs of a sweep, as many at a time as there is room for, and parts of a pass over data."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from embershard.errors import SetupError
from embershard.sweeps.experiments import Experiment, Sweep
from embershard.sweeps.outcomes import Begin, End, Outcome, make_outcome
from embershard.sweeps.run import run_once

T = TypeVar("T")
_TASKS_PER_CPU = 2  # in work, or waiting for a CPU: parts are kept until those before them were added

#: Of a task whose worker or machine died.
RETRIES = 3


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """Connect to the Ray cluster of RAY_ADDRESS, to the one of `ray start` on this machine, or to one started here;
    return the module `ray`. At the end, the tasks that are left are stopped.

    Raises:
        SetupError: Ray is not installed, or the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise SetupError('--on ray needs Ray, which is not installed. Try: pip install "ray>=2.40"') from error
    try:
        ray.init(log_to_driver=False, include_dashboard=None)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise SetupError(
            f"--on ray: no cluster can be reached or started ({str(error).splitlines()[0]}). Check RAY_ADDRESS, and "
            "`ray status`."
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def run_on_ray(sweep: Sweep, experiments: Sequence[Experiment], folder: Path, begin: Begin, end: End) -> None:
    """Run experiments of a sweep on a Ray cluster (`ray_cluster`).

    A run takes a CPU, and where the cluster has GPUs a GPU, for each of its ranks, all on one machine. The sweep's
    folder, the settings and the data must be at the same paths on all machines. Ray starts a run again whose worker or
    machine died; what that one left is set aside. A run that cannot even begin, or keep its outcome, ends alone: all
    tasks end with this function, so it waits for the others.

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


_work: tuple[str, Callable[..., Any]] | None = None  # of this worker: what made it, and what counts


def in_parts_on_ray(
    ranges: list[tuple[int, int]], make: Callable[[], Callable[..., T]], others: Callable[[], tuple[Any, ...]]
) -> Iterator[T]:
    """Yield what a function of (start, stop) returns for each range, in their order, computed by tasks of Ray.

    The data must be at the same path on all its machines. Ray runs a task again whose worker or machine died.

    Args:
        make: returns the function, once in each worker; pickled.
        others: returns further arguments, when a range is given out.

    Raises:
        SetupError: Ray is not installed, no cluster can be reached, or workers die again and again.
        DataError, ConfigError: as the function does, on this machine.
    """
    with ray_cluster() as ray:
        task = ray.remote(max_retries=RETRIES, num_cpus=1)(_count)
        most = _TASKS_PER_CPU * max(1, int(ray.cluster_resources().get("CPU", 1)))
        made_by, waiting, left = ray.put(make), deque[Any](), iter(ranges)
        while True:
            while len(waiting) < most and (part := next(left, None)) is not None:
                waiting.append(task.remote([made_by], Path.cwd(), part, others()))
            if not waiting:
                return
            try:
                yield ray.get(waiting.popleft())
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayError as error:
                raise SetupError(f"Ray gave up a part after {RETRIES} retries: {str(error).splitlines()[0]}") from error


def _count(made_by: Sequence[Any], started_in: Path, part: tuple[int, int], others: tuple[Any, ...]) -> Any:
    """Count a part in a worker; `made_by` holds the reference of `make`, in a list: else Ray fetches it each time."""
    global _work
    import ray

    (reference,) = made_by
    if _work is None or _work[0] != reference.hex():
        os.chdir(started_in)  # settings may have relative paths
        _work = reference.hex(), ray.get(reference)()
    return _work[1](*part, *others)
