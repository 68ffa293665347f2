"""The best model of a run: kept, known after a resume, and the end of a run that no longer gets better."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from embershard.cache import CacheConfig
from embershard.data import Target
from embershard.distributed import CheckpointConfig, complete_checkpoints
from embershard.distributed.checkpoint.best import BEST, BestEvaluation
from embershard.errors import ConfigError, InvalidCheckpointError
from embershard.metrics.figures import Judge
from embershard.training.checkpoint.resume import resume_run
from embershard.training.checkpoint.saved_run import EvaluationProgress
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.parts.evaluations import Evaluations
from embershard.training.reports import EvalReport, Report, SaveReport, TrainReport
from embershard.training.trained_run import open_trained
from embershard.training.trainer import Trainer
from tests.covering import keep, matrix
from tests.small_runs import small_run
from tests.unit.distributed.test_blocks import stock_loaded

pytestmark = pytest.mark.slow  # whole training runs

#: AUC by evaluation: the best is the third; ties and what is undefined are no better.
SCRIPT = (0.6, None, 0.8, 0.8, 0.7, float("nan"), 0.75, 0.9, 0.1)


def make_config(train: dict[str, Any] | None = None, checkpoint: dict[str, Any] | None = None) -> RunConfig:
    return small_run(
        cache=CacheConfig(ratio=0.3, policy="lru"),
        train=TrainConfig(**{"batch_size": 100, "epochs": 2, "eval_every": 2, "log_every": 1, **(train or {})}),
        checkpoint=CheckpointConfig(**{"keep_best": True, "asynchronous": False, **(checkpoint or {})}),
    )  # fmt: skip


def scripted(trainer: Trainer, values: Sequence[float | None] = SCRIPT, every: int = 2) -> None:
    """Give the trainer's evaluations these AUCs, by their step."""
    evaluate = trainer.evaluate

    def changed() -> EvalReport | None:
        report = evaluate()
        if report is None:
            return None
        value = values[min(trainer.steps // every, len(values)) - 1]
        return dataclasses.replace(report, quality={**report.quality, "auc": value})

    trainer.evaluate = changed


def run(trainer: Trainer, stop_at: int | None = None) -> list[Report]:
    """Train to the end; or, as a kill would, drop everything after the training step `stop_at`."""
    reports: list[Report] = []
    for report in trainer.train():
        reports.append(report)
        if isinstance(report, TrainReport) and report.step == stop_at:
            break
    trainer.close()
    return reports


def best_of(trainer: Trainer) -> Evaluations:
    evaluations = trainer.part(Evaluations)
    return evaluations


def names(folder: Path) -> list[str]:
    return [path.name for path in complete_checkpoints(folder)]


def test_the_best_is_saved_and_stays(ranks, tmp_path):
    trainer = Trainer(make_config(checkpoint={"every_steps": 7, "keep_last": 1}), ranks, tmp_path)
    scripted(trainer, SCRIPT[:7])
    reports = run(trainer)
    assert [report.step for report in reports if isinstance(report, EvalReport) and report.is_best] == [2, 6]
    saved = [report.step for report in reports if isinstance(report, SaveReport)]
    assert saved == [2, 6, 7, 14, 18]
    assert names(tmp_path) == ["step_6", "step_18"]
    best = BestEvaluation.find(tmp_path)
    assert (best.step, best.metric, best.value, best.quality["auc"]) == (6, "auc", 0.8, 0.8)
    assert best_of(trainer).kept == best


def test_it_is_the_state_of_its_step(ranks, tmp_path):
    """Bit for bit that of a run that saves at this step by itself: neither evaluations nor saves change anything."""
    trainer = Trainer(make_config(), ranks, tmp_path / "a")
    scripted(trainer)
    run(trainer)
    plain = make_config({"max_steps": 16, "eval_every": None}, {"keep_best": False, "asynchronous": None})
    run(Trainer(plain, ranks, tmp_path / "b"))
    assert BestEvaluation.find(tmp_path / "b") is None
    kept, alone = (stock_loaded(tmp_path / name / "step_16") for name in "ab")
    names = {name for name in kept if not name.startswith("cache.")}  # the last step of a run looks no further ahead
    assert names == {name for name in alone if not name.startswith("cache.")}
    assert [name for name in names if not torch.equal(kept[name], alone[name])] == []


@pytest.mark.parametrize(
    ("values", "improves"), [((0.6, 0.7, 0.8), True), ((0.6, 0.8, 0.7), False), matrix((0.6,), False)]
)
def test_a_run_says_that_it_was_still_improving(ranks, values, improves):
    trainer = Trainer(make_config({"max_steps": 2 * len(values)}), ranks)
    scripted(trainer, values)
    run(trainer)
    assert trainer.part(Evaluations).result()["was_improving"] == improves


def test_training_ends_where_it_gets_no_better(ranks, tmp_path):
    trainer = Trainer(make_config({"early_stopping": 3}), ranks, tmp_path)
    scripted(trainer)
    reports = run(trainer)
    assert (trainer.steps, trainer.is_over, trainer.total_steps) == (12, True, 18)
    assert [report.step for report in reports if isinstance(report, EvalReport)] == [2, 4, 6, 8, 10, 12]
    assert best_of(trainer).stop_reason == (
        "Stopped early: the last 3 evaluations gave nothing better than auc 0.8 at step 6 (train.early_stopping)."
    )
    assert names(tmp_path) == ["step_6", "step_12"]
    resumed = Trainer(make_config({"early_stopping": 3}), ranks, tmp_path)
    resume_run(resumed)
    assert resumed.is_over, "nothing is trained or evaluated again"
    patient = Trainer(make_config({"early_stopping": 4}), ranks, tmp_path)
    resume_run(patient)
    assert not patient.is_over, "the setting may be raised"
    scripted(patient)
    assert (best_of(patient).progress.num_worse, [type(each) for each in run(patient)][:1]) == (3, [TrainReport])
    assert patient.steps == 14
    resumed.close()


@pytest.mark.matrix
@pytest.mark.parametrize(("stop_at", "every_steps"), [(7, 3), matrix(9, 4), matrix(11, 4)])
def test_a_resumed_run_decides_alike(ranks, tmp_path, stop_at, every_steps):
    config = make_config({"early_stopping": 3}, {"every_steps": every_steps, "keep_last": 1})

    def trained(folder: Path, stop_at: int | None = None, is_resumed: bool = False) -> list[Report]:
        trainer = Trainer(config, ranks, folder)
        if is_resumed:
            resume_run(trainer)
        scripted(trainer)
        return run(trainer, stop_at)

    whole = trained(tmp_path / "a")
    trained(tmp_path / "b", stop_at)
    rest = trained(tmp_path / "b", is_resumed=True)
    losses = [{each.step: each.loss for each in reports if isinstance(each, TrainReport)} for reports in (whole, rest)]
    assert rest
    assert losses[1] == {step: loss for step, loss in losses[0].items() if step >= min(losses[1])}
    assert max(losses[1]) == 12
    assert names(tmp_path / "a") == names(tmp_path / "b")
    files = [json.loads((tmp_path / name / BEST).read_text()) for name in "ab"]
    assert files[0] == files[1]
    assert files[0]["step"] == 6


def test_an_interrupted_evaluation_is_made_up_for(ranks, tmp_path):
    """A signal in the evaluation at step 6: the checkpoint of that step lacks it."""
    config = make_config({"early_stopping": 3})
    trainer = Trainer(config, ranks, tmp_path)
    scripted(trainer)
    evaluate = trainer.evaluate
    stopped = mock.Mock(side_effect=lambda: trainer.supervision.note_agreed(15))
    trainer.evaluate = lambda: evaluate() if trainer.steps != 6 else stopped()
    run(trainer)
    assert (trainer.steps, names(tmp_path)[-1]) == (6, "step_6")
    assert best_of(trainer).progress.step == 4
    resumed = Trainer(config, ranks, tmp_path)
    resume_run(resumed)
    scripted(resumed)
    reports = run(resumed)
    assert isinstance(reports[0], EvalReport)
    assert (reports[0].step, reports[0].is_best, resumed.steps) == (6, True, 12)
    best = BestEvaluation.find(tmp_path)
    assert best.step == 6, "the checkpoint that was there already is kept"


def test_a_kill_before_the_pointer_is_written(ranks, tmp_path):
    trainer = Trainer(make_config(), ranks, tmp_path)
    scripted(trainer)
    run(trainer, stop_at=7)
    (tmp_path / BEST).unlink()
    resumed = Trainer(make_config(), ranks, tmp_path)
    resume_run(resumed)
    assert resumed.steps == 6
    assert (best_of(resumed).kept, BestEvaluation.find(tmp_path)) == (best_of(resumed).progress.best,) * 2
    resumed.close()


@pytest.mark.parametrize("is_there", [True, matrix(False)])
def test_a_resume_from_before_the_best(ranks, tmp_path, is_there):
    """The best is of a future that the run does not have: that before it is the best again, if it is still there."""
    trainer = Trainer(make_config(checkpoint={"every_steps": 4, "keep_last": 2}), ranks, tmp_path)
    scripted(trainer)
    run(trainer, stop_at=8)
    assert names(tmp_path) == ["step_2", "step_4", "step_6"]
    if not is_there:
        (tmp_path / "step_2").rename(tmp_path / "elsewhere")
    resumed = Trainer(make_config(checkpoint={"every_steps": 4, "keep_last": 2}), ranks, tmp_path)
    resume_run(resumed, step=4)
    assert best_of(resumed).progress.best.step == 2, "patience goes by what was seen"
    assert best_of(resumed).kept == BestEvaluation.find(tmp_path)
    assert best_of(resumed).kept == (best_of(resumed).progress.best if is_there else None)
    resumed.close()


@pytest.mark.parametrize("problem", keep(["damaged"], ["damaged", "gone", "unreadable"]))
def test_a_best_one_that_cannot_be_used(ranks, tmp_path, problem):
    config = make_config({"epochs": 1})
    trainer = Trainer(config, ranks, tmp_path)
    scripted(trainer, (0.6, 0.8, 0.7, 0.5))
    run(trainer)
    used = open_trained(config, tmp_path, ranks)
    assert (used.saved.step, used.skipped) == (4, ())
    assert used.title.endswith("step_4, the best evaluation's (auc 0.8 at step 4; --step last: the newest)")
    assert open_trained(config, tmp_path, ranks, "last").saved.step == 9
    assert open_trained(config, tmp_path, ranks, 9).saved.step == 9
    if problem == "damaged":
        file = next((tmp_path / "step_4").glob("*.distcp"))
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    elif problem == "gone":
        (tmp_path / "step_4").rename(tmp_path / "elsewhere")
    else:
        (tmp_path / BEST).write_text('{"step": ')
    used = open_trained(config, tmp_path, ranks)
    assert (used.saved.step, used.best) == (9, None)
    said = {"damaged": "step_4: ", "gone": "the checkpoint of the best evaluation", "unreadable": "cannot be read"}
    assert said[problem] in used.skipped[0]


def test_without_a_number_of_steps_each_epoch_is_evaluated(ranks, tmp_path):
    trainer = Trainer(make_config({"eval_every": None, "early_stopping": 2}), ranks, tmp_path)
    scripted(trainer, every=9)
    assert [report.step for report in run(trainer) if isinstance(report, EvalReport)] == [9, 18]
    plain = Trainer(make_config({"eval_every": None}, {"keep_best": False, "asynchronous": None}), ranks)
    assert [report.step for report in run(plain) if isinstance(report, EvalReport)] == [18]


def test_an_undefined_figure_is_never_the_best(ranks, tmp_path):
    trainer = Trainer(make_config({"early_stopping": 2}), ranks, tmp_path)
    scripted(trainer, [None, float("nan")])
    run(trainer)
    assert (trainer.steps, BestEvaluation.find(tmp_path)) == (4, None)
    assert "2 evaluations gave nothing with a defined auc" in best_of(trainer).stop_reason


@pytest.mark.parametrize(
    ("train", "checkpoint", "keeps"),
    [
        ({}, {}, True),
        ({"epochs": 1}, {}, False),
        ({"epochs": 1, "early_stopping": 1}, {}, True),
        ({}, {"at_end": False}, False),
        ({"epochs": 1}, {"keep_best": True, "at_end": False}, True),
        ({"early_stopping": 1}, {"keep_best": False}, False),
    ],
)
def test_what_is_kept_by_default(train, checkpoint, keeps):
    unset = {"keep_best": None, "asynchronous": None}
    assert make_config(train, unset | checkpoint).keeps_best == keeps


@pytest.mark.parametrize(
    ("train", "checkpoint", "message"),
    [
        ({"metric": "calibration"}, {}, "train.metric: got 'calibration', needed one of auc, ne, logloss, accuracy."),
        ({"metric": "rmse"}, {}, "train.metric: got 'rmse', needed one of auc, ne, logloss"),
        (
            {"metric": "auc", "epochs": 1},
            {"keep_best": None, "asynchronous": None},
            "train.metric has no effect without checkpoint.keep_best or",
        ),
        ({"early_stopping": 0}, {}, "train.early_stopping: got 0, needed at least 1"),
    ],
)
def test_wrong_settings(train, checkpoint, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        make_config(train, checkpoint)


@pytest.mark.parametrize(("section", "name", "value"), [("train", "early_stopping", 2), ("checkpoint", "keep_best", 1)])
def test_nothing_is_held_out(section, name, value):
    config = make_config({"eval_every": None}, {"keep_best": None, "asynchronous": None})
    data = dataclasses.replace(config.data, eval_fraction=0.0)
    changed = dataclasses.replace(getattr(config, section), **{name: value})
    with pytest.raises(ConfigError, match=rf"{section}\.{name} has no effect: nothing is held out"):
        dataclasses.replace(config, data=data, **{section: changed})


def report(step: int, auc: float | None) -> EvalReport:
    return EvalReport(step, {"samples": 9, "auc": auc, "logloss": 0.5}, 0.1)


def test_a_save_that_takes_long_is_awaited(ranks, tmp_path):
    """Evaluations beside it that are no better do not take its place; after a failure, the next better one does."""
    run = SimpleNamespace(config=make_config(), checkpoints=tmp_path, ranks=ranks, steps=0)
    best = Evaluations(run)
    best._judge, best.progress = Judge("auc"), EvaluationProgress("auc")

    def awaits(step: int) -> bool:
        run.steps = step
        return best.wants_save()

    best.add(report(2, 0.6))
    assert (best.progress.best.step, awaits(2), best.kept) == (2, True, None)
    best.add(report(4, 0.5))
    assert (best.progress.best.step, awaits(4), awaits(2)) == (2, False, True)
    best.note_save(2)
    assert (best.kept.step, BestEvaluation.find(tmp_path)) == (2, best.kept)
    best.add(report(6, 0.8))
    best.note_save(6, is_complete=False)
    assert (best.kept.step, best.progress.best.step) == (2, 6)
    best.add(report(8, 0.7))
    assert (best.progress.best.step, awaits(8)) == (6, True), "better than what is kept"


def test_the_best_of_several_labels_is_that_of_their_mean():
    assert Judge.of("auc", Target(("a", "b"))).value({"auc/a": 0.5, "auc/b": 0.7, "ne/a": 0.1}) == 0.6
    assert Judge.of("auc/b", Target(("a", "b"))).value({"auc/a": 0.5, "auc/b": 0.7}) == 0.7
    assert Judge.of("auc", Target(("a", "b"))).value({"auc/a": 0.5, "auc/b": None}) is None
    graded = Target(("a", "s"), ("binary", "multiclass")).with_classes({"s": (1, 2, 3)})
    figures = {"auc/a": 0.5, "auc/s=1": 0.8, "auc/s=2": None, "auc/s=3": 0.6, "logloss/s=1": 9.0, "logloss/s": 1.0}
    assert Judge.of(None, graded).value(figures) == pytest.approx((0.5 + 0.7) / 2), "a class without samples, a label"
    assert Judge.of("logloss", graded).value({**figures, "logloss/a": 2.0}) == 1.5, "of the label, not of its classes"
    assert Judge.of("auc/s=1", graded).value(figures) == 0.8
    assert Judge.of("auc/s=2", graded).value(figures) is None
    smaller = Judge.of(None, Target(task="regression"))
    assert (smaller.metric, smaller.is_better(1.0, 2.0), smaller.is_better(2.0, 1.0)) == ("rmse", True, False)


def test_no_valid_one_is_an_error(ranks, tmp_path):
    (tmp_path / "step_4").mkdir()
    BestEvaluation(4, "auc", 0.5).write(tmp_path)
    with pytest.raises(InvalidCheckpointError, match=r"manifest\.json is missing"):
        open_trained(make_config(), tmp_path, ranks)
