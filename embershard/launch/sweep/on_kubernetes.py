"""The runs of a sweep as TrainJobs on a Kubernetes cluster, through its official client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from embershard.errors import ConfigError, SetupError
from embershard.launch.sweep.cluster_settings import job_name
from embershard.launch.sweep.experiments import Experiment, Sweep
from embershard.launch.sweep.outcomes import Outcome, begin_attempt, find_outcome, keep_outcome, make_outcome
from embershard.launch.sweep.train_job import GROUP, PLURAL, VERSION, jobs_of, train_job

_POLL_SECONDS = 5.0
_MISSING = 404  # HTTP


def run_on_kubernetes(
    sweep: Sweep, experiments: Sequence[Experiment], folder: Path, begin: Callable[[Experiment], None]
) -> Iterator[Outcome]:
    """Run experiments of a sweep as TrainJobs; yield each outcome as it ends.

    Jobs are deleted when this ends in order. When it is killed they go on, and the next sweep waits for them: a run's
    job always has the same name.

    Args:
        folder: of the sweep, on the volume that all pods mount.
        begin: called when an experiment is handed to Kubernetes.

    Raises:
        SetupError: the client is not installed, or has no cluster.
        ConfigError: the sweep's file does not say what is needed, or Kubernetes refuses a job.
    """
    manifests = {experiment.name: train_job(experiment, sweep, folder) for experiment in experiments}
    jobs = _Jobs(jobs_of(sweep).namespace)
    running: dict[str, tuple[Experiment, int, float]] = {}
    try:
        for experiment in experiments:
            begin(experiment)
            name, attempt = job_name(experiment.name, folder), 1
            if not jobs.is_active(name):
                attempt = begin_attempt(folder, experiment.name)
                jobs.create(name, manifests[experiment.name])
            running[name] = experiment, attempt, time.time()
        while running:
            for name in list(running):
                ended = jobs.end_of(name)
                if ended is not None:
                    yield _outcome(*running[name], *ended, name, folder)
                    del running[name]
            time.sleep(_POLL_SECONDS if running else 0)
    finally:
        for name in running:
            jobs.delete(name)


def _outcome(
    experiment: Experiment, attempt: int, started_at: float, is_complete: bool, reason: str, name: str, folder: Path
) -> Outcome:
    """Return what became of a job that has ended, and keep it."""
    found = find_outcome(experiment, folder)
    if found is not None:
        return found
    why = "the job completed without a result" if is_complete else reason
    outcome = make_outcome(
        experiment,
        "timed out" if reason.startswith("DeadlineExceeded") else "failed",
        f"{why} (kubectl logs --selector jobset.sigs.k8s.io/jobset-name={name})",
        started_at=started_at,
        seconds=time.time() - started_at,
        attempt=attempt,
    )
    keep_outcome(outcome, folder)
    return outcome


class _Jobs:
    """The TrainJobs of a namespace."""

    def __init__(self, namespace: str) -> None:
        try:
            from kubernetes import client, config
        except ImportError as error:
            raise SetupError(
                "--on kubernetes needs the Kubernetes client, which is not installed. Try: pip install kubernetes; or "
                "--dry-run, which prints the manifests for kubectl."
            ) from error
        try:
            config.load_config()
        except config.ConfigException as error:
            raise SetupError(
                f"--on kubernetes: no cluster is configured ({error}). Check `kubectl cluster-info`."
            ) from error
        self._api, self._error = client.CustomObjectsApi(), client.ApiException
        self._place = {"group": GROUP, "version": VERSION, "namespace": namespace, "plural": PLURAL}

    def create(self, name: str, manifest: Mapping[str, Any]) -> None:
        """Create a job; one of that name that has ended is deleted first."""
        self.delete(name)
        try:
            while self._conditions(name) is not None:
                time.sleep(_POLL_SECONDS)
            self._api.create_namespaced_custom_object(**self._place, body=manifest)
        except self._error as error:
            raise ConfigError(
                f"Kubernetes refused the TrainJob {name}: {error.reason} {error.body or ''}. Kubeflow Trainer must be "
                "installed there, and the section [kubernetes] fit the cluster."
            ) from error

    def is_active(self, name: str) -> bool:
        """Return True if a job of that name waits or runs."""
        conditions = self._conditions(name)
        return conditions is not None and self._end(conditions) is None

    def end_of(self, name: str) -> tuple[bool, str] | None:
        """Return whether a job completed, and why it did not; None while it has not ended."""
        conditions = self._conditions(name)
        return (False, "somebody deleted the job") if conditions is None else self._end(conditions)

    def delete(self, name: str) -> None:
        """Delete a job, if it is there."""
        try:
            self._api.delete_namespaced_custom_object(**self._place, name=name)
        except self._error as error:
            if error.status != _MISSING:
                raise

    def _conditions(self, name: str) -> Sequence[Mapping[str, str]] | None:
        """Return the conditions of a job's status; None where there is no such job."""
        try:
            job = self._api.get_namespaced_custom_object(**self._place, name=name)
        except self._error as error:
            if error.status == _MISSING:
                return None
            raise
        found: Sequence[Mapping[str, str]] = job.get("status", {}).get("conditions", [])
        return found

    @staticmethod
    def _end(conditions: Sequence[Mapping[str, str]]) -> tuple[bool, str] | None:
        for each in conditions:
            if each["type"] in ("Complete", "Failed") and each["status"] == "True":
                return each["type"] == "Complete", f"{each.get('reason', '')}: {each.get('message', '')}"
        return None
