"""Messages about folders that are followed and their journals, publications, and disks without room; `make test` runs
two of each."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embershard.commands import cli
from embershard.extras.publications import write
from tests.covering import matrix
from tests.unit.commands.remedies.table import FILES, Remedy, cases, check, said_by

_SETTINGS = """
[data]
kind = "table"
path = "hours"
follow = true
idle_seconds = 0.01
chunk_rows = 40
eval_fraction = 0.0
time = {column = "at", window = 3600}
[data.table]
label = "click"
[data.table.features]
user = {kind = "sparse", num_rows = 9, mapping = "hash"}
price = {kind = "dense"}
[model]
embedding_dim = 4
dense_arch_layer_sizes = [8, 4]
over_arch_layer_sizes = [8, 1]
[train]
batch_size = 10
device = "cpu"
[checkpoint]
every_steps = 1
keep_last = 9
"""


def _hour(number: int, price: str = "1.5", *others: str) -> str:
    """A file of 20 samples, the last ones of which have other prices."""
    prices = [price] * (20 - len(others)) + [*others]
    rows = (f"{3600 * number + n},{n % 7},{each},{n % 2}\n" for n, each in enumerate(prices))
    return "at,user,price,click\n" + "".join(rows)


FILES |= {
    "followed.toml": _SETTINGS,
    **{f"{folder}/a.csv": _hour(0) for folder in ("hours", "cheap", "few")},
    "hours/b.csv": _hour(1),
    "cheap/b.csv": _hour(1, "cheap"),
    "few/b.csv": _hour(1, "1.5", "cheap"),
    "large/disk": "",
    "published/base_0/export.json": '{"format": "module"}',
}
_FOLLOW = "train followed.toml --run-dir one"
_CHEAP, _FEW = "--set data.path=cheap", "--set data.path=few"
OF_BAD_FILES = [
    Remedy((_FOLLOW,), "", _FEW, r"To go on without such rows: (--set data\.bad_rows=0\.01)",
        "--resume --set data.bad_rows=0.01", leads_to=r"To allow them: --set data\.bad_rows"),
    Remedy((_FOLLOW,), "", _CHEAP, 'Or set (data.bad_files = "skip")', "--resume --set data.bad_files=skip"),
    Remedy((_FOLLOW,), "", _CHEAP, "(mend it in place) or move it away, then go on with --resume", "--resume",
        done=lambda _: Path("cheap/b.csv").write_text(_hour(1))),
    Remedy((_FOLLOW,), "", _CHEAP, "or (move it away), then go on with --resume", "--resume",
        done=lambda _: Path("cheap/b.csv").unlink()),
    Remedy((_FOLLOW,), "", f"{_FEW} --set data.bad_rows=0.01", r"To allow them: (--set data\.bad_rows=0\.025)",
        f"{_FEW} --resume --set data.bad_rows=0.025", True),
    Remedy(("train followed.toml",), "", "--run-dir one --set data.eval_fraction=1", "needed (0), or the default",
        "--run-dir two --set data.eval_fraction=0", True),
]  # fmt: skip
_RESUME = f"{_FOLLOW} --set train.max_steps=5"


def _write(path: str, text: str) -> Callable[..., object]:
    return lambda *_: Path(path).write_text(text)


def _mend_journal(_: str) -> None:
    shutil.copy("journal", "one/files.jsonl")


#: Of a run that ended within the second of two files: what is wrong with them now, and what helps.
OF_JOURNALS = [
    (_write("one/files.jsonl", "{}\n{}\n"), Remedy((_RESUME,), "", "--resume", "(Restore the journal)",
        done=_mend_journal)),
    (_write("hours/b.csv", _hour(1, "2.5")), Remedy((_RESUME,), "", "--resume", "(bring it back) as it was",
        done=_write("hours/b.csv", _hour(1)))),
    (_write("hours/b.csv", _hour(1, "2.5")), Remedy((_RESUME,), "", "--resume", r"\((--resume) STEP\)", "--resume 2",
        True)),
    (lambda: os.remove("hours/b.csv"), Remedy((_RESUME,), "", "--resume", "(bring it back) as it was",
        done=_write("hours/b.csv", _hour(1)))),
    (_write("one/files.jsonl", "{}\n{}\n"), Remedy(("train followed.toml",), "", "--run-dir one --resume",
        "with another (--run-dir)", "--run-dir two", True)),
    (lambda: os.remove("one/files.jsonl"), Remedy((_RESUME,), "", "--resume", "(Resume with the run's own files.jsonl)",
        done=_mend_journal)),
]  # fmt: skip
_PUBLISH = "train tiny.toml --set publish.every_steps=1 --set checkpoint.at_end=false"
_SAVE = "train tiny.toml --set checkpoint.every_steps=1 --set checkpoint.keep_last=3 --set train.max_steps=9"
_BASES = "--set publish.base_every=1 --set publish.keep_bases=5"
#: With so many bytes free on the disk, but for the folder "large".
OF_DISKS = [
    (300_000, Remedy((_SAVE,), "", "--run-dir one", "set (checkpoint.keep_last = 1)",
        "--set checkpoint.keep_last=1 --run-dir one", True)),
    (150_000, Remedy((_PUBLISH,), "", "--run-dir one --set publish.folder=new", "or set (publish.dtype = fp16)",
        "--set publish.dtype=fp16")),
    (200_000, Remedy((_PUBLISH,), "", f"--run-dir one --set publish.folder=new {_BASES}",
        r"or set (publish.keep_bases = 1)\.", "--set publish.keep_bases=1")),
    (100_000, Remedy((_PUBLISH,), "", "--run-dir one --set publish.folder=new",
        r"choose a folder on a (larger disk)\.", "--set publish.folder=large/new")),
    (200_000, Remedy((_SAVE,), "", "--run-dir one", r"Free [^,]*, or use a (--run-dir) on a larger disk",
        "--run-dir large/one", True)),
]  # fmt: skip
OF_PUBLICATIONS = [
    Remedy(("",), "", "serve published --port 1", "`embershard (publish verify published)`", instead=True,
        leads_to="INVALID published/base_0"),
    Remedy((_PUBLISH,), "", "--run-dir two --set publish.folder=public", "(Give an empty folder)",
        "--run-dir three --set publish.folder=new", True),
    Remedy((_PUBLISH,), "", "--run-dir two --set publish.folder=public", "or (remove it)",
        "--run-dir three --set publish.folder=public", True, done=lambda _: shutil.rmtree("public")),
    Remedy((_PUBLISH,), "", "--run-dir two --set publish.folder=taken", "(Give each run a folder) of its own",
        "--run-dir three --set publish.folder=new", True),
    Remedy((_PUBLISH,), "", "--run-dir two --set publish.folder=two.csv", "(Choose a path) where nothing is",
        "--run-dir three --set publish.folder=new", True),
    Remedy((_PUBLISH,), "", "--run-dir two --set publish.folder=two.csv/new", "(check the path)",
        "--run-dir three --set publish.folder=new", True),
]  # fmt: skip
pytestmark = [pytest.mark.extra, pytest.mark.slow, pytest.mark.usefixtures("one_rank_here")]


@pytest.fixture(autouse=True)
def forgets_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run holds a folder until the process ends."""

    def make(path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr("embershard.commands.train.run.lock_run_dir", make)


@pytest.mark.parametrize(("row", "command"), [*cases(OF_BAD_FILES[:2]), *cases(OF_BAD_FILES[2:], pytest.mark.matrix)])
def test_what_is_advised_of_files_that_came_helps(row: Remedy, command: str, capsys: pytest.CaptureFixture[str]):
    check(row, command, capsys)


@pytest.mark.parametrize(("wrong", "row"), [*OF_JOURNALS[:2], *(matrix(*each) for each in OF_JOURNALS[2:])])
def test_what_is_advised_of_journals_helps(
    wrong: Callable[[], object], row: Remedy, capsys: pytest.CaptureFixture[str]
):
    code, said = said_by(shlex.split(f"{_FOLLOW} --set train.max_steps=3"), capsys)
    assert code == 0, said
    shutil.copy("one/files.jsonl", "journal")
    wrong()
    check(row, row.commands[0], capsys)


@pytest.mark.parametrize(("free_bytes", "row"), [*OF_DISKS[:2], *(matrix(*each) for each in OF_DISKS[2:])])
def test_what_is_advised_of_disks_helps(
    free_bytes: int, row: Remedy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def usage(path: object) -> SimpleNamespace:
        return SimpleNamespace(free=10**9 if "large" in str(path) else free_bytes)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    check(row, row.commands[0], capsys)


@pytest.mark.parametrize(
    ("row", "command"), [*cases(OF_PUBLICATIONS[:2]), *cases(OF_PUBLICATIONS[2:], pytest.mark.matrix)]
)
def test_what_is_advised_of_publications_helps(
    row: Remedy, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    claim = write.claim
    monkeypatch.setattr(write, "claim", lambda folder: None if folder.name == "taken" else claim(folder))
    if "public" in row.words:
        assert cli.main(shlex.split(f"{_PUBLISH} --run-dir one --set publish.folder=public")) == 0
    check(row, command, capsys)


def test_the_command_that_is_shown_publishes_what_a_full_disk_did_not_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    writes = write._write_tensors

    def fails(path: Any, tensors: Any) -> Any:
        if "delta_" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return writes(path, tensors)

    with monkeypatch.context() as patched:
        patched.setattr(write, "_write_tensors", fails)
        words = "train tiny.toml --run-dir one --set publish.every_steps=2 --set publish.folder=new"
        code, said = said_by(shlex.split(words), capsys)
    found = re.search(r"Publish it with: embershard (train .*)", said)
    assert (code, found is not None) == (2, True), said
    assert found is not None
    code, said = said_by(shlex.split(found[1]), capsys)
    assert code == 0, said
    assert Path("new/base_1").exists(), "of the step that no delta has"
