"""The page of `embershard report -o`: what it has of runs and sweeps."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="Plotly is not installed (the extra [report])")

from embershard.commands import cli
from embershard.extras.report_page import measured, predicted, runs, sweep
from embershard.extras.report_page.parts import PageFigure, PageTable, Section
from embershard.extras.report_page.runs import Run
from embershard.reports.run_folder import RunFolder
from embershard.sharding.plan import Plan
from embershard.sweeps.spread import read_configurations
from tests.unit.planning.runs import changed, predicted_plan, result_of, without_cache
from tests.unit.reports.reported_runs import reports, write_run, write_sweep

pytestmark = [pytest.mark.slow, pytest.mark.extra]


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    plan = predicted_plan()
    result = changed(result_of(plan), 1, "b", hit_rate_lookups=0.25)
    return write_run(tmp_path / "planned", plan, result, reports=reports([10, 20]))


@pytest.fixture
def uncached(tmp_path: Path) -> Path:
    folder = write_run(
        tmp_path / "uncached", None, without_cache(result_of(predicted_plan())), reports=reports([10, 20])
    )
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("batch_size = 128", "batch_size = 64"))
    return folder


def runs_of(*folders: Path) -> list[Run]:
    return [Run(folder.name, number, RunFolder.read_begun(folder)) for number, folder in enumerate(folders)]


def part(section: Section, title: str) -> Any:
    (found,) = [each for each in section.parts if each.title == title]
    return found.drawn if isinstance(found, PageFigure) else found


def lines_of(figure: Any, name: str) -> list[tuple[list[float], list[float]]]:
    return [(list(trace.x), list(trace.y)) for trace in figure.data if trace.name == name]


def test_curves_are_over_the_samples_trained(planned: Path):
    section = measured.training(runs_of(planned))
    assert lines_of(part(section, "Loss"), "planned") == [([2560.0, 5120.0], [0.5, 0.5])]
    assert lines_of(part(section, "Loss"), "planned, held out") == [([5120.0], [0.4])]
    assert lines_of(part(section, "AUC"), "planned, held out") == [([5120.0], [0.7])]
    assert lines_of(part(section, "Throughput"), "planned") == [([2560.0, 5120.0], [1e3, 1e3])]
    moved = measured.moved(runs_of(planned))
    assert [y for _, y in lines_of(part(moved, "Rows moved"), "planned")] == [[30.0, 30.0], [20.0, 20.0]]
    assert len(part(moved, "Bytes between ranks").data) == 5  # a panel for each kind


def test_averages_have_a_panel_where_any_run_has_groups(planned: Path, uncached: Path):
    lines = planned / "metrics.jsonl"
    lines.write_text(lines.read_text().replace('"sent_bytes_ids"', '"sent_bytes_sync": 2097152.0, "sent_bytes_ids"'))
    for folders in ((planned,), (uncached, planned)):
        figure = part(measured.moved(runs_of(*folders)), "Bytes between ranks")
        titles = [each.text for each in figure.layout.annotations]
        assert titles == ["ids", "embeddings", "gradients", "dense all reduce", "other", "sync"]
        assert lines_of(figure, "planned")[-1][1] == [2.0, 2.0]
    alone = part(measured.moved(runs_of(uncached)), "Bytes between ranks")
    assert "sync" not in [each.text for each in alone.layout.annotations]


def test_the_heat_map_has_every_table_of_every_rank(planned: Path):
    figure = part(measured.caches(runs_of(planned)), "Hit rate per table and rank")
    (heat,) = figure.data
    assert list(heat.x) == ["rank 0", "rank 1"]  # one run needs no name
    cells = dict(zip(heat.y, heat.text, strict=True))
    assert list(cells) == ["a", "b"]
    assert cells["a"][1] == ""  # the table is on the first rank
    assert list(cells["b"]) == ["70.00%", "25.00%"]


def test_colours_tell_98_from_99_percent(planned: Path):
    """On a scale from 0 to 100 % they are a hundredth of it apart."""
    result = json.loads((planned / "result.json").read_text())
    for (rank, table), rate in {(0, "a"): 0.98, (0, "b"): 0.99, (1, "b"): 0.65}.items():
        result = changed(result, rank, table, hit_rate_lookups=rate)
    (planned / "result.json").write_text(json.dumps(result))
    (heat,) = part(measured.caches(runs_of(planned)), "Hit rate per table and rank").data
    (a, _), (b, least) = heat.z
    assert (heat.zmin, heat.zmax) == (least, b)
    assert b - a > 0.1 * (heat.zmax - heat.zmin)
    assert a - measured._shade(0.96) == pytest.approx(b - a), "misses halve"
    labels = dict(zip(heat.colorbar.ticktext, heat.colorbar.tickvals, strict=True))
    assert labels["98 %"] == pytest.approx(a)


def test_hit_rates_have_as_many_digits_as_tell_them_apart(planned: Path):
    """With ".0%" four labels between 94.6 % and 94.9 % all read 95 %."""
    figure = part(measured.moved(runs_of(planned)), "Hit rate")
    assert {axis.tickformat for axis in figure.select_yaxes()} == {"~%"}


def test_one_run_has_no_legend_and_held_out_samples_have_an_entry(planned: Path, uncached: Path):
    assert part(measured.moved(runs_of(planned)), "Rows moved").layout.showlegend is False
    assert part(measured.training(runs_of(planned, uncached)), "Throughput").layout.showlegend is True
    loss = part(measured.training(runs_of(planned)), "Loss")
    assert loss.layout.showlegend is True
    assert [trace.name for trace in loss.data if trace.showlegend is not False] == ["planned", "held-out samples"]


def test_hits_of_different_exchanges_stand_apart(planned: Path, tmp_path: Path):
    """A lookup of the one is an id of a sample, of the other a row of a batch."""
    result = result_of(predicted_plan())
    folders = [write_run(tmp_path / name, None, result, reports=reports([10, 20])) for name in ("p", "r")]
    config = folders[1] / "config.toml"
    config.write_text(config.read_text().replace('exchange = "pooled"', 'exchange = "rows"'))
    section = measured.moved(runs_of(*folders))
    titles = [each.title for each in section.parts if each.title.startswith("Hit rate")]
    assert titles == ['Hit rate, exchange "pooled"', 'Hit rate, exchange "rows"']
    assert {trace.name for trace in part(section, titles[1]).data} == {"r"}
    assert runs.HITS_DIFFER in runs.summary(runs_of(*folders)).parts[0].note
    assert runs.HITS_DIFFER not in runs.summary(runs_of(folders[0], planned)).parts[0].note


def test_tables_are_in_the_order_of_their_numbers():
    assert sorted(["t_10", "t_9", "u", "t_1b"], key=measured._natural) == ["t_1b", "t_9", "t_10", "u"]


def test_memory_and_step_time_are_what_was_measured(planned: Path, uncached: Path):
    found = runs_of(planned, uncached)
    figure = part(measured.caches(found), "Memory per tier and rank")
    device, _ = figure.data
    assert figure.layout.xaxis.title.text == "KiB"
    assert list(device.x) == [rank.device_bytes / 2**10 for rank in found[0].cache.ranks]
    section = measured.step_time(found)
    cached, plain = part(section, "Step time").data
    assert list(cached.x) == pytest.approx([10.0, 20.0, 1.0, 0.5])  # ms; 0.2 s on caches, 2 ranks, 100 steps
    assert list(plain.x)[2:] == [None, None]
    assert "are not measured apart: train with --profile-steps" in " ".join(section.text)


def test_predicted_values_are_divided_by_the_measured_ones(planned: Path, uncached: Path):
    section = predicted.predicted(runs_of(planned, uncached))
    (dots,) = part(section, "Predicted over measured").data
    ratios = dict(zip(dots.y, dots.x, strict=True))
    assert ratios["step time"] == pytest.approx(1.0)
    assert ratios["fills"] == pytest.approx(1.0)
    outcomes = {row[1]: row[4] for row in part(section, "Promises").rows}
    assert outcomes["hit rate per lookup"] == "NOT kept"  # 45 points off in one of three
    assert outcomes["device bytes"] == "kept"
    assert predicted.predicted(runs_of(uncached)).text == ["No run that ended had a plan."]


def test_the_simulated_step_stands_beside_the_measured_one(planned: Path):
    figure = part(predicted.predicted(runs_of(planned)), "Predicted parts of a step")
    steps = {trace.name: list(trace.x) for trace in figure.data if trace.type == "scatter"}
    plan = Plan.load(planned / "plan.json")
    assert steps["simulated step of the plan"] == [1e3 * plan.prediction.step_seconds] * plan.world_size
    assert set(steps) == {"simulated step of the plan", "measured median of the run"}


def test_main_settings_and_those_that_differ_are_shown(planned: Path, uncached: Path):
    table = part(runs.settings(runs_of(planned, uncached)), "Settings that differ")
    assert [tuple(row) for row in table.rows] == [("train.batch_size", "128", "64")]
    assert runs.settings(runs_of(planned, planned)).text == ["No setting differs."]
    alone = runs.settings(runs_of(planned))
    assert [each.title for each in alone.parts] == ["Main settings"]
    wanted = {("data.kind", "synthetic"), ("data.seed", "0"), ("train.batch_size", "128"), ("ranks", "2")}
    assert wanted | {("held out", "not known"), ("model.arch", "dlrm")} <= set(alone.parts[0].rows)
    assert "data.path" not in dict(alone.parts[0].rows), "no run has one"


def with_result(folder: Path, **changes: Any) -> Path:
    file = folder / "result.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


TAIL = {"split": "tail", "how": "the last 10% of every file", "samples": 10, "all_samples": 100}


def test_figures_of_different_held_out_samples_are_said_not_to_compare(planned: Path, uncached: Path):
    both = with_result(planned, held_out=TAIL), with_result(uncached, held_out=TAIL)
    assert not runs.summary(runs_of(*both)).text
    with_result(uncached, held_out={**TAIL, "split": "random", "how": "10% by chance"})
    found = runs.summary(runs_of(*both))
    assert found.text == ["The held-out sets differ, so figures of held-out samples do not compare."]
    rows = {row[0]: row[1:] for row in part(runs.settings(runs_of(*both)), "Settings that differ").rows}
    assert rows["held out"] == tuple(f"{how}: 10 of 100 samples" for how in (TAIL["how"], "10% by chance"))


def test_a_regression_has_its_figures_and_captions(planned: Path):
    result = json.loads((planned / "result.json").read_text())
    for name in ("auc", "ne", "logloss"):
        del result[name]
    (planned / "result.json").write_text(json.dumps({**result, "rmse": 1.25, "mae": 0.5, "r2": 0.25}))
    table = part(runs.summary(runs_of(planned)), "Results")
    row = dict(table.rows)
    assert (row["RMSE"], row["MAE"], row["R2"]) == ("1.25", "0.5", "0.2500")
    assert table.note == "Of the held-out samples, at the last step: RMSE, MAE, R2."
    assert "AUC" not in table.note
    lines = [{key: value for key, value in line.items() if key != "logloss"} for line in reports([10, 20])]
    (planned / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    notes = {each.title: each.note for each in measured.training(runs_of(planned)).parts}
    assert "Diamonds" not in notes["Loss"]
    assert "Diamonds" in notes["AUC"]


def test_what_is_since_a_resume_is_said_and_marked(planned: Path, uncached: Path):
    """The first run of 100 steps was resumed after step 10."""
    found = runs_of(with_result(planned, measured_steps=90), uncached)
    (said,) = runs.summary(found).text
    assert said.startswith("planned: speed, step ms, hits, sent and the sections of caches are since the resume at")
    assert " step 10. " in said
    marks = [shape.x0 for shape in part(measured.training(found), "AUC").layout.shapes]
    assert marks == [2560.0]
    assert len(part(measured.moved(found), "Rows moved").layout.shapes) == 2, "in each panel"
    assert not part(measured.training(found[1:]), "AUC").layout.shapes


def test_the_speed_of_a_short_run_is_marked(planned: Path, uncached: Path):
    table = part(runs.summary(runs_of(with_result(planned, is_steady=False), uncached)), "Results")
    assert ("samples/s", "25,600 (not steady yet)", "25,600") in table.rows
    assert "not steady yet" in table.terms
    assert "not steady yet" not in part(runs.summary(runs_of(uncached)), "Results").terms


@pytest.fixture
def dealt(planned: Path) -> Path:
    """The same run, of which each line of training says how its samples were dealt."""
    lines = [json.loads(line) for line in (planned / "metrics.jsonl").read_text().splitlines()]
    ratios = {10: (1.25, 2.5), 20: (1.0, 1.75)}
    for line in lines:
        if line["kind"] == "train":
            line["max_over_mean_dealt"], line["max_over_mean_undealt"] = ratios[line["step"]]
    folder = planned.with_name("mine")
    planned.rename(folder)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return with_result(folder, deal={"dealt": 1.125, "undealt": 2.1254})


def test_the_slowest_rank_s_cost_is_shown_as_samples_were_dealt_and_undealt(dealt: Path, uncached: Path):
    """Over the training, and of the whole run; of a run in slices nothing, and without one that deals no figure."""
    found = runs_of(dealt, uncached)
    section = measured.training(found)
    (drawn,) = [each for each in section.parts if each.title == "Cost of the slowest rank"]
    assert lines_of(drawn.drawn, "mine, dealt") == [([2560.0, 5120.0], [1.25, 1.0])]
    assert lines_of(drawn.drawn, "mine, undealt") == [([2560.0, 5120.0], [2.5, 1.75])]
    assert [key.name for key in drawn.keys] == ["mine, dealt", "mine, undealt"]
    assert len({key.style for key in drawn.keys}) == 2, "or they look alike"
    assert "over those of the mean rank" in drawn.note
    table = part(runs.summary(found), "Results")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["slowest rank, dealt"] == ("1.125 x mean cost", "")
    assert rows["slowest rank, undealt"] == ("2.125 x mean cost", "")
    assert {"slowest rank, dealt", "slowest rank, undealt"} <= set(table.terms)
    in_slices = runs_of(uncached)
    assert not [each for each in measured.training(in_slices).parts if each.title == "Cost of the slowest rank"]
    assert "slowest" not in str(part(runs.summary(in_slices), "Results"))


def test_ratios_of_the_dealt_are_said_to_be_since_a_resume(dealt: Path):
    (said,) = runs.summary(runs_of(with_result(dealt, measured_steps=90))).text
    assert "hits, sent, slowest rank and the sections of caches are since the resume" in said


def test_a_run_that_has_not_ended_has_its_curves(planned: Path):
    (planned / "result.json").unlink()
    found = runs_of(planned)
    assert "Not ended, so without a result: planned." in runs.summary(found).text
    assert len(part(measured.training(found), "Loss").data[0].y) == 2
    assert measured.caches(found).parts == ()


def test_values_of_any_type_have_an_order(tmp_path: Path):
    """Runs of a list `[[runs]]` vary different settings."""
    states = sorted((write_sweep(tmp_path) / "states").iterdir())[::2]
    for state, value in zip(states, (True, "none", [8, 1], 2, 0.5, "all"), strict=True):
        varied = {"ranks": 1, "varied": value}
        state.write_text(json.dumps({**json.loads(state.read_text()), "digest": str(value), "varied": varied}))
    found = [each.varied["varied"] for each in read_configurations(tmp_path) if "varied" in each.varied]
    assert found == [0.5, True, 2, [8, 1], "all", "none"]


def test_a_sweep_has_means_and_their_spread(tmp_path: Path):
    configurations = read_configurations(write_sweep(tmp_path / "s"))
    section = sweep.sweep_section(tmp_path / "s", configurations)
    table = part(section, "Comparison")
    rows = {tuple(row[:2]): dict(zip(table.header, row, strict=True)) for row in table.rows}
    assert rows["1", "0.1"]["samples/s"] == "1,000 ± 635\n(sd 71)"
    assert rows["2", "0.2"]["finished"] == "1 of 2"
    assert rows["2", "0.2"]["samples/s"] == "1,850"
    figure = part(section, "Quality and speed, every run")
    assert [each.text for each in figure.layout.annotations] == ["AUC", "NE", "samples/s"]
    assert len(figure.data[0].x) == 11  # one failed
    assert section.text[0].startswith("Best by AUC: ")


def test_quality_of_a_sweep_has_its_intervals(tmp_path: Path):
    folder = write_sweep(tmp_path / "s")
    for number, run in enumerate(sorted((folder / "runs").iterdir())):
        with_result(run, auc=0.7 + 0.01 * number)
    configurations = read_configurations(folder)
    figure = part(sweep.sweep_section(folder, configurations), "Quality and speed, every run")
    dots, means = figure.data[:2]
    assert sorted(dots.x) == pytest.approx([0.7 + 0.01 * number for number in range(11)])
    spreads = [each.spread("auc") for each in configurations]
    assert list(means.x) == [spread.mean for spread in spreads]
    assert list(means.error_x.array) == [spread.interval or 0.0 for spread in spreads]
    assert means.y[0] == "ranks=1, cache.ratio=0.1"


def test_captions_are_sentences(planned: Path, uncached: Path, tmp_path: Path):
    """Not chains of semicolons: what words mean stands in a list of its own."""
    found = runs_of(planned, uncached)
    folder = write_sweep(tmp_path / "s")
    sections = [sweep.sweep_section(folder, read_configurations(folder)), predicted.predicted(found)]
    makers = (runs.summary, runs.settings, measured.training, measured.moved, measured.caches, measured.step_time)
    sections += [make(found) for make in makers]
    notes = [each.note for section in sections for each in section.parts if each.note]
    assert len(notes) > 12
    assert [note for note in notes if ";" in note or len(note) > 400] == []


def test_names_have_only_settings_that_differ(tmp_path: Path):
    for state in (write_sweep(tmp_path) / "states").iterdir():
        if '"ranks": 2' not in state.read_text():
            state.unlink()
    assert [each.name for each in read_configurations(tmp_path)] == ["cache.ratio=0.1", "cache.ratio=0.2"]


def test_runs_that_differ_in_their_seeds_are_repeats(tmp_path: Path):
    for state in (write_sweep(tmp_path) / "states").iterdir():
        found = json.loads(state.read_text())
        varied = {**found["varied"], "train.seed": found["repeat"]}
        state.write_text(json.dumps({**found, "digest": found["name"], "group": found["digest"], "varied": varied}))
    found = read_configurations(tmp_path)
    assert len(found) == 6
    assert {len(each.results) for each in found} == {1, 2}
    assert "train.seed" not in found[0].varied


def test_scaling_has_its_ideal_and_its_efficiency(tmp_path: Path):
    section = sweep.sweep_section(tmp_path, read_configurations(write_sweep(tmp_path)))
    figure = part(section, "Scaling")
    (speed, efficiency), (ideal,) = lines_of(figure, "cache.ratio=0.1"), lines_of(figure, "cache.ratio=0.1: ideal")
    assert speed == ([1, 2, 4], [1000.0, 1900.0, 3000.0])
    assert ideal == ([1, 2, 4], [1000.0, 2000.0, 4000.0])
    assert efficiency == ([1, 2, 4], [1.0, 0.95, 0.75])


def test_failures_have_their_reasons(tmp_path: Path):
    section = sweep.sweep_section(tmp_path, read_configurations(write_sweep(tmp_path)))
    table = part(section, "Runs that did not finish")
    assert isinstance(table, PageTable)
    assert [(row[0], row[3], row[5]) for row in table.rows] == [
        ("ranks=2, cache.ratio=0.2", "failed", "ConfigError: <i>no room</i>")
    ]


def test_names_are_texts_not_html(tmp_path: Path):
    name = "<b>bold<"
    folder = write_run(tmp_path / name, predicted_plan(), result_of(predicted_plan()), reports=reports([10, 20]))
    output = tmp_path / "page.html"
    assert cli.main(["report", str(folder), "-o", str(output)]) == 0
    page = output.read_text().split("<body>")[1]
    assert name not in page
    assert "&lt;b&gt;bold&lt;" in page
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.smoke
def test_the_page_has_every_section(planned: Path, uncached: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, output = write_sweep(tmp_path / "s"), tmp_path / "page.html"
    assert cli.main(["report", str(planned), str(uncached), str(folder), "-o", str(output)]) == 0
    assert "open it in a browser" in capsys.readouterr().out
    titles = re.findall(r"<h2[^>]*>([^<]*)</h2>", output.read_text())
    wanted = ["Runs", "Settings", "Training", "Rows and bytes moved", "Caches"]
    assert titles == [f"Sweep {folder}", *wanted, "Where a step&#39;s time goes", "Predicted beside measured"]


def test_what_is_missing_says_so(planned, tmp_path, capsys, monkeypatch):
    output = str(tmp_path / "page.html")
    assert cli.main(["report", str(tmp_path / "none"), "-o", output]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert cli.main(["report", str(write_sweep(tmp_path / "s"))]) == 2
    assert "is the folder of a sweep, which needs -o FILE.html or --format" in capsys.readouterr().err
    (planned / "result.json").write_text('{"steps": 1}')
    assert cli.main(["report", str(planned), "-o", output]) == 2
    assert f"{planned / 'result.json'}: measured_steps: is missing, needed integer" in capsys.readouterr().err
    (tmp_path / "s" / "states" / "bad.json").write_text("{")
    assert cli.main(["report", str(tmp_path / "s"), "-o", output]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"embershard: {tmp_path / 's' / 'states' / 'bad.json'}: cannot be read ("), "said once"
    monkeypatch.setitem(sys.modules, "embershard.extras.report_page.write", None)
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.delitem(sys.modules, "embershard.extras.report_page.write")
    for module in [name for name in sys.modules if name.startswith("embershard.extras.report_page.")]:
        monkeypatch.delitem(sys.modules, module)
    assert cli.main(["report", str(planned), "-o", output]) == 2
    assert "plotly is not installed. Try: pip install" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_stages_of_traced_steps_stand_beside_the_step(planned: Path):
    (planned / "profile").mkdir()
    for rank in (0, 1):
        stages = {"training": {"forward": 3.0 + rank, "other": 1.0}, "beside": {"plan": 2.0}}
        text = json.dumps({"rank": rank, "steps": 4, **stages, "between_ranks": {"gloo:all_reduce": 0.5}})
        (planned / "profile" / f"rank_{rank}.stages.json").write_text(text)
    section = measured.step_time(runs_of(planned))
    assert "Not measured apart" not in " ".join(section.text)
    figure = part(section, "Stages of a step: planned")
    drawn = [(trace.name, list(trace.x)) for trace in figure.data if any(trace.x)]
    assert drawn == [("forward", [3.0, 4.0]), ("other", [1.0, 1.0]), ("plan", [2.0, 2.0])]
    (note,) = [each.note for each in section.parts if each.title == "Stages of a step: planned"]
    assert "gloo:all_reduce 0.50 ms" in note


def test_slices_and_curves_of_several_runs(planned: Path, uncached: Path):
    """A row for each value and run, and lines of each run; a run without them, and a damaged file, have none."""
    for number, folder in enumerate((planned, uncached)):
        result = json.loads((folder / "result.json").read_text())
        result["slices"] = {
            "country": {"DE": {"samples": 90 + number, "auc": 0.7}, "(missing)": {"samples": 9, "auc": None}}
        }
        (folder / "result.json").write_text(json.dumps(result))
    points = {name: [[0.0, 0.5, 1.0], [0.0, 0.75, 1.0]] for name in ("roc", "precision_recall", "reliability")}
    curves = {"label": {**points, "histogram": [[0.1, 0.9], [0.2, 0.8], [0.6, 0.4]]}}
    (planned / "curves.json").write_text(json.dumps({"step": 20, "labels": curves}))
    (uncached / "curves.json").write_text('{"labels": 3')
    both = runs_of(planned, uncached)
    table = part(measured.by_slice(both), "By country")
    assert table.header == ["country", "samples", "AUC"]
    assert table.rows[:2] == [["DE · planned", "90", "0.7000"], ["DE · uncached", "91", "0.7000"]]
    assert table.rows[3] == ["(missing) · uncached", "9", "n/a"]
    figure = part(measured.curves(both), "Curves")
    assert [each.text for each in figure.layout.annotations] == [
        "ROC",
        "precision over recall",
        "reliability",
        "scores",
    ]
    assert lines_of(figure, "planned")[0] == ([0.0, 0.5, 1.0], [0.0, 0.75, 1.0])
    assert lines_of(figure, "planned")[3:] == [([0.1, 0.9], [0.2, 0.8]), ([0.1, 0.9], [0.6, 0.4])]
    assert not measured.curves(runs_of(uncached)).parts
