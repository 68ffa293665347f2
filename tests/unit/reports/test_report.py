"""The command `embershard report`: a run's summary, predicted beside measured, corrected rates."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from embershard.commands import cli
from embershard.planning.cost.topology import load_topology
from embershard.reports.results import evaluation_text
from embershard.reports.sweep_tables import spread_tables
from embershard.settings.decoding import to_toml
from embershard.settings.files import load_config
from embershard.sharding.plan import Plan
from embershard.sweeps.spread import read_configurations
from embershard.training.config import RunConfig
from tests.unit.planning.runs import STEPS, changed, predicted_plan, result_of, without_cache
from tests.unit.reports.reported_runs import write_run, write_sweep
from tests.unit.sharding.plans import small_plan

ReportOf = Callable[..., tuple[int, str, str]]


@pytest.fixture
def report(capsys) -> ReportOf:
    """Runs the command: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["report", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def run_dir(tmp_path) -> Path:
    plan = predicted_plan()
    result = changed(result_of(plan), 1, "b", hit_rate_unique=0.5)
    return write_run(tmp_path / "run", plan, {**result, "step_ms": {"p50": 20.0, "p95": 30.0}})


def test_the_summary_tells_quality_speed_and_where_the_misses_are(run_dir, report):
    code, out, _ = report(run_dir)
    assert code == 0
    assert "AUC" in out
    assert "25,600 samples/s" in out
    lines = [line.split() for line in out.splitlines()]
    order = [words[0] for words in lines if words and words[0] in ("a", "b", "c")]
    assert order == ["b", "a"]  # 540 misses a step, and 200
    misses = next(words[5] for words in lines if words and words[0] == "b")
    assert misses == "540"
    _, out, _ = report(run_dir, "--top", 1)
    assert "The 1 of 2 tables with most misses" in out


def test_the_summary_of_a_run_without_a_cache(tmp_path, report):
    plan = predicted_plan()
    code, out, _ = report(write_run(tmp_path, None, without_cache(result_of(plan))))
    assert code == 0
    assert "all embedding rows are on the device" in out


def test_predicted_beside_measured_fits_150_columns(run_dir, report):
    code, out, _ = report(run_dir, "--predicted")
    assert code == 0
    lines = out.splitlines()
    sentences = ("Note:", "Advice:", "hit rate per", "device bytes:", "step time:")
    assert max(len(line) for line in lines if not line.startswith(sentences)) <= 150
    assert "hit rate per unique id: off by 3.33 points, promised at most 2 points: NOT kept" in out
    assert "step time: off by 50.00 %" in out
    assert "Advice: correct the machine's rates" in out
    first = next(number for number, line in enumerate(lines) if line.strip().startswith("b "))
    assert "60.00%  +10.00" in lines[first]
    assert "50.00%" in lines[first + 1]
    assert [line.split()[0] for line in lines if line.split() and line.split()[0] in "abc"] == ["b", "a", "b"]
    assert "Note: Another setting: train.device" not in out


def test_top_shows_fewer_tables(run_dir, report):
    _, out, _ = report(run_dir, "--predicted", "--top", 1)
    assert "the 1 of 3 with the largest errors" in out


def test_json_has_the_same_numbers(run_dir, report):
    code, out, _ = report(run_dir, "--predicted", "--json")
    found = json.loads(out)["predicted"]
    assert code == 0
    worst = found["tables"][0]
    assert (worst["table"], worst["rank"]) == ("b", 1)
    assert worst["traffic"]["hit_rate_unique"] == {
        "predicted": pytest.approx(0.6),
        "measured": 0.5,
        "error": pytest.approx(0.1),
    }
    assert [each["kept"] for each in found["verdicts"]] == [True, False, True, True, False]
    assert found["notes"]
    assert json.loads(report(run_dir, "--json")[1])["result"]["steps"] == STEPS


def test_other_settings_and_checkpoints_are_told(tmp_path, report):
    plan = predicted_plan()
    folder = write_run(tmp_path / "run", plan, result_of(plan, steps=STEPS + 50), checkpoints=(50, 51, 150))
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace('policy = "lfu"', 'policy = "lru"'))
    _, out, _ = report(folder, "--predicted")
    assert "cache.policy is 'lru'; the plan's prediction assumed 'lfu'" in out
    assert "include what 2 checkpoints wrote back" in out  # the one of step 50 was before the resume
    (folder / "config.toml").unlink()
    assert "the run's config cannot be read" in report(folder, "--predicted")[1]


def test_another_plan_can_be_named(tmp_path, report):
    plan = predicted_plan()
    folder = write_run(tmp_path / "run", None, result_of(plan, plan=None))
    plan.save(tmp_path / "other.json")
    code, out, _ = report(folder, "--predicted", "--plan", tmp_path / "other.json")
    assert code == 0
    assert "The run had no plan" in out
    assert "Advice" not in out


def test_a_dropped_prediction_is_an_error_that_names_the_way_out(run_dir, report):
    text = (run_dir / "plan.json").read_text()
    (run_dir / "plan.json").write_text(text.replace('"batch_size": 128', '"batch_size": 64'))
    code, _, err = report(run_dir, "--predicted")
    assert code == 2
    assert "the plan has no prediction to compare with" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--plan", "p.json"], "--plan has no effect without --predicted or --recalibrate"),
        (["--predicted", "--topology", "cpu"], "--topology has no effect without --recalibrate"),
        (["--json", "--top", "3"], "--top has no effect with --json"),
        (["--recalibrate", "machine.json"], "needed a file name that ends in .toml"),
        (["--recalibrate", "nowhere/machine.toml"], "nowhere/machine.toml: No such file or directory"),
        (["other"], "got 2 folders, which need -o FILE.html or --format"),
        (["--format", "csv", "--json"], "--json has no effect with --format"),
        (["--format", "csv", "-o", "page.html"], "-o has no effect with --format"),
        (["-o", "page.html", "--top", "3"], "--top has no effect with -o"),
        (["-o", "page.pdf"], "needed a file name that ends in .html"),
        (["-o", "nowhere/page.html"], "is in a folder that does not exist"),
    ],
)
def test_options_without_an_effect_are_errors(run_dir, report, arguments, says):
    code, out, err = report(run_dir, *arguments)
    assert (code, out) == (2, "")
    assert says in err


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("plan.json", [], "plan.json is a file: of a plan there is a page, -o FILE.html."),
        ("plan.json", ["--format", "csv"], "plan.json is a file, of which --format has no table"),
        ("result.json", ["-o", "page.html"], "result.json is a file of a run; give its folder: "),
    ],
)
def test_a_file_in_place_of_a_folder_gets_the_right_remedy(run_dir, report, name, options, says):
    code, out, err = report(run_dir / name, *options)
    assert (code, out) == (2, "")
    assert says in err


def table_of(report, form: str, *folders: Path) -> str:
    code, out, err = report(*folders, "--format", form)
    assert (code, err) == (0, "")
    return str(out)


@pytest.mark.slow
def test_results_are_a_table_for_programs(run_dir, tmp_path, report):
    sweep = write_sweep(tmp_path / "s")
    rows = json.loads(table_of(report, "json", run_dir, sweep))
    assert [row["name"] for row in rows[:2]] == ["run", "s: ranks=1, cache.ratio=0.1"]
    assert (rows[1]["runs"], rows[1]["result.samples_per_second"]) == (2, 1000.0)
    assert rows[1]["result.samples_per_second.sd"] == pytest.approx(50 * 2**0.5)
    assert rows[1]["result.samples_per_second.ci95"] == pytest.approx(50 * 12.7062, rel=1e-5)  # Student's t, 1 degree
    assert "result.auc.ci95" not in rows[0], "one run has no interval"
    read = list(csv.DictReader(io.StringIO(table_of(report, "csv", run_dir, sweep))))
    assert [{name: value for name, value in row.items() if value} for row in read] == [
        {name: str(value) for name, value in row.items()} for row in rows
    ]


@pytest.mark.slow
def test_results_are_a_table_for_readers(tmp_path, report):
    folder = write_run(tmp_path / "a_b|c", None, result_of(predicted_plan()))
    lines = table_of(report, "markdown", folder, write_sweep(tmp_path / "s")).splitlines()
    assert len(lines) == 2 + 1 + 6
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {11}
    assert "| AUC | NE | efficiency |" in lines[0]
    assert lines[2].startswith("| a_b\\|c | 1 |")
    assert lines[6].startswith("| s: ranks=2, cache.ratio=0.2 | 1 of 2 |"), "the other one failed"
    assert "| 1,000 ± 635 (sd 71) |" in lines[3]
    latex = table_of(report, "latex", folder, tmp_path / "s")
    assert "a\\_b\\textbar{}c &  &  & 1 &" in latex
    assert r"s & 1 & 0.1 & 2 & $0.5000$ & $0.5000$ & $1{,}000 \pm 635$ &" in latex
    check_latex(latex)


def check_latex(text: str) -> None:
    """Raise where LaTeX would: as far as braces, environments, cells of rows and special characters tell."""
    assert text.isascii()
    bare = re.sub(r"\\[&%$#_{}\\]|\\,", "", text)
    assert "%" not in bare
    assert "#" not in bare
    depth = 0
    for each in bare:
        depth += (each == "{") - (each == "}")
        assert depth >= 0
    assert depth == 0
    opened = list[str]()
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", bare):
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert not opened
    columns = re.search(r"\\begin{tabular}{([lr]+)}", text)
    assert columns
    body = text.split(r"\toprule")[-1].split(r"\bottomrule")[0]
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(columns[1]) - 1}
    for part, outside in enumerate(re.sub(r"\\.", "", text).split("$")):
        assert part % 2 or not re.search(r"[\^_]", outside), outside
    assert bare.count("$") % 2 == 0


@pytest.mark.slow
def test_latex_of_a_sweep_has_columns_with_units_and_no_sentences(tmp_path: Path, report: ReportOf):
    held_out = {"split": "tail", "how": "the last 10% of every file", "samples": 10, "all_samples": 100}
    folder = write_sweep(tmp_path / "s")
    for run in (folder / "runs").iterdir():
        file = run / "result.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "held_out": held_out, "is_steady": False}))
    latex = table_of(report, "latex", folder)
    check_latex(latex)
    titles = next(line for line in latex.splitlines() if line.startswith(r"\texttt"))
    names = [r"\texttt{ranks}", r"\texttt{cache.ratio}", "runs", "AUC", "NE", "throughput (samples/s)"]
    assert titles.startswith(" & ".join(names))
    assert r" & hits (\%) " in titles
    rows = [line for line in latex.splitlines() if line.endswith(r"\\")][1:]
    assert rows[0].startswith(r"1 & 0.1 & 2 & $0.5000$ & $0.5000$ & $1{,}000 \pm 635^{\ast}$ & ")
    assert not any(" of every file" in row or "steady" in row or "equal" in row for row in rows)
    (caption,) = (line for line in latex.splitlines() if line.startswith(r"\caption"))
    assert r"Held out: the last 10\% of every file: 10 of 100 samples." in caption
    assert r"$^{\ast}$: too short for the speed of a long run." in caption


def test_latex_marks_rows_that_were_judged_by_other_samples(tmp_path: Path, report: ReportOf):
    for name, how in (("a", "the last 10% of every file"), ("b", "10% by chance")):
        held_out = {"split": "tail", "how": how, "samples": 10, "all_samples": 100}
        write_run(tmp_path / name, None, {**result_of(predicted_plan()), "held_out": held_out})
    latex = table_of(report, "latex", tmp_path / "a", tmp_path / "b")
    check_latex(latex)
    rows = [line for line in latex.splitlines() if line.startswith(("a &", "b &"))]
    assert [row.removesuffix(r" \\").rpartition(" & ")[2] for row in rows] == ["a", "b"]
    assert "(a) the last 10" in latex


def test_latex_needs_no_editing():
    """Whatever a name has in it, and with or without booktabs."""
    slices = {"a_b": {"50 % & more #1 {$x^2~\\} <5>|": {"samples": 10, "auc": 0.5}}}
    latex = evaluation_text(3, {"samples": 10, "auc": 0.5}, slices, "latex")
    row = next(line for line in latex.splitlines() if "more" in line)
    assert row.startswith(
        r"a\_b = 50 \% \& more \#1 \{\$x\textasciicircum{}2\textasciitilde{}\textbackslash{}\} "
        r"\textless{}5\textgreater{}\textbar{} & "
    )
    check_latex(latex)
    head, table = latex.split(r"\begin{tabular}")
    for rule in re.findall(r"\\(\w+rule)\b", table):
        assert rf"\providecommand{{\{rule}}}{{\hline}}" in head
    assert table.count("rule") == 3


@pytest.mark.slow
def test_a_row_says_what_is_held_out_whether_all_failed_and_whether_its_speed_is_steady(tmp_path, report):
    held_out = {"split": "tail", "how": "the last 10% of every file", "samples": 10, "all_samples": 100}
    run = write_run(tmp_path / "r", None, {**result_of(predicted_plan()), "held_out": held_out, "is_steady": False})
    sweep = write_sweep(tmp_path / "s")
    for state in (sweep / "states").glob("ratio=0.1-2-*"):
        state.write_text(state.read_text().replace("finished", "failed"))
    lines = table_of(report, "markdown", run, sweep).splitlines()
    assert lines[2].startswith("| r | 1 | 25,600 (not steady yet) |")
    assert lines[2].endswith(" | the last 10% of every file: 10 of 100 samples |")
    assert "| s: ranks=2, cache.ratio=0.1 | 0 of 2 |  |  |  |  |  |  |  |  |" in lines
    rows = {row["name"]: row for row in json.loads(table_of(report, "json", run, sweep))}
    assert rows["r"]["held_out"] == "the last 10% of every file: 10 of 100 samples"
    assert (rows["r"]["result.is_steady"], rows["s: ranks=1, cache.ratio=0.1"]["result.is_steady"]) == (False, True)
    assert rows["s: ranks=2, cache.ratio=0.1"]["runs"] == 0


def test_what_is_no_finished_run_says_so(tmp_path, report):
    assert "there is no such folder" in report(tmp_path / "none")[2]
    assert "the run has not ended" in report(tmp_path)[2]
    (tmp_path / "result.json").write_text("[]")
    assert "got a JSON list" in report(tmp_path)[2]
    (tmp_path / "result.json").write_text("{")
    assert "cannot be read" in report(tmp_path)[2]
    (tmp_path / "result.json").write_text("{}")
    assert "is missing, needed" in report(tmp_path)[2]
    write_run(tmp_path, None, result_of(predicted_plan()))
    code, _, err = report(tmp_path, "--predicted")
    assert code == 2
    assert "was trained without a plan" in err


def test_recalibrating_another_model_or_batch_size_is_refused(run_dir, report):
    config = (run_dir / "config.toml").read_text()
    (run_dir / "config.toml").write_text(config.replace("batch_size = 128", "batch_size = 256"))
    code, _, err = report(run_dir, "--recalibrate", run_dir / "machine.toml")
    assert code == 2
    assert "the work of the run is not the plan's" in err
    assert not (run_dir / "machine.toml").exists()


def test_a_topology_outside_the_catalogue_must_be_given(tmp_path, report):
    plan = small_plan(made_from={"topology": "this-machine"})
    result = {**result_of(predicted_plan()), "plan": {"path": "p", "digest": plan.digest}}
    folder = write_run(tmp_path / "run", plan, result)
    code, _, err = report(folder, "--recalibrate", tmp_path / "new.toml")
    assert code == 2
    assert "made for topology 'this-machine', which is not in the catalogue" in err


@pytest.mark.slow
def test_planning_again_with_the_corrected_topology_predicts_what_was_measured(tmp_path, report):
    config = tmp_path / "run.toml"
    config.write_text(
        "[data]\nkind = 'synthetic'\n[data.synthetic]\nnum_samples = 2400\nscale = 0.0005\n"
        "[model]\nembedding_dim = 16\ndense_arch_layer_sizes = [16]\nover_arch_layer_sizes = [8, 1]\n"
        "[cache]\nratio = 0.3\n[train]\nbatch_size = 64\n"
    )
    given = ["--config", str(config)]
    assert cli.main(["profile", *given, "-o", str(tmp_path / "p.npz"), "--workers", "1"]) == 0
    planned = ["--profile", str(tmp_path / "p.npz"), "--ranks", "2", "-o", str(tmp_path / "plan.json")]
    assert cli.main(["plan", *given, *planned]) == 0
    plan = Plan.load(tmp_path / "plan.json")
    measured = 3.7 * plan.prediction.step_seconds
    folder = write_run(tmp_path / "run", plan, result_of(plan, step_ms={"p50": measured * 1e3, "p95": None}))
    (folder / "config.toml").write_text(to_toml(load_config(RunConfig, config)))
    machine = tmp_path / "machine.toml"
    code, out, err = report(folder, "--recalibrate", machine, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)["recalibrated"]
    assert found["factor"] == pytest.approx(3.7, rel=0.01)
    assert found["from_estimate"]
    assert load_topology(str(machine)).source.endswith("after run run")
    assert cli.main(["plan", *given, *planned, "--topology", str(machine)]) == 0
    again = Plan.load(tmp_path / "plan.json")
    assert again.prediction.step_seconds == pytest.approx(measured, rel=0.01)


def test_the_command_is_there(run_dir, capsys):
    assert cli.main(["report", str(run_dir), "--recalibrate", str(run_dir / "m.toml")]) == 0
    assert "All rates for 2 ranks were multiplied by" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("width", "is_whole"), [(110, True), (60, False)])
def test_names_of_settings_are_whole_where_there_is_room(tmp_path: Path, width: int, is_whole: bool):
    """Numbers that have none beside them get tables of their own."""
    name = "embedding_optimizer.weight_decay_of_rows"
    for state in (write_sweep(tmp_path) / "states").iterdir():
        state.write_text(state.read_text().replace("cache.ratio", name))
    tables = spread_tables(read_configurations(tmp_path), width)
    screen = io.StringIO()
    for table in tables:
        Console(file=screen, width=width, color_system=None).print(table)
    assert screen.getvalue().count(name) == (len(tables) if is_whole else 0)
    assert max(map(len, screen.getvalue().splitlines())) <= width
