"""The runs of a sweep as TrainJobs of Kubeflow Trainer, without a connection to a cluster."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embershard.errors import ConfigError
from embershard.launch.sweep.cluster_settings import KubernetesJobs, job_name
from embershard.launch.sweep.experiments import Experiment, Sweep
from embershard.launch.sweep.outcomes import run_folder

GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
_CONTAINER = "node"  # and the replicated job: in Kubeflow's runtimes for torch
_PROGRAM = "embershard.launch.train.command"


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
    words = ["torchrun", "-m", _PROGRAM, *experiment.settings, "--run-dir", str(run)]
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
