"""`Progress`: lines of progress, while a run trains."""

from __future__ import annotations

from collections.abc import Iterator

from embershard.training.checkpoint.identity import global_batch
from embershard.training.parts.loss_monitor import Losses
from embershard.training.parts.part import Part, Run
from embershard.training.reports import Report, TrainReport


class Progress(Part):
    """Reports every `train.log_every` steps, and behind the last one."""

    def __init__(self, run: Run, losses: Losses) -> None:
        super().__init__(run)
        self._losses = losses

    def after_step(self) -> Iterator[Report]:
        if self.run.is_report_due:
            yield self.run.report()

    def at_end(self) -> Iterator[Report]:
        if self.run.metrics.has_unreported:
            yield self.run.report()

    def report(self) -> TrainReport:
        """Return loss, quality, speed, and what caches and links moved, since the last report. Collective."""
        run, losses, schedule = self.run, self._losses.monitor, self.run.stream.schedule
        heads = run.target.heads
        return run.metrics.report(
            step=run.steps,
            epoch=run.position.epoch,
            samples=run.samples,
            global_batch=global_batch(run.config, run.ranks.world_size),
            loss=losses.mean(),
            label_losses=dict(zip(heads, losses.label_means(), strict=False)),
            batches=None if schedule is None else dict(schedule.num_trained),
            learning_rate_factor=run.optimizers.factor or 1.0,
        )
