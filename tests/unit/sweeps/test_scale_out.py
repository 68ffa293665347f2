"""A study of scaling: its plans and simulations are commands, made once; its points are what runs and plans say."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embershard.commands.sweep import command
from embershard.errors import ConfigError
from embershard.extras.report_page.scaling import scaling_section
from embershard.extras.scale_out import nodes, study
from embershard.extras.scale_out.page import write_study_page
from embershard.extras.scale_out.picture import scaling_figure
from embershard.extras.scale_out.points import Point, points_of, write_points
from embershard.extras.scale_out.tables import more_tables, speed_tables
from embershard.launch.screen import plain_console, save_figure
from embershard.planning.cost.rates import Rates
from embershard.planning.cost.topology import Topology, load_topology
from embershard.settings.decoding import to_toml
from embershard.settings.files import load_config
from embershard.sweeps.experiments import Sweep
from embershard.sweeps.outcomes import Outcome, keep_outcome, run_folder
from embershard.sweeps.spread import read_configurations
from embershard.training.config import RunConfig
from tests.unit.planning.runs import predicted_plan, result_of
from tests.unit.reports.reported_runs import write_run

pytestmark = pytest.mark.extra

FILE = """
config = "run.toml"
[grid]
ranks = [1, 2]
plan = ["", "--types row_wise"]
train.seed = [1, 2]
[[runs]]
train.batch_size = 64
[[runs]]
train.batch_size = "none"
train.global_batch_size = 128
[scale_out]
topology = "cpu"
simulate_to = 8
"""


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text("[data.synthetic]\nscale = 0.001\n")
    (tmp_path / "sweep.toml").write_text(FILE)
    return tmp_path / "sweep.toml"


@pytest.mark.smoke
def test_a_dry_run_prints_every_command_once(sweep_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(sweep_file), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(set(lines))
    of = {name: [line for line in lines if f" {name} " in line] for name in ("profile", "plan", "train")}
    simulated = [line for line in of["plan"] if "--simulate" in line]
    assert (len(of["profile"]), len(of["plan"]) - len(simulated), len(simulated), len(of["train"])) == (1, 8, 4, 16)
    assert all("train.seed" not in line for line in of["plan"])  # a plan is of all seeds
    assert sum("--ranks 1,2,4,8 --topology cpu" in line for line in simulated) == 4
    plans = [line.split("--plan ")[1].split()[0] for line in of["train"]]
    assert {plans.count(plan) for plan in plans} == {2}  # a plan for both seeds, and another for each case
    assert all(any(f"-o {plan}" in line for line in of["plan"]) for plan in plans)


def test_a_product_is_made_once_and_whole(sweep_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Sequence[str]] = []

    def main(words: Sequence[str]) -> int:
        made.append(words)
        Path(words[-1]).write_text("whole" if len(made) > 1 else "torn")
        if len(made) == 1:
            raise KeyboardInterrupt
        return 0

    monkeypatch.setitem(study._COMMANDS, "profile", main)
    monkeypatch.setitem(study._COMMANDS, "plan", main)

    def prepared() -> Sweep:
        return study.Study(Sweep.read(sweep_file), tmp_path, plain_console(), is_dry=False).prepared()

    with pytest.raises(KeyboardInterrupt):
        prepared()
    experiments = prepared().experiments
    assert len(made) == 1 + 1 + 8 + 4  # a torn profile, and then each of them once
    prepared()
    assert len(made) == 14
    plans = {experiment.settings[-1] for experiment in experiments}
    assert {Path(plan).read_text() for plan in plans} == {"whole"}


def write_study(folder: Path) -> Path:
    """Runs that are as fast as planned on one rank, and take a quarter longer on two."""
    for scaling, ranks in (("weak", 1), ("weak", 2), ("strong", 1), ("strong", 2)):
        batch = {"train.batch_size": 128} if scaling == "weak" else {"train.global_batch_size": 256}
        plan = predicted_plan(world_size=ranks)
        size = 128 * ranks if scaling == "weak" else 256
        for seed in (1, 2):
            name, varied = f"{scaling}{ranks}-{seed}", {"ranks": ranks, "plan": "", "train.seed": seed, **batch}
            step = 0.01 if ranks == 1 else 0.0125
            result = result_of(plan, samples_per_second=size / step + seed - 1.5, step_ms={"p50": 1e3 * step})
            path = write_run(run_folder(folder, name), plan, result)
            overrides = ["train.batch_size=none"] if scaling == "strong" else []
            overrides += [f"{key}={value}" for key, value in batch.items()]
            (path / "config.toml").write_text(to_toml(load_config(RunConfig, path / "given.toml", overrides)))
            outcome = Outcome(name, name, 0, ranks, varied, "finished", "", 1.0, f"2026-01-0{seed}", 1, name[:-2])
            keep_outcome(outcome, folder)
    return folder


def simulation(folder: Path) -> Path:
    runs = [
        {"num_ranks": ranks, "global_batch_size": 128 * ranks, "samples_per_second": 9e3 * ranks, "efficiency": 0.9}
        | {"step_seconds": 0.014, "low_seconds": 0.01, "high_seconds": 0.02, "problem": ""}
        for ranks in (1, 4096)
    ]
    path = folder / "weak.json"
    path.write_text(json.dumps({"topology": "h100", "runs": [*runs, {"num_ranks": 9, "problem": "no room"}]}))
    return path


@pytest.mark.smoke
def test_points_are_what_runs_plans_and_simulations_say(tmp_path: Path) -> None:
    folder = write_study(tmp_path)
    simulations = {run_folder(folder, f"weak{ranks}-{seed}"): simulation(folder) for ranks in (1, 2) for seed in (1, 2)}
    points = points_of(read_configurations(folder), simulations)
    assert [(p.source, p.scaling, p.ranks, p.batch_size) for p in points] == [
        ("measured", "weak", 1, 128),
        ("measured", "weak", 2, 256),
        ("simulated", "weak", 1, 128),
        ("simulated", "weak", 4096, 128 * 4096),
        ("measured", "strong", 1, 256),
        ("measured", "strong", 2, 256),
    ]
    one, two, _, many, strong_one, strong_two = points
    assert one.configuration == "128 a rank"
    assert strong_one.configuration == "256 in all"
    assert (one.efficiency, two.efficiency, strong_two.efficiency) == pytest.approx((1.0, 0.8, 0.4))
    assert (one.error, two.error) == pytest.approx((0.0, -0.2))
    assert two.predicted_per_second == pytest.approx(25_600)
    assert one.low is not None
    assert one.low < one.samples_per_second == pytest.approx(12_800)
    assert {kind: two.sent_bytes[kind] for kind in ("ids", "embeddings")} == {"ids": 1000, "embeddings": 2000}
    assert {name: two.sent_bytes[name] for name in two.predicted_sent_bytes} == two.predicted_sent_bytes
    assert two.hit_rate == pytest.approx(two.predicted_hit_rate, abs=0.005)
    assert two.cache_bytes == two.predicted_cache_bytes
    assert (many.low, many.high) == pytest.approx((128 * 4096 / 0.02, 128 * 4096 / 0.01))
    assert many.configuration.endswith("simulated on h100")


def test_results_are_a_table_a_file_a_picture_and_a_page(tmp_path: Path) -> None:
    folder = write_study(tmp_path)
    assert scaling_section(folder) is None
    points = points_of(read_configurations(folder), {run_folder(folder, "weak1-1"): simulation(folder)})
    write_points(points, folder)
    with (folder / "scaling.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["source"] for row in rows] == [point.source for point in points]
    assert float(rows[1]["error"]) == pytest.approx(-0.2)
    assert float(rows[1]["sent_bytes.embeddings"]) == 2000
    save_figure(scaling_figure(points), folder / "scaling.png")
    assert scaling_section(folder) is None, "a study that has not ended"
    write_study_page(points, [], folder)
    section = scaling_section(folder)
    assert section is not None
    picture, *tables = section.parts
    assert picture.html("figure").startswith('<img id="figure"')
    shown = [*speed_tables(points), *more_tables(points)]
    assert [table.title for table in tables[: len(shown)]] == [table.title for table in shown]
    assert tables[0].rows[1][-1] == "-20.0%"
    assert [len(table.rows) for table in shown[:3]] == [4, 4, 2]
    title = scaling_figure(points).get_suptitle()
    assert "SIMULATED on h100" in title
    assert "SIMULATED" not in scaling_figure([each for each in points if each.source == "measured"]).get_suptitle()


def test_a_picture_has_points_without_plan_seeds_and_cache(tmp_path: Path) -> None:
    point = Point("measured", "strong", "64 in all", 1, 64, 100.0, 1.0)
    save_figure(scaling_figure([point, replace(point, ranks=2, efficiency=0.5)]), tmp_path / "drawn.png")


def of_grid(path: Path, text: str) -> Sweep:
    path.write_text(f'config = "run.toml"\n[grid]\n{text}\n')
    return Sweep.read(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ranks = [3]\nnodes = [2]\n[scale_out]", "nodes: got 2, needed a divisor of the 3 ranks"),
        ('ranks = [2]\nlink = ["1gbit"]\n[scale_out]', "no effect with nodes = 1"),
        ('ranks = [2]\nnodes = [2]\nlink = ["fast"]\n[scale_out]', "link: got 'fast', needed bits a second"),
        ('ranks = [2]\nnodes = ["2"]\n[scale_out]', "nodes: got '2', needed a int"),
        ("ranks = [2]\nnodes = [2]", "nodes"),  # a key of a study alone
        ("ranks = [2]\n[scale_out]\nsimulated_on = 'h100x8'", "simulate_to: got 0"),
        ("ranks = [2]\n[scale_out]\nquick = true\ntopology = 'cpu'", "quick has no effect"),
        ("ranks = [2]\n[scale_out]\nranks = 4", "ranks"),
        ("ranks = [2]\n[scale_out]\nprofile_steps = [9, 5]", r"profile_steps: got \[9, 5\], needed the first and"),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused(sweep_file: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        study.Study(of_grid(sweep_file, text), sweep_file.parent, plain_console(), is_dry=True)


def test_runs_that_are_placed_otherwise_are_others(sweep_file: Path) -> None:
    text = 'ranks = [2]\nnodes = [1, 2]\nplan = ["none", ""]\n[scale_out]\ntopology = "cpu"'
    experiments = of_grid(sweep_file, text).experiments
    assert len({each.group for each in experiments}) == len(experiments) == 4
    placed = study.Study(of_grid(sweep_file, text), sweep_file.parent, plain_console(), is_dry=True).prepared()
    assert ["--plan" in each.settings for each in placed.experiments] == [False, True] * 2
    assert not any("--profile-steps" in each.settings for each in placed.experiments)
    traced = of_grid(sweep_file, f"{text}\nprofile_steps = [5, 9]")
    placed = study.Study(traced, sweep_file.parent, plain_console(), is_dry=True).prepared()
    assert all(each.settings[-2:] == ("--profile-steps", "5:9") for each in placed.experiments)
    assert [each.digest for each in traced.experiments] == [each.digest for each in experiments]
    assert [each.command.startswith("python -m embershard.extras") for each in placed.experiments] == [False] * 2 + [
        True
    ] * 2


def test_a_link_is_shared_by_the_ranks_of_a_node() -> None:
    own = Rates(seconds_per_all_to_all_byte=1e-9, seconds_per_all_reduce_byte=2e-9)
    calibrated = Topology("here", "calibrated", "cpu", 4, 2**30, rates={4: own})
    linked = nodes.with_link(calibrated, "800mbit", 2).rates[4]
    a_byte = 1e-8 / (1448 / 1514)
    assert linked.seconds_per_network_byte == pytest.approx(1e-9 + 2 * a_byte)
    assert linked.seconds_per_all_reduce_byte == pytest.approx(2e-9 + a_byte)
    gpus = nodes.with_link(load_topology("h100x8"), "800mbit", 8).bandwidths
    assert gpus is not None
    assert gpus.network_bytes == pytest.approx(1 / (8 * a_byte))


def test_nodes_of_one_machine_share_it() -> None:
    """Four ranks on two nodes are as fast as four on one, but for what goes between the nodes."""
    own = Rates(seconds_per_flop=1e-9, seconds_per_collective=3e-4, seconds_per_all_to_all_byte=1e-9)
    calibrated = Topology("here", "calibrated", "cpu", 4, 2**30, cores_per_node=2, rates={2: Rates(), 4: own})
    both = nodes.cut(calibrated, 4, 2).shaped(2, 2)
    assert both.cores_per_node == 1
    assert both.rates_for(4) == replace(own, seconds_per_network_byte=1e-9)
    estimated = load_topology("cpu")
    part = nodes.with_link(nodes.cut(estimated, 4, 2), "800mbit", 2).shaped(2, 2)
    whole = estimated.shaped(4).rates_for(4)
    assert part.rates_for(4).seconds_per_embedding_byte == pytest.approx(whole.seconds_per_embedding_byte)
    assert part.rates_for(4).seconds_per_network_byte == pytest.approx(2 * 1e-8 / (1448 / 1514))


@pytest.mark.parametrize("name", ["scale_out", "slow_link", "groups"])
def test_the_examples_are_sound(project_dir: Path, name: str) -> None:
    sweep = Sweep.read(project_dir / "examples" / f"{name}.toml")
    made: Any = study.Study(sweep, Path("sweeps") / name, plain_console(), is_dry=True)
    assert len(made.prepared().experiments) == {"scale_out": 36, "slow_link": 12, "groups": 15}[name]
