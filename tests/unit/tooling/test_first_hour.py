"""The first hour on a GPU goes on after whatever happens to a step, and can be run without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

from embershard.cache.rows.page_lock import PageLock
from embershard.commands import cli
from embershard.pipeline import LookAheadPipeline
from tests.gpu import first_hour, hour_steps, machine_checks
from tests.gpu.first_hour import Ended
from tests.gpu.hour_steps import STEPS, Place, Step


def place(folder: Path, name: str = "step") -> Place:
    return Place(name, folder, seconds=60.0, num_gpus=0)


def works(place: Place) -> None:
    place.note("found", 1)


def fails(place: Place) -> None:
    place.note("found", 1)
    raise RuntimeError("no such kernel")


def test_what_a_step_found_before_it_failed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(first_hour, "STEPS", (Step(works, 1), Step(fails, 1)))
    given = ["--out", str(tmp_path), "--seconds", "60", "--gpus", "0"]
    assert first_hour.main(["--step", "works", *given]) == 0
    assert first_hour.main(["--step", "fails", *given]) == 1
    assert json.loads((tmp_path / "fails.json").read_text()) == {"found": 1, "error": "RuntimeError('no such kernel')"}


@pytest.mark.parametrize(
    ("program", "status", "why"),
    [
        ("print('found')", "done", ""),
        ("raise SystemExit('no such kernel')", "failed", "exit code 1: no such kernel"),
        ("import time; time.sleep(3600)", "too long", "ended after 1 s"),
    ],
)
def test_how_a_step_ends(program: str, status: str, why: str, tmp_path: Path):
    ended = first_hour.run_step(
        Step(works, 1), tmp_path, 1.0 if status == "too long" else 60.0, 0, [sys.executable, "-c", program]
    )
    assert ended.status == status
    assert ended.why.startswith(why)


def test_all_steps_run_and_the_summary_grows_with_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seconds: dict[str, float] = {}

    def run(step: Step, out: Path, limit: float, num_gpus: int, command: list[str]) -> Ended:
        seconds[step.name] = limit
        if step.name == "doctor":
            raise OSError("no process")
        assert (out / "summary.txt").is_file() == (len(seconds) > 1)
        return Ended(step.name, "skipped" if step.num_gpus else "done")

    monkeypatch.setattr(first_hour, "run_step", run)
    monkeypatch.setattr(first_hour, "count_gpus", lambda: 0)
    assert first_hour.main(["--minutes", "6", "--out", str(tmp_path)]) == 1
    assert sum(seconds.values()) == pytest.approx(360.0)
    assert [line.split()[0] for line in (tmp_path / "summary.txt").read_text().splitlines()] == [s.name for s in STEPS]
    assert "doctor       failed" in (tmp_path / "summary.txt").read_text()


def test_steps_that_need_a_gpu_are_skipped_by_name(tmp_path: Path):
    for step in STEPS:
        if step.num_gpus:
            assert first_hour.run_step(step, tmp_path, 1.0, 0, ["/never"]).status == "skipped"
    assert {step.name for step in STEPS if step.num_gpus} == {"lock", "kernels", "exactness", "sanitizers", "nsys"}


def test_a_command_that_fails_or_is_not_there_fails_the_step_which_goes_on(tmp_path: Path):
    here = place(tmp_path)
    assert here.command("absent", ["no-such-program"], may_fail=True) == 127
    assert not here.failed
    assert here.command("wrong", [sys.executable, "-c", "raise SystemExit('wrong sum')"]) == 1
    assert here.failed
    found = json.loads((tmp_path / "step.json").read_text())
    assert (found["absent"]["code"], found["wrong"]["last"]) == (127, ["wrong sum"])


def test_waits_are_counted_by_the_line_that_waits(monkeypatch: pytest.MonkeyPatch):
    waited: list[None] = []

    def step(pipeline: object, batches: object) -> None:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp:1)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        torch.cuda.Event.synchronize(None)

    monkeypatch.setattr(LookAheadPipeline, "step", step)
    monkeypatch.setattr(torch.cuda.Event, "synchronize", waited.append)
    with warnings.catch_warnings(), hour_steps.counted_waits(first_step=3) as counted:
        warnings.simplefilter("ignore")  # as `embershard train` does, until the first step that counts
        for _ in range(5):
            LookAheadPipeline.step(None, None)  # type: ignore[arg-type]
    assert counted.num_steps == 3
    assert list(counted.lines.values()) == [3, 3], "of a result, and of an event"
    assert all(f"{Path(__file__).name}:" in line and line.endswith(" step") for line in counted.lines)
    assert len(waited) == 5
    torch.cuda.Event.synchronize(None)
    assert list(counted.lines.values()) == [3, 3], "nobody counts any more"
    assert LookAheadPipeline.step is step


def test_launches_beside_the_locking_are_timed(monkeypatch: pytest.MonkeyPatch):
    """With a stand-in for CUDA that locks the last block once a kernel has run."""
    num_bytes, launched = 1 << 20, threading.Event()
    add = torch.Tensor.add_

    def lock(address: int, size: int) -> None:
        assert launched.wait(30)

    monkeypatch.setattr(torch.Tensor, "add_", lambda *args: (launched.set(), add(*args))[1])
    monkeypatch.setattr(machine_checks, "lock_for", lambda _, rows: PageLock(rows, lock, lambda _: None))
    found = machine_checks.launches_while_locking(num_bytes, "cpu")
    assert found["launches"] >= 1
    assert found["longest_ms"] >= found["median_ms"] > 0
    assert found["seconds_per_gib"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_gpus", [0, 4])
def test_the_commands_of_the_steps_are_understood(num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Settings are read, files of tests are there; nothing is trained."""
    commands: list[list[str]] = []
    monkeypatch.setattr(Place, "command", lambda _, name, words, *args, **more: commands.append(list(words)) or 0)
    monkeypatch.setattr(machine_checks, "seconds_to_end", lambda words, *_: commands.append(list(words)))
    monkeypatch.setattr(hour_steps.shutil, "which", lambda program: f"/opt/{program}")
    for step in (hour_steps.kernels, hour_steps.exactness, hour_steps.sanitizers, hour_steps.trace, hour_steps.modes,
                 hour_steps.nsys, hour_steps.several, hour_steps.resume):  # fmt: skip
        step(Place(step.__name__, tmp_path, 60.0, num_gpus))
    trained = [words[words.index("train") + 1 :] for words in commands if "train" in words]
    assert len(trained) >= 15
    for words in trained:
        assert cli.main(["train", *words, "--dry-run"]) == 0, words
    files = [words[-1] for words in commands if "pytest" in words]
    assert len(files) == 10
    assert all((hour_steps.PROJECT / file).is_file() for file in files)


@pytest.mark.slow
@pytest.mark.matrix
def test_steps_run_without_a_gpu(tmp_path: Path, project_dir: Path):
    """All of them take minutes; these have the most of their own."""
    only = ["machine", "lookup", "lock", "waits", "figures", "several"]
    command = [
        sys.executable,
        "-m",
        "tests.gpu.first_hour",
        "--out",
        str(tmp_path),
        "--minutes",
        "240",
        "--only",
        *only,
    ]
    done = subprocess.run(command, cwd=project_dir, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {step["name"]: step["status"] for step in summary} == {
        name: "skipped" if name == "lock" else "done" for name in only
    }
    waits = json.loads((tmp_path / "waits.json").read_text())
    assert waits == {"steps": 41, "waits_per_step": {}}
    several = json.loads((tmp_path / "several.json").read_text())
    assert [several[name]["code"] for name in ("SIGTERM", "SIGKILL", "SIGSTOP")] == [0, 1, 1]
