"""`Trackers`: all trackers of a run. One that fails is left out from then on; training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from embershard.errors import SetupError
from embershard.launch.trackers.kinds import (
    MlflowTracker,
    PrometheusTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandbTracker,
)
from embershard.launch.trackers.tracker import TrackedRun, Tracker
from embershard.training.config import TrackingConfig

#: Of each tracker its class, the module that it needs, and what to install.
_KINDS: Mapping[str, tuple[Callable[[TrackedRun], Tracker], str, str]] = {
    "tensorboard": (TensorBoardTracker, "tensorboard", "tensorboard>=2.15"),
    "wandb": (WandbTracker, "wandb", "wandb>=0.18"),
    "mlflow": (MlflowTracker, "mlflow", "mlflow-skinny>=2.20"),
    "trackio": (TrackioTracker, "trackio", "trackio>=0.20"),
    "prometheus": (PrometheusTracker, "prometheus_client", "prometheus-client>=0.20"),
}


def check_trackers(config: TrackingConfig) -> None:
    """Raise `SetupError` where a tracker is not installed: before the training, not in it."""
    for name in config.trackers:
        _, module, requirement = _KINDS[name]
        if find_spec(module) is None:
            raise SetupError(
                f'tracking.trackers has {name!r}, which is not installed. Try: pip install "{requirement}", or leave '
                "it out."
            )


class Trackers:
    """The trackers of a run, on its first rank.

    Args:
        warn: told in a sentence, once per tracker, that one failed.

    Raises:
        SetupError: one is not installed.
    """

    def __init__(self, run: TrackedRun, warn: Callable[[str], None]) -> None:
        check_trackers(run.config)
        self._warn = warn
        self._trackers: dict[str, Tracker] = {}
        for name in run.config.trackers:
            make = _KINDS[name][0]
            self._try(name, lambda name=name, make=make: self._trackers.update({name: make(run)}))  # type: ignore[misc]

    def add(self, kind: str, values: Mapping[str, Any]) -> None:
        """Hand on the numbers of a report, a line of metrics.jsonl."""
        numbers = {f"{kind}/{name}": value for name, value in _numbers(values) if name != "step"}
        self._all(lambda tracker: tracker.add(values["step"], numbers))

    def finish(self, result: Mapping[str, Any]) -> None:
        """Hand on the numbers of result.json."""
        numbers = {f"result/{name}": value for name, value in _numbers(result)}
        self._all(lambda tracker: tracker.finish(numbers))

    def close(self) -> None:
        """End all trackers."""
        self._all(lambda tracker: tracker.close())
        self._trackers.clear()

    def _all(self, do: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            self._try(name, lambda tracker=tracker: do(tracker))  # type: ignore[misc]

    def _try(self, name: str, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # whatever a tracker raises, the run matters more
            self._trackers.pop(name, None)
            first = (str(error).splitlines() or [""])[0]
            self._warn(f"Warning: {name} failed and gets nothing more ({type(error).__name__}: {first}).")


def _numbers(values: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested values by `name.name`; lists, which have a value per table or rank, are left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{at}{name}.")
        elif isinstance(value, (int, float)):
            yield f"{at}{name}", value
