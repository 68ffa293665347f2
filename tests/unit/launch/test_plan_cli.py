"""The command `embershard plan`: what it says, what it writes, and how it refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from embershard.frequency import FrequencyProfile
from embershard.launch import cli
from embershard.models import table_name
from embershard.planning.cost.topology import load_topology, save_topology
from embershard.sharding.plan import Plan
from tests.unit.planning.traces import profile_of, skewed

ROWS = {"a": 20_000, "b": 9000, "c": 3000, "d": 60}
CONFIG = f"""
[data]
kind = "parquet"
path = "nowhere"
[data.parquet]
sparse = {list(ROWS)}
num_rows = {list(ROWS.values())}
dense = ["x"]
[model]
embedding_dim = 64
dense_arch_layer_sizes = [16, 64]
over_arch_layer_sizes = [8, 1]
[cache]
ratio = 0.1
[look_ahead]
lookahead = 8
[train]
batch_size = 50
"""


def main(arguments: Sequence[str]) -> int:
    return cli.main(["plan", *arguments])


@pytest.fixture(autouse=True)
def _few_ranks(monkeypatch) -> None:
    """Looking for a number of ranks that fits need not go far."""
    monkeypatch.setattr("embershard.planning.budget._MOST_RANKS", 16)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with run.toml and p.npz; the data themselves are not needed."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "run.toml").write_text(CONFIG)
    lookups = {table_name(name): (rows, skewed(rows, 3000, seed=rows)) for name, rows in ROWS.items()}
    profile_of(lookups).save(folder / "p.npz")
    return folder


def given(files: Path, *more: str) -> list[str]:
    return ["--config", str(files / "run.toml"), "--profile", str(files / "p.npz"), *more]


def refused(capsys, arguments: Sequence[str]) -> str:
    """What is said; the exit code must be 2, and nothing must be on the screen but one sentence."""
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("embershard: ")
    assert "Traceback" not in said.err
    return said.err


def test_a_plan_is_shown_and_written(files, tmp_path, capsys):
    file = tmp_path / "plan.json"
    arguments = given(
        files, "--ranks", "2", "--topology", "h100x8", "--device-memory", "4MB", "--top", "2", "-o", str(file)
    )
    assert main(arguments) == 0
    said = capsys.readouterr().out
    plan = Plan.load(file)
    assert (plan.world_size, plan.ranks_per_node, plan.batch_size, plan.device) == (2, 2, 50, "cuda")
    assert (plan.device_memory_bytes, plan.host_memory_bytes) == (4_000_000, 500_000_000_000)
    assert plan.settings["look_ahead.lookahead"] == 8
    assert plan.made_from["topology"] == "h100x8"
    assert plan.made_from["command"].startswith("embershard plan --config ")
    assert plan.prediction is not None
    for expected in (
        "4 tables with 32,060 rows on 2 ranks",
        f"{plan.prediction.step_seconds * 1e3:.2f} ms a step",
        "from a replay of the profile's trace",
        "Ranks: memory, and what moves in a step",
        "Ranks: milliseconds of a step",
        "the 2 largest of 4 tables",
        "state beside them takes 8.0 bytes: 4.0 in the map to slots (device), 4.0 for its score (host).",
        "The speed of h100x8 is an estimate",
        f"--plan {file} --nproc 2",
    ):
        assert expected in said, expected
    assert main(given(files, "--ranks", "2", "--topology", "h100x8", "--device-memory", "4MB", "-o", f"{file}2")) == 0
    assert Plan.load(f"{file}2").digest == plan.digest


def test_the_command_that_trains_keeps_the_settings(files, tmp_path, capsys):
    settings = ("sharding.mode=hot_cold", "sharding.hot_bytes=9000", "cache.ratio=0.2", "sharding.exchange=rows")
    words = [word for text in settings for word in ("--set", text)]
    file = tmp_path / "a plan.json"
    assert main(given(files, "--ranks", "2", "-o", str(file), *words)) == 0
    said = " ".join(capsys.readouterr().out.split())
    kept = "--set sharding.mode=hot_cold --set sharding.hot_bytes=9000"
    assert f"Train with it: embershard train --config {files}/run.toml {kept} --plan '{file}' --nproc 2" in said
    plan = Plan.load(file)
    assert (plan.settings["sharding.mode"], plan.settings["sharding.hot_bytes"]) == ("hot_cold", 9000)
    assert any('predicted for sharding.mode="sharded", without hot rows' in note for note in plan.notes)
    assert main(given(files, "--ranks", "2", "-o", str(file))) == 0
    assert not any("hot rows" in note for note in Plan.load(file).notes)


def test_several_ranks_are_compared_and_drawn(files, tmp_path, capsys):
    picture = tmp_path / "scaling.png"
    assert main(given(files, "--ranks", "1,2,4", "--topology", "cpu", "--png", str(picture))) == 0
    said = capsys.readouterr().out
    assert picture.read_bytes()[:4] == b"\x89PNG"
    lines = [line.split() for line in said.splitlines() if re.match(r"\W*\d+ ", line)]
    assert [line[1] for line in lines] == ["1", "2", "4"]
    assert "100%" in " ".join(lines[0])
    assert f"Drawn to {picture}." in said


def test_several_ratios(files, tmp_path, capsys):
    picture = tmp_path / "ratios.png"
    assert main(given(files, "--ranks", "1", "--ratios", "0.05,0.3,1.0", "--png", str(picture))) == 0
    said = capsys.readouterr().out
    assert all(f" {ratio} " in said for ratio in ("0.05", "0.3", "1"))
    assert "nothing is ever evicted" in said
    assert picture.exists()


def test_a_case_that_does_not_fit_is_a_line(files, capsys):
    """Of the caches' least need one rank has all, two have about half."""
    arguments = given(files, "--set", "cache.ratio=none", "--ranks")
    need = re.search(r"cache\.device_bytes=(\d+)", refused(capsys, [*arguments, "1", "--set", "cache.device_bytes=9"]))
    assert need is not None
    assert main([*arguments, "1,2", "--set", f"cache.device_bytes={int(need[1]) - 1}"]) == 0
    said = capsys.readouterr().out
    assert said.count("does not fit") == 2, "in the table, and why"
    assert "1 ranks: the plan does not fit" in said
    assert main([*arguments, "1,2", "--set", "cache.device_bytes=9"]) == 2


@pytest.mark.parametrize("table", ["t_a", "t_d"])
def test_a_table_is_explained(files, table, capsys):
    assert main(given(files, "--ranks", "2", "--explain", table)) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{table} (")
    assert sum(" ms a step" in line for line in said) == 2
    assert not any("less than" in line for line in said), "the plan is not the best one that was found"
    assert any(f"bytes of all ranks in a step: {table} pooled embeddings, " in line for line in said)


def test_the_named_change_fits(files, capsys):
    """Device memory, host memory and ranks, as the sentence says them."""
    for topology, option in (("h100x8", "--device-memory"), ("h100x8", "--host-memory"), ("cpu", "--host-memory")):
        base = given(files, "--ranks", "1", "--topology", topology)
        if option == "--host-memory" and topology == "h100x8":
            base += ["--device-memory", "3MB"]
        low = "300kB" if option == "--device-memory" else "6MB"
        said = refused(capsys, [*base, option, low])
        need = re.search(rf"{option} (\d+)", said)
        assert need is not None, said
        assert main([*base, option, need[1]]) == 0
        assert f"needs at least {need[1]}" in said or f"({need[1]} bytes)" in said
        refused(capsys, [*base, option, str(int(need[1]) - 1)])
        ranks = re.search(r"--ranks (\d+)", said)
        if ranks is not None:
            base[base.index("--ranks") + 1] = ranks[1]
            assert main([*base, option, low]) == 0, said
        capsys.readouterr()


def test_plans_are_compared(files, tmp_path, capsys):
    for name, ratio in (("a", "0.1"), ("b", "0.2")):
        assert main(given(files, "--ranks", "1", "--ratios", ratio, "-o", str(tmp_path / name))) == 0
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out == "The plans are equal.\n"
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "slots" in capsys.readouterr().out
    assert "no.json: cannot be read" in refused(capsys, ["diff", str(tmp_path / "a"), str(tmp_path / "no.json")])


def test_what_is_refused(files, tmp_path, capsys):
    counts = FrequencyProfile.count([{"t_a": torch.tensor([1])}], {"t_a": 5})
    counts.save(tmp_path / "counts.npz")
    config = str(files / "run.toml")
    cases: list[tuple[list[str], str]] = [
        (["--ranks", "2"], "needs --config .* and --profile"),
        (given(files, "--topology", "h9000"), "Unknown topology 'h9000'. Known are .*h100"),
        (["--config", config, "--profile", str(tmp_path / "none.npz")], "none.npz"),
        (["--config", config, "--profile", str(tmp_path / "counts.npz")], "has row counts only"),
        (["--config", str(tmp_path / "none.toml"), "--profile", str(files / "p.npz")], "none.toml"),
        (given(files, "--ranks", "1,2", "-o", str(tmp_path / "x")), "-o and --explain are for one plan"),
        (given(files, "--ranks", "1,2", "--explain", "t_a"), "-o and --explain are for one plan"),
        (given(files, "--ranks", "2", "--png", str(tmp_path / "x.png")), "--png draws a comparison"),
        (given(files, "--ranks", "2", "--explain", "t_C99"), "no table is called 't_C99'. Tables are t_a"),
        (given(files, "--ranks", "3", "--ranks-per-node", "2"), "--ranks 3: needed a multiple of 2"),
        (given(files, "--ranks", "12", "--topology", "h100x8"), "--ranks 12: needed a multiple of 8"),
        (given(files, "--ranks", "2", "--set", "train.device=cuda"), "train.device is 'cuda'.*of kind 'cpu'"),
        (given(files, "--set", "data.parquet.num_rows=[20000, 9000, 3000, 61]"), "'t_d': .* 61 rows, .* 60 rows"),
        (given(files, "--ranks", "1", "--ratios", "0.9", "--topology", "h100x8", "--device-memory", "2MB"), "ratio"),
        (["--calibrate"], "--calibrate needs -o"),
    ]  # fmt: skip
    for arguments, expected in cases:
        assert re.search(expected, refused(capsys, arguments)), arguments
    assert not (tmp_path / "x").exists()
    for wrong in (
        ["--ranks", "0"],
        ["--ranks", "two"],
        ["--types", "row"],
        ["--ratios", "-1"],
        ["--device-memory", "x"],
    ):
        with pytest.raises(SystemExit) as error:
            main(given(files, *wrong))
        assert error.value.code == 2
    capsys.readouterr()


def test_a_folder_that_is_not_there_is_said(files, tmp_path, capsys):
    said = refused(capsys, given(files, "--ranks", "1", "-o", str(tmp_path / "none" / "plan.json")))
    assert "plan.json" in said


def test_topologies_in_files(files, tmp_path):
    save_topology(load_topology("h100x2"), tmp_path / "own.toml")
    assert main(given(files, "--topology", str(tmp_path / "own.toml"), "-o", str(tmp_path / "plan.json"))) == 0
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.world_size == 2, "all of the topology's ranks"
    assert plan.device_memory_bytes == 80_000_000_000
