"""What docs/planning.md shows, in one go: profile, plan, train by the plan, report, plan again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embershard.commands import cli
from embershard.planning.cost.topology import load_topology
from embershard.run_result import RunResult
from embershard.sharding.plan import Plan
from embershard.units import size
from tests.ranks import commands

pytestmark = pytest.mark.ranks
CONFIG = """
[data]
kind = "synthetic"
eval_fraction = 0.05
num_workers = 0
[data.synthetic]
num_samples = 6000
scale = 0.003
[model]
embedding_dim = 8
dense_arch_layer_sizes = [8]
over_arch_layer_sizes = [8, 1]
[cache]
ratio = 0.1
[look_ahead]
lookahead = 8
prefetch = 1
[train]
batch_size = 64
[checkpoint]
at_end = false
"""


def embershard(*arguments: object) -> None:
    assert cli.main([str(argument) for argument in arguments]) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A profile, a plan for two ranks, and a run of it."""
    folder = tmp_path_factory.mktemp("planning")
    (folder / "run.toml").write_text(CONFIG)
    embershard("profile", "--config", folder / "run.toml", "-o", folder / "p.npz")
    embershard("plan", *inputs(folder), "--ranks", 2, "-o", folder / "plan.json")
    places = ["--config", folder / "run.toml", "--plan", folder / "plan.json", "--run-dir", folder / "run"]
    done = commands.run(["train", *map(str, places)], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def inputs(folder: Path) -> list[object]:
    return ["--config", folder / "run.toml", "--profile", folder / "p.npz"]


def test_the_run_did_what_the_plan_said(folder):
    plan, result = Plan.load(folder / "plan.json"), json.loads((folder / "run" / "result.json").read_text())
    assert plan.prediction.method == "replay"
    assert result["plan"]["digest"] == plan.digest
    assert result["cache"]["evictions"] > 1000
    for table in plan.prediction.tables:
        measured = result["cache"]["ranks"][table.rank]["tables"][table.table]
        # All rows are in the trace, and it is the whole epoch: what was replayed is what was trained.
        assert table.hit_rate_unique == pytest.approx(measured["hit_rate_unique"], abs=1e-9), table
        assert table.fills * result["steps"] == pytest.approx(measured["fills"], abs=1e-6), table
    for rank, measured in zip(plan.prediction.ranks, result["cache"]["ranks"], strict=True):
        assert rank.cache_device_bytes == measured["device_bytes"] < rank.total_device_bytes
        assert sum(rank.host_bytes.values()) == measured["host_bytes"]


def test_memory_of_caches_is_one_number_everywhere(folder, capsys):
    """In the plan's table, the closing table and the reports, beside a name that says what it counts."""
    rank = Plan.load(folder / "plan.json").prediction.ranks[0]
    embershard("plan", *inputs(folder), "--ranks", 2)
    planned = capsys.readouterr().out
    assert "Ranks: device memory by use" in planned
    assert size(rank.cache_device_bytes) in planned
    assert size(rank.total_device_bytes) in planned
    embershard("report", folder / "run")
    result = RunResult.read(folder / "run")
    fullest = max(caches.device_bytes for caches in result.cache.ranks)
    reported = capsys.readouterr().out
    assert f"slots and maps of all ranks, {size(fullest)} on the fullest" in " ".join(reported.split())
    assert size(rank.cache_device_bytes) in reported
    assert "device memory of slots and maps" in " ".join(reported.split())


@pytest.mark.matrix
def test_a_run_otherwise_than_planned_is_told_apart(folder):
    """The control of the test above: plans for another policy or window predict other fills."""
    result = json.loads((folder / "run" / "result.json").read_text())
    for setting in ("cache.policy=lru", "look_ahead.lookahead=2"):
        embershard("plan", *inputs(folder), "--set", setting, "--ranks", 2, "-o", folder / "other.json")
        tables = Plan.load(folder / "other.json").prediction.tables
        assert sum(table.fills for table in tables) * result["steps"] > result["cache"]["fills"] + 100


@pytest.mark.matrix
def test_the_report_and_a_recalibrated_machine(folder, capsys):
    embershard("report", folder / "run")
    embershard("report", folder / "run", "--predicted")
    said = capsys.readouterr().out
    assert "t_C3" in said
    embershard("report", folder / "run", "--predicted", "--recalibrate", folder / "machine.toml")
    machine = load_topology(str(folder / "machine.toml"))
    assert machine.source in machine.note(2)
    embershard(
        "plan", *inputs(folder), "--topology", folder / "machine.toml", "--ranks", 2, "-o", folder / "again.json"
    )
    measured = json.loads((folder / "run" / "result.json").read_text())["step_ms"]["p50"]
    assert Plan.load(folder / "again.json").prediction.step_seconds * 1e3 == pytest.approx(measured, rel=0.1)
    embershard("plan", "diff", folder / "plan.json", folder / "again.json")


@pytest.mark.matrix
def test_what_if_and_the_profile_s_views(folder):
    embershard("plan", *inputs(folder), "--ranks", "1,2,4", "--png", folder / "scaling.png")
    embershard("plan", *inputs(folder), "--ratios", "0.01,0.1", "--ranks", 2)
    embershard("plan", *inputs(folder), "--ranks", 2, "--explain", "t_C3")
    embershard("profile", "show", folder / "p.npz", "--png", folder / "curves.png")
    for picture in ("scaling.png", "curves.png"):
        assert (folder / picture).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    embershard("profile", "merge", folder / "p.npz", folder / "p.npz", "-o", folder / "twice.npz")
    embershard("profile", "compare", folder / "p.npz", folder / "twice.npz")
