"""The first hour on a GPU goes on after whatever happens to a step, and can be run without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from embershard.cache.rows.page_lock import PageLock
from embershard.commands import cli
from embershard.pipeline import LookAheadPipeline
from tests.covering import keep
from tests.gpu import first_hour, hour_steps, machine_checks
from tests.gpu.bare_steps import BARE_STEPS
from tests.gpu.first_hour import Ended
from tests.gpu.hour_steps import STEPS, Place, Step
from tests.gpu.torch_tables import register


def place(folder: Path, name: str = "step") -> Place:
    return Place(name, folder, seconds=60.0, num_gpus=0)


def works(place: Place) -> None:
    place.note("found", 1)


def fails(place: Place) -> None:
    place.note("found", 1)
    raise RuntimeError("no such kernel")


def hour(argv: list[str], *steps: Step) -> int:
    return first_hour.main(argv, "tests.gpu.first_hour", "", steps or STEPS)


def test_what_a_step_found_before_it_failed_is_kept(tmp_path: Path):
    given = ["--out", str(tmp_path), "--seconds", "60", "--gpus", "0"]
    assert hour(["--step", "works", *given], Step(works, 1), Step(fails, 1)) == 0
    assert hour(["--step", "fails", *given], Step(works, 1), Step(fails, 1)) == 1
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
    assert hour(["--out", str(tmp_path)]) == 1
    assert sum(seconds.values()) == pytest.approx(3600.0)
    assert [line.split()[0] for line in (tmp_path / "summary.txt").read_text().splitlines()] == [s.name for s in STEPS]
    assert "doctor       failed" in (tmp_path / "summary.txt").read_text()


@pytest.mark.parametrize(
    ("minutes", "names"),
    [
        (0.9, []),
        (4, ["machine", "kernels"]),
        (20, ["machine", "lookup", "kernels", "waits", "exactness"]),
        (60, [step.name for step in STEPS]),
    ],
)
def test_in_less_time_the_steps_of_most_value_run_whole(minutes: float, names: list[str]):
    assert [step.name for step in first_hour.chosen(STEPS, minutes)] == names


def test_steps_without_time_are_skipped_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(first_hour, "run_step", lambda step, *_: Ended(step.name, "done"))
    monkeypatch.setattr(first_hour, "count_gpus", lambda: 0)
    assert hour(["--minutes", "3", "--out", str(tmp_path)], Step(works, 2), Step(fails, 2, value=1)) == 0
    assert (tmp_path / "summary.txt").read_text().splitlines() == [
        "works        skipped       0.0 s  needs 2 minutes",
        "fails        done          0.0 s",
    ]


def test_steps_that_need_a_gpu_are_skipped_by_name(tmp_path: Path):
    for step in STEPS:
        if step.num_gpus:
            assert first_hour.run_step(step, tmp_path, 1.0, 0, ["/never"]).status == "skipped"
    assert {step.name for step in STEPS if step.num_gpus} == {"lock", "kernels", "exactness", "sanitizers", "nsys"}


@pytest.mark.slow
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
@pytest.mark.parametrize("num_gpus", keep([4], [0, 4]))
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
    command = [sys.executable, "-m", "tests.gpu.first_hour", "--out", str(tmp_path), "--only", *only]
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


@pytest.mark.slow
@pytest.mark.matrix
def test_the_first_ten_minutes_run_without_a_gpu_and_without_torchrec_and_fbgemm(tmp_path: Path, project_dir: Path):
    """But for the training, which needs TorchRec."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = None\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), str(project_dir)))
    command = [sys.executable, "-m", "tests.gpu.ten_minutes", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=project_dir, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    ended = {step["name"]: step["status"] for step in summary}
    assert ended == {step.name: "skipped" if step.num_gpus else "done" for step in BARE_STEPS}
    found = {name: json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("rounding", "training")}
    assert {each["wrong rows"] for each in found["rounding"].values()} == {0}
    assert "TorchRec" in found["training"]["skipped"]


@pytest.mark.slow
@pytest.mark.matrix
def test_a_training_by_torchs_operations_is_one_by_fbgemms_kernels_do(tmp_path: Path, project_dir: Path):
    command = [sys.executable, "-m", "tests.gpu.ten_minutes", "--out", str(tmp_path), "--only", "training"]
    assert subprocess.run(command, cwd=project_dir, capture_output=True).returncode == 0
    found = json.loads((tmp_path / "training.json").read_text())
    assert 0 < found["farthest from the CPU's"] < 1e-6, "0: the same kernels"
    assert len(found["losses"]) == 6


@pytest.mark.parametrize("pooling_mode", [PoolingMode.SUM, PoolingMode.MEAN], ids=lambda mode: mode.name)
@pytest.mark.parametrize("optimizer", [EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD], ids=str)
def test_torchs_operations_compute_what_fbgemms_kernels_do(pooling_mode: PoolingMode, optimizer: EmbOptimType):
    """But for the order of sums. Three features, two of one table; bags of up to four ids; two steps."""

    def trained() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        specs = [(rows, 8, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in (50, 20)]
        tables = SplitTableBatchedEmbeddingBagsCodegen(
            specs, feature_table_map=[0, 0, 1], pooling_mode=pooling_mode, optimizer=optimizer, learning_rate=0.1
        )
        for rows in tables.split_embedding_weights():
            rows.data.copy_(torch.rand(rows.shape, generator=generator))
        found = []
        for _ in range(2):
            offsets = torch.cat([torch.zeros(1), torch.randint(0, 5, (3 * 40,), generator=generator).cumsum(0)]).long()
            ids = torch.randint(0, 20, (int(offsets[-1]),), generator=generator)
            found.append(tables(ids, offsets))
            found[-1].backward(torch.randn(found[-1].shape, generator=generator))
        return [*found, *tables.split_embedding_weights()]

    expected = trained()
    library = register("cpu")
    got = trained()
    library._destroy()
    assert all(torch.allclose(*pair, rtol=0, atol=1e-5) for pair in zip(got, expected, strict=True))
    assert not all(map(torch.equal, got, expected)), "the same kernels"
    assert all(map(torch.equal, trained(), expected)), "FBGEMM's kernels are back"
