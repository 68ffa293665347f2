"""Plans of rows in a file: a run reads and writes the pages that its plan says, and takes the memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from embershard.cache.file.file_counts import FILE_COUNTS
from embershard.commands import cli
from embershard.sharding.plan import Plan
from tests.covering import keep, matrix
from tests.ranks import commands

pytestmark = pytest.mark.ranks
CONFIG = """
[data]
kind = "synthetic"
eval_fraction = 0.0
num_workers = 0
[data.synthetic]
num_samples = 6000
scale = 0.01
[model]
embedding_dim = 8
dense_arch_layer_sizes = [8]
over_arch_layer_sizes = [8, 1]
[cache]
ratio = 0.006
host = "file"
host_dir = "HERE"
host_bytes = HOST_BYTES
[look_ahead]
lookahead = 16
prefetch = 1
[train]
batch_size = 64
[checkpoint]
at_end = false
"""
RANKS = (1, 2)


def embershard(*arguments: object) -> None:
    assert cli.main([str(argument) for argument in arguments]) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings and a plan for one rank and for two, of one profile."""
    folder = tmp_path_factory.mktemp("files")
    for ranks in RANKS:
        text = CONFIG.replace("HERE", str(folder)).replace("HOST_BYTES", str(260_000 // ranks))
        (folder / f"run{ranks}.toml").write_text(text)
        if ranks == 1:
            embershard("profile", "--config", folder / "run1.toml", "-o", folder / "p.npz")
        embershard("plan", *inputs(folder, ranks), "-o", folder / f"plan{ranks}.json")
    return folder


def inputs(folder: Path, ranks: int) -> list[object]:
    return ["--config", folder / f"run{ranks}.toml", "--profile", folder / "p.npz", "--ranks", ranks]


def run_of(folder: Path, ranks: int) -> Path:
    """The folder of a run by the plan, which tests share."""
    run_dir = folder / f"of{ranks}"
    if not run_dir.exists():
        places = ["--config", folder / f"run{ranks}.toml", "--plan", folder / f"plan{ranks}.json", "--run-dir", run_dir]
        done = commands.run(["train", *map(str, places)], folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return run_dir


def counts(plan: Plan) -> dict[str, float]:
    """Of all ranks, in a step."""
    assert plan.prediction is not None
    assert plan.prediction.method == "replay"
    return {name: sum(rank.files[name] for rank in plan.prediction.ranks) for name in FILE_COUNTS}


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", keep([2], RANKS))
def test_a_run_moves_the_rows_and_pages_of_its_plan(folder: Path, ranks: int) -> None:
    plan = Plan.load(folder / f"plan{ranks}.json")
    run: dict[str, Any] = json.loads((run_of(folder, ranks) / "result.json").read_text())
    ahead = run["look_ahead"]
    measured = {name: ahead["files"][name] / ahead["steps"] for name in FILE_COUNTS}
    assert counts(plan) == pytest.approx(measured, rel=1e-9)
    assert min(measured.values()) > 1, "the case proves nothing"
    assert run["cache"]["evictions"] > 1000
    assert plan.prediction is not None
    for rank, of_rank in zip(plan.prediction.ranks, run["cache"]["ranks"], strict=True):
        beside = rank.host_bytes["file_maps"]
        assert sum(rank.host_bytes.values()) - beside == of_rank["host_bytes"]
        assert beside > 0
        assert rank.work["moved_pages"] > rank.files["pages_read"] + rank.files["pages_written"]


@pytest.mark.matrix
@pytest.mark.parametrize("setting", ["look_ahead.lookahead=4", matrix("cache.host_bytes=180000")])
def test_a_plan_of_another_window_or_memory_says_other_pages(folder: Path, setting: str) -> None:
    """The control of the test above."""
    embershard("plan", *inputs(folder, 1), "--set", setting, "-o", folder / "other.json")
    ours = counts(Plan.load(folder / "plan1.json"))
    assert counts(Plan.load(folder / "other.json"))["rows_read"] > 1.05 * ours["rows_read"]


def test_what_a_file_costs_is_shown(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In a plan, and beside what was measured; a disk that is slower than all else decides the step."""
    embershard("plan", *inputs(folder, 2))
    said = " ".join(capsys.readouterr().out.split())
    assert "Ranks: rows between file and memory in a step" in said
    assert "how fast is the disk? embershard doctor measures it" in said
    embershard("report", run_of(folder, 2), "--predicted")
    said = " ".join(capsys.readouterr().out.split())
    assert "Between files and memory in a step, all ranks" in said
    machine = tmp_path / "slow.toml"
    machine.write_text(
        '[slow]\nsource = "a test"\ndevice = "cpu"\nranks_per_node = 2\nhost_memory_bytes = 1_000_000_000_000\n'
        "disk_pages_per_second = 100\n[slow.bandwidths]\nflops = 1e12\ndevice_memory_bytes = 1e11\n"
        "host_memory_bytes = 1e11\nto_device_bytes = 1e11\nto_host_bytes = 1e11\nnode_bytes = 1e11\n"
    )
    embershard("plan", *inputs(folder, 2), "--topology", machine, "-o", tmp_path / "slow.json")
    assert "embershard doctor" not in capsys.readouterr().out
    slow = Plan.load(tmp_path / "slow.json").prediction
    assert slow is not None
    assert slow.bottleneck == "disk"
    pages = max(rank.work["moved_pages"] for rank in slow.ranks)
    assert slow.step_seconds == pytest.approx(2 * pages / 100)


def test_memory_in_front_of_a_file_holds_twice_a_cache(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = ["plan", *map(str, inputs(folder, 1)), "--set", "cache.host_bytes=100000"]
    assert cli.main(told) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "cache.host_bytes=100000 holds" in said
    assert "needed are twice as many" in said
