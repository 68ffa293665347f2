"""`TrackingConfig`: which trackers get a run's settings, reports and result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from embershard.errors import ConfigError

TrackerKind = Literal["tensorboard", "wandb", "mlflow", "trackio", "prometheus"]


@dataclass(frozen=True)
class TrackingConfig:
    """Trackers of a run, beside the files in its folder. The first rank alone tells them; one that fails is left out.

    >>> TrackingConfig(trackers=("tensorboard", "mlflow")).trackers
    ('tensorboard', 'mlflow')
    """

    trackers: tuple[TrackerKind, ...] = ("tensorboard",)
    """Who gets the run's settings, reports and result: TensorBoard, Weights & Biases, MLflow, Trackio; and Prometheus,
    which reads them from a port of this machine. Each must be installed. See docs/tracking.md."""
    project: str = "embershard"
    """Name under which Weights & Biases and Trackio gather runs; for MLflow, the experiment."""
    prometheus_port: int = 9464
    """Port at which Prometheus reads the newest reports."""
    prometheus_host: str = "127.0.0.1"
    """Address of that port. Anyone who can reach it can read the reports."""

    def __post_init__(self) -> None:
        known = get_args(TrackerKind)
        for name in self.trackers:
            if name not in known:
                raise ConfigError(f"tracking.trackers: got {name!r}, needed some of {', '.join(known)}.")
        twice = [name for name in known if self.trackers.count(name) > 1]
        if twice:
            raise ConfigError(f"tracking.trackers: got {twice[0]!r} twice, needed each tracker once.")
        if not self.project:
            raise ConfigError("tracking.project: got an empty name.")
        if not 1 <= self.prometheus_port <= 65535:
            raise ConfigError(f"tracking.prometheus_port: got {self.prometheus_port}, needed 1 to 65535.")
        is_changed = (self.prometheus_port, self.prometheus_host) != (9464, "127.0.0.1")
        if is_changed and "prometheus" not in self.trackers:
            raise ConfigError('tracking.prometheus_port and prometheus_host have no effect without "prometheus".')
