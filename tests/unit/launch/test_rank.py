"""The program of each rank: what is handed to it, and a command that torchrun started is a rank itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from embershard.commands import cli
from embershard.commands.score import ScoreJob
from embershard.commands.train.command import TrainJob
from embershard.distributed import Ranks, Supervision
from embershard.errors import DataError
from embershard.extras.verify.command import VerifyJob
from embershard.launch import launcher, rank
from embershard.settings.decoding import decode
from embershard.settings.files import load_config
from embershard.training.config import RunConfig
from tests.unit.settings.test_code_of_runs import settings, write_module

TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(autouse=True)
def _own_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank shows errors by a hook of its own; other tests get theirs back."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


def hand_over(job: object, monkeypatch: pytest.MonkeyPatch) -> int:
    """Give this process a job, as the launcher does; return the descriptor of its file."""
    descriptor, variables = rank.hand_over(job)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return descriptor


def test_jobs_arrive_whole_and_once(project_dir, monkeypatch):
    config = load_config(RunConfig, project_dir / "examples" / "quickstart.toml", ["train.max_steps=3"])
    file, runs = Path("a.toml"), Path("runs")
    for job in (
        TrainJob(config, runs, True, file, ["train.max_steps=3"], 7, True, ["data.seed"], (2, 5), "json"),
        VerifyJob(config, None, False, 8, runs / "different"),
        ScoreJob(config, runs, False, runs / "checkpoints", None, Path("scores.parquet")),
    ):
        descriptor = hand_over(job, monkeypatch)
        assert rank.handed_job() == job
        assert "EMBERSHARD_JOB" not in os.environ, "processes that a rank starts are no ranks"
        os.close(descriptor)


def test_settings_are_read_once_by_the_launcher(project_dir, tmp_path, monkeypatch):
    """Ranks need no file of them: it may have changed meanwhile."""
    handed: list[rank.Job] = []
    trained: list[dict[str, Any]] = []
    monkeypatch.setattr(launcher, "start_ranks", lambda *_, job, **options: handed.append(job) or 0)
    monkeypatch.setattr("embershard.commands.train.run.train_run", lambda config, *_, **given: trained.append(given))
    file = tmp_path / "run.toml"
    file.write_text((project_dir / "examples" / "quickstart.toml").read_text())
    words = ["train", str(file), "--run-dir", str(tmp_path / "run"), "--nproc", "1", "--set", "train.device=cpu"]
    assert cli.main([*words, "--profile-steps", "3:4"]) == 0
    file.unlink()
    assert rank.do(lambda: handed[0]) == 0
    (given,) = trained
    assert (given["resume"], given["profile_steps"]) == (None, (3, 4))
    assert f"--config {file} --set train.device=cpu --nproc 1 --run-dir {tmp_path / 'run'} --resume" in given["go_on"]


def test_a_rank_looks_for_code_of_runs_on_its_own_python_path(tmp_path, monkeypatch, capsys):
    """The launcher's has not the folder that `python -m` is started in."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "run.toml").write_text(settings())
    run = tmp_path / "received_run"
    write_module(run)
    (run / "metrics.jsonl").touch()
    config = load_config(RunConfig, tmp_path / "home" / "run.toml")
    monkeypatch.setattr(sys, "path", [str(run), *sys.path])
    os.close(hand_over(None, monkeypatch))
    for trusted in (False, True):
        job = VerifyJob(config, None, trusted, 1)
        monkeypatch.setattr(VerifyJob, "run", lambda *_: 0)
        descriptor = hand_over(job, monkeypatch)
        assert rank.main() == (0 if trusted else 1)
        os.close(descriptor)
        assert ("whose code runs only with --trust-code" in capsys.readouterr().err) is not trusted


@pytest.mark.parametrize(
    "words", [["train", "nowhere.toml"], ["verify", "nowhere.toml"], ["predict", "none", "-o", "x"], ["eval", "none"]]
)
def test_under_torchrun_a_command_is_a_rank(words, under_torchrun, monkeypatch, capsys):
    """It starts none, and shows its errors as a rank does."""
    monkeypatch.setattr(launcher, "start_ranks", None)
    assert cli.main(words) == 1
    assert "ConfigError: no" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--nproc", "--max-restarts", "--hang-seconds"])
def test_under_torchrun_options_of_the_launcher_are_refused(option, project_dir, under_torchrun, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", str(project_dir / "examples" / "quickstart.toml"), option, "2"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert f"{option}: this process is a rank already, since RANK=0, LOCAL_RANK=0, WORLD_SIZE=1 and MASTER_ADDR" in said
    assert f"Leave {option} out; or, to start ranks here: unset RANK LOCAL_RANK WORLD_SIZE" in said


@pytest.mark.parametrize("uses_gpu", [True, False])
def test_a_rank_that_fails_on_a_gpu_waits_for_none_of_its_kernels(uses_gpu, monkeypatch, capsys):
    """They may wait for a rank that has ended. What it has to say is shown before."""
    ended: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: uses_gpu)
    monkeypatch.setattr(os, "_exit", lambda code: ended.append((code, capsys.readouterr().err)))

    def fail() -> rank.Job:
        raise DataError("no such file")

    assert rank.run_rank(fail) == 1
    assert [code for code, _ in ended] == [1] * uses_gpu
    assert all("no such file" in said for _, said in ended)


@pytest.mark.parametrize(
    ("number", "level", "is_said"),
    [("0", "DETAIL", True), ("0", "detail", True), ("0", "INFO", False), ("1", "DETAIL", False)],
)
def test_the_first_rank_warns_of_what_would_kill_a_training(number, level, is_said, monkeypatch, capsys):
    """Before it makes a group."""

    def stop(*_: object) -> None:
        raise DataError("this far")

    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    monkeypatch.setenv("RANK", number)
    monkeypatch.setattr("embershard.training.arithmetic.prepare_process", stop)
    with pytest.raises(DataError, match="this far"):
        rank.do(lambda: rank.Job(RunConfig(), None, False))
    assert (f"warning: TORCH_DISTRIBUTED_DEBUG={level}: " in capsys.readouterr().err) is is_said


@pytest.mark.parametrize("missing", TORCHRUN)
def test_without_one_of_the_variables_it_is_none(missing, under_torchrun, monkeypatch):
    assert rank.is_rank()
    monkeypatch.delenv(missing)
    assert not rank.is_rank()


def test_a_rank_computes_in_as_many_threads_as_its_steps_are_worth(monkeypatch):
    """Before the model is built, and threads beside the training are started."""

    class Looks(rank.Job):
        def run(self, ranks: Ranks, supervision: Supervision) -> int:
            return torch.get_num_threads()

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("EMBERSHARD_RANK_CORES", "7")
    before = torch.get_num_threads()
    large = decode(RunConfig, {"model": {"over_arch_layer_sizes": [1024, 512, 1]}, "train": {"device": "cpu"}})
    try:
        torch.set_num_threads(7)
        found = [rank.do(lambda config=config: Looks(config, None, False)) for config in (RunConfig(), large)]
    finally:
        torch.set_num_threads(before)
    assert found == [1, 3]
