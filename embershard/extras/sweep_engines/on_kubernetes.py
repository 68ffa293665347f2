"""The runs of a sweep as TrainJobs on a Kubernetes cluster, through its official client."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from embershard.errors import ConfigError, SetupError
from embershard.sweeps.clusters import KubernetesJobs, job_name, jobs_outlive_errors
from embershard.sweeps.experiments import Experiment, Sweep
from embershard.sweeps.outcomes import (
    Begin,
    End,
    Outcome,
    begin_attempt,
    find_outcome,
    keep_outcome,
    make_outcome,
    run_folder,
)

_POLL_SECONDS = 5.0
#: How long the cluster may fail to answer: longer than its control plane takes to restart.
_PATIENCE_SECONDS = 900.0
_ANSWER_SECONDS = 15.0
#: HTTP. Those that pass: the login has expired, too slow, too many requests; and errors of the server.
_MISSING, _CONFLICT, _LOGIN, _PASSING = 404, 409, 401, {401, 408, 429}
GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
_CONTAINER = "node"  # and the replicated job: in Kubeflow's runtimes for torch


def run_on_kubernetes(sweep: Sweep, experiments: Sequence[Experiment], folder: Path, begin: Begin, end: End) -> None:
    """Run experiments of a sweep, whose folder is on the volume that all pods mount, as TrainJobs.

    Ctrl-C deletes the jobs. When this ends in another way they go on, and the next sweep waits for them: a run's job
    always has the same name.

    Raises:
        SetupError: the client is not installed, has no cluster, or the cluster has not answered for 15 minutes.
        ConfigError: the sweep's file does not say what is needed, or Kubernetes refuses a job.
    """
    made = {experiment.name: train_job(experiment, sweep, folder) for experiment in experiments}
    jobs = _Jobs(jobs_of(sweep).namespace)
    running: dict[str, tuple[Experiment, int, float]] = {}
    with jobs_outlive_errors(running, partial(jobs.delete, is_patient=False), jobs.delete_command):
        for experiment in experiments:
            begin(experiment)
            name, attempt = job_name(experiment.name, folder), 1
            is_new = not jobs.is_active(name)
            if is_new:
                attempt = begin_attempt(folder, experiment.name)
            running[name] = experiment, attempt, time.time()  # first: Ctrl-C must find a job that was just made
            if is_new:
                jobs.create(name, made[experiment.name])
        while running:
            for name in list(running):
                ended = jobs.end_of(name)
                if ended is not None:
                    end(_outcome(*running.pop(name), *ended, name, folder))
            time.sleep(_POLL_SECONDS if running else 0)


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
    """The TrainJobs of a namespace.

    What the cluster does not answer, or answers with an error that passes, is asked again for `_PATIENCE_SECONDS`, once
    it has answered at all.

    Attributes:
        delete_command: deletes jobs whose names follow.
    """

    def __init__(self, namespace: str) -> None:
        try:
            from kubernetes import client, config
            from urllib3.exceptions import HTTPError  # the client's own errors are of answers only
        except ImportError as error:
            raise SetupError(
                '--on kubernetes needs the Kubernetes client, which is not installed. Try: pip install "kubernetes>=31"'
                "; or --dry-run, which prints the manifests for kubectl."
            ) from error
        self._client, self._config = client, config
        self._errors = client.ApiException, HTTPError
        self._place = {"group": GROUP, "version": VERSION, "namespace": namespace, "plural": PLURAL}
        self.delete_command = f"kubectl delete --namespace {namespace} {PLURAL}.{GROUP}"
        self._has_answered = False
        try:
            self._log_in()
        except config.ConfigException as error:
            raise SetupError(
                f"--on kubernetes: no cluster is configured ({error}). Check `kubectl cluster-info`."
            ) from error

    def create(self, name: str, manifest: Mapping[str, Any]) -> None:
        """Create a job; one of that name that has ended is deleted first."""
        self.delete(name)
        while self._conditions(name) is not None:
            time.sleep(_POLL_SECONDS)
        self._ask("create", name, body=manifest)

    def is_active(self, name: str) -> bool:
        """Return True if a job of that name waits or runs."""
        conditions = self._conditions(name)
        return conditions is not None and self._end(conditions) is None

    def end_of(self, name: str) -> tuple[bool, str] | None:
        """Return whether a job completed, and why it did not; None while it has not ended."""
        conditions = self._conditions(name)
        return (False, "somebody deleted the job") if conditions is None else self._end(conditions)

    def delete(self, name: str, is_patient: bool = True) -> None:
        """Delete a job, if it is there."""
        self._ask("delete", name, is_patient, name=name)

    def _conditions(self, name: str) -> Sequence[Mapping[str, str]] | None:
        """Return the conditions of a job's status; None where there is no such job."""
        job = self._ask("get", name, name=name)
        return None if job is None else job.get("status", {}).get("conditions", [])

    @staticmethod
    def _end(conditions: Sequence[Mapping[str, str]]) -> tuple[bool, str] | None:
        for each in conditions:
            if each["type"] in ("Complete", "Failed") and each["status"] == "True":
                return each["type"] == "Complete", f"{each.get('reason', '')}: {each.get('message', '')}"
        return None

    def _log_in(self) -> None:
        self._config.load_config()
        self._api = self._client.CustomObjectsApi()

    def _ask(self, verb: str, job: str, is_patient: bool = True, **arguments: Any) -> Any:
        """Get, create or delete a job; return what the cluster answers, None where there is no such job.

        Raises:
            SetupError: the cluster does not answer.
            ConfigError: it refuses.
        """
        method, failed_at = f"{verb}_namespaced_custom_object", None
        while True:
            try:
                answer = getattr(self._api, method)(**self._place, **arguments, _request_timeout=_ANSWER_SECONDS)
                self._has_answered = True
                return answer
            except self._errors as error:
                status, reason = getattr(error, "status", None) or 0, getattr(error, "reason", None) or error
                if status == _MISSING and verb != "create":
                    self._has_answered = True
                    return None
                if status == _CONFLICT and verb == "create" and failed_at is not None:
                    return None  # an attempt before was heard
                if 0 < status < 500 and status not in _PASSING:
                    raise ConfigError(
                        f"Kubernetes refused to {verb} the TrainJob {job}: {status} {reason} "
                        f"{getattr(error, 'body', None) or ''}. Kubeflow Trainer must be installed there, and the "
                        "section [kubernetes] fit the cluster."
                    ) from error
                failed_at = self._be_patient(f"{status or ''} {reason}".strip(), failed_at, is_patient, error)
            time.sleep(_POLL_SECONDS)
            if status == _LOGIN:
                with contextlib.suppress(self._config.ConfigException):
                    self._log_in()

    def _be_patient(self, reason: str, failed_at: float | None, is_patient: bool, error: Exception) -> float:
        """Return since when the cluster has not answered, and tell the user once; raise where that is too long."""
        now = time.monotonic()
        waited = now - (now if failed_at is None else failed_at)
        if not (is_patient and self._has_answered) or waited > _PATIENCE_SECONDS:
            raise SetupError(
                f"--on kubernetes: the cluster has not answered for {waited:.0f} s ({reason}). Check `kubectl "
                "cluster-info`."
            ) from error
        if failed_at is None:
            print(
                f"embershard: Kubernetes does not answer ({reason}); the jobs go on, and it is asked again for "
                f"{_PATIENCE_SECONDS / 60:.0f} minutes.",
                file=sys.stderr,
            )
        return now - waited


def jobs_of(sweep: Sweep) -> KubernetesJobs:
    """Return what the runs of a sweep ask Kubernetes for; raise `ConfigError` where its file does not say it."""
    if sweep.kubernetes is None:
        raise ConfigError("--on kubernetes needs a section [kubernetes] in the sweep's file: image, claim and mount.")
    return sweep.kubernetes


def train_job(experiment: Experiment, sweep: Sweep, folder: Path) -> dict[str, Any]:
    """Return the manifest of a run as a TrainJob, https://www.kubeflow.org/docs/components/trainer (of version 2.3).

    The runtime starts torchrun in each pod, with the addresses. Paths in the settings start from the current folder, as
    in a run on this machine.

    Args:
        folder: of the sweep.

    Raises:
        ConfigError: the sweep's file has no section [kubernetes], pods would have different numbers of ranks, or what
            the run needs is not on the volume.
    """
    jobs = jobs_of(sweep)
    nodes, started_in = jobs.nodes(experiment.ranks), Path.cwd()
    for path in (folder.absolute(), started_in):
        if not path.is_relative_to(jobs.mount):
            raise ConfigError(
                f"{path} is not below kubernetes.mount = {jobs.mount}, so the pods cannot see it. Start the command on "
                "the volume of kubernetes.claim, mounted here at the same path, and keep the sweep's folder there."
            )
    run = run_folder(folder.absolute(), experiment.name)
    words = ["torchrun", "-m", "embershard", "train", *experiment.settings, "--run-dir", str(run)]
    spec: dict[str, Any] = {
        "runtimeRef": {"apiGroup": GROUP, "kind": "ClusterTrainingRuntime", "name": jobs.runtime},
        "trainer": {
            "image": jobs.image,
            "command": ["sh", "-c", 'cd "$0" && exec "$@"', str(started_in), *words],
            "env": [{"name": "OMP_NUM_THREADS", "value": str(jobs.cpus_per_rank)}],
            "numNodes": nodes,
            "numProcPerNode": experiment.ranks // nodes,
            "resourcesPerNode": _resources(jobs, experiment.ranks // nodes),
        },
        "runtimePatches": [_volumes(jobs)],
    }
    if sweep.time_limit_seconds is not None:
        spec["activeDeadlineSeconds"] = math.ceil(sweep.time_limit_seconds)
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "TrainJob",
        "metadata": {
            "name": job_name(experiment.name, folder),
            "namespace": jobs.namespace,
            "labels": {"app.kubernetes.io/name": "embershard", "embershard/run": experiment.name},
        },
        "spec": spec,
    }


def manifests(sweep: Sweep, folder: Path) -> str:
    """Return the manifests of all runs as one YAML stream (of JSON documents), for `kubectl create -f`."""
    found = [train_job(experiment, sweep, folder) for experiment in sweep.experiments]
    return "\n".join(f"---\n{json.dumps(manifest, indent=2)}" for manifest in found)


def _resources(jobs: KubernetesJobs, ranks: int) -> Mapping[str, Any]:
    """Return what a pod of so many ranks asks for; Kubernetes wants limits for GPUs."""
    requests = {"cpu": str(jobs.cpus_per_rank * ranks)}
    limits = {}
    if jobs.memory_per_node is not None:
        requests["memory"] = limits["memory"] = jobs.memory_per_node
    if jobs.gpus_per_rank:
        requests["nvidia.com/gpu"] = limits["nvidia.com/gpu"] = str(jobs.gpus_per_rank * ranks)
    return {"requests": requests, **({"limits": limits} if limits else {})}


def _volumes(jobs: KubernetesJobs) -> Mapping[str, Any]:
    """Return the patch that mounts the claim, and enough shared memory for NCCL, in each pod."""
    volumes = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": jobs.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [{"name": "shared", "mountPath": jobs.mount}, {"name": "shm", "mountPath": "/dev/shm"}]
    pod = {"volumes": volumes, "containers": [{"name": _CONTAINER, "volumeMounts": mounts}]}
    replicated = {"name": _CONTAINER, "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "manager": "embershard/sweep",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
    }
