"""`embershard sweep`: which runs a file describes, what becomes of each, and the tables of results."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from embershard.commands.sweep import command
from embershard.errors import ConfigError, SetupError
from embershard.extras.sweep_engines import on_ray
from embershard.launch.arguments import examples
from embershard.reports.sweep_tables import write_results
from embershard.sweeps import run
from embershard.sweeps.experiments import Experiment, Sweep
from embershard.sweeps.outcomes import Outcome, find_outcome, make_outcome, read_outcomes, run_folder
from embershard.sweeps.run import run_experiment
from embershard.sweeps.spread import best_sentence, read_configurations
from tests.unit.planning.runs import predicted_plan, result_of
from tests.unit.reports.reported_runs import write_sweep

CONFIG = "[data.synthetic]\nscale = 0.001\n"
GRID = (
    'config = "run.toml"\nrepeats = 2\n[set]\ntrain.max_steps = 4\n[grid]\nranks = [1, 2]\ncache.ratio = [0.1, 0.2]\n'
)
_GIVEN = result_of(predicted_plan(), loss=0.5, step_ms={"p50": 2.0}, versions={})
RESULT = json.dumps({**_GIVEN, "cache": {**_GIVEN["cache"], "fills": 7, "device_bytes": 19_999_000}})
# The program in place of `embershard train`: what a run leaves in its folder.
LEAVES = """
import os, sys
folder = sys.argv[-1]
os.makedirs(folder)
open(folder + "/config.toml", "w").close()
open(folder + "/result.json", "w").write({!r})
"""
TRAINS, TEARS = LEAVES.format(RESULT), LEAVES.format(RESULT[:-20])
FAILS = "import sys; print('noise'); sys.exit('[rank0]: ConfigError: cache.ratio: got 7, needed less.')"
WAITS = "import os, sys, time; os.makedirs(sys.argv[-1]); time.sleep(60)"


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "sweep.toml").write_text(GRID)
    return tmp_path / "sweep.toml"


def of_file(path: Path, text: str) -> tuple[Experiment, ...]:
    path.write_text(text)
    return Sweep.read(path).experiments


def train_by(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(run, "_command", lambda experiment, folder: [sys.executable, "-c", program, str(folder)])


def test_a_grid_is_every_combination_and_repeats_are_interleaved(sweep_file: Path) -> None:
    experiments = Sweep.read(sweep_file).experiments
    places = [(each.varied["ranks"], each.varied["cache.ratio"], each.repeat) for each in experiments]
    first = [(1, 0.1, 0), (1, 0.2, 0), (2, 0.1, 0), (2, 0.2, 0)]
    assert places == first + [(ranks, ratio, 1) for ranks, ratio, _ in first[::-1]]
    assert len({each.name for each in experiments}) == 8
    assert len({each.digest for each in experiments}) == 4  # repeats have the same settings
    assert "--set cache.ratio=0.2 --nproc 2" in " ".join(experiments[3].arguments)
    assert "--set train.max_steps=4" in " ".join(experiments[0].arguments)


def test_the_digest_is_of_the_resolved_settings(sweep_file: Path) -> None:
    before = Sweep.read(sweep_file).experiments[0].digest
    assert of_file(sweep_file, GRID.replace("train.max_steps = 4", "train.max_steps = 5"))[0].digest != before
    (sweep_file.parent / "run.toml").write_text(CONFIG.replace("0.001", "0.002"))
    assert of_file(sweep_file, GRID)[0].digest != before


def test_an_example_is_named_as_for_training(sweep_file: Path) -> None:
    sweep_file.write_text('config = "quickstart"\n[grid]\ntrain.seed = [1, 2]\n')
    (first, *_) = Sweep.read(sweep_file).experiments
    assert str(examples()["quickstart"]) in first.arguments


def test_a_list_of_runs_is_combined_with_the_grid(sweep_file: Path) -> None:
    text = 'config = "run.toml"\n[grid]\ncache.ratio = [0.1, 0.2]\n[[runs]]\ntrain.seed = 1\n[[runs]]\ntrain.seed = 2\n'
    found = [(each.varied["train.seed"], each.varied["cache.ratio"]) for each in of_file(sweep_file, text)]
    assert found == [(1, 0.1), (1, 0.2), (2, 0.1), (2, 0.2)]


def test_all_runs_are_trained_with_one_seed_before_the_next(sweep_file: Path) -> None:
    text = 'config = "run.toml"\ngrid.train.seed = [5, 3]\ngrid.ranks = [1, 2]\n'
    experiments = of_file(sweep_file, text + "[[runs]]\ncache.ratio = 0.1\n[[runs]]\ncache.ratio = 0.2\n")
    assert [each.varied["train.seed"] for each in experiments] == [5] * 4 + [3] * 4
    assert [each.varied["cache.ratio"] for each in experiments[:4]] == [0.1, 0.1, 0.2, 0.2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('config = "run.toml"\nrepeat = 2', "Did you mean repeats"),
        ('config = "run.toml"\nrepeats = 0', "needed at least 1"),
        ('config = "run.toml"\ntime_limit_seconds = 0', "needed more than 0"),
        ('config = "none.toml"', "none.toml: cannot be read"),
        ('config = "run.toml"\ngrid.cache.ratio = 0.1', "needed a list of values"),
        ('config = "run.toml"\ngrid.cache.ratio = [0.1, 7.0]', "cache.ratio"),
        ('config = "run.toml"\ngrid.cache.rati = [0.1]', "Did you mean cache.ratio"),
        ('config = "run.toml"\ngrid.ranks = [0]', "needed a whole number"),
        ('config = "run.toml"\ngrid.cache.ratio = [0.1, 0.1]', "two runs have the same settings"),
        ('config = "run.toml"\nset.train.global_batch_size = 5\ngrid.ranks = [2]', "a multiple of the 2 ranks"),
    ],
)
def test_what_no_run_could_do_is_refused_before_the_first(sweep_file: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of_file(sweep_file, text)


def one(sweep_file: Path) -> Experiment:
    return Sweep.read(sweep_file).experiments[0]


def test_a_run_that_ends_well_is_kept(sweep_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train_by(monkeypatch, TRAINS)
    folder, experiment = tmp_path / "out", one(sweep_file)
    assert find_outcome(experiment, folder) is None
    outcome = run_experiment(experiment, folder, 60)
    assert (outcome.status, outcome.reason, outcome.attempt) == ("finished", "", 1)
    assert find_outcome(experiment, folder) == outcome
    assert read_outcomes(folder) == [outcome]


def test_a_failure_keeps_its_reason(sweep_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train_by(monkeypatch, FAILS)
    outcome = run_experiment(one(sweep_file), tmp_path / "out", None)
    assert (outcome.status, outcome.reason) == ("failed", "[rank0]: ConfigError: cache.ratio: got 7, needed less.")


@pytest.mark.slow
def test_a_run_that_a_signal_stopped_has_not_ended(sweep_file, monkeypatch, tmp_path) -> None:
    """`embershard train` ends with 0 after SIGTERM, without a result."""
    train_by(monkeypatch, "print('stopped before the first step.')")
    folder, experiment = tmp_path / "out", one(sweep_file)
    outcome = run_experiment(experiment, folder, None)
    assert (outcome.status, outcome.reason) == ("interrupted", "stopped before the first step.")
    assert find_outcome(experiment, folder) is None
    train_by(monkeypatch, "import sys; print('dlrm: 26 tables'); print('stopped at once.'); sys.exit(143)")
    outcome = run_experiment(experiment, folder, None)
    assert (outcome.status, outcome.reason, outcome.attempt) == ("interrupted", "stopped at once.", 2)


@pytest.mark.slow
def test_an_edited_file_repeats_no_run(sweep_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train_by(monkeypatch, TRAINS)
    folder = tmp_path / "out"
    run_experiment(one(sweep_file), folder, None)
    text = GRID.replace("train.max_steps = 4\n", "").replace("[grid]", "[grid]\ntrain.max_steps = [4, 5]")
    found = [find_outcome(each, folder) for each in of_file(sweep_file, text)]
    ended = [outcome for outcome in found if outcome is not None]
    assert len(ended) == 1
    assert ended[0].varied == {"ranks": 1, "cache.ratio": 0.1, "train.max_steps": 4}


def test_a_damaged_state_is_named(sweep_file: Path, tmp_path: Path) -> None:
    experiment = one(sweep_file)
    state = tmp_path / "out" / "states" / f"{experiment.name}.json"
    state.parent.mkdir(parents=True)
    state.touch()
    with pytest.raises(ConfigError, match="Remove it"):
        find_outcome(experiment, tmp_path / "out")


@pytest.mark.slow
def test_attempts_are_counted_by_their_highest_number(sweep_file, monkeypatch, tmp_path) -> None:
    train_by(monkeypatch, TRAINS)
    folder, experiment = tmp_path / "out", one(sweep_file)
    for _ in range(3):
        outcome = run_experiment(experiment, folder, None)
    (folder / "outputs" / f"{experiment.name}.txt.aside-1").unlink()
    shutil.rmtree(folder / "runs" / f"{experiment.name}.aside-1")
    outcome = run_experiment(experiment, folder, None)
    assert outcome.attempt == 4
    assert len(list((folder / "runs").iterdir())) == 3


def test_a_run_that_takes_too_long_is_ended(sweep_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train_by(monkeypatch, WAITS)
    started = time.monotonic()
    outcome = run_experiment(one(sweep_file), tmp_path / "out", 0.5)
    assert (outcome.status, outcome.reason) == ("timed out", "took longer than 0.5 s")
    assert time.monotonic() - started < 60, "it sleeps for 60 s"


@pytest.mark.slow
def test_what_an_earlier_attempt_left_is_set_aside(sweep_file, monkeypatch, tmp_path) -> None:
    folder, experiment = tmp_path / "out", one(sweep_file)
    run_folder(folder, experiment.name).mkdir(parents=True)  # of a sweep that was killed
    (run_folder(folder, experiment.name) / "metrics.jsonl").write_text("half")
    train_by(monkeypatch, TRAINS)
    outcome = run_experiment(experiment, folder, None)
    assert outcome.attempt == 2
    aside = folder / "runs" / f"{experiment.name}.aside-1"
    assert (aside / "metrics.jsonl").read_text() == "half"


@pytest.mark.slow
def test_a_run_whose_end_was_not_noted_is_not_started_again(sweep_file, monkeypatch, tmp_path) -> None:
    train_by(monkeypatch, TRAINS)
    folder, experiment = tmp_path / "out", one(sweep_file)
    run_experiment(experiment, folder, None)
    for state in (folder / "states").iterdir():
        state.unlink()
    found = find_outcome(experiment, folder)
    assert (found.status, found.attempt) == ("finished", 1)
    assert read_outcomes(folder) == [found]


def test_a_run_with_a_result_is_finished_whatever_became_of_its_last_checkpoint(sweep_file, monkeypatch, tmp_path):
    """With `checkpoint.on_failed_save = "continue"` such a run writes its result and ends with 1. All engines, and a
    sweep that finds the run later, say the same."""
    train_by(monkeypatch, f"{TRAINS}sys.exit('FailedSaveError: step 4 could not be saved')")
    folder, experiment = tmp_path / "out", one(sweep_file)
    outcome = run_experiment(experiment, folder, None)
    assert (outcome.status, outcome.reason) == ("finished", "")
    next((folder / "states").iterdir()).unlink()
    found = find_outcome(experiment, folder)
    assert (found.status, found.reason) == ("finished", "")


def leave(experiment: Experiment, folder: Path, result: str) -> None:
    """A run's files, without what the sweep notes of it."""
    run = run_folder(folder, experiment.name)
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.toml").touch()
    (run / "result.json").write_text(result, encoding="latin-1")


@pytest.mark.parametrize("text", ["", RESULT[:-20], "{}", "[1]", "\xff"])
def test_a_torn_result_is_none(sweep_file: Path, tmp_path: Path, text: str) -> None:
    folder, experiment = tmp_path / "out", one(sweep_file)
    leave(experiment, folder, text)
    assert find_outcome(experiment, folder) is None
    leave(experiment, folder, RESULT)
    assert find_outcome(experiment, folder) is not None


@pytest.mark.slow
def test_a_run_that_ends_without_a_whole_result_is_started_again(sweep_file, monkeypatch, tmp_path) -> None:
    train_by(monkeypatch, TEARS)
    folder, experiment = tmp_path / "out", one(sweep_file)
    assert run_experiment(experiment, folder, None).status == "interrupted"
    assert find_outcome(experiment, folder) is None


@pytest.mark.slow
def test_the_results_are_one_table(sweep_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    first, second, *_ = Sweep.read(sweep_file).experiments
    train_by(monkeypatch, TRAINS)
    run_experiment(first, folder, None)
    train_by(monkeypatch, FAILS)
    run_experiment(second, folder, None)
    write_results(folder)
    rows = pq.read_table(folder / "results.parquet").to_pylist()
    assert [row["status"] for row in rows] == ["finished", "failed"]
    assert [row["cache.ratio"] for row in rows] == [0.1, 0.2]
    assert [rows[0][f"result.{name}"] for name in ("loss", "cache.fills", "step_ms.p50")] == [0.5, 7, 2.0]
    assert rows[1]["result.loss"] is None
    assert not any("tables" in name or "versions" in name for name in rows[0])
    assert csv.read_csv(folder / "results.csv").column_names == list(rows[0])


@pytest.mark.parametrize(
    ("setting", "values", "columns"),
    [
        ("cache.device_bytes", "[10_000_000, 20_000_000]", [10_000_000, 20_000_000]),
        ("cache.ratio", "[0.1, 0.2]", [0.1, 0.2]),
        ("model.dense_arch_layer_sizes", "[[32, 16], [64, 16]]", ["[32, 16]", "[64, 16]"]),
        ("tracking.trackers", '["none", ["tensorboard"]]', ["[]", '["tensorboard"]']),
        ("train.max_steps", '["none", 7]', [None, 7]),
    ],
)
def test_what_a_sweep_varies_is_in_its_tables(sweep_file, tmp_path, setting, values, columns) -> None:
    """Beside the measurements of the same name."""
    folder = tmp_path / "out"
    for experiment in of_file(sweep_file, f'config = "run.toml"\ngrid.{setting} = {values}'):
        leave(experiment, folder, RESULT)
        assert find_outcome(experiment, folder) is not None
    write_results(folder)
    table = pq.read_table(folder / "results.parquet")
    assert table[setting].to_pylist() == columns
    assert set(table["result.cache.device_bytes"].to_pylist()) == {19_999_000}
    assert csv.read_csv(folder / "results.csv")[setting].to_pylist() == columns
    means = table.group_by([setting]).aggregate([("result.loss", "mean")])
    assert means.num_rows == 2


def run_all(sweep_file: Path, folder: Path, *options: str) -> int:
    return command.main([str(sweep_file), "--out", str(folder), *options])


@pytest.mark.slow
def test_the_same_command_goes_on(sweep_file, monkeypatch, tmp_path, capsys) -> None:
    started: list[str] = []
    monkeypatch.setattr(
        "embershard.commands.sweep.run.lock_run_dir", lambda folder, option: folder.mkdir(exist_ok=True)
    )

    def program(experiment: Experiment, folder: Path) -> Sequence[str]:
        started.append(experiment.name)
        return [sys.executable, "-c", FAILS if len(started) == 2 else TRAINS, str(folder)]

    monkeypatch.setattr(run, "_command", program)
    folder = tmp_path / "out"
    assert run_all(sweep_file, folder) == 1  # one failed
    assert len(started) == 8
    shown = capsys.readouterr().out
    assert "[8/8]" in shown
    assert "ConfigError: cache.ratio: got 7" in shown
    assert run_all(sweep_file, folder) == 1
    assert len(started) == 8  # nothing was started again
    assert run_all(sweep_file, folder, "--retry-failed") == 0
    assert started[8:] == [started[1]]
    assert {row["status"] for row in pq.read_table(folder / "results.parquet").to_pylist()} == {"finished"}


@pytest.mark.slow
def test_a_table_that_cannot_be_written_ends_no_run(sweep_file, monkeypatch, tmp_path, capsys) -> None:
    """The runs go on, and the command says so at the end."""
    monkeypatch.setattr(
        "embershard.commands.sweep.run.lock_run_dir", lambda folder, option: folder.mkdir(exist_ok=True)
    )
    train_by(monkeypatch, TRAINS)
    sweep_file.write_text('config = "run.toml"\ngrid.ranks = [1, 2]')
    (tmp_path / "out" / "results.csv.partial").mkdir(parents=True)
    with pytest.raises(OSError, match=r"results\.csv"):
        run_all(sweep_file, tmp_path / "out")
    assert len(read_outcomes(tmp_path / "out")) == 2
    assert capsys.readouterr().out.count("Warning: the results so far could not be written (IsADirectoryError") == 2


@pytest.mark.slow
def test_seeds_are_repeats_and_the_best_is_named(sweep_file, monkeypatch, tmp_path, capsys) -> None:
    """AUC 0.71, 0.72, 0.73 by seed with the smaller cache, and half a hundredth less with the larger one."""
    monkeypatch.setattr(
        "embershard.commands.sweep.run.lock_run_dir", lambda folder, option: folder.mkdir(exist_ok=True)
    )
    sweep_file.write_text('config = "run.toml"\n[grid]\ncache.ratio = [0.1, 0.2]\ntrain.seed = [1, 2, 3]\n')

    def program(experiment: Experiment, folder: Path) -> Sequence[str]:
        auc = 0.7 + experiment.varied["train.seed"] / 100 - 0.005 * (experiment.varied["cache.ratio"] > 0.1)
        text = json.dumps({**json.loads(RESULT), "auc": auc, "loss": auc})
        return [sys.executable, "-c", LEAVES.format(text), str(folder)]

    monkeypatch.setattr(run, "_command", program)
    experiments = Sweep.read(sweep_file).experiments
    assert [each.varied["train.seed"] for each in experiments] == [1, 1, 2, 2, 3, 3], "every run once, then again"
    assert run_all(sweep_file, tmp_path / "out") == 0
    said = capsys.readouterr().out
    best = run_folder(tmp_path / "out", experiments[4].name)
    assert "Best by AUC: cache.ratio=0.1: 0.7200 ± 0.0248 (sd 0.0100), mean of 3 runs, 95 % interval" in said
    assert f"Its best run has 0.7300: {best}" in said
    rows = pq.read_table(tmp_path / "out" / "configurations.parquet").to_pylist()
    assert [(row["cache.ratio"], row["runs"]) for row in rows] == [(0.1, 3), (0.2, 3)]
    assert rows[0]["result.auc.sd"] == pytest.approx(0.01)
    assert rows[0]["result.auc.ci95"] == pytest.approx(4.302653 * 0.01 / 3**0.5)
    assert run_all(sweep_file, tmp_path / "out", "--by", "loss") == 0
    assert "Best by training loss: cache.ratio=0.2" in capsys.readouterr().out, "less of it is better"
    assert run_all(sweep_file, tmp_path / "out", "--by", "step_ms.p50") == 0
    assert "As good: cache.ratio=0.2" in capsys.readouterr().out
    assert run_all(sweep_file, tmp_path / "out", "--by", "auc/buy") == 0
    assert "--by auc/buy: no run that finished has this figure" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_all(sweep_file, tmp_path / "out", "--by", "steps")
    said = capsys.readouterr().err
    assert "steps: neither more nor less of it is known to be better" in said
    assert "cache.hit_rate_lookups" in said


def test_the_best_of_different_held_out_samples_is_warned_of(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "s")
    warning = ". The held-out sets differ, so figures of held-out samples do not compare"
    for file in sorted((sweep / "runs").glob("*/result.json")):
        split = "random" if "ratio=0.2" in str(file) else "tail"
        held_out = {"split": split, "how": split, "samples": 10, "all_samples": 100}
        file.write_text(json.dumps({**json.loads(file.read_text()), "held_out": held_out, "is_steady": False}))
    found = read_configurations(sweep)
    assert best_sentence(found).endswith(warning)
    by_speed = best_sentence(found, "samples_per_second")
    assert warning not in by_speed
    assert "3,000 ± 635 (sd 71) (not steady yet), mean of 2 runs" in by_speed
    same = best_sentence([each for each in found if each.varied["cache.ratio"] == 0.1])
    assert same
    assert warning not in same


def test_a_dry_run_prints_the_commands(sweep_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(sweep_file), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert all(line.startswith("embershard train --config") for line in lines)


def test_ray_is_asked_for_where_it_is_missing(sweep_file, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SetupError, match="pip install"):
        run_all(sweep_file, tmp_path / "out", "--on", "ray")


class TaskError(Exception):
    """As Ray raises what a task raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("traceback of a worker")
        self.cause = cause


class MadeUpRay:
    """Stands in for Ray: the tasks that `fails` names raise an error, the others finish."""

    exceptions = SimpleNamespace(RayTaskError=TaskError, RayError=RuntimeError)

    def __init__(self, fails: str) -> None:
        self._fails = fails
        self._tasks: dict[str, Experiment] = {}

    def init(self, **_: Any) -> None: ...
    def shutdown(self) -> None: ...
    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0}}]

    def remote(self, **_: Any) -> Any:
        return lambda function: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._start))

    def _start(self, experiment: Experiment, *_: Any) -> str:
        self._tasks[experiment.name] = experiment
        return experiment.name

    def wait(self, tasks: list[str]) -> tuple[list[str], list[str]]:
        return tasks[:1], tasks[1:]

    def get(self, task: str) -> Outcome:
        if task == self._fails:
            raise TaskError(OSError("[Errno 116] Stale file handle"))
        return make_outcome(self._tasks[task], "finished", "", started_at=0.0, seconds=1.0, attempt=1)


def test_an_error_on_a_machine_of_ray_ends_no_other_run(sweep_file, monkeypatch, tmp_path) -> None:
    """All tasks end with the command, so the command must not."""
    first, second, *_ = (sweep := Sweep.read(sweep_file)).experiments
    monkeypatch.setitem(sys.modules, "ray", MadeUpRay(fails=first.name))
    found: list[Outcome] = []
    on_ray.run_on_ray(sweep, [first, second], tmp_path, lambda experiment: None, found.append)
    assert [each.status for each in found] == ["interrupted", "finished"]
    assert found[0].reason == "OSError: [Errno 116] Stale file handle"


@pytest.mark.parametrize(("file", "number"), [("examples/sweep.toml", 8), ("benchmarks/group_quality.toml", 50)])
def test_a_sweep_of_the_project_is_sound(project_dir: Path, file: str, number: int) -> None:
    assert len(Sweep.read(project_dir / file).experiments) == number


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["missing.toml"])
    assert (
        "argument FILE: missing.toml: there is no such file; give the TOML file of a sweep" in capsys.readouterr().err
    )
