"""`WarmStarted`: the part of a run that began with a trained model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from embershard.training.checkpoint.saved_run import SavedRun, SettingsComparison
from embershard.training.parts.part import Part, Training
from embershard.training.reports import Report
from embershard.training.warm.report import summary
from embershard.training.warm.source import WARM_START
from embershard.training.warm.start import PlannedStart, WarmStart, fill_model, plan_start


@dataclass(frozen=True)
class WarmStartReport(Report):
    """What a run began with: `ids` are, of each table of ids, those with a row and those that found none; `fates` are
    numbers of tables and layers."""

    kind = "warm_start"
    told_by = ()

    source: str
    fates: Mapping[str, int] = field(default_factory=dict)
    ids: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def line(self) -> str:
        """Return what ids found a row."""
        return "\n".join(
            f"table {name}: {placed:,} ids have a row, {left:,} found none" for name, (placed, left) in self.ids.items()
        )


class WarmStarted(Part):
    """Fills the model before the first step, and tells the optimizers with which step they begin.

    Args:
        start: None: the run went on from a checkpoint, which says how it began.
    """

    def __init__(self, run: Training, start: WarmStart | None) -> None:
        super().__init__(run)
        self._start = start
        self._plan: PlannedStart | None = None
        self._state: dict[str, Any] = {}
        self._is_due = start is not None

    def check(self) -> None:
        """Match before anything is built.

        Raises:
            ConfigError, CheckpointError: as `plan_start`.
        """
        if self._start is not None:
            self._plan = plan_start(self._start, self.run.config, self.run.ranks)

    def after_build(self) -> None:
        if self._plan is not None:
            plan = self._plan
            self._state = {
                "source": plan.model.title, "schedule_steps": plan.schedule_steps, "state_steps": plan.state_steps
            }  # fmt: skip

    def notes(self) -> list[str]:
        return [summary(self._plan.matching, self._plan.model.title)] if self._plan and self._is_due else []

    def read_state(self, saved: SavedRun, comparison: SettingsComparison) -> None:
        self._is_due, self._state = False, dict(saved.of_parts.get(WARM_START, {}))
        self._count_steps(saved.step)

    def begin(self) -> Iterable[Report]:
        """Fill the model, unless the run goes on from a checkpoint."""
        if self._plan is None or not self._is_due:
            return
        self._is_due, run = False, self.run
        mine = fill_model(self._plan, run.model, run.optimizers.dense, run.state.tensors)
        self._count_steps(0)
        ids: dict[str, tuple[int, int]] = {}
        for of_rank in run.ranks.all_gather_objects(mine):
            for name, counts in of_rank.items():
                ids[name] = tuple(map(sum, zip(ids.get(name, (0, 0)), counts, strict=True)))  # type: ignore[assignment]
        fates: dict[str, int] = {}
        for entry in self._plan.matching.entries:
            fates[f"{entry.kind}s_{entry.fate}"] = fates.get(f"{entry.kind}s_{entry.fate}", 0) + 1
        yield WarmStartReport(run.steps, self._plan.model.title, fates, ids)

    def state(self) -> dict[str, Any]:
        return {WARM_START: self._state} if self._state else {}

    def _count_steps(self, steps: int) -> None:
        self.run.optimizers.begin_behind(self._state.get("schedule_steps", 0), self._state.get("state_steps", 0))
        self.run.optimizers.set_num_steps(steps)
