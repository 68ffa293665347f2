"""Trackers: what each gets, and that none of them can end a training."""

from __future__ import annotations

import json
import os
import posixpath
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from embershard.errors import ConfigError, SetupError
from embershard.reports.tracking import trackers as module
from embershard.reports.tracking.run import TrackedRun
from embershard.reports.tracking.trackers import Trackers, check_trackers
from embershard.settings.decoding import flat
from embershard.training.config import TrackingConfig

SETTINGS = flat({"train": {"batch_size": 8, "epochs": None}, "data": {"path": "/a b", "bag_sizes": (1, 2)}})


def tracked(folder: Path, *names: Any, resumed_at: int | None = None, **config: Any) -> TrackedRun:
    return TrackedRun(folder, SETTINGS, TrackingConfig(trackers=names, **config), resumed_at)


def tell(trackers: Trackers) -> None:
    """A short run."""
    for step, loss in ((10, 0.7), (20, 0.6)):
        trackers.add("train", {"step": step, "loss": loss, "auc": None, "path": "x", "batches": {"hot": 3}})
    trackers.finish({"steps": 20, "step_ms": {"p50": 5.0}, "auc": 0.75, "ranks": [1, 2], "device": "cpu"})
    trackers.close()


class Fake:
    """Notes what it gets; fails where it is told to."""

    def __init__(self, fails_at: str = "") -> None:
        self.got: list[Any] = []
        self._fails_at = fails_at

    def _note(self, name: str, *what: Any) -> None:
        self.got.append((name, *what))
        if name == self._fails_at:
            raise RuntimeError("the network is away\nand more")

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        self._note("add", step, dict(numbers))

    def finish(self, result: Mapping[str, float]) -> None:
        self._note("finish", dict(result))

    def close(self) -> None:
        self._note("close")


def with_fakes(monkeypatch: pytest.MonkeyPatch, **fakes: Any) -> None:
    def make(fake: Any) -> Any:
        def begin(_: TrackedRun) -> Any:
            if fake is None:
                raise PermissionError("no key")
            return fake

        return begin

    monkeypatch.setattr(module, "_KINDS", {name: (make(fake), "json", "x") for name, fake in fakes.items()})


def test_numbers_of_reports_and_result(monkeypatch, tmp_path):
    fake = Fake()
    with_fakes(monkeypatch, wandb=fake)
    warnings: list[str] = []
    tell(Trackers(tracked(tmp_path, "wandb"), warnings.append))
    assert fake.got == [
        ("add", 10, {"train/loss": 0.7, "train/batches.hot": 3}),
        ("add", 20, {"train/loss": 0.6, "train/batches.hot": 3}),
        ("finish", {"result/steps": 20, "result/step_ms.p50": 5.0, "result/auc": 0.75}),
        ("close",),
    ]
    assert warnings == []


@pytest.mark.parametrize("fails_at", ["add", "finish", "close"])
def test_a_tracker_that_fails_is_left_out_after_one_warning(fails_at, monkeypatch, tmp_path):
    broken, whole = Fake(fails_at), Fake()
    with_fakes(monkeypatch, wandb=broken, mlflow=whole)
    warnings: list[str] = []
    tell(Trackers(tracked(tmp_path, "wandb", "mlflow"), warnings.append))
    assert warnings == ["Warning: wandb failed and gets nothing more (RuntimeError: the network is away)."]
    assert [call[0] for call in whole.got] == ["add", "add", "finish", "close"]
    assert [call[0] for call in broken.got].count(fails_at) == 1


def test_a_tracker_that_cannot_begin(monkeypatch, tmp_path):
    with_fakes(monkeypatch, wandb=None)
    warnings: list[str] = []
    tell(Trackers(tracked(tmp_path, "wandb"), warnings.append))
    assert warnings == ["Warning: wandb failed and gets nothing more (PermissionError: no key)."]


def tell_in_a_process(home: Path, kind: str, **variables: str) -> None:
    """Tell a tracker of a run in the project "clicks", in a process of its own: some leave threads."""
    code = (
        "import sys; from pathlib import Path; from tests.unit.reports.test_trackers import *; "
        "tell(Trackers(tracked(Path(sys.argv[1]), sys.argv[2], project='clicks'), sys.exit))"
    )
    command = [sys.executable, "-c", code, str(home), kind]
    ran = subprocess.run(
        command, env={**os.environ, "HOME": str(home), **variables}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_one_that_is_not_installed_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r'"wandb"|\'wandb\', which is not installed. Try: pip install "wandb>='):
        check_trackers(TrackingConfig(trackers=("wandb",)))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"trackers": ("wanbd",)}, "got 'wanbd', needed some of tensorboard"),
        ({"trackers": ("wandb", "wandb")}, "got 'wandb' twice"),
        ({"prometheus_port": 80}, 'no effect without "prometheus"'),
        ({"prometheus_port": 0, "trackers": ("prometheus",)}, "needed 1 to 65535"),
        ({"project": ""}, "empty name"),
    ],
)
def test_wrong_settings(given, said):
    with pytest.raises(ConfigError, match=said):
        TrackingConfig(**given)


@pytest.mark.slow
def test_tensorboard_has_reports_and_result(tmp_path):
    tell(Trackers(tracked(tmp_path, "tensorboard"), pytest.fail))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(each.step, round(each.value, 3)) for each in events.Scalars("train/loss")] == [(10, 0.7), (20, 0.6)]
    assert [(each.step, each.value) for each in events.Scalars("result/auc")] == [(20, 0.75)]


@pytest.mark.slow
def test_a_result_stands_at_the_newest_step(monkeypatch, tmp_path):
    """Not at that of a save whose report came later."""
    monkeypatch.setattr(module, "check_trackers", lambda config: None)
    steps = []
    store = SimpleNamespace(
        add_scalar=lambda name, value, step: steps.append(step),
        log=lambda numbers, step: steps.append(step),
        close=lambda: None,
        finish=lambda: None,
    )
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", lambda *_, **__: store)
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda *_, **__: store))
    for kind in ("tensorboard", "trackio"):
        trackers = Trackers(tracked(tmp_path, kind), pytest.fail)
        trackers.add("train", {"step": 22, "loss": 0.5})
        trackers.add("checkpoint", {"step": 20, "seconds": 0.5})
        trackers.finish({"auc": 0.75})
        trackers.close()
    assert steps == [22, 20, 22] * 2


class MadeUpBackend:
    """The modules of all trackers, which note the names that their stores would have, by their rules."""

    def __init__(self) -> None:
        self.names: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *words, **options: self  # what begins and ends runs

    def log(self, numbers: dict[str, float], step: int | None = None) -> None:
        self.names += [name for name in numbers if name != "step"]

    def log_metrics(self, numbers: dict[str, float], step: int | None = None) -> None:
        for name in numbers:  # mlflow.utils.validation
            assert re.match(r"^[/\w.\- :]*$", name)
            assert posixpath.normpath(name) == name
            assert len(name) <= 250
        self.names += numbers

    def add_scalar(self, name: str, value: float, step: int) -> None:
        from torch.utils.tensorboard.summary import scalar

        self.names.append(scalar(name, value).value[0].tag)

    def Gauge(self, name: str, words: str, labels: list[str], registry: Any) -> Any:  # noqa: N802
        assert re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", name)
        assert name not in self.gauges
        self.gauges.add(name)
        return SimpleNamespace(labels=lambda *values: SimpleNamespace(set=lambda _: self._gauge(name, values)))

    def _gauge(self, name: str, labels: tuple[str, ...]) -> None:
        if name != "embershard_step":
            self.names.append((name, *labels))

    def start_http_server(self, *_: Any) -> tuple[Any, Any]:
        self.gauges = set[str]()
        return self, self


NAMES = st.text(st.sampled_from('aé/.:_-@%\\ \n\udcff~\ud800"') | st.characters(codec=None), max_size=5) | st.just(
    "x" * 400
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow", "trackio", "prometheus"])
@given(
    st.dictionaries(NAMES, st.dictionaries(NAMES, st.just({"auc": 0.5, "ndcg@10": 0.5}), max_size=3), max_size=3),
    st.sets(NAMES, max_size=4),
)
@settings(max_examples=60, deadline=None)
@example(
    {"a": {"b.c": {"auc": 0.5}}, "a.b": {"c": {"auc": 0.5}}, "@": {"é": {"auc": 1}}, "_": {"é": {"auc": 1}}}, {"a b"}
)
@example({"c": {"x" * 400: {"auc": 0.5}, "x" * 401: {"auc": 0.5}, "/": {"auc": 0.5}, "//": {"auc": 0.5}}}, {"\udcff"})
def test_numbers_of_two_names_stay_two_numbers_in_every_tracker(kind, slices, labels):
    store = MadeUpBackend()
    modules = {"wandb": store, "mlflow": store, "trackio": store, "prometheus_client": store}
    values = {f"loss/{label}": 0.5 for label in labels}
    with pytest.MonkeyPatch.context() as patch:
        for name, made_up in modules.items():
            patch.setitem(sys.modules, name, made_up)
        patch.setattr("torch.utils.tensorboard.SummaryWriter", lambda *_, **__: store)
        patch.setattr(module, "check_trackers", lambda config: None)
        trackers = Trackers(tracked(Path("runs/\udcff"), kind), pytest.fail)
        trackers.add("eval", {"step": 1, "auc": 0.5, **values, "slices": slices})
        trackers.close()
    count = 1 + len(labels) + sum(len(figures) for of in slices.values() for figures in of.values())
    assert len(store.names) == len(set(store.names)) == count
    for name in store.names:
        "".join(name).encode()
    given = {"data.path": "/\udcff", "data.paths": ("/\udc80",)}
    assert TrackedRun(Path("a"), given, TrackingConfig(), None).settings == {
        "data.path": r"/\xff",
        "data.paths": (r"/\x80",),
    }


def test_runs_of_two_names_are_two_runs_of_weights_and_biases(monkeypatch):
    ids = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda id, **_: ids.append(id) or MadeUpBackend()))
    for name in ("mine", "my run", "my_run", "my.run", "x" * 70, "x" * 71, "\udcff"):
        module.WandbTracker(tracked(Path(name), "wandb"))
    assert ids[0] == "mine"
    assert len(set(ids)) == 7
    assert all(re.fullmatch("[A-Za-z0-9_-]{1,64}", each) for each in ids)


class MadeUpWandb:
    """Keeps numbers by W&B's rule: those of a step before its newest are dropped, without an error."""

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []
        self.axes: dict[str, str | None] = {}
        self.summary: dict[str, float] = {}
        self._newest = 0

    def init(self, **_: Any) -> MadeUpWandb:
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, numbers: dict[str, float], step: int | None = None) -> None:
        step = self._newest + 1 if step is None else step
        if step >= self._newest:
            self._newest = step
            self.history.append(numbers)

    def finish(self) -> None: ...


def test_weights_and_biases_get_the_report_of_a_save_that_ended_later(monkeypatch, tmp_path):
    wandb = MadeUpWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(module, "check_trackers", lambda config: None)
    trackers = Trackers(tracked(tmp_path, "wandb"), pytest.fail)
    for kind, step in (("train", 20), ("train", 22), ("checkpoint", 20), ("eval", 22)):
        trackers.add(kind, {"step": step, "seconds": 0.5})
    trackers.close()
    expected = [("train", 20), ("train", 22), ("checkpoint", 20), ("eval", 22)]
    assert wandb.history == [{"step": step, f"{kind}/seconds": 0.5} for kind, step in expected]
    assert wandb.axes == {"step": None, "*": "step"}  # over which its curves are drawn


@pytest.mark.slow
def test_weights_and_biases_offline(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    tell_in_a_process(tmp_path, "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    for said in (b"train/loss", b"result/auc", b"train.batch_size"):
        assert said in content


@pytest.mark.slow
def test_mlflow_in_files(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tell(Trackers(tracked(tmp_path / "mine", "mlflow", project="clicks"), pytest.fail))
    client = mlflow.tracking.MlflowClient((tmp_path / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("clicks").experiment_id])
    assert found.data.params["train.batch_size"] == "8"
    assert found.info.run_name == "mine"
    assert [(each.step, each.value) for each in client.get_metric_history(found.info.run_id, "train/loss")] == [
        (10, 0.7),
        (20, 0.6),
    ]
    assert found.data.metrics["result/auc"] == 0.75


@pytest.mark.slow
def test_trackio_on_this_machine(tmp_path):
    pytest.importorskip("trackio", reason="trackio is not installed")
    tell_in_a_process(tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    (file,) = (tmp_path / "trackio").glob("clicks*.db")
    import sqlite3

    rows = sqlite3.connect(file).execute("select step, metrics from metrics order by id").fetchall()
    assert [(step, json.loads(values)["train/loss"]) for step, values in rows[:2]] == [(10, 0.7), (20, 0.6)]


def test_prometheus_reads_the_newest_numbers_on_this_machine_only(tmp_path):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    trackers = Trackers(tracked(tmp_path / "mine", "prometheus", prometheus_port=port), pytest.fail)
    for step in (10, 20):
        trackers.add("train", {"step": step, "loss": 1 / step})
    trackers.add("checkpoint", {"step": 10, "seconds": 0.5})  # of a save that ended later
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    assert 'embershard_train_loss{name="train/loss",run="mine"} 0.05\n' in text
    assert 'embershard_step{name="step",run="mine"} 20.0\n' in text
    with pytest.raises(OSError):
        socket.create_connection((socket.gethostname(), port), timeout=1).close() if (
            not socket.gethostbyname(socket.gethostname()).startswith("127.")
        ) else refuse()
    trackers.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=1)


def refuse() -> None:
    raise OSError
