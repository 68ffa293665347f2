"""Jobs of a sweep on a cluster: the sections `[slurm]` and `[kubernetes]` of its file, and the jobs' end by Ctrl-C."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embershard.errors import ConfigError

_ATTEMPTS = 3
_PAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class SlurmJobs:
    """Section `[slurm]`.

    Attributes:
        cpus_per_rank: and threads of each rank.
        gpus_per_rank: 1 on GPUs.
        options: further ones of sbatch, by their long names: partition, account, mem.

    >>> SlurmJobs(cpus_per_rank=0)
    Traceback (most recent call last):
    embershard.errors.ConfigError: slurm.cpus_per_rank: got 0, needed at least 1.
    """

    cpus_per_rank: int = 1
    gpus_per_rank: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least("slurm", cpus_per_rank=(self.cpus_per_rank, 1), gpus_per_rank=(self.gpus_per_rank, 0))


@dataclass(frozen=True)
class KubernetesJobs:
    """Section `[kubernetes]`.

    Attributes:
        image: of the containers; has embershard installed.
        claim: the PersistentVolumeClaim with the sweep's folder, the settings and the data.
        mount: where it is mounted in the pods; the same path as on the machine that submits.
        namespace: of the jobs.
        runtime: the ClusterTrainingRuntime that starts torchrun.
        ranks_per_node: of each pod; None: a run is in one pod.
        cpus_per_rank: and threads of each rank.
        gpus_per_rank: 1 on GPUs.
        memory_per_node: of a pod, as Kubernetes writes it, for instance 64Gi.

    >>> KubernetesJobs("embershard:0.1", "data", "/data", ranks_per_node=8).nodes(16)
    2
    """

    image: str
    claim: str
    mount: str
    namespace: str = "default"
    runtime: str = "torch-distributed"
    ranks_per_node: int | None = None
    cpus_per_rank: int = 1
    gpus_per_rank: int = 0
    memory_per_node: str | None = None

    def __post_init__(self) -> None:
        _at_least("kubernetes", cpus_per_rank=(self.cpus_per_rank, 1), gpus_per_rank=(self.gpus_per_rank, 0))
        if self.ranks_per_node is not None:
            _at_least("kubernetes", ranks_per_node=(self.ranks_per_node, 1))

    def nodes(self, ranks: int) -> int:
        """Return the pods of a run.

        Raises:
            ConfigError: the ranks cannot be shared out evenly.
        """
        per_node = self.ranks_per_node or ranks
        if ranks > per_node and ranks % per_node:
            raise ConfigError(
                f"kubernetes.ranks_per_node = {per_node} does not divide {ranks} ranks; each pod has as many."
            )
        return max(1, ranks // per_node)


def job_name(run: str, folder: Path) -> str:
    """Return what a cluster calls the job of a run: the same for this run of this sweep, and for no other.

    Args:
        run: its name.
        folder: of the sweep.

    >>> job_name("8502745f01b5-0", Path("/sweeps/ratios"))
    'embershard-146f7fbe-8502745f01b5-0'
    """
    return f"embershard-{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]}-{run}"


def _at_least(section: str, **values: tuple[int, int]) -> None:
    for name, (value, least) in values.items():
        if value < least:
            raise ConfigError(f"{section}.{name}: got {value}, needed at least {least}.")


@contextmanager
def jobs_outlive_errors(running: Collection[str], cancel: Callable[[str], None], by_hand: str) -> Iterator[None]:
    """Return a context in which jobs run. A user's Ctrl-C cancels all that run then; after any other exception they go
    on, and the user is told so.

    >>> with jobs_outlive_errors([], print, "scancel"):
    ...     pass

    Args:
        running: names of the jobs that run; the caller adds and removes them.
        cancel: ends the job of a name. Where it fails, the other jobs are ended all the same, and it is tried again.
        by_hand: the command that does the same.
    """
    try:
        yield
    except KeyboardInterrupt:
        _cancel_all(list(running), cancel, by_hand)
        raise
    except BaseException:
        if running:
            _say("the jobs that were handed over go on. Start the same command again: it waits for them.")
        raise


def _cancel_all(names: list[str], cancel: Callable[[str], None], by_hand: str) -> None:
    left, reason = dict.fromkeys(names), "interrupted"
    try:
        for attempt in range(_ATTEMPTS):
            time.sleep(_PAUSE_SECONDS if left and attempt else 0)
            for name in list(left):
                try:
                    cancel(name)
                    del left[name]
                except Exception as error:  # whatever it is, the other jobs must end
                    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    finally:
        if left:
            _say(f"{len(left)} jobs could not be cancelled ({reason}). To end them: {by_hand} {' '.join(left)}")


def _say(text: str) -> None:
    print(f"embershard: {text}", file=sys.stderr)
