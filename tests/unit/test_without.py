"""Without the rooms of a capability beside the core, all other modules import, and a run trains and resumes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from embershard.commands import cli
from tests.covering import keep
from tests.without import CAPABILITIES, PROJECT, hide, hiding_environment, imports_of, is_in, needs, rooms_of

PACKAGE = PROJECT / "embershard"
#: The quickstart, small, without a tracker.
SMALL = (
    *("data.synthetic.num_samples=9000", "data.synthetic.scale=0.0001", "train.batch_size=256", "train.log_every=5"),
    *("train.eval_every=10", "checkpoint.every_steps=10", "profile.samples=2000", "train.device=cpu"),
    "tracking.trackers=[]",
)


def module_name(file: Path) -> str:
    parts = file.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of_modules() -> dict[str, list[str]]:
    """What each module imports when it is imported."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {module_name(file): [*imports_of(ast.parse(file.read_text(encoding="utf-8")).body)] for file in files}


def imports_from(rooms: frozenset[str]) -> Iterator[str]:
    """Yield the imports of rooms that other modules make when they are imported."""
    for module, names in imports_of_modules().items():
        if not is_in(module, rooms):
            yield from (f"{module} imports {name}" for name in names if is_in(name, rooms))


@pytest.mark.slow
@pytest.mark.parametrize("name", CAPABILITIES)
def test_nothing_else_imports_a_room_when_it_is_imported(name):
    assert list(imports_from(rooms_of([name]))) == []


@pytest.mark.parametrize("name", CAPABILITIES)
def test_its_rooms_are_there(name):
    assert [room for room in rooms_of([name]) if find_spec(room) is None] == []


def test_an_import_is_noticed_wherever_it_runs():
    text = "import a.b\nif x:\n    from c import d\nclass E:\n    import e\ndef f():\n    import g\n"
    text += "if TYPE_CHECKING:\n    import h\ntry:\n    import i\nfinally:\n    pass\n"
    assert set(imports_of(ast.parse(text).body)) == {"a.b", "c", "c.d", "e", "i"}


def test_a_test_file_that_needs_a_room_through_another_is_found():
    assert needs(PROJECT / "tests" / "unit" / "sharding" / "test_id_tables.py", rooms_of(["ids"]))  # a lazy name
    rooms = rooms_of(["networks"])
    assert needs(PROJECT / "tests" / "unit" / "models" / "test_tasks.py", rooms)
    assert not needs(Path(__file__), rooms)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("report_page", "report nowhere -o page.html"),
        ("compare", "compare a.parquet b.parquet"),
        ("verify", "verify quickstart"),
        ("calibrate", "plan --calibrate -o machine.toml"),
        ("replan", "plan replan old.json"),
        ("convert", "data convert a.csv -o a.parquet"),
        ("serving", "export runs/a -o exported"),
        ("serving", "serve exported"),
    ],
)
def test_a_command_says_which_extra_is_missing(name, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for module in [module for module in sys.modules if is_in(module, rooms_of([name]))]:
        monkeypatch.delitem(sys.modules, module)
    hide([name])
    assert cli.main(words.split()) == 2
    assert f"this needs embershard.extras.{name}, which this installation of embershard is without" in (
        capsys.readouterr().err
    )


#: Commands of one new interpreter, whose ranks are forked: imports take longer than these runs.
_COMMANDS = """
import json, subprocess, sys
import embershard.launch.rank, embershard.training.trainer
from embershard.commands import cli
from tests.ranks import commands

subprocess.Popen = commands._popen
sys.exit(max(cli.main(words) for words in json.loads(sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", keep([tuple(CAPABILITIES)], [tuple(CAPABILITIES), *((name,) for name in CAPABILITIES)])
)
def test_a_run_trains_and_resumes(names, tmp_path):
    environment = hiding_environment(tmp_path, names)
    train = ["train", "quickstart", "--nproc", "1", "--run-dir", str(tmp_path / "run")]
    train += [word for setting in SMALL for word in ("--set", setting)]
    runs = [*train, "--set", "train.max_steps=10"], [*train, "--set", "train.max_steps=14", "--resume"]
    command = [sys.executable, "-c", _COMMANDS, json.dumps(runs)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 14


@pytest.mark.matrix  # an interpreter of its own, for what a part that few have asks for
@pytest.mark.slow
def test_a_run_that_cannot_publish_is_refused_before_it_is_built(tmp_path):
    words = ["train", "quickstart", "--nproc", "1", "--run-dir", str(tmp_path / "run")]
    words += [
        word
        for each in (*SMALL, f"publish.folder={tmp_path / 'published'}", "publish.every_steps=5")
        for word in ("--set", each)
    ]
    command = [sys.executable, "-c", _COMMANDS, json.dumps([words])]
    environment = hiding_environment(tmp_path, ["serving"])
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "this needs embershard.extras.serving, which this installation of embershard is without" in done.stderr
    assert not (tmp_path / "published").exists()


@pytest.mark.matrix  # the runs above train with the modules that are hidden, or do not
@pytest.mark.slow
def test_what_is_hidden_is_not_found(tmp_path):
    """By any Python process of that environment; a negative control of the runs above."""
    environment = hiding_environment(tmp_path, ["hstu"])
    done = subprocess.run(
        [sys.executable, "-c", "import embershard.extras.hstu"], env=environment, capture_output=True, text=True
    )
    assert "embershard.extras.hstu is taken out" in done.stderr
