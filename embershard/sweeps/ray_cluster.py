"""`ray_cluster`: the Ray cluster that commands hand their work to; `in_parts_on_ray`: a pass over data on it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from embershard.errors import SetupError

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


T = TypeVar("T")
_TASKS_PER_CPU = 2  # in work, or waiting for a CPU: parts are kept until those before them were added

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
