"""A run, as trackers know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embershard.errors import printable
from embershard.training.config import TrackingConfig


@dataclass(frozen=True)
class TrackedRun:
    """A run, as trackers know it.

    Attributes:
        folder: of the run; its name is the run's.
        settings: all settings, by `section.key`; texts are UTF-8.
        resumed_at: step from which an earlier run goes on; None for a new run.
        global_batch_size: samples per step of all ranks.
        train_samples: of the training data.
        platform: the devices, in words.
    """

    folder: Path
    settings: Mapping[str, Any]
    config: TrackingConfig
    resumed_at: int | None
    world_size: int = 1
    global_batch_size: int = 1
    train_samples: int = 0
    platform: str = "CPU"

    def __post_init__(self) -> None:
        settings = {printable(key): printable(value) for key, value in self.settings.items()}
        object.__setattr__(self, "settings", settings)

    @property
    def name(self) -> str:
        """The run's name."""
        return printable(self.folder.absolute().name)
