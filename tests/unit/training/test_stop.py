"""A training that is asked to stop: it ends after its step, saves, and its resumed rest is the rest of the run."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from embershard.commands.train.run import train_run
from embershard.distributed import CheckpointConfig, Ranks, Supervision, complete_checkpoints
from embershard.launch.stop_signals import stop_training_on_signals
from embershard.training.checkpoint.run_state import PreparedSave
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.reports import EvalReport, Report, SaveReport, StopReport, TrainReport
from embershard.training.trainer import Trainer
from tests.small_runs import small_run

pytestmark = pytest.mark.slow


def config(train: TrainConfig | None = None, checkpoint: CheckpointConfig | None = None) -> RunConfig:
    return small_run(
        train=train or TrainConfig(batch_size=100, log_every=1),
        checkpoint=checkpoint or CheckpointConfig(every_steps=100),
    )


def stopped_after(trainer: Trainer, step: int) -> list[Report]:
    """Train, and ask for the end after the report of `step`: in the step after it."""
    reports: list[Report] = []
    for report in trainer.train():
        reports.append(report)
        if isinstance(report, TrainReport) and report.step == step:
            trainer.supervision.signal = signal.SIGTERM
    trainer.close()
    return reports


def kinds(reports: list[Report]) -> list[tuple[type, int]]:
    return [(type(report), report.step) for report in reports]


def losses(reports: list[Report]) -> list[tuple[int, float]]:
    return [(report.step, report.loss) for report in reports if isinstance(report, TrainReport)]


def test_it_ends_after_the_step_saves_and_can_be_resumed(ranks, tmp_path):
    whole = Trainer(config(), ranks, None)
    reports = list(whole.train())
    whole.close()
    first = stopped_after(Trainer(config(), ranks, tmp_path), 3)
    assert kinds(first[-3:]) == [(TrainReport, 4), (SaveReport, 4), (StopReport, 4)]
    assert first[-1].path == tmp_path / "step_4"
    second = Trainer(config(), ranks, tmp_path)
    second.resume(tmp_path / "step_4")
    assert losses(first) + losses(list(second.train())) == losses(reports)
    second.close()


@pytest.mark.parametrize(
    ("checkpoint", "is_saved"),
    [
        (CheckpointConfig(), True),
        (CheckpointConfig(every_steps=100, at_end=False), True),
        (CheckpointConfig(at_end=False), False),  # a run that writes no checkpoints
    ],
)
def test_it_saves_if_the_run_saves_at_all(ranks, tmp_path, checkpoint, is_saved):
    reports = stopped_after(Trainer(config(checkpoint=checkpoint), ranks, tmp_path), 2)
    assert [report.path is not None for report in reports if isinstance(report, StopReport)] == [is_saved]
    assert len(complete_checkpoints(tmp_path)) == is_saved


def test_a_signal_in_a_save_needs_no_other_step_and_no_other_save(ranks, tmp_path):
    trainer = Trainer(config(checkpoint=CheckpointConfig(every_steps=2)), ranks, tmp_path)
    prepare = trainer.prepare_save

    def interrupted(*given: Any) -> PreparedSave:
        trainer.supervision.signal = signal.SIGTERM
        return prepare(*given)

    trainer.prepare_save = interrupted  # type: ignore[method-assign]
    assert kinds(list(trainer.train()))[-3:] == [(TrainReport, 2), (SaveReport, 2), (StopReport, 2)]
    trainer.close()


def test_a_signal_in_an_evaluation_ends_it_without_a_result(ranks, tmp_path):
    """The last evaluation is made up for by the resumed run."""
    train = TrainConfig(batch_size=10, log_every=1, max_steps=2)
    trainer = Trainer(config(train), ranks, tmp_path)
    evaluated: list[int] = []
    beat = trainer.supervision.beat

    def interrupted() -> None:
        beat()
        evaluated.append(trainer.steps)
        if len(evaluated) == 2 + 3:
            trainer.supervision.signal = signal.SIGTERM

    trainer.supervision.beat = interrupted  # type: ignore[method-assign]
    reports = list(trainer.train())
    trainer.close()
    assert not any(isinstance(report, EvalReport) for report in reports)
    assert kinds(reports)[-2:] == [(SaveReport, 2), (StopReport, 2)]
    second = Trainer(config(train), ranks, tmp_path)
    second.resume(tmp_path / "step_2")
    assert kinds(list(second.train())) == [(EvalReport, 2)]
    second.close()


def test_signals_are_noted_in_the_training_and_given_back(monkeypatch):
    supervision, before = Supervision(), signal.getsignal(signal.SIGTERM)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with stop_training_on_signals(supervision):
        supervision.is_training = True
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # the same request, sent twice
        assert (supervision.signal, ended) == (signal.SIGTERM, [])
        monkeypatch.setattr("embershard.launch.stop_signals._SAME_REQUEST_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [143]
    assert signal.getsignal(signal.SIGTERM) is before


def test_ranks_begin_to_note_signals_together_once_the_files_are_made(ranks, tmp_path, monkeypatch, capsys):
    supervision, seen, folder = Supervision(), [], tmp_path / "my run"
    made = folder / "metrics.jsonl"
    monkeypatch.setattr(Ranks, "barrier", lambda _: seen.append((supervision.is_training, made.exists())))
    settings = config(TrainConfig(batch_size=10, max_steps=1), CheckpointConfig(at_end=False))
    words = {"resume": None, "unverified": False, "changes": (), "same_run": "", "go_on": ""}
    train_run(settings, ranks, folder, supervision=supervision, **words)
    assert seen == [(False, True)]
    assert f"--logdir '{folder}'\n" in capsys.readouterr().out  # it can be pasted


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)])
def test_a_signal_before_the_training_ends_the_process(number, code, monkeypatch, capfd):
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.delenv("RANK", raising=False)
    before = signal.signal(number, signal.SIG_DFL)  # under nohup, SIGHUP is ignored, and stays so
    try:
        with stop_training_on_signals(Supervision()):
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)
    assert ended == [code]
    assert capfd.readouterr().err == "embershard: stopped before the first step. Nothing was trained.\n"
