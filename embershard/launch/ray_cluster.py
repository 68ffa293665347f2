"""`ray_cluster`: the Ray cluster that commands hand their work to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
