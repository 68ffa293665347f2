"""The best evaluation of a run: which one it is, whether its checkpoint is kept, and when no better one is awaited."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from embershard.data import Target
from embershard.distributed import Ranks
from embershard.distributed.checkpoint.best import BEST, BestEvaluation
from embershard.distributed.checkpoint.folder import checkpoint_at
from embershard.errors import InvalidCheckpointError
from embershard.metrics.figures import Judge
from embershard.training.config import RunConfig
from embershard.training.reports import EvalReport


@dataclass(frozen=True)
class EvaluationProgress:
    """What the evaluations so far have shown. Checkpoints have it, so that a resumed run decides as one that was not
    interrupted.

    Attributes:
        metric: the figure that decides.
        step: of the last evaluation; None so far.
        best: the first of the best ones; None while the figure was undefined.
        num_worse: evaluations after it.
    """

    metric: str
    step: int | None = None
    best: BestEvaluation | None = None
    num_worse: int = 0

    def after(self, evaluation: BestEvaluation | int, judge: Judge) -> EvaluationProgress:
        """Return the progress after one more evaluation, given by its step alone where its figure is undefined.

        >>> first = EvaluationProgress("auc").after(BestEvaluation(10, "auc", 0.7), Judge("auc"))
        >>> second = first.after(BestEvaluation(20, "auc", 0.7), Judge("auc")).after(30, Judge("auc"))
        >>> second.best.step, second.num_worse, second.step
        (10, 2, 30)
        """
        if isinstance(evaluation, int):
            return EvaluationProgress(self.metric, evaluation, self.best, self.num_worse + 1)
        if judge.is_better(evaluation.value, None if self.best is None else self.best.value):
            return EvaluationProgress(self.metric, evaluation.step, evaluation)
        return EvaluationProgress(self.metric, evaluation.step, self.best, self.num_worse + 1)


class BestModel:
    """Follows the evaluations of a run, and says which checkpoint to keep. All ranks call its methods together.

    Args:
        config: of the run.
        target: what is predicted.
        checkpoints: folder of the run's checkpoints; None: none is saved.

    Attributes:
        progress: what the evaluations so far have shown.
        kept: the best evaluation whose checkpoint is there; `best.json` has it.

    Raises:
        ConfigError: no evaluation has the figure that is to decide.
    """

    def __init__(self, config: RunConfig, target: Target, checkpoints: Path | None, ranks: Ranks) -> None:
        self._judge = Judge.of(config.train.metric, target, config.metrics.more)
        self._patience = config.train.early_stopping
        self._folder, self._ranks, self._keeps = checkpoints, ranks, config.keeps_best
        self.progress = EvaluationProgress(self._judge.metric)
        self.kept: BestEvaluation | None = None
        self._awaited: BestEvaluation | None = None  # its checkpoint is not there yet

    def add(self, report: EvalReport) -> bool:
        """Note an evaluation; return True if it is the best so far. On every rank by the figures of the first one."""
        if report.step != self.progress.step:  # else a resumed run made it again
            values = self._ranks.from_first(lambda: report.quality)
            self._add(report.step, {name: value for name, value in values.items() if name != "samples"})
        best = self.progress.best
        return best is not None and best.step == report.step

    def _add(self, step: int, quality: dict[str, float | None]) -> None:
        value = self._judge.value(quality)
        if value is None:
            self.progress = self.progress.after(step, self._judge)
            return
        found = BestEvaluation(step, self._judge.metric, value, quality)
        self.progress = self.progress.after(found, self._judge)
        before = self._awaited or self.kept
        is_better = self._judge.is_better(value, None if before is None else before.value)
        if self._keeps and self._folder is not None and is_better:
            self._awaited = found

    def awaits(self, step: int) -> bool:
        """Return True if the checkpoint of this step is to be kept, and is not there yet."""
        return self._awaited is not None and self._awaited.step == step

    def note_save(self, step: int, *, is_complete: bool = True) -> None:
        """Note that the save of a step ended. If it was awaited, its checkpoint is the best one from now on."""
        best, folder = self._awaited, self._folder
        if best is None or folder is None or best.step != step:
            return
        self._awaited = None
        if is_complete:
            self._ranks.from_first(lambda: best.write(folder))
            self.kept = best

    def resume(self, saved: EvaluationProgress | None, step: int, *, is_same_data: bool) -> None:
        """Go on after the checkpoint of `step`. Evaluations by another figure or on other data do not count any more,
        and the checkpoint of the best one is kept if it is there, and no later than `step`."""
        is_comparable = is_same_data and saved is not None and saved.metric == self._judge.metric
        self.progress = saved if saved is not None and is_comparable else EvaluationProgress(self._judge.metric)
        self._awaited = None
        self.kept = self._ranks.from_first(lambda: self._keep(step, is_same_data))

    def _keep(self, step: int, is_same_data: bool) -> BestEvaluation | None:
        """Return the best of what `best.json` and the progress say, and make the file say so, too."""
        if self._folder is None:
            return None
        try:
            noted = BestEvaluation.find(self._folder)
        except InvalidCheckpointError:
            noted = None
        best: BestEvaluation | None = None
        for found in (self.progress.best, noted if is_same_data else None):
            is_there = found is not None and found.step <= step and checkpoint_at(self._folder, found.step).is_dir()
            if found is None or not is_there or found.metric != self._judge.metric:
                continue
            if self._judge.is_better(found.value, None if best is None else best.value):
                best = found
        if best is None:
            (self._folder / BEST).unlink(missing_ok=True)
        elif best != noted:
            best.write(self._folder)
        return best

    @property
    def stop_reason(self) -> str:
        """Why the training ends early, as a sentence; empty where it goes on."""
        if self._patience is None or self.progress.num_worse < self._patience:
            return ""
        best, count = self.progress.best, self.progress.num_worse
        than = f"better than {best.title}" if best else f"with a defined {self.progress.metric}"
        return f"Stopped early: the last {count} evaluations gave nothing {than} (train.early_stopping)."
