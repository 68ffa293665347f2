"""`embershard sweep --on slurm`: what its jobs ask for, and what becomes of them. submitit and Slurm are made up here;
tests/ranks/test_sweep.py has a real one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embershard.commands.sweep import command
from embershard.errors import ConfigError, SetupError
from embershard.extras.sweep_engines import on_slurm
from embershard.sweeps import clusters
from embershard.sweeps.experiments import Experiment, Sweep
from embershard.sweeps.outcomes import Outcome, keep_outcome, make_outcome

pytestmark = pytest.mark.extra

FILE = """
config = "run.toml"
time_limit_seconds = 90
grid.ranks = [1, 4]
[slurm]
gpus_per_rank = 1
cpus_per_rank = 3
options.partition = "gpu"
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    (tmp_path / "run.toml").write_text("")
    (tmp_path / "sweep.toml").write_text(FILE)
    return Sweep.read(tmp_path / "sweep.toml")


class Slurm:
    """Stands in for submitit and Slurm: a job leaves the queue when the queue is looked at, `work` having been done.
    It takes `most` jobs, and cancels none of those that are `stuck`."""

    def __init__(self, work: Callable[..., Outcome | None], most: int = 9, stuck: Set[str] = frozenset()) -> None:
        self.asked: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self._work, self._most, self._stuck = work, most, stuck
        self._waiting: list[tuple[Any, ...]] = []

    def update_parameters(self, **parameters: Any) -> None:
        self.asked.append(parameters)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        assert function is on_slurm.run_once
        number = str(len(self.asked))
        if len(self.asked) > self._most:
            raise RuntimeError("sbatch: QOSMaxSubmitJobPerUserLimit")
        self._waiting.append(arguments)
        return SimpleNamespace(
            job_id=number, cancel=lambda: self._cancel(number), stderr=lambda: "noise\nslurmstepd: killed\n"
        )

    def _cancel(self, number: str) -> None:
        if number in self._stuck:
            raise RuntimeError("scancel: Socket timed out")
        self.cancelled.append(number)

    def queued(self, jobs: Set[str]) -> Set[str]:
        for arguments in self._waiting:
            self._work(*arguments)
        self._waiting.clear()
        return set()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Slurm], Slurm]:
    def use_slurm(slurm: Slurm) -> Slurm:
        monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(AutoExecutor=lambda folder, cluster: slurm))
        monkeypatch.setattr("shutil.which", lambda name: name)
        monkeypatch.setattr(on_slurm, "_queued_ids", slurm.queued)
        monkeypatch.setattr(on_slurm, "_POLL_SECONDS", 0.0)
        monkeypatch.setattr(on_slurm, "_SETTLE_SECONDS", 0.0)
        return slurm

    return use_slurm


def finished(experiment: Experiment, folder: Path, *_: Any) -> Outcome:
    outcome = make_outcome(experiment, "finished", "", started_at=0.0, seconds=1.0, attempt=1)
    keep_outcome(outcome, folder)
    return outcome


def run_all(sweep: Sweep, folder: Path, end: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
    found: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        found.append(outcome)
        end(outcome)

    on_slurm.run_on_slurm(sweep, sweep.experiments, folder, lambda experiment: None, note)
    return found


@pytest.mark.smoke
def test_a_run_is_a_job(sweep: Sweep, use: Callable[[Slurm], Slurm], tmp_path: Path) -> None:
    slurm = use(Slurm(finished))
    found = run_all(sweep, tmp_path / "out")
    assert [each.status for each in found] == ["finished"] * 2
    first, second = slurm.asked
    assert (first["cpus_per_task"], second["cpus_per_task"]) == (3, 12)
    options = second["slurm_additional_parameters"]
    assert options == {"partition": "gpu", "gpus_per_node": 4, "dependency": "singleton"}
    assert second["timeout_min"] == 7
    # Jobs of the same run of the same sweep, and no others, wait for each other.
    again = on_slurm._parameters(sweep.experiments[0], sweep, tmp_path / "out")
    assert first["name"] == again["name"] != second["name"]
    assert first["name"] != on_slurm._parameters(sweep.experiments[0], sweep, tmp_path / "other")["name"]
    assert slurm.cancelled == []


def test_a_job_without_a_result_has_not_ended(sweep: Sweep, use: Callable[[Slurm], Slurm], tmp_path: Path) -> None:
    use(Slurm(lambda *arguments: None))
    first, _ = run_all(sweep, tmp_path / "out")
    assert (first.status, first.reason) == ("interrupted", "Slurm's job 1 ended without a result: slurmstepd: killed")


def test_a_queue_that_does_not_answer_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for program, queued in (("exit 1", {"7"}), ("echo 8", {"8"})):
        found = subprocess.run(["sh", "-c", program], capture_output=True, text=True, check=False)
        monkeypatch.setattr("subprocess.run", lambda *_, found=found, **__: found)
        assert on_slurm._queued_ids({"7"}) == queued
        monkeypatch.undo()


def stop(_: Outcome) -> None:
    raise KeyboardInterrupt


def test_jobs_end_with_a_sweep_that_is_stopped(sweep: Sweep, use: Callable[[Slurm], Slurm], tmp_path: Path) -> None:
    slurm = use(Slurm(finished))
    with pytest.raises(KeyboardInterrupt):
        run_all(sweep, tmp_path / "out", stop)
    assert slurm.cancelled == ["2"]


def test_a_job_that_cannot_be_cancelled_does_not_keep_the_others(sweep, use, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(clusters, "_PAUSE_SECONDS", 0.0)
    slurm = use(Slurm(finished, stuck={"1"}))

    def queued(jobs: Set[str]) -> Set[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(on_slurm, "_queued_ids", queued)
    with pytest.raises(KeyboardInterrupt):
        run_all(sweep, tmp_path / "out")
    assert slurm.cancelled == ["2"]
    assert "1 jobs could not be cancelled (scancel: Socket timed out). To end them: scancel 1\n" in (
        capsys.readouterr().err
    )


def test_jobs_go_on_after_an_error(sweep, use, tmp_path, capsys) -> None:
    slurm = use(Slurm(finished, most=1))
    with pytest.raises(ConfigError, match="Slurm refused a job: sbatch: QOSMaxSubmitJobPerUserLimit"):
        run_all(sweep, tmp_path / "out")
    assert slurm.cancelled == []
    assert "the jobs that were handed over go on. Start the same command again" in capsys.readouterr().err


def test_what_is_missing_is_asked_for(sweep, use, tmp_path, monkeypatch) -> None:
    use(Slurm(finished))
    file = tmp_path / "sweep.toml"
    file.write_text(FILE.replace("time_limit_seconds = 90", ""))
    arguments = [str(file), "--on", "slurm", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(
        "embershard.commands.sweep.run.lock_run_dir", lambda folder, option: folder.mkdir(exist_ok=True)
    )
    with pytest.raises(ConfigError, match="needs time_limit_seconds"):
        command.main(arguments)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SetupError, match="sbatch"):
        command.main(arguments)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(SetupError, match="pip install"):
        command.main(arguments)
