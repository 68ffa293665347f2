"""`Tracker`, the protocol of all experiment trackers, and `TrackedRun`, what they know of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from embershard.training.config import TrackingConfig


@dataclass(frozen=True)
class TrackedRun:
    """A run, as trackers know it.

    Attributes:
        folder: of the run; its name is the run's.
        settings: all settings, by `section.key`.
        resumed_at: step from which an earlier run goes on; None for a new run.
    """

    folder: Path
    settings: Mapping[str, Any]
    config: TrackingConfig
    resumed_at: int | None

    @property
    def name(self) -> str:
        """The run's name."""
        return self.folder.absolute().name


class Tracker(Protocol):
    """Gets the numbers of a run, on its first rank."""

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Note the numbers of a report at `step`, by `kind/name`.

        A report may be of an earlier step than the one before: that of a save beside training comes when it has ended.
        """

    def finish(self, result: Mapping[str, float]) -> None:
        """Note the numbers of result.json, by `result/name`."""

    def close(self) -> None:
        """Write what is left, and end."""
