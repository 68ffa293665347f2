"""`Evaluations` of a run: which is the best, whether its checkpoint is kept, and when no better one is awaited."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from embershard.data import Source
from embershard.distributed import shortest
from embershard.distributed.checkpoint.best import BEST, BestEvaluation
from embershard.distributed.checkpoint.folder import checkpoint_at
from embershard.distributed.traffic import counted_as_other
from embershard.errors import InvalidCheckpointError
from embershard.metrics.evaluation import Evaluation, Evaluator
from embershard.metrics.figures import Judge
from embershard.metrics.predictions import PredictionBuffer, predicted_of, until_stopped
from embershard.training.arithmetic import autocast
from embershard.training.checkpoint.saved_run import EvaluationProgress, SavedRun, SettingsComparison
from embershard.training.parts.bad_rows import BadRows
from embershard.training.parts.part import Part
from embershard.training.reports import EvalReport, FailedSaveReport, Report, SaveReport
from embershard.training.steps import open_stream


class Evaluations(Part):
    """Evaluates the held-out part when that is due, and knows which evaluation is the best, and which checkpoint to
    keep.

    Attributes:
        progress: what the evaluations so far have shown.
        kept: the best evaluation whose checkpoint is there; `best.json` has it.
        was_better: the last evaluation was better than one before it.
    """

    progress: EvaluationProgress
    kept: BestEvaluation | None = None
    was_better = False
    _awaited: BestEvaluation | None = None  # its checkpoint is not there yet
    _judge: Judge
    _evaluator: Evaluator
    _evaluated: int | None = None  # the step of the last evaluation of this process

    def check(self) -> None:
        """Raise where no evaluation has the figure that is to decide, or the data lack a column of metrics."""
        run, config = self.run, self.run.config
        self._evaluator = Evaluator(run.target, config.metrics, run.source, run.ranks)
        self._judge = Judge.of(config.train.metric, run.target, config.metrics.more)
        self.progress = EvaluationProgress(self._judge.metric)

    def before_batch(self) -> Iterator[Report]:
        """Where evaluations judge, make up for that in which a run was stopped, and for the end of an epoch whose last
        batch was skipped."""
        if self.run.config.judges and self.progress.step != self.run.steps:
            yield from self.after_step()

    def after_step(self) -> Iterator[Report]:
        run, every = self.run, self.run.config.train.eval_every
        is_due = run.steps % every == 0 if every else run.config.judges and run.stream.ends_epoch(run.position)
        if self.is_time(is_due) and run.steps > 0 and not run.is_last and self._evaluated != run.steps:
            yield from self._evaluate()

    def evaluate_at_end(self) -> Iterator[Report]:
        if self.run.config.holds_out and self._evaluated != self.run.steps:
            yield from self._evaluate()

    def _evaluate(self) -> Iterator[EvalReport]:
        """Evaluate, and note whether it is the best so far; nothing where a rank was asked to stop."""
        run = self.run
        self._evaluated = run.steps
        if (report := run.evaluate()) is None:
            return
        self.add(report)
        if run.steps in (run.saved_step, run.first_step or None):  # its checkpoint is there
            self.note_save(run.steps)
        best = self.progress.best
        is_best = run.config.judges and best is not None and best.step == report.step
        yield replace(report, is_best=is_best)

    def evaluate(self) -> EvalReport | None:
        """See `Trainer.evaluate`."""
        started = time.perf_counter()
        if (found := self.of(self.run.source)) is None:
            return None
        seconds = time.perf_counter() - started
        return EvalReport(self.run.steps, found.quality, seconds, slices=found.slices, curves=found.curves)

    @counted_as_other()
    def of(self, source: Source) -> Evaluation | None:
        """Return what the held-out samples of a source say; None: a rank was asked to stop meanwhile."""
        run = self.run
        device, target = run.ranks.device, run.target
        with run.served(), open_stream(run.config, source, run.ranks, None) as stream:
            batches = run.input_failure.watch(shortest(stream, device))
            batches = until_stopped(batches, run.supervision, run.ranks)
            predictions = PredictionBuffer(target)
            for predicted in predicted_of(run.model, batches, device, lambda: autocast(run.config.train, device)):
                predictions.add(predicted)
            if source is run.source and (bad_rows := run.part(BadRows)) is not None:
                bad_rows.add(stream, "eval")  # samples of other sources count when they train
        return None if run.supervision.agree(run.ranks) else self._evaluator.judge(predictions, source)

    # -- the best one

    def add(self, report: EvalReport) -> None:
        """Note an evaluation: on every rank, by the figures of the first one. Collective."""
        if report.step == self.progress.step:  # a resumed run made it again
            return
        figures = self.run.ranks.from_first(lambda: report.quality)
        quality = {name: figure for name, figure in figures.items() if name != "samples"}
        value = self._judge.value(quality)
        if value is None:
            self.progress = self.progress.after(report.step, self._judge)
            return
        found = BestEvaluation(report.step, self._judge.metric, value, quality)
        first = self.progress.best
        self.progress = self.progress.after(found, self._judge)
        self.was_better = first is not None and self.progress.best == found
        before, run = self._awaited or self.kept, self.run
        is_better = self._judge.is_better(value, None if before is None else before.value)
        if run.config.keeps_best and run.checkpoints is not None and is_better:
            self._awaited = found

    def wants_save(self) -> bool:
        """Return True if this step needs a checkpoint, and has none yet."""
        return self._awaited is not None and self._awaited.step == self.run.steps

    def note(self, report: Report) -> None:
        """A part reported: learn what became of saves."""
        if isinstance(report, SaveReport | FailedSaveReport):
            self.note_save(report.step, is_complete=isinstance(report, SaveReport))

    def note_save(self, step: int, *, is_complete: bool = True) -> None:
        """Note that the save of a step ended. If it was awaited, its checkpoint is the best one from now on."""
        best, folder = self._awaited, self.run.checkpoints
        if best is None or folder is None or best.step != step:
            return
        self._awaited = None
        if is_complete:
            self.run.ranks.from_first(lambda: best.write(folder))
            self.kept = best

    @property
    def stop_reason(self) -> str:
        """See `Training.stop_reason`."""
        patience, best, count = self.run.config.train.early_stopping, self.progress.best, self.progress.num_worse
        if patience is None or count < patience:
            return ""
        than = f"better than {best.title}" if best else f"with a defined {self.progress.metric}"
        return f"Stopped early: the last {count} evaluations gave nothing {than} (train.early_stopping)."

    def state(self) -> dict[str, Any]:
        return {"evaluations": asdict(self.progress)}

    def read_state(self, saved: SavedRun, comparison: SettingsComparison) -> None:
        """Evaluations by another figure or on other data do not count any more, and the checkpoint of the best one is
        kept if it is there, and no later than that of the resume."""
        is_same_data = not any(change.key.startswith("data.") for change in comparison.changes)
        progress, metric = saved.evaluations, self._judge.metric
        is_comparable = is_same_data and progress is not None and progress.metric == metric
        self.progress = progress if progress is not None and is_comparable else EvaluationProgress(metric)
        self._evaluated = self._awaited = None
        self.kept = self.run.ranks.from_first(lambda: self._keep(saved.step, is_same_data))

    def _keep(self, step: int, is_same_data: bool) -> BestEvaluation | None:
        """Return the best of what `best.json` and the progress say, and make the file say so, too."""
        folder = self.run.checkpoints
        if folder is None:
            return None
        try:
            noted = BestEvaluation.find(folder)
        except InvalidCheckpointError:
            noted = None
        best: BestEvaluation | None = None
        for found in (self.progress.best, noted if is_same_data else None):
            is_there = found is not None and found.step <= step and checkpoint_at(folder, found.step).is_dir()
            if found is None or not is_there or found.metric != self._judge.metric:
                continue
            if self._judge.is_better(found.value, None if best is None else best.value):
                best = found
        if best is None:
            (folder / BEST).unlink(missing_ok=True)
        elif best != noted:
            best.write(folder)
        return best

    def summary(self) -> str:
        return self.stop_reason

    def result(self) -> dict[str, Any]:
        if not self.run.config.judges:
            return {}
        newest = self.progress.best
        return {
            "best": newest if self.kept is None else self.kept,
            "keeps_best": self.kept is not None,
            "stopped_early": bool(self.stop_reason),
            "was_improving": self.was_better and newest is not None and newest.step == self.run.steps,
        }
