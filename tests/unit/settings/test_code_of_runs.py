"""Who may run code: a module of `model.build` or `cache.policy` in a run's folder runs only with `--trust-code`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from embershard.commands import cli
from embershard.errors import ConfigError
from embershard.launch.rank_group import _environment
from embershard.settings.files import load_config
from embershard.training.config import RunConfig
from tests.conftest import PROJECT

REFUSED = "is in the run folder .*, whose code runs only with --trust-code"


def write_module(folder: Path, name: str = "received") -> Path:
    """A module that leaves a file where it was imported from."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text("from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\ndef build(*_): ...\n")
    return path


def settings(build: str = "received:build", folder: str | None = None) -> str:
    return f'[model]\nbuild = "{build}"\n' + ("" if folder is None else f'folder = "{folder}"\n')


@pytest.fixture(autouse=True)
def python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that a module was imported from stay on the path of no other test."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder that somebody sent, with a module in it."""
    folder = tmp_path / "received_run"
    write_module(folder)
    (folder / "checkpoints" / "step_2").mkdir(parents=True)
    (folder / "config.toml").write_text(settings())
    (folder / "foreign.toml").write_text(settings())
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "predict RUN -o scores.parquet",
        "eval RUN",
        "export RUN -o exported",
        "train RUN/foreign.toml --dry-run",
        "train RUN/foreign.toml",
        "train RUN/config.toml --run-dir RUN --resume",
        "verify RUN/config.toml",
        "plan --config RUN/foreign.toml --profile p.npz",
        "profile synthetic --config RUN/foreign.toml -o p.npz",
        "sweep sweep.toml --dry-run",
    ],
)
def test_code_in_a_run_folder_runs_only_where_that_is_asked_for(words, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("sweep.toml").write_text('config = "received_run/foreign.toml"\n[grid]\ncache.ratio = [0.1, 0.2]\n')
    assert cli.main([word.replace("RUN", run.name) for word in words.split()]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert f"model.build: {run}/received.py is in the run folder {run}, whose code runs only with --trust-code" in line
    assert not said.out
    assert not (run / "received.ran").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [run.name, "sweep.toml"], "nothing is left"


@pytest.mark.parametrize(
    "words", ["train RUN/foreign.toml --dry-run", "train RUN/foreign.toml", "verify RUN/config.toml"]
)
@pytest.mark.parametrize(
    ("setting", "settings", "folder"),
    [
        ("cache.policy", '[cache]\npolicy = "received:make"\n', "policy_folder"),
        ("metrics.names", '[metrics]\nnames = ["auc", "received:make"]\n', "folder"),
    ],
)
def test_policies_and_figures_in_a_run_folder_are_code_too(
    setting, settings, folder, words, run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in ("config.toml", "foreign.toml"):
        (run / name).write_text(settings)
    assert cli.main([word.replace("RUN", run.name) for word in words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{setting}: {run}/received.py is in the run folder {run}, whose code runs only with --trust-code" in line
    assert f"--set {setting.partition('.')[0]}.{folder}=DIR" in line
    assert not (run / "received.ran").exists()


def test_the_folder_of_a_policy_is_recorded(run, tmp_path):
    home = tmp_path / "home"
    write_module(home)
    (home / "run.toml").write_text('[cache]\npolicy = "received:make"\n')
    assert load_config(RunConfig, home / "run.toml").cache.policy_folder == str(home)
    (home / "plain.toml").write_text('[cache]\npolicy = "lru"\n')
    assert load_config(RunConfig, home / "plain.toml").cache.policy_folder is None
    (run / "config.toml").write_text('[cache]\npolicy = "received:make"\npolicy_folder = "code"\n')
    with pytest.raises(ConfigError, match=r"cache.policy_folder = 'code', needed an absolute path"):
        load_config(RunConfig, run / "config.toml")


def test_where_it_is_asked_for_it_runs(run, tmp_path, capsys):
    (run / "own_trusted.py").write_text((PROJECT / "examples" / "own_model.py").read_text())
    words = ["--dry-run", "--trust-code", "--set", "model.build=own_trusted:build"]
    words += ["--set", "data.synthetic.num_samples=1200", "--set", "data.synthetic.scale=0.001"]
    assert cli.main(["train", str(run / "foreign.toml"), *words]) == 0
    assert "own_trusted:build makes a model" in capsys.readouterr().out


def test_the_folder_of_the_settings_and_that_of_the_training_need_no_trust(run, tmp_path):
    home = tmp_path / "home"
    write_module(home)
    (home / "run.toml").write_text(settings())
    assert load_config(RunConfig, home / "run.toml").model.folder == str(home)
    (run / "config.toml").write_text(settings(folder=str(home)))
    (run / "received.py").unlink()
    assert load_config(RunConfig, run / "config.toml", run_dir=run).model.folder == str(home)


def test_a_run_whose_folder_has_its_own_module_is_refused_before_it_begins(tmp_path):
    """A resume of it would be refused, and a restart by --max-restarts."""
    write_module(tmp_path)
    (tmp_path / "run.toml").write_text(settings())
    assert load_config(RunConfig, tmp_path / "run.toml", run_dir=tmp_path / "runs" / "mine").model.build
    with pytest.raises(ConfigError, match=REFUSED):
        load_config(RunConfig, tmp_path / "run.toml", run_dir=tmp_path)


@pytest.mark.parametrize("way", ["cwd", "subfolder", "link", "linked folder", "package", "namespace"])
def test_no_way_leads_into_a_run_folder(way, run, tmp_path, monkeypatch):
    """Whatever else the record says: the Python path, links, and packages that are folders without a file."""
    build, folder = "received:build", tmp_path
    if way == "cwd":
        monkeypatch.chdir(run)
        monkeypatch.setattr(sys, "path", ["", *sys.path])
    elif way == "subfolder":
        folder = write_module(run / "checkpoints" / "code").parent
        (run / "received.py").unlink()
    elif way == "link":
        os.rename(run / "received.py", tmp_path / "elsewhere.py")
        (run / "received.py").symlink_to(tmp_path / "elsewhere.py")
        folder = run
    elif way == "linked folder":
        (tmp_path / "code").symlink_to(run)
        folder = tmp_path / "code"
    elif way == "package":
        write_module(run / "package", "__init__")
        build, folder = "package:build", run
    else:
        build = f"{run.name}.received:build"
    (run / "config.toml").write_text(settings(build, str(folder)))
    with pytest.raises(ConfigError, match=REFUSED):
        load_config(RunConfig, run / "config.toml", run_dir=run)
    assert load_config(RunConfig, run / "config.toml", run_dir=run, trust_code=True).model.build == build


def test_a_recorded_folder_is_absolute(run, tmp_path, monkeypatch):
    """A relative one of a received record would lead beside it: embershard writes absolute ones."""
    monkeypatch.chdir(tmp_path)
    write_module(tmp_path / "code")
    (run / "config.toml").write_text(settings(folder="code"))
    with pytest.raises(ConfigError, match=r"model.folder = 'code', needed an absolute path. Give --set model.folder="):
        load_config(RunConfig, run / "config.toml")
    (tmp_path / "mine.toml").write_text(settings(folder="code"))
    for path, overrides in ((run / "config.toml", ["model.folder=code"]), (tmp_path / "mine.toml", [])):
        assert load_config(RunConfig, path, overrides).model.folder == str(tmp_path / "code")


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 always imports from the folder it is started in")
def test_ranks_that_start_in_a_run_folder_import_nothing_from_it(run, monkeypatch):
    """`python -m` looks for every module, torch too, in the folder that it is started in first."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    write_module(run, "secrets")
    ask = [sys.executable, "-m", "secrets"]  # of the standard library, and without a package that hides it
    for folder in (run, run / "checkpoints"):
        monkeypatch.chdir(folder)
        assert subprocess.run(ask, env=_environment(0, 1, ("localhost", 1)), cwd=run).returncode == 0
        assert not (run / "secrets.ran").exists()
    monkeypatch.chdir(run.parent)
    subprocess.run(ask, env=_environment(0, 1, ("localhost", 1)), cwd=run, check=True)
    assert (run / "secrets.ran").exists(), "otherwise this shows nothing"
