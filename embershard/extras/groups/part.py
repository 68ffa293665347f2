"""`RowAverages`: a run whose ranks are groups, which average their rows behind every `sharding.sync_every`-th step."""

from __future__ import annotations

from collections.abc import Iterable

from embershard.extras.groups.groups import Groups
from embershard.extras.groups.model import GroupedModelParallel
from embershard.extras.groups.settings import check_run
from embershard.training.checkpoint.saved_run import SavedRun, SettingsComparison
from embershard.training.parts.part import Part, Training
from embershard.training.reports import Report


class RowAverages(Part):
    """The averages of a run's groups. It comes before all parts that read rows.

    Raises:
        ConfigError: the ranks cannot be divided so, or a setting does not go with groups.
    """

    def __init__(self, run: Training) -> None:
        super().__init__(run)
        Groups(run.config.sharding.groups, run.ranks.world_size)
        check_run(run.config)

    @property
    def _model(self) -> GroupedModelParallel:
        assert isinstance(self.run.model, GroupedModelParallel), "built with groups"
        return self.run.model

    @property
    def is_settled(self) -> bool:  # type: ignore[override]
        return self._model.rows_are_equal

    def read_state(self, saved: SavedRun, comparison: SettingsComparison) -> None:
        self._model.begin_behind(saved.step)

    def after_step(self) -> Iterable[Report]:
        is_awaited = self.run.supervision.must_stop or any(part.is_late for part in self.run.parts)
        self._model.end_step(must_be_equal=is_awaited)
        return ()

    def at_end(self) -> Iterable[Report]:
        """Average once more, where steps were trained since: what follows reads the rows."""
        if not self.is_settled:
            self._model.sync()
        return ()

    def close(self) -> None:
        model = getattr(self.run, "model", None)  # None: the run was not built
        if isinstance(model, GroupedModelParallel):
            model.close()

    def notes(self) -> list[str]:
        config, size = self.run.config.sharding, self.run.ranks.world_size // self.run.config.sharding.groups
        every = "every step" if config.sync_every == 1 else f"every {config.sync_every} steps"
        if config.sync_delay:
            every += ", beside " + ("1 step" if config.sync_delay == 1 else f"{config.sync_delay} steps")
        ranks = "1 rank" if size == 1 else f"{size} ranks"
        return [f"{config.groups} groups of {ranks} average the rows that they train, {every}."]
