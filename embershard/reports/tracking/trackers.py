"""What a run tells experiment trackers. One that fails is left out from then on; training goes on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Protocol

from embershard.errors import SetupError, printable
from embershard.lazy_names import named
from embershard.reports.tracking.run import TrackedRun
from embershard.training.config import TrackingConfig


class Tracker(Protocol):
    """Gets the numbers of a run, on its first rank.

    Numbers of two names stay two numbers, whatever text the names have: a tracker that takes fewer characters escapes
    the others, one to one. Names are UTF-8.
    """

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Note the numbers of a report at `step`, by `kind/name`.

        A report may be of an earlier step than the one before: that of a save beside training comes when it has ended.
        """

    def finish(self, result: Mapping[str, float]) -> None:
        """Note the numbers of result.json, by `result/name`."""

    def close(self) -> None:
        """Write what is left, and end."""


#: MLflow takes at most so many parameters at once, and so many characters of a name.
_MOST_PARAMETERS, _MOST_CHARACTERS = 100, 250


class TensorBoardTracker:
    """Event files in the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        purged = None if run.resumed_at is None else run.resumed_at + 1
        self._writer = SummaryWriter(str(run.folder), purge_step=purged)
        self._step = run.resumed_at or 0

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        self._step = max(self._step, step)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, result: Mapping[str, float]) -> None:
        self.add(self._step, result)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases. Its own variables say where it goes: `WANDB_MODE=offline` keeps it in the folder."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=run.config.project,
            name=run.name,
            id=_wandb_id(run.name),
            resume="never" if run.resumed_at is None else "allow",
            dir=str(run.folder),
            config=dict(run.settings),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        # Not as its own step: it drops numbers of one before its newest, without an error.
        self._run.log({"step": step, **numbers})

    def finish(self, result: Mapping[str, float]) -> None:
        self._run.summary.update(dict(result))

    def close(self) -> None:
        self._run.finish()


def _wandb_id(name: str) -> str:
    """Return the id of a run with this name, of each name another.

    >>> _wandb_id("mine"), _wandb_id("my runs/1")[:10]
    ('mine', 'my_runs_1-')
    """
    found = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64]
    return found if found == name else f"{found[:47]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


class MlflowTracker:
    """A run of MLflow. `MLFLOW_TRACKING_URI` says where it goes."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(run.config.project)
        mlflow.start_run(run_name=run.name, log_system_metrics=False)
        if run.resumed_at is not None:
            mlflow.set_tag("resumed_at", str(run.resumed_at))
        settings = [(_mlflow_name(name), value) for name, value in run.settings.items()]
        for first in range(0, len(settings), _MOST_PARAMETERS):
            mlflow.log_params(dict(settings[first : first + _MOST_PARAMETERS]))

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(self._named(numbers), step=step)

    def finish(self, result: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(self._named(result))

    def _named(self, numbers: Mapping[str, float]) -> dict[str, float]:
        return {_mlflow_name(name): value for name, value in numbers.items()}

    def close(self) -> None:
        self._mlflow.end_run()


def _mlflow_name(name: str) -> str:
    """Return a name that MLflow takes, of each name another: other characters as their numbers, `:40:` of "@", parts
    that a path would lose, too, and of a name that is too long the start and a digest.

    >>> _mlflow_name("eval/ndcg@10"), _mlflow_name("eval//..")
    ('eval/ndcg:40:10', 'eval/::/:2e::2e:')
    """
    escaped = re.sub(r"[^\w/. -]", lambda found: f":{ord(found[0]):x}:", name)
    parts = [
        "::" if not part else part.replace(".", ":2e:") if part in (".", "..") else part for part in escaped.split("/")
    ]
    found = "/".join(parts)
    if len(found) <= _MOST_CHARACTERS:
        return found
    digest = f":{hashlib.sha256(name.encode()).hexdigest()}"
    return found[: _MOST_CHARACTERS - len(digest)] + digest


class TrackioTracker:
    """A run of Trackio, on this machine unless its variables say otherwise."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        resume = "never" if run.resumed_at is None else "allow"
        self._run = trackio.init(
            run.config.project, name=run.name, config=dict(run.settings), resume=resume, embed=False
        )
        self._step = run.resumed_at or 0

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        self._step = max(self._step, step)
        self._run.log(dict(numbers), step=step)

    def finish(self, result: Mapping[str, float]) -> None:
        self.add(self._step, result)

    def close(self) -> None:
        self._run.finish()


class PrometheusTracker:
    """The newest numbers, as gauges at `http://prometheus_host:prometheus_port/metrics`, until the run ends.

    A gauge has the numbers that are named alike but for names of columns, values, tables and labels: these are in its
    label `name`, which is the whole name.
    """

    def __init__(self, run: TrackedRun) -> None:
        import prometheus_client

        self._make = prometheus_client.Gauge
        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._name, self._step = run.name, run.resumed_at or 0
        self._server, self._thread = prometheus_client.start_http_server(
            run.config.prometheus_port, run.config.prometheus_host, self._registry
        )

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        self._step = max(self._step, step)
        for name, value in {"step": self._step, **numbers}.items():
            metric = _prometheus_metric(name)
            if metric not in self._gauges:
                self._gauges[metric] = self._make(metric, metric, ["run", "name"], registry=self._registry)
            self._gauges[metric].labels(self._name, name).set(value)

    def finish(self, result: Mapping[str, float]) -> None:
        pass  # the port closes with the run

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _prometheus_metric(name: str) -> str:
    """Return the gauge that has a number of this name.

    >>> _prometheus_metric("train/loss/click"), _prometheus_metric("eval/slices.country.DE.ndcg@10")
    ('embershard_train_loss', 'embershard_eval_slices_ndcg_10')
    """
    first, *middle = name.split(".")
    last = [each.partition("/")[0] for each in middle[-1:]]
    return "embershard_" + re.sub(r"[^a-zA-Z0-9_]", "_", "_".join([*first.split("/")[:2], *last]))


#: Of each tracker its class, the module that it needs, and what to install.
_KINDS: Mapping[str, tuple[Callable[[TrackedRun], Tracker], str, str]] = {
    "tensorboard": (TensorBoardTracker, "tensorboard", "tensorboard>=2.15"),
    "wandb": (WandbTracker, "wandb", "wandb>=0.18"),
    "mlflow": (MlflowTracker, "mlflow", "mlflow-skinny>=2.20"),
    "trackio": (TrackioTracker, "trackio", "trackio>=0.20"),
    "prometheus": (PrometheusTracker, "prometheus_client", "prometheus-client>=0.20"),
    "mlperf": (
        lambda run: named("embershard.extras.mlperf:MlperfTracker")(run),
        "mlperf_logging",
        "mlperf-logging>=4.1.68",
    ),
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
        numbers = _numbers(kind, {name: value for name, value in values.items() if name != "step"})
        self._all(lambda tracker: tracker.add(values["step"], numbers))

    def finish(self, result: Mapping[str, Any]) -> None:
        """Hand on the numbers of result.json."""
        numbers = _numbers("result", result)
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
            self._warn(f"Warning: {name} failed and gets nothing more ({type(error).__name__}: {printable(first)}).")


def _numbers(at: str, values: Mapping[str, Any], separator: str = "/") -> dict[str, float]:
    """Return the numbers of nested values, by `kind/name.name`; lists, which have a value per table or rank, are left
    out. A point in a name, as in that of a slice, is `%2E`: so no two numbers have one name.

    >>> _numbers("eval", {"auc": 0.5, "slices": {"age": {"7.5": {"auc": 0.25}}}})
    {'eval/auc': 0.5, 'eval/slices.age.7%2E5.auc': 0.25}
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        place = at + separator + re.sub(r"[%.\ud800-\udfff]", lambda found: f"%{ord(found[0]):02X}", name)
        if isinstance(value, Mapping):
            found |= _numbers(place, value, ".")
        elif isinstance(value, (int, float)):
            found[place] = value
    return found
