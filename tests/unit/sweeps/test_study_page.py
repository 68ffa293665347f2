"""The page of a study of scaling: what runs, plans and simulations say, with what is missing, in markdown and drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from embershard.extras.scale_out.page import write_study_page
from embershard.extras.scale_out.picture import scaling_figure
from embershard.extras.scale_out.points import Point, absent, points_of
from embershard.launch.screen import save_figure
from embershard.settings.decoding import to_toml
from embershard.settings.files import load_config
from embershard.sweeps.outcomes import Outcome, Status, keep_outcome, run_folder
from embershard.sweeps.spread import read_configurations
from embershard.training.config import RunConfig
from tests.unit.planning.runs import predicted_plan, result_of
from tests.unit.reports.reported_runs import write_run

pytestmark = [pytest.mark.extra, pytest.mark.slow]

MIB = 1 << 20
ONE, TWO = (10_000.0, 10_400.0, 9_800.0), (15_000.0, 15_900.0, 16_100.0)


def memory(*hosts: int, device: int | None = None) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "host_bytes": host, "host_bytes_before": 300 * MIB, "device_bytes": device}
        for rank, host in enumerate(hosts)
    ]


def write(
    folder: Path,
    ranks: int,
    speeds: Sequence[float],
    *,
    varied: dict[str, Any] | None = None,
    planned: bool = True,
    statuses: Sequence[Status] = (),
    **changes: Any,
) -> list[Path]:
    """Write a configuration's runs, with a seed each, as `embershard sweep` leaves them; return their folders.

    Args:
        varied: its settings; by default 128 samples for each rank.
        statuses: of runs that did not finish, behind the others.
    """
    batch = varied or {"train.batch_size": 128}
    plan, group = predicted_plan(world_size=ranks), f"{ranks}{batch}"
    found = []
    for seed, speed in enumerate(speeds):
        name = f"{'-'.join(str(value) for value in batch.values())}-{ranks}-{seed}"
        result = result_of(plan, samples_per_second=speed, step_ms={"p50": 12.5}, **changes)
        path = write_run(run_folder(folder, name), plan if planned else None, result)
        settings = {**batch, **({"train.batch_size": "none"} if "train.global_batch_size" in batch else {})}
        overrides = sorted((f"{key}={value}" for key, value in settings.items()), reverse=True)
        (path / "config.toml").write_text(to_toml(load_config(RunConfig, path / "given.toml", overrides)))
        keep_outcome(outcome(name, ranks, {**batch, "train.seed": seed}, "finished", "", group), folder)
        found.append(path)
    for number, status in enumerate(statuses):
        varied = {**batch, "train.seed": 100 + number}
        keep_outcome(outcome(f"{status}-{ranks}-{number}", ranks, varied, status, "rank 1 hung", group), folder)
    return found


def outcome(name: str, ranks: int, varied: dict[str, Any], status: Status, reason: str, group: str) -> Outcome:
    return Outcome(name, name, 0, ranks, {"ranks": ranks, **varied}, status, reason, 1.0, f"2026-{name}", 1, group)


def read(folder: Path) -> list[Point]:
    return points_of(read_configurations(folder), {})


def page(folder: Path, simulations: dict[Path, Path] | None = None) -> str:
    """Write the page; return its markdown."""
    configurations, simulations = read_configurations(folder), simulations or {}
    points = points_of(configurations, simulations)
    write_study_page(points, absent(configurations, simulations), folder)
    return (folder / "scaling.md").read_text()


def table(text: str, title: str) -> list[dict[str, str]]:
    """The rows of a markdown table; a column "planned" is named by the one before it."""
    lines = text.split(f"## {title}\n\n")[1].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    names = [f"{before} {name}" if name == "planned" else name for before, name in zip(["", *cells[0]], cells[0])]  # noqa: B905
    return [dict(zip(names, row, strict=True)) for row in cells[2:]]


def test_speed_and_efficiency_have_the_intervals_of_their_repeats(tmp_path: Path) -> None:
    write(tmp_path, 1, ONE)
    write(tmp_path, 2, TWO)
    one, two = read(tmp_path)
    half = stats.t.ppf(0.975, 2) * np.std(TWO, ddof=1) / np.sqrt(3)
    assert (two.low, two.high) == pytest.approx((np.mean(TWO) - half, np.mean(TWO) + half))
    errors = [np.var(each, ddof=1) / 3 / np.mean(each) ** 2 for each in (ONE, TWO)]
    freedom = sum(errors) ** 2 / sum(error**2 / 2 for error in errors)
    share = np.mean(TWO) / 2 / np.mean(ONE)
    half = share * stats.t.ppf(0.975, freedom) * np.sqrt(sum(errors))
    assert two.efficiency == pytest.approx(share)
    assert (two.efficiency_low, two.efficiency_high) == pytest.approx((share - half, share + half))
    assert (one.efficiency, one.efficiency_low, one.notes[1:]) == (1.0, None, ())
    assert two.predicted_efficiency == pytest.approx(1.0), "both plans take 10 ms for 128 samples a rank"
    assert two.ideal_per_second == pytest.approx(2 * np.mean(ONE))
    text = page(tmp_path)
    row = table(text, "Efficiency, measured")[1]
    assert (row["efficiency"], row["from"]) == (f"{share:.1%}", f"{share - half:.1%}")
    assert (row["to"], row["to planned"], row["beside ranks"]) == (f"{share + half:.1%}", "100.0%", "1")
    row = table(text, "Samples per second, measured")[1]
    assert (row["samples/s"], row["to planned"], row["ideal"], row["error"]) == ("15,667", "25,600", "20,133", "-20.0%")


@pytest.mark.parametrize(
    ("of_ranks", "lines"),
    [
        ([{"train.batch_size": 128}] * 2, {"weak: 128 a rank": [1, 2]}),
        ([{"train.global_batch_size": 256}] * 2, {"strong: 256 in all": [1, 2]}),
        # Sizes of ranks that differ, so that all ranks together have the same.
        ([{"train.batch_size": 256}, {"train.batch_size": 128}], {"strong: 256 in all": [1, 2]}),
        # Neither is the same: nothing is compared.
        ([{"train.batch_size": 128}, {"train.batch_size": 256}], {"weak: 128 a rank": [1], "weak: 256 a rank": [2]}),
    ],
)
def test_weak_and_strong_are_named_by_the_settings(
    tmp_path: Path, of_ranks: list[dict[str, int]], lines: dict[str, list[int]]
) -> None:
    for ranks, settings in zip((1, 2), of_ranks, strict=True):
        write(tmp_path, ranks, ONE, varied=settings)
    found: dict[str, list[int]] = {}
    for point in read(tmp_path):
        found.setdefault(point.line, []).append(point.ranks)
    assert found == lines
    text, is_weak = page(tmp_path), next(iter(lines)).startswith("weak")
    assert ("Weak scaling: the same samples per rank" in text) == is_weak
    assert ("Strong scaling: the same global batch" in text) != is_weak
    held = {row["held"] for row in table(text, "Efficiency, measured")}
    assert held == {"same samples per rank" if is_weak else "same global batch"}
    title = "Weak scaling (same samples per rank)" if is_weak else "Strong scaling (same global batch)"
    assert any(axes.get_title("left").startswith(title) for axes in scaling_figure(read(tmp_path)).axes if axes.lines)


def test_one_run_has_no_interval_and_a_run_without_a_plan_no_prediction(tmp_path: Path) -> None:
    write(tmp_path, 1, ONE, memory=memory(512 * MIB))
    write(tmp_path, 2, TWO[:1], planned=False, memory=memory(512 * MIB, 400 * MIB))
    one, two = read(tmp_path)
    assert (two.low, two.efficiency_low, two.predicted_efficiency) == (None, None, None)
    assert one.notes == ()
    assert two.notes == (
        "one run: its samples/s have no interval",
        "efficiency: one run on 2 ranks: no interval",
        "trained without a plan, so nothing was predicted",
    )
    text = page(tmp_path)
    row = table(text, "Samples per second, measured")[1]
    assert [row[name] for name in ("from", "to", "to planned", "planned ms", "error")] == ["n/a"] * 5
    assert all(f"* weak: 128 a rank, 2 ranks: {note}\n" in f"{text}\n" for note in two.notes)
    save_figure(scaling_figure([one, two]), tmp_path / "scaling.png")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_is_measured_beside_what_the_plan_adds_to_a_process(tmp_path: Path, device: str) -> None:
    on_gpu = 7 * MIB if device == "cuda" else None
    write(tmp_path, 2, ONE, device=device, memory=memory(500 * MIB, 640 * MIB, device=on_gpu))
    (point,) = read(tmp_path)
    prediction = predicted_plan(world_size=2).prediction
    assert prediction is not None
    host = max(sum(rank.host_bytes.values()) for rank in prediction.ranks)
    own = max(sum(rank.device_bytes.values()) for rank in prediction.ranks)
    assert (point.peak_process_bytes, point.process_bytes_before) == (640 * MIB, 300 * MIB)
    assert (point.peak_device_bytes, point.predicted_device_bytes) == (on_gpu, own)
    assert point.predicted_process_bytes == 300 * MIB + host + (own if device == "cpu" else 0)
    row = table(page(tmp_path), "Memory of a rank")[0]
    assert (row["process, peak"], row["before the model"]) == ("640.00 MiB", "300.00 MiB")
    assert row["device, peak"] == ("n/a" if on_gpu is None else "7.00 MiB")


def test_bytes_stand_by_kind_beside_those_of_the_plan(tmp_path: Path) -> None:
    write(tmp_path, 2, ONE)
    (row,) = table(page(tmp_path), "Sent by a rank in a step, by kind")
    assert (row["ids"], row["ids planned"]) == ("1000 B", "1000 B")
    assert (row["embeddings"], row["embeddings planned"]) == ("1.95 KiB", "1.95 KiB")
    assert (row["in training"], row["in training planned"]) == ("4.88 KiB", "4.88 KiB")
    assert row["other planned"] == "n/a", "nobody predicts it"


def test_parts_of_a_step_are_planned_measured_and_simulated(tmp_path: Path) -> None:
    folders = write(tmp_path, 2, ONE[:2])
    for number, folder in enumerate(folders):
        (folder / "profile").mkdir()
        for rank in (0, 1):
            training = {"forward": 4.0 + number, "backward": 2.0 + rank, **({"lookup": 1.0} if rank else {})}
            stages = {"rank": rank, "steps": 5, "training": training, "beside": {"plan": 9.0}, "between_ranks": {}}
            (folder / "profile" / f"rank_{rank}.stages.json").write_text(json.dumps(stages))
    run = {"num_ranks": 2, "global_batch_size": 256, "samples_per_second": 9e3, "efficiency": 1.0, "problem": ""}
    run |= {"step_seconds": 0.028, "low_seconds": 0.02, "high_seconds": 0.03}
    run |= {"parts": {"dense": 0.02, "stragglers": 0.008, "exchange": 0.0}}
    shorter = {**run, "num_ranks": 4, "step_seconds": 0.011, "parts": {"dense": 0.01, "network": 0.001}}
    (tmp_path / "simulated.json").write_text(json.dumps({"topology": "h100", "runs": [run, shorter]}))
    text = page(tmp_path, {folders[0]: tmp_path / "simulated.json"})
    (row,) = table(text, "Parts of a step, measured, ms")
    assert [row[name] for name in ("forward", "backward", "lookup")] == ["4.50", "2.50", "0.50"]
    assert "plan" not in row, "of another thread"
    (row,) = table(text, "Parts of a step, planned, ms")
    assert row["dense"] == "10.00"
    row, other = table(text, "Parts of a step, SIMULATED, ms")
    assert [*row] == ["configuration", "ranks", "dense", "stragglers", "network"]
    assert [row[name] for name in ("dense", "stragglers", "network")] == ["20.00", "8.00", "n/a"]
    assert (other["ranks"], other["network"]) == ("4", "1.00")
    assert "2 ranks: steps were traced, which makes them longer" in text
    figure = scaling_figure(points_of(read_configurations(tmp_path), {folders[0]: tmp_path / "simulated.json"}))
    (stages,) = (axes for axes in figure.axes if axes.get_title("left").startswith("Measured stages"))
    assert sum(bar.get_height() for bar in stages.patches) == pytest.approx(7.5)
    assert max(bar.get_y() + bar.get_height() for bar in stages.patches) == pytest.approx(7.5), "they are stacked"
    (parts,) = (axes for axes in figure.axes if axes.get_title("left").startswith("SIMULATED parts"))
    assert parts.get_ylim()[1] > 28.5, "the highest bar, of 28 ms, ends below the frame"


def test_what_is_missing_or_mixed_is_named_with_its_reason(tmp_path: Path) -> None:
    write(tmp_path, 1, ONE, other_programs=0.3, versions={"torch": "2.13.0"}, memory=memory(9))
    write(tmp_path, 2, TWO, is_steady=False, versions={"torch": "2.14.1"}, statuses=["failed"], memory=memory(9, 9))
    write(tmp_path, 4, (), statuses=["timed out"])
    text = page(tmp_path)
    missing = text.split("## What is missing or mixed, and why\n\n")[1].splitlines()
    assert missing == [
        "* ranks=4: no run finished (timed out: rank 1 hung)",
        "* runs differ in more than the study varies, torch: 2.13.0, 2.14.1",
        "* weak: 128 a rank, 1 rank: other programs took up to 30% of the processor time: alone on the machine, steps "
        "are faster",
        "* weak: 128 a rank, 2 ranks: 3 of 4 runs finished (failed: rank 1 hung)",
        "* weak: 128 a rank, 2 ranks: too few steps for the speed of a long run",
    ]
    values = json.loads((tmp_path / "scaling.json").read_text())
    assert [f"* {line}" for line in values["missing"]] == missing, "the HTML page has the same"
    assert [f"## {each['title']}" for each in values["tables"]] == [
        line for line in text.splitlines() if line.startswith("## ") and "missing" not in line
    ]


def test_a_plan_of_other_ranks_predicts_nothing(tmp_path: Path) -> None:
    (folder,) = write(tmp_path, 2, ONE[:1], memory=memory(9, 9))
    predicted_plan(world_size=4).save(folder / "plan.json")
    (point,) = read(tmp_path)
    assert point.predicted_step_ms is None
    assert point.notes[-1].startswith("nothing is predicted: the plan is for 4 ranks; the run had 2.")


def test_the_fewest_ranks_that_ran_are_what_others_are_compared_with(tmp_path: Path) -> None:
    write(tmp_path, 1, (), statuses=["failed"])
    write(tmp_path, 2, TWO)
    write(tmp_path, 4, tuple(2 * speed for speed in TWO))
    two, four = read(tmp_path)
    assert (two.efficiency, four.efficiency) == pytest.approx((1.0, 1.0))
    assert (two.base_ranks, four.base_ranks) == (2, 2)
    assert "* ranks=1: no run finished (failed: rank 1 hung)" in page(tmp_path)
