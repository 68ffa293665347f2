"""The trackers: each hands numbers on by its package's own functions, imported when the run begins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from embershard.launch.trackers.tracker import TrackedRun

#: MLflow takes at most so many parameters at once.
_MOST_PARAMETERS = 100


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
            id=re.sub(r"[^A-Za-z0-9_-]", "_", run.name)[:64],
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


class MlflowTracker:
    """A run of MLflow. `MLFLOW_TRACKING_URI` says where it goes."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(run.config.project)
        mlflow.start_run(run_name=run.name, log_system_metrics=False)
        if run.resumed_at is not None:
            mlflow.set_tag("resumed_at", str(run.resumed_at))
        settings = list(run.settings.items())
        for first in range(0, len(settings), _MOST_PARAMETERS):
            mlflow.log_params(dict(settings[first : first + _MOST_PARAMETERS]))

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step)

    def finish(self, result: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(result))

    def close(self) -> None:
        self._mlflow.end_run()


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
    """The newest numbers, as gauges at `http://prometheus_host:prometheus_port/metrics`, until the run ends."""

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
            metric = "embershard_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            if metric not in self._gauges:
                self._gauges[metric] = self._make(metric, name, ["run"], registry=self._registry)
            self._gauges[metric].labels(self._name).set(value)

    def finish(self, result: Mapping[str, float]) -> None:
        pass  # the port closes with the run

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
