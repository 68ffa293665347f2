"""The scripts in examples/clusters: their shell, their manifest, and the arguments of the programs that they start."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from embershard.launch.arguments import add_run_arguments

pytestmark = pytest.mark.extra


def check_torchrun(words: list[str]) -> argparse.Namespace:
    """Parse a torchrun command, and the arguments of its program; return torchrun's."""
    assert words[0] == "torchrun"
    found = get_args_parser().parse_args(words[1:])
    assert found.module
    assert found.training_script == "embershard"
    assert found.training_script_args[0] == "train"
    program = argparse.ArgumentParser(exit_on_error=False)
    add_run_arguments(program)
    program.parse_args(found.training_script_args[1:])
    return found


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_the_slurm_script(project_dir: Path, tmp_path: Path, restarts: str) -> None:
    for name, prints in (("srun", 'printf "%s\\n" "$@"'), ("scontrol", "printf 'node7\\nnode8\\n'")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{prints}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "123456"}
    slurm |= {"SLURM_CPUS_PER_TASK": "16", "SLURM_RESTART_COUNT": restarts, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    script = project_dir / "examples" / "clusters" / "slurm.sh"
    command = ["bash", str(script), "--config", "a b.toml", "--run-dir", "/shared/run1"]
    done = subprocess.run(command, env=slurm, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    options = words[: words.index("torchrun")]
    assert options == ["--cpus-per-task=16", "--kill-on-bad-exit=1"], "srun inherits no cores from sbatch"
    found = check_torchrun(words[len(options) :])
    assert (found.nnodes, found.nproc_per_node, found.rdzv_endpoint) == ("2", "8", "node7:23456")
    resume = ["--resume"] if restarts == "1" else []
    assert found.training_script_args == ["train", "--config", "a b.toml", "--run-dir", "/shared/run1", *resume]
    for line in re.findall(r"^#   (?:RANKS_PER_NODE=4 )?(sbatch .*)$", script.read_text(), re.MULTILINE):
        assert "examples/clusters/slurm.sh" in shlex.split(line)


@pytest.mark.slow
def test_the_manifest_follows_the_published_schema(project_dir: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    manifest: dict[str, Any] = yaml.safe_load((project_dir / "examples" / "clusters" / "kubernetes.yaml").read_text())
    job = models.TrainerV1alpha1TrainJob.from_dict(manifest)
    assert yaml.safe_load(job.to_json()) == manifest  # it drops what it does not know
    check_torchrun(manifest["spec"]["trainer"]["command"])
