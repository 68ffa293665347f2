"""The command `embershard plan`: what it says, what it writes, and how it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.axes import Axes

from embershard.commands import cli
from embershard.errors import DataError
from embershard.extras.what_if import cases, picture
from embershard.extras.what_if.batches import StepBatch
from embershard.extras.what_if.simulate_scaling import SimulatedRun
from embershard.frequency import FrequencyProfile
from embershard.launch.screen import save_figure
from embershard.models import table_name
from embershard.planning.cost.topology import load_topology, save_topology
from embershard.planning.uncertainty import PlannedCase
from embershard.sharding.plan import Plan
from tests.covering import keep, matrix
from tests.unit.planning.traces import profile_of, skewed
from tests.unit.sharding.plans import small_plan

pytestmark = pytest.mark.slow

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
    """Arguments for a plan by a short search."""
    return ["--config", str(files / "run.toml"), "--profile", str(files / "p.npz"), "--effort", "0.03", *more]


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
        " ranks would hold all rows without a cache; this plan has 2.",
        "4 tables with 32,060 rows on 2 ranks",
        f"{plan.prediction.step_seconds * 1e3:.2f} ms a step",
        "from a replay of the profile's trace",
        "Ranks: what moves in a step",
        "Ranks: device memory by use",
        "; first touches are ",
        "; in the long run ",
        "first touches: share of the misses",
        "Reserve: 2.00 GiB of a GPU's memory are left free",
        "2.00 GiB of them lie outside of --device-memory",
        f"Error of such a prediction, limited by {plan.prediction.bottleneck.replace('_', ' ')}: ",
        "Ranks: milliseconds of a step",
        "the 2 largest of 4 tables",
        "state beside them takes 8.0 bytes: 4.0 in the map to slots (device), 4.0 for its score (host).",
        "The speed of h100x8 is an estimate",
        f"--plan {file} --nproc 2",
    ):
        assert expected in said, expected
    assert main(given(files, "--ranks", "2", "--topology", "h100x8", "--device-memory", "4MB", "-o", f"{file}2")) == 0
    assert Plan.load(f"{file}2").digest == plan.digest


def test_limits_of_the_settings_are_those_of_the_plan(files, tmp_path, capsys):
    """The command line's come first; limits for other ranks are refused."""
    file, setting = tmp_path / "plan.json", "sharding.device_bytes=[4_000_000, 3_000_000]"
    of_ranks = ("--topology", "h100x8", "--set", setting)
    assert main(given(files, "--ranks", "2", *of_ranks, "-o", str(file))) == 0
    plan = Plan.load(file)
    assert plan.memory_bytes_by_rank == (4_000_000, 3_000_000)
    assert f"--set '{setting}'" in " ".join(capsys.readouterr().out.split())
    assert main(given(files, "--ranks", "2", *of_ranks, "--device-memory", "5MB", "-o", str(file))) == 0
    assert (Plan.load(file).device_memory_bytes, Plan.load(file).memory_bytes_by_rank) == (5_000_000, ())
    capsys.readouterr()
    said = refused(capsys, given(files, "--ranks", "4", *of_ranks))
    assert "sharding.device_bytes: got 2 numbers, needed one, or one for each of 4 ranks" in said


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
    file = tmp_path / "scaling.png"
    assert main(given(files, "--ranks", "1,2,4", "--topology", "cpu", "--png", str(file))) == 0
    said = capsys.readouterr().out
    assert file.read_bytes()[:4] == b"\x89PNG"
    lines = [line.split() for line in said.splitlines() if re.match(r"\W*\d+ ", line)]
    assert [line[1] for line in lines] == ["1", "2", "4"] * 2, "speed, then memory"
    assert "100%" in " ".join(lines[0])
    assert f"Drawn to {file}." in said


@pytest.mark.extra
def test_a_compared_case_is_told_when_it_is_done(files, capsys, monkeypatch):
    """Also to a pipe: before the next one is planned."""
    seen, make = [], cases.plan_quickly
    monkeypatch.setattr(cases, "plan_quickly", lambda request: (seen.append(capsys.readouterr().out), make(request))[1])
    assert main(given(files, "--ranks", "1,2,4")) == 0
    assert [out.startswith(f"Planned {n} of 3: ") for n, out in enumerate(seen)] == [False, True, True]
    assert " ms a step, " in seen[1]


@pytest.mark.parametrize(
    ("machine", "precision", "is_noted"),
    [matrix("cpu", "fp32", False), ("cpu", "tf32", False), ("cpu", "bf16", True), matrix("h100x1", "bf16", False)],
)
def test_a_precision_that_predictions_do_not_know_is_noted(files, capsys, machine, precision, is_noted):
    options = ("--ranks", "1", "--topology", machine, "--set", f"train.precision={precision}")
    assert main(given(files, *options)) == 0
    assert ("Dense work is predicted in fp32, and the run computes it in" in capsys.readouterr().out) == is_noted


def dense_seconds(path: Path) -> float:
    plan = Plan.load(path)
    return plan.prediction.ranks[0].seconds["dense"]


@pytest.mark.matrix
def test_dense_work_is_planned_and_simulated_at_the_speed_of_its_precision(files, tmp_path, capsys):
    seconds, steps = {}, {}
    for precision in ("fp32", "tf32", "bf16"):
        path, options = tmp_path / f"{precision}.json", ("--ranks", "1", "--topology", "h100x1")
        options += ("--set", f"train.precision={precision}", "--set", "train.batch_size=4096")
        assert main(given(files, *options, "-o", str(path))) == 0
        seconds[precision] = dense_seconds(path)
        assert main(given(files, *options, "--simulate", "-o", str(tmp_path / "simulated.json"))) == 0
        steps[precision] = json.loads((tmp_path / "simulated.json").read_text())["runs"][0]["step_seconds"]
    assert seconds["fp32"] > seconds["tf32"] > seconds["bf16"]
    assert seconds["fp32"] / seconds["tf32"] < 494.5 / 67, "bytes and launches take what they took"
    assert steps["fp32"] > steps["tf32"] > steps["bf16"]


@pytest.mark.matrix
def test_several_ratios(files, tmp_path, capsys):
    file = tmp_path / "ratios.png"
    assert main(given(files, "--ranks", "1", "--ratios", "0.05,0.3,1.0", "--png", str(file))) == 0
    said = capsys.readouterr().out
    lines = [line.replace("│", " ").split() for line in said.splitlines() if re.match(r"\W*1 ", line)]
    assert [line[1] for line in lines] == ["0.05", "0.3", "1"] * 2
    hits = [float(line[2].removesuffix("%")) for line in lines[3:]]
    assert hits == sorted(hits)
    assert hits[0] < hits[-1] - 5
    assert "Note on 1 rank, ratio 1: Every row has a slot: nothing is ever evicted." in said
    assert "\nNote: The speed of cpu is an estimate" in said, "of all plans: no case is named"
    assert file.exists()


def labels(axes: Axes) -> list[str]:
    low, high = axes.get_ylim()
    places = [each for each in axes.yaxis.get_majorticklocs() if low <= each <= high]
    return [axes.yaxis.get_major_formatter()(each) for each in places]


@pytest.mark.extra
def test_pictures_draw_a_line_for_each_batch_and_machine():
    """Over the ranks; with one number of ranks over the batches. Cases without caches use memory for less."""
    plan = small_plan()
    assert plan.prediction is not None
    ranks = [replace(each, device_bytes={**each.device_bytes, "more": 2**20}) for each in plan.prediction.ranks]
    with_more = replace(plan, prediction=replace(plan.prediction, ranks=tuple(ranks)))
    batches, machine = (StepBatch(1024), StepBatch(65_536, is_global=True)), load_topology("h100x8")
    outcomes = [
        cases.ComparedCase(number, None, made, machine=name, batch=batch)
        for number in (4, 2)
        for name in ("h100", "a100")
        for batch, made in zip(batches, (plan, with_more), strict=True)
    ]
    speed, memory = picture.what_if_figure(outcomes, machine).axes
    drawn = [line for line in speed.get_lines() if line.get_linestyle() == "-"]
    assert [line.get_label() for line in drawn] == [
        f"{name}, {batch}" for name in ("h100", "a100") for batch in ("1,024 samples each", "65,536 samples together")
    ]
    assert all(list(line.get_xdata()) == [2, 4] for line in drawn)
    assert memory.get_xlabel() == "ranks; below: machine, batch"
    assert len({text.get_text() for text in memory.get_xticklabels()}) == len(outcomes), "a bar each"
    of_two = [each for each in outcomes if (each.num_ranks, each.machine) == (2, "a100")]
    (speed, _) = picture.what_if_figure(of_two, machine).axes
    assert speed.get_xlabel() == "samples of a rank (logarithmic)"
    assert [list(line.get_xdata()) for line in speed.get_lines()] == [[1024, 32_768]]


@pytest.mark.extra
def test_pictures_of_plans_say_what_they_show(files):
    outcomes = [cases.ComparedCase(*case, small_plan()) for case in ((2, 0.1), (4, 0.1), (2, 0.2), (4, 0.2))]
    figure = picture.what_if_figure(outcomes, load_topology("h100x8"))
    title, *errors = figure.get_suptitle().split("\n")
    assert title == "Estimate: plans for h100x8. Nothing here was measured."
    limits = {outcome.prediction.bottleneck for outcome in outcomes if outcome.prediction}
    assert " ".join(errors).count("Error of such a prediction, limited by ") == len(limits)
    assert all(len(line) <= 165 for line in errors)
    speed, memory = figure.axes
    lines = ["0.1 of the rows on the device", "ideal: as fast per rank as on 2", "0.2 of the rows on the device"]
    assert speed.get_legend_handles_labels()[1] == lines
    assert speed.get_ylabel() == "samples per second, all ranks (logarithmic)"
    assert speed.get_xlabel() == "ranks (logarithmic)"
    assert memory.get_ylabel() == "device memory of a rank, MiB"
    assert all(axes.get_title(loc="left") for axes in figure.axes)
    (speed, _) = picture.what_if_figure(outcomes[:2], load_topology("h100x8")).axes
    assert speed.get_legend_handles_labels()[1][0] == "predicted", "the one ratio tells nothing apart"


@pytest.mark.parametrize("most", [1.3, 2.0, 9.0, 300.0, 1e5])
def test_a_logarithmic_axis_has_labels_to_read_it_by(most):
    runs = [SimulatedRun(ranks, 64, 0.1, 1234.0 * speed, {"dense": 0.1}) for ranks, speed in ((1, 1.0), (8, most))]
    speed, _ = picture.simulation_figure(runs, load_topology("h100x8")).axes
    found = labels(speed)
    assert 4 <= len(found) <= 14
    assert len(set(found)) == len(found)


def test_one_plan_is_drawn_by_rank(files, tmp_path, capsys):
    file = tmp_path / "plan.png"
    assert main(given(files, "--ranks", "2", "--png", str(file))) == 0
    assert file.read_bytes()[:4] == b"\x89PNG"
    assert f"Drawn to {file}." in capsys.readouterr().out
    times, memory = picture.plan_figure(PlannedCase(2, None, small_plan()), load_topology("cpu")).axes
    assert times.get_ylabel() == "ms of a step"
    assert memory.get_ylabel() == "device memory of a rank, MiB"
    with pytest.raises(DataError, match=r"x.nonsense: cannot be drawn .* ends in .png"):
        save_figure(times.figure, tmp_path / "x.nonsense")


@pytest.mark.matrix
def test_a_whole_gpu_has_a_reserve_and_a_cpu_has_none(files, tmp_path):
    """It is one of the uses that add up to the device's memory; a smaller limit leaves it outside."""
    h100 = load_topology("h100x2")
    memory = h100.device_memory_bytes
    assert [h100.reserve_within(each) for each in (None, memory, memory - 2**30, memory // 2)] == [
        2 * 2**30, 2 * 2**30, 2**30, 0
    ]  # fmt: skip
    for topology, reserve in ("h100x2", 2 * 2**30), ("cpu", None):
        assert main(given(files, "--ranks", "2", "--topology", topology, "-o", str(tmp_path / "plan.json"))) == 0
        plan = Plan.load(tmp_path / "plan.json")
        assert [rank.device_bytes.get("reserve") for rank in plan.prediction.ranks] == [reserve] * 2
        assert any(note.startswith("Reserve: ") for note in plan.notes) is (reserve is not None)


@pytest.mark.matrix
def test_many_more_ranks_than_cores_are_a_warning(files, tmp_path, capsys):
    warning = "8 ranks share the 2 cores of a node (cpu) and take turns on them"
    for more, warns in ([], True), (["--ranks-per-node", "2"], False):
        assert main(given(files, "--ranks", "8", *more, "-o", str(tmp_path / "plan.json"))) == 0
        assert any(note.startswith(warning) for note in Plan.load(tmp_path / "plan.json").notes) is warns
        assert (warning in capsys.readouterr().out) is warns


def test_a_case_that_does_not_fit_is_a_line(files, capsys):
    """Of the caches' least need one rank has all, two have about half."""
    arguments = given(files, "--set", "cache.ratio=none", "--ranks")
    need = re.search(r"cache\.device_bytes=(\d+)", refused(capsys, [*arguments, "1", "--set", "cache.device_bytes=9"]))
    assert main([*arguments, "1,2", "--set", f"cache.device_bytes={int(need[1]) - 1}"]) == 0
    said = capsys.readouterr().out
    assert said.count("does not fit") == 3, "when it is known, in the table, and why"
    assert "1 rank: the plan does not fit" in said
    assert main([*arguments, "1,2", "--set", "cache.device_bytes=9"]) == 2


@pytest.mark.parametrize("table", keep(("t_a",), ("t_a", "t_d")))
def test_a_table_is_explained(files, table, capsys):
    assert main(given(files, "--ranks", "2", "--explain", table)) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{table} (")
    assert sum(" ms a step" in line for line in said) == 2
    assert not any("less than" in line for line in said), "the plan is not the best one that was found"
    assert any(f"bytes of all ranks in a step: {table} pooled embeddings, " in line for line in said)


@pytest.mark.parametrize("device", keep(("3MB",), ("3MB", "64GiB")))
def test_a_whole_plan_is_explained_in_five_sentences(files, device, capsys):
    """With what caches buy, where there is something to buy."""
    arguments = given(files, "--ranks", "2", "--topology", "h100x8", "--device-memory", device, "--price", "3")
    assert main([*arguments, "--explain"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    texts = re.split(r" ?\b[1-5]\. (?=[A-Z4])", said)[1:]
    assert len(texts) == 5, said
    assert texts[0].startswith("4 tables with 32,060 rows take 7.95 MiB with their optimizer states")
    assert "A step of 100 samples takes " in texts[1]
    assert texts[2].startswith("Within ")
    assert texts[3].startswith("Tables are ")
    if device == "3MB":
        whole, cached = re.search(r"take (\d+) ranks \(.* with caches they take (\d+) ranks? \(", texts[4]).groups()
        assert int(cached) == int(whole) // 4
        assert "an hour" in texts[4]
    else:
        assert texts[4].startswith("Fewer than 4 ranks hold all rows without a cache")


def test_a_replicated_table_is_explained(files, capsys):
    assert main(given(files, "--ranks", "2", "--replicate-rows", "100", "--explain", "t_d")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("t_d (60 rows) is replicated: each of 2 ranks has a copy of ")
    assert "since --replicate-rows 100 asks for it" in said


@pytest.mark.parametrize(
    ("topology", "option"),
    [("h100x8", "--device-memory"), matrix("h100x8", "--host-memory"), ("cpu", "--host-memory")],
)
def test_the_named_change_fits(topology, option, files, capsys):
    """Device memory, host memory and ranks, as the sentence says them."""
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
        (["--ranks", "2"], "a plan needs a run's settings and a profile"),
        (["quickstart", "--simulate"], r"embershard profile --config \S*quickstart.toml -o profile.npz$"),
        (given(files, "--topology", "h9000"), "Unknown topology 'h9000'. Known are .*h100"),
        (["--config", config, "--profile", str(tmp_path / "none.npz")], "none.npz"),
        (["--config", config, "--profile", str(tmp_path / "counts.npz")], "has row counts only"),
        (["--config", str(tmp_path / "none.toml"), "--profile", str(files / "p.npz")], "none.toml"),
        (given(files, "--ranks", "1,2", "-o", str(tmp_path / "x")), "-o and --explain are for one plan"),
        (given(files, "--ranks", "1,2", "--explain", "t_a"), "-o and --explain are for one plan"),
        (given(files, "--ranks", "2", "--explain", "t_C99"), "no table is called 't_C99'. Tables are t_a"),
        (given(files, "--ranks", "3", "--ranks-per-node", "2"), "--ranks 3: needed a multiple of 2"),
        (given(files, "--ranks", "12", "--topology", "h100x8"), "--ranks 12: needed a multiple of 8"),
        (given(files, "--ranks", "2", "--set", "train.device=cuda"), "train.device is 'cuda'.*of kind 'cpu'"),
        (given(files, "--set", "data.parquet.num_rows=[20000, 9000, 3000, 61]"), "'t_d': .* 61 rows, .* 60 rows"),
        (given(files, "--ranks", "1", "--ratios", "0.9", "--topology", "h100x8", "--device-memory", "2MB"), "ratio"),
        (given(files, "--types", "table_wise,data_parallel"), "--types data_parallel: copies .*--replicate-rows N"),
        (given(files, "--topology", "h100x2+a10x2", "--ranks", "2"), "got 1 nodes of 2 ranks, needed its 2 nodes of 2"),
        (["--calibrate"], "--calibrate needs -o"),
    ]  # fmt: skip
    for arguments, expected in cases:
        assert re.search(expected, refused(capsys, arguments)), arguments
    assert not (tmp_path / "x").exists()
    for wrong in (
        ["--ranks", "0"],
        ["--ranks", "two"],
        ["--types", "row"],
        ["--types", "data_parallel"],
        ["--ratios", "-1"],
        ["--device-memory", "x"],
    ):
        with pytest.raises(SystemExit) as error:
            main(given(files, *wrong))
        assert error.value.code == 2
    capsys.readouterr()


def test_an_option_that_is_no_number_or_none_of_its_range_is_refused(files, capsys):
    """Each numeric option, each odd value: one sentence and exit code 2, or a number that a plan can be made with."""
    odd = ("0", "-1", "nan", "inf", "1e-300", "1e300", "", "9" * 30)
    taken = {
        "--ranks": (),
        "--ratios": ("1e-300",),
        "--ranks-per-node": ("9" * 30,),  # refused with the ranks
        "--device-memory": (),
        "--host-memory": (),
        "--replicate-rows": ("0", "9" * 30),
        "--effort": ("1e-300",),
        "--top": ("0", "9" * 30),
    }
    for option, plannable in taken.items():
        for value in odd:
            if value in plannable:
                continue
            try:
                code = main(given(files, f"{option}={value}"))
            except SystemExit as error:
                code = error.code
            said = capsys.readouterr()
            assert code == 2, (option, value, said)
            assert said.out == "", (option, value)
            assert option in said.err, (option, value, said.err)
            assert "got" in said.err or "needed" in said.err, (option, value, said.err)
    assert "--ranks 2: needed a multiple" in refused(capsys, given(files, "--ranks", "2", "--ranks-per-node", "9" * 30))
    every = [
        f"{option}={value}" for option, values in taken.items() for value in values if option != "--ranks-per-node"
    ]
    for words in (every[:2], every[2:]):
        assert main(given(files, "--ranks", "1", *words)) == 0, words
    capsys.readouterr()


def test_a_machine_without_a_network_is_refused_for_several_nodes(files, tmp_path, capsys):
    own = load_topology("h100x2")
    assert own.bandwidths is not None
    save_topology(replace(own, bandwidths=replace(own.bandwidths, network_bytes=0)), tmp_path / "own.toml")
    arguments = given(files, "--topology", str(tmp_path / "own.toml"), "--ranks")
    said = refused(capsys, [*arguments, "4"])
    assert f"--topology {tmp_path / 'own.toml'}, 4 ranks: Bandwidths.network_bytes: got 'none', needed" in said
    assert main([*arguments, "2"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("profile", ["trace", "counts"])
def test_caches_that_a_batch_does_not_fit_are_said_to_grow(files, profile, tmp_path, capsys):
    """A share of the rows may be less than one batch looks up; with counts alone, too."""
    arguments = given(files, "--ranks", "2", "--ratios", "1e-9")
    if profile == "counts":  # too few batches to replay
        arguments += ["--set", "train.batch_size=1000"]
    assert main([*arguments, "-o", str(tmp_path / "plan.json")]) == 0
    assert "will grow: one batch needs more rows than they have slots" in " ".join(capsys.readouterr().out.split())
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.prediction.method == ("counts" if profile == "counts" else "replay")


def test_a_folder_that_is_not_there_is_said(files, tmp_path, capsys):
    said = refused(capsys, given(files, "--ranks", "1", "-o", str(tmp_path / "none" / "plan.json")))
    assert "plan.json" in said


@pytest.mark.matrix
def test_topologies_in_files(files, tmp_path):
    save_topology(load_topology("h100x2"), tmp_path / "own.toml")
    assert main(given(files, "--topology", str(tmp_path / "own.toml"), "-o", str(tmp_path / "plan.json"))) == 0
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.world_size == 2, "all of the topology's ranks"
    assert plan.device_memory_bytes == 80_000_000_000


def test_scaling_is_simulated_and_written(files, tmp_path, capsys):
    file = tmp_path / "scaling.json"
    arguments = given(files, "--simulate", "--ranks", "1..64", "--topology", "h100x8", "--device-memory", "4MB")
    assert main([*arguments, "-o", str(file), "--png", str(tmp_path / "scaling.png")]) == 0
    assert (tmp_path / "scaling.png").read_bytes()[:4] == b"\x89PNG"
    said = " ".join(capsys.readouterr().out.split())
    for expected in (
        "Simulated training (estimate)",
        "where a step's time goes",
        "Beyond 32 ranks placements are searched on as",
    ):
        assert expected in said, expected
    assert "The speed of h100x8 is an estimate" in said
    runs = json.loads(file.read_text())["runs"]
    assert [run["num_ranks"] for run in runs] == [1, 2, 4, 8, 16, 32, 64]
    for run in runs:
        assert sum(run["parts"].values()) == pytest.approx(run["step_seconds"])
        assert f"{run['samples_per_second']:,.0f}" in said


@pytest.mark.extra
def test_simulated_ranks_of_a_cpu_fill_nodes(files, capsys):
    assert main(given(files, "--simulate", "--ranks", "4", "--topology", "cpu", "--types", "table_row_wise")) == 0
    assert "table_row_wise" not in capsys.readouterr().err
    assert main(given(files, "--simulate", "--ranks", "3", "--topology", "cpu")) == 2
    assert "--ranks 3: needed a multiple of 2, the ranks per node" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--explain", "t_a"], ["--ratios", "0.1,0.2"]])
def test_a_simulation_refuses_what_it_does_not_use(files, capsys, more):
    assert "--simulate takes -o FILE.json" in refused(capsys, given(files, "--simulate", "--ranks", "2", *more))


@pytest.mark.parametrize("text", ["8..4", "1..", "1..x", "0..8"])
def test_a_range_of_ranks_that_is_none_is_refused(files, capsys, text):
    with pytest.raises(SystemExit):
        main(given(files, "--simulate", "--ranks", text))
    assert "--ranks" in capsys.readouterr().err


@pytest.mark.extra
def test_a_simulation_of_what_does_not_fit_says_why(files, capsys):
    assert main(given(files, "--simulate", "--ranks", "2", "--topology", "h100x8", "--device-memory", "1kB")) == 2
    said = capsys.readouterr().out
    assert "does not fit" in said
    assert "2 ranks: the plan does not fit" in said
