"""The command line up to the point where ranks start; what ranks do is tested in tests/ranks."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from embershard.commands import cli
from embershard.commands.train.command import TrainJob, resume_step
from embershard.errors import ConfigError
from embershard.launch import launcher
from embershard.launch.arguments import NEWEST
from embershard.launch.run_dir import default_run_dir, note_resume
from embershard.settings.decoding import tomllib
from embershard.settings.files import load_config
from embershard.training.config import RunConfig

QUICK = "examples/quickstart.toml"


def job_of(file: str, *overrides: str) -> TrainJob:
    return TrainJob(RunConfig(), None, False, Path(file), overrides, None, False, (), None, "text")


@pytest.fixture(autouse=True)
def _in_the_project(project_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project_dir)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What ranks were started with: their number, program and more."""
    calls: list[tuple] = []
    monkeypatch.setattr(launcher, "start_ranks", lambda *given, **more: calls.append((*given, more)) or 0)
    return calls


@pytest.mark.parametrize("example", [QUICK, "examples/criteo.toml"])
def test_dry_run_prints_all_settings_and_starts_nothing(example, started, tmp_path, capsys):
    words = ["train", "--config", example, "--dry-run", "--set", "train.batch_size=7"]
    if example != QUICK:
        assert cli.main(words) == 2, "it needs data.path"
        (tmp_path / "day_0").write_text("1")
        words += ["--set", f"data.path={tmp_path}"]
    capsys.readouterr()
    assert cli.main(words) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["train"]["batch_size"] == 7
    assert set(printed) >= {"data", "model", "cache", "embedding_optimizer", "dense_optimizer", "schedule", "train"}
    assert cli.main([*words, "--run-dir", str(tmp_path), "--resume"]) == 0
    assert "The checkpoint was not looked at" in capsys.readouterr().out
    assert started == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "# Threads of each of 4 ranks on a CPU: 2; a step is 3.8 GFLOP, a thread gets 1.5 or more, "),
        ("3", "# Threads of each of 4 ranks on a CPU: 3; by OMP_NUM_THREADS."),
    ],
)
def test_a_dry_run_names_the_threads_of_a_rank_and_why(given, said, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16))
    (tmp_path / "day_0").write_text("1")
    words = ["--set", f"data.path={tmp_path}", "--set", "train.batch_size=16384", "--nproc", "4"]
    assert cli.main(["train", "--config", "examples/criteo.toml", "--dry-run", *words]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("policy", [None, "active"])
def test_threads_that_wait_sleep_soon_unless_the_user_says_otherwise(policy, monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr(cli, "_command", lambda words: lambda words: 0)
    assert cli.main(["settings"]) == 0
    assert os.environ.get("GOMP_SPINCOUNT") == (None if policy else "10000")


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--config", QUICK, "--set", "data.path=b\udcff/a.csv"],
        ["train", "--config", QUICK, "--run-dir", "b\udcff"],
        ["data", "inspect", "b\udcff/a.csv"],
    ],
)
def test_a_name_that_is_no_utf_8_is_refused_with_a_way_on(words, started, capsys):
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "b\\xff" in line
    assert "Rename the file or folder" in line
    assert started == []


def test_ranks_get_what_was_asked_for(started, tmp_path, capsys):
    overrides = ["--set", "train.max_steps=3", "--set", "data.seed=4"]
    assert cli.main(["train", "--config", QUICK, "--run-dir", str(tmp_path), "--nproc", "3", *overrides]) == 0
    ranks, module, more = started[0]
    assert (ranks, module) == (3, "embershard.launch.rank")
    job = pickle.loads(pickle.dumps(more["job"]))
    assert job.config == load_config(RunConfig, Path(QUICK), ["train.max_steps=3", "data.seed=4"])
    assert (job.run_dir, job.resume, job.unverified, job.changes) == (tmp_path, None, False, [])


@pytest.mark.parametrize(
    ("given", "has_trained", "resume"),
    [
        ([], False, NEWEST),
        ([], True, NEWEST),
        (["--resume", "400"], False, 400),  # nothing newer is of this run
        (["--resume", "400"], True, NEWEST),
        (["--resume", "400", "--unverified", "--allow-change", "data.seed"], True, NEWEST),
    ],
)
def test_restarts_resume(given, has_trained, resume, started, tmp_path):
    arguments = ["--config", QUICK, "--run-dir", str(tmp_path), "--nproc", "2", "--max-restarts", "3", *given]
    assert cli.main(["train", *arguments]) == 0
    more = started[0][2]
    assert more["most_restarts"] == 3
    assert more["restarted"](has_trained) == replace(more["job"], resume=resume)
    assert more["job"].unverified is ("--unverified" in given)
    assert more["job"].changes == (["data.seed"] if "--allow-change" in given else [])


@pytest.mark.parametrize(
    ("given", "seconds"), [([], 50), (["--hang-seconds", "7"], 7), (["--hang-seconds", "0"], None)]
)
def test_how_long_ranks_may_hang(given, seconds, started, tmp_path):
    assert cli.main(["train", "--config", QUICK, "--run-dir", str(tmp_path), "--nproc", "2", *given]) == 0
    assert started[0][2]["hang_seconds"] == seconds


def test_ctrl_c_while_a_command_loads_its_libraries(monkeypatch, capsys):
    def load(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "named", load)
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "embershard: stopped.\n"


def test_under_torchrun_the_folder_outlives_a_restart(monkeypatch):
    config = Path("examples/criteo.toml")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job/7")
    assert default_run_dir(config) == Path("runs/criteo-job_7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert default_run_dir(config).name.startswith("criteo-2")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ConfigError, match="Give --run-dir, or give torchrun --rdzv-id"):
        default_run_dir(config)


def test_a_restart_by_torchrun_goes_on_from_the_chosen_step_until_the_run_has(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert [resume_step(step, tmp_path) for step in (None, NEWEST, 50)] == [None, NEWEST, 50]
    (tmp_path / ".resumed_by").write_text("another job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert [resume_step(step, tmp_path) for step in (None, NEWEST, 50)] == [NEWEST, NEWEST, 50]
    note_resume(tmp_path)  # newer checkpoints were set aside
    assert resume_step(50, tmp_path) == NEWEST


def test_the_command_that_goes_on_can_be_pasted():
    job = job_of("a b.toml", "cache.enabled=false")
    command = job.resume_command(Path("runs/x y"), 2)
    assert command == (
        "embershard train --config 'a b.toml' --set cache.enabled=false --nproc 2 --run-dir 'runs/x y' --resume"
    )
    assert job.resume_command(Path("r"), None) == "torchrun as before, with --run-dir r --resume"


def test_ranks_trace_the_steps_that_were_asked_for(started, tmp_path, capsys):
    given = ["train", QUICK, "--run-dir", str(tmp_path), "--nproc", "2"]
    assert cli.main([*given, "--profile-steps", "20:25"]) == 0
    assert started[0][2]["job"].profile_steps == (20, 25)
    for wrong in ("20", "25:20", "0:5", "a:b"):
        with pytest.raises(SystemExit):
            cli.main([*given, "--profile-steps", wrong])
        assert "needed the first and the last step, for instance 20:25" in capsys.readouterr().err


def test_a_tracker_that_is_not_installed_stops_before_ranks_start(started, monkeypatch, capsys):
    monkeypatch.setattr("embershard.reports.tracking.trackers.find_spec", lambda name: None)
    assert cli.main(["train", QUICK, "--set", "tracking.trackers=wandb"]) == 2
    assert 'Try: pip install "wandb>=' in capsys.readouterr().err
    assert started == []


def test_two_ranks_on_the_cpu_unless_told_and_it_says_so(started, capsys):
    assert cli.main(["train", "--config", QUICK, "--set", "train.device=cpu"]) == 0
    assert started[0][0] == 2
    assert str(started[0][2]["job"].run_dir).startswith("runs/quickstart-")
    assert "starting 2 ranks (--nproc N" in capsys.readouterr().err


_GLOBAL_BATCH = ("--set", "train.batch_size=none", "--set", "train.global_batch_size=1000")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (
            ["--config", QUICK, "--set", "train.batchsize=3"],
            "train.batchsize: unknown key. Did you mean train.batch_size?",
        ),
        (["--config", QUICK, "--set", "model.embedding_dim=6"], "The next one is 8"),
        (
            [*("--config", QUICK, "--nproc", "3"), *_GLOBAL_BATCH],
            "train.global_batch_size: got 1000, needed a multiple of the 3 ranks, for instance 999.",
        ),
        (
            [*("--config", QUICK, "--nproc", "3", "--dry-run"), *_GLOBAL_BATCH],
            "train.global_batch_size: got 1000, needed a multiple of the 3 ranks, for instance 999.",
        ),
        (
            ["--config", QUICK, "--set", "sharding.exchange=auto"],
            'sharding.exchange: got "auto" without a plan, needed "pooled" or "rows". To choose per table, make a plan',
        ),
        (
            ["--config", QUICK, "--set", "sharding.pin.t_C3.ranks=[0]"],
            "sharding.pin.t_C3 has no effect without a plan. Make one with these settings",
        ),
        (["--config", QUICK, "--set", "sharding.pin.t_C3.kernel=uvm"], "sharding.pin.t_C3.kernel: got 'uvm', needed"),
        (["--config", QUICK, "--set", "sharding.pin.t_C3.slots=0"], "sharding.pin: slots: got 0"),
        (
            ["--config", QUICK, "--nproc", "1", "--set", "sharding.device_bytes=[9, 9]"],
            "sharding.device_bytes: got 2 numbers, needed one, or one for each of 1 ranks.",
        ),
        (
            ["--config", QUICK, "--set", "sharding.device_bytes=[]"],
            "sharding.device_bytes: got (), needed 1 or more",
        ),
        (["--config", QUICK, "--set", "sharding.device_bytes=0"], "sharding.device_bytes: got 0, needed 1 or more"),
        (["--config", QUICK, "--resume"], "--resume needs --run-dir"),
        (["--config", QUICK, "--allow-change", "data.seed"], "--allow-change has no effect without --resume"),
        (["--config", QUICK, "--run-dir", "x", "--resume", "--allow-change", "data.sed"], "Did you mean data.seed?"),
    ],
)
def test_wrong_settings_stop_before_ranks_start(arguments, said, started, capsys):
    assert cli.main(["train", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert started == []


def test_a_folder_with_a_run_is_refused_before_ranks_start(started, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").touch()
    given = ["train", "--config", QUICK, "--run-dir", str(tmp_path)]
    assert cli.main(given) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert started == []
    assert cli.main([*given, "--resume"]) == 0
    assert len(started) == 1


def test_version_and_unknown_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("embershard 0.")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["trian"])
    assert stopped.value.code == 2


@pytest.mark.parametrize("program", ["embershard", ".venv/bin/python -m embershard"])
def test_the_hint_at_the_end_is_a_command_that_can_be_pasted(program, monkeypatch):
    monkeypatch.setenv("EMBERSHARD_PROGRAM", program)
    job = job_of("a.toml", "data.path=/a b", "cache.enabled=false")
    assert job.same_run_command(3) == f"{program} train --config a.toml --set 'data.path=/a b' --nproc 3"
    assert job.same_run_command(None) == "torchrun as before, with"
