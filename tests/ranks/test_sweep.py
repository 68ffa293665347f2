"""A sweep of real runs that is killed in the middle and goes on; the same on Ray and on Slurm, where they are."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from embershard.commands import cli
from tests.ranks import commands

pytestmark = pytest.mark.ranks

FILE = """
config = "{config}"
time_limit_seconds = 300
[set]
data.synthetic.scale = 0.0005
data.eval_fraction = 0.0
profile.samples = 1000
train.batch_size = 32
train.max_steps = 8
train.eval_every = "none"
checkpoint.at_end = false
checkpoint.every_steps = "none"
[grid]
ranks = [1]
cache.ratio = [0.1, 0.2]
"""


def words(project_dir: Path, folder: Path) -> list[str]:
    file = folder / "sweep.toml"
    file.write_text(FILE.format(config=project_dir / "examples" / "quickstart.toml"))
    return ["sweep", str(file), "--out", str(folder / "out")]


def sweep(project_dir: Path, folder: Path, *options: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(project_dir),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-m", "embershard.commands.cli", *words(project_dir, folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *options], env=environment, text=True, stdout=pipe, stderr=pipe)


def ended(folder: Path) -> list[Path]:
    return sorted((folder / "out" / "states").glob("*.json"))


def test_a_killed_sweep_goes_on_without_running_anything_twice(project_dir: Path, tmp_path: Path) -> None:
    said = tmp_path / "said.txt"
    first = commands.start(words(project_dir, tmp_path), said)
    ends_at = time.monotonic() + 400
    while len(ended(tmp_path)) < 1 or len(list((tmp_path / "out" / "runs").iterdir())) < 2:
        assert first.poll() is None, said.read_text()
        assert time.monotonic() < ends_at
        time.sleep(0.05)
    children = psutil.Process(first.pid).children(recursive=True)
    first.kill()
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert gone
    assert not alive  # no run trains on without its sweep
    before = {path: path.read_text() for path in ended(tmp_path)}

    second = commands.run(words(project_dir, tmp_path), tmp_path, timeout=400.0)
    assert second.returncode == 0, f"{second.stdout}\n{second.stderr}"
    rows = pq.read_table(tmp_path / "out" / "results.parquet").to_pylist()
    assert sorted(row["cache.ratio"] for row in rows) == [0.1, 0.2]  # none lost, none twice
    assert {row["status"] for row in rows} == {"finished"}
    assert len({row["result.loss"] for row in rows}) == 1  # the cache's size changes no loss
    assert all(path.read_text() == text for path, text in before.items())

    pytest.importorskip("plotly", reason="Plotly is not installed (the extra [report])")
    assert cli.main(["report", str(tmp_path / "out"), "-o", str(tmp_path / "report.html")]) == 0
    titles = set(re.findall(r"<h3>([^<]*)</h3>", (tmp_path / "report.html").read_text()))
    assert {"Comparison", "Loss", "Rows moved", "Hit rate per table and rank", "Step time"} <= titles


needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (the extra [ray])")


def complete(running: subprocess.Popen[str], folder: Path) -> None:
    output, errors = running.communicate(timeout=400)
    assert running.returncode == 0, f"{output}\n{errors}"
    rows = pq.read_table(folder / "out" / "results.parquet").to_pylist()
    assert sorted(row["cache.ratio"] for row in rows) == [0.1, 0.2]  # none lost, none twice
    assert {row["status"] for row in rows} == {"finished"}
    assert len({row["result.loss"] for row in rows}) == 1


def wait_for(condition: Callable[[], Any], running: subprocess.Popen[str]) -> None:
    ends_at = time.monotonic() + 300
    while not condition():
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < ends_at
        time.sleep(0.1)


def started(folder: Path) -> list[Path]:
    runs = folder / "out" / "runs"
    return list(runs.iterdir()) if runs.exists() else []


@pytest.mark.extra
@needs_ray
def test_a_sweep_on_ray_survives_the_death_of_a_worker(project_dir: Path, tmp_path: Path) -> None:
    running = sweep(project_dir, tmp_path, "--on", "ray")
    wait_for(lambda: started(tmp_path), running)
    workers = psutil.Process(running.pid).children(recursive=True)
    busy = [process for process in workers if process.name().startswith("ray::run_once")]
    busy[0].send_signal(signal.SIGKILL)
    complete(running, tmp_path)
    assert len(list((tmp_path / "out" / "outputs").glob("*.aside-1"))) == 1  # of the run that was started again


@pytest.mark.extra
@needs_ray
def test_a_sweep_on_ray_survives_the_death_of_a_machine(project_dir, tmp_path, monkeypatch) -> None:
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(project_dir))  # of the cluster's workers
    machines = Cluster()
    try:
        machines.add_node(num_cpus=1)
        second = machines.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", machines.address)
        running = sweep(project_dir, tmp_path, "--on", "ray")
        wait_for(lambda: len(started(tmp_path)) == 2, running)
        machines.remove_node(second, allow_graceful=False)
        complete(running, tmp_path)
    finally:
        machines.shutdown()
    assert len(list((tmp_path / "out" / "outputs").glob("*.aside-1"))) == 1  # of the run that was started again


def has_slurm() -> bool:
    found = shutil.which("sinfo") and subprocess.run(["sinfo", "-h"], capture_output=True, text=True, check=False)
    return bool(found) and found.returncode == 0 and importlib.util.find_spec("submitit") is not None


@pytest.mark.extra
@pytest.mark.skipif(not has_slurm(), reason="there is no Slurm here, or submitit is not installed (the extra [slurm])")
def test_a_sweep_on_slurm_that_is_killed_runs_nothing_twice(project_dir: Path, tmp_path: Path) -> None:
    first = sweep(project_dir, tmp_path, "--on", "slurm")
    wait_for((tmp_path / "out" / "outputs").exists, first)  # a run begins
    first.kill()  # its jobs go on
    first.communicate()
    complete(sweep(project_dir, tmp_path, "--on", "slurm"), tmp_path)
    assert len(started(tmp_path)) == 2
