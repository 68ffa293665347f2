"""`embershard sweep --on kubernetes`: its manifests by Kubeflow's schema, and what it does on a made-up cluster.

No test runs on a real cluster.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embershard.commands.sweep import command
from embershard.errors import ConfigError, SetupError
from embershard.extras.sweep_engines import on_kubernetes
from embershard.extras.sweep_engines.on_kubernetes import manifests, train_job
from embershard.sweeps import clusters
from embershard.sweeps.clusters import job_name
from embershard.sweeps.experiments import Experiment, Sweep
from embershard.sweeps.outcomes import Outcome, find_outcome, read_outcomes, run_folder
from tests.unit.planning.runs import predicted_plan, result_of

pytestmark = pytest.mark.extra

FILE = """
config = "run.toml"
time_limit_seconds = 90.5
grid.ranks = [1, 4]
set.train.max_steps = 4
[kubernetes]
image = "registry/embershard:0.1"
claim = "clicks"
mount = "{mount}"
ranks_per_node = 2
gpus_per_rank = 1
cpus_per_rank = 3
memory_per_node = "64Gi"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.toml").write_text("")
    (tmp_path / "sweep.toml").write_text(FILE.format(mount=tmp_path))
    monkeypatch.chdir(tmp_path)
    return Path("sweep.toml")


def documents(text: str) -> list[dict[str, Any]]:
    return [json.loads(document) for document in text.split("---\n") if document]


@pytest.mark.smoke
def test_a_run_is_a_train_job(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(file), "--on", "kubernetes", "--dry-run"]) == 0
    one, four = documents(capsys.readouterr().out)
    assert (one["apiVersion"], one["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert (one["spec"]["trainer"]["numNodes"], one["spec"]["trainer"]["numProcPerNode"]) == (1, 1)
    trainer = four["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    gpus = {"nvidia.com/gpu": "2", "memory": "64Gi"}
    assert trainer["resourcesPerNode"] == {"requests": {"cpu": "6", **gpus}, "limits": gpus}
    assert trainer["command"][3:] == [
        str(Path.cwd()), "torchrun", "-m", "embershard", "train", "--config", "run.toml",
        "--set", "train.max_steps=4", "--run-dir", str(Path.cwd() / "sweeps/sweep/runs" / names(file)[1]),
    ]  # fmt: skip
    assert four["spec"]["activeDeadlineSeconds"] == 91
    assert one["metadata"]["name"] != four["metadata"]["name"]
    assert len(four["metadata"]["name"]) <= 63


def names(file: Path) -> list[str]:
    return [experiment.name for experiment in Sweep.read(file).experiments]


def kept_by_the_schema(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest as Kubeflow's own classes read and write it: they drop what they do not know."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    job = models.TrainerV1alpha1TrainJob.from_dict(manifest)
    found: dict[str, Any] = json.loads(job.to_json())
    return found


@pytest.mark.slow
def test_manifests_follow_the_published_schema(file: Path) -> None:
    for manifest in documents(manifests(Sweep.read(file), Path("out"))):
        assert kept_by_the_schema(manifest) == manifest


@pytest.mark.slow
def test_the_schema_finds_mistakes(file: Path) -> None:
    manifest = documents(manifests(Sweep.read(file), Path("out")))[0]
    misspelt = {**manifest, "spec": {**manifest["spec"], "numNode": 1}}
    assert kept_by_the_schema(misspelt) != misspelt
    wrong = {**manifest, "spec": {**manifest["spec"], "activeDeadlineSeconds": "soon"}}
    with pytest.raises(ValueError, match="activeDeadlineSeconds"):
        kept_by_the_schema(wrong)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[kubernetes]", "[[runs]]\n[slurm]\noptions.x = 1\n[more]", "more"),
        ("ranks_per_node = 2", "ranks_per_node = 3", "does not divide 4 ranks"),
        ("ranks_per_node = 2", "ranks_per_node = 0", "needed at least 1"),
        ("mount = ", 'mount = "/elsewhere" #', "is not below kubernetes.mount = /elsewhere"),
    ],
)
def test_what_no_pod_could_do(file: Path, before: str, after: str, message: str) -> None:
    file.write_text(file.read_text().replace(before, after))
    with pytest.raises(ConfigError, match=message):
        command.main([str(file), "--on", "kubernetes", "--dry-run"])


def test_the_section_is_asked_for(file: Path) -> None:
    file.write_text(file.read_text().partition("[kubernetes]")[0])
    with pytest.raises(ConfigError, match=r"needs a section \[kubernetes\]"):
        command.main([str(file), "--on", "kubernetes", "--dry-run"])


class ApiError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status, self.reason, self.body = status, "Refused", ""


class NoAnswerError(Exception):
    """As urllib3 raises where there is no connection."""


class Cluster:
    """Stands in for a cluster: `ends` says what becomes of a job, when its status is asked for; `fails` raises what a
    cluster in trouble answers, for a verb and a job."""

    def __init__(
        self, ends: Callable[[str], dict[str, Any]], fails: Callable[[str, str], None] = lambda verb, name: None
    ) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.created: list[str] = []
        self.deleted: list[str] = []
        self.logins = 0
        self._ends, self._fails = ends, fails

    def create_namespaced_custom_object(self, body: dict[str, Any], **place: str) -> None:
        assert place["plural"] == "trainjobs"
        self._fails("create", body["metadata"]["name"])
        if body["metadata"]["name"] in self.jobs:
            raise ApiError(409)
        self.jobs[body["metadata"]["name"]] = body
        self.created.append(body["metadata"]["name"])

    def get_namespaced_custom_object(self, name: str, **_: str) -> dict[str, Any]:
        self._fails("get", name)
        if name not in self.jobs:
            raise ApiError(404)
        return {"status": {"conditions": [self._ends(name)]}}

    def delete_namespaced_custom_object(self, name: str, **_: str) -> None:
        self._fails("delete", name)
        if self.jobs.pop(name, None) is None:
            raise ApiError(404)
        self.deleted.append(name)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cluster], Cluster]:
    def use_cluster(cluster: Cluster) -> Cluster:
        def log_in() -> None:
            cluster.logins += 1

        client = SimpleNamespace(CustomObjectsApi=lambda: cluster, ApiException=ApiError)
        config = SimpleNamespace(load_config=log_in, ConfigException=KeyError)
        monkeypatch.setitem(sys.modules, "kubernetes", SimpleNamespace(client=client, config=config))
        monkeypatch.setitem(sys.modules, "urllib3.exceptions", SimpleNamespace(HTTPError=NoAnswerError))
        monkeypatch.setattr(on_kubernetes, "_POLL_SECONDS", 0.0)
        monkeypatch.setattr(clusters, "_PAUSE_SECONDS", 0.0)
        return cluster

    return use_cluster


def condition(kind: str, reason: str = "", message: str = "") -> dict[str, str]:
    return {"type": kind, "status": "True", "reason": reason, "message": message}


def finish(experiment: Experiment, folder: Path) -> None:
    """What the first pod leaves."""
    run = run_folder(folder, experiment.name)
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.toml").touch()
    (run / "result.json").write_text(json.dumps(result_of(predicted_plan())))


def run_all(sweep: Sweep, folder: Path, end: Callable[[Outcome], None] = lambda outcome: None) -> dict[str, Outcome]:
    """Return the outcomes by name."""
    found: dict[str, Outcome] = {}

    def note(outcome: Outcome) -> None:
        found[outcome.name] = outcome
        end(outcome)

    on_kubernetes.run_on_kubernetes(sweep, sweep.experiments, folder, lambda experiment: None, note)
    return found


@pytest.mark.smoke
def test_jobs_become_outcomes(file: Path, use: Callable[[Cluster], Cluster]) -> None:
    sweep, folder = Sweep.read(file), Path("out").absolute()
    good, bad = sweep.experiments

    def ends(name: str) -> dict[str, Any]:
        if name == job_name(bad.name, folder):
            return condition("Failed", "DeadlineExceeded", "it was active longer than specified")
        finish(good, folder)
        return condition("Complete")

    cluster = use(Cluster(ends))
    found = run_all(sweep, folder)
    assert (found[good.name].status, found[bad.name].status) == ("finished", "timed out")
    assert "DeadlineExceeded: it was active longer" in found[bad.name].reason
    assert {each.name for each in read_outcomes(folder)} == {good.name, bad.name}
    assert cluster.deleted == []


def test_a_job_that_still_runs_is_waited_for_and_one_that_ended_is_replaced(file, use) -> None:
    sweep, folder = Sweep.read(file), Path("out").absolute()
    running, ended = sweep.experiments
    looks = {job_name(each.name, folder): 0 for each in sweep.experiments}

    def ends(name: str) -> dict[str, Any]:
        looks[name] += 1
        if name == job_name(running.name, folder):
            if looks[name] < 3:
                return condition("Suspended")
            finish(running, folder)
        elif cluster.created:
            finish(ended, folder)
        return condition("Complete")

    cluster = use(Cluster(ends))
    cluster.jobs = {job_name(each.name, folder): train_job(each, sweep, folder) for each in sweep.experiments}
    found = run_all(sweep, folder)
    assert {each.status for each in found.values()} == {"finished"}
    assert cluster.created == [job_name(ended.name, folder)]  # the other one was there


def stop(_: Outcome) -> None:
    raise KeyboardInterrupt


def made_of(sweep: Sweep, folder: Path) -> list[str]:
    return [job_name(each.name, folder) for each in sweep.experiments]


def test_jobs_end_with_a_sweep_that_is_stopped(file: Path, use: Callable[[Cluster], Cluster]) -> None:
    sweep, folder = Sweep.read(file), Path("out").absolute()
    first, second = made_of(sweep, folder)
    cluster = use(Cluster(lambda name: condition("Failed" if name == first else "Created", "Oops")))
    with pytest.raises(KeyboardInterrupt):
        run_all(sweep, folder, stop)
    assert cluster.deleted == [second]
    assert find_outcome(sweep.experiments[0], folder) is not None
    assert find_outcome(sweep.experiments[1], folder) is None


@pytest.mark.parametrize("error", [ApiError(503), ApiError(429), ApiError(401), ApiError(0), NoAnswerError("refused")])
@pytest.mark.parametrize("verb", ["get", "create"])
def test_a_cluster_that_does_not_answer_for_a_while_costs_no_job(file, use, capsys, error, verb) -> None:
    sweep, folder = Sweep.read(file), Path("out").absolute()
    left = [error] * 3

    def fails(asked: str, name: str) -> None:
        if asked == verb and cluster.created and left:
            raise left.pop()

    def ends(name: str) -> dict[str, Any]:
        finish(next(each for each in sweep.experiments if job_name(each.name, folder) == name), folder)
        return condition("Complete")

    cluster = use(Cluster(ends, fails))
    found = run_all(sweep, folder)
    assert not left
    assert {each.status for each in found.values()} == {"finished"}
    assert (cluster.created, cluster.deleted) == (made_of(sweep, folder), [])
    assert (cluster.logins > 1) == (getattr(error, "status", 0) == 401)  # a new login where the old one has expired
    said = capsys.readouterr().err
    assert said.count("Kubernetes does not answer") == 1
    assert "the jobs go on" in said


def test_a_job_whose_creation_was_heard_without_an_answer_is_made_once(file, use) -> None:
    sweep, folder = Sweep.read(file), Path("out").absolute()
    first, second = made_of(sweep, folder)

    def fails(verb: str, name: str) -> None:
        if (verb, name) == ("create", second) and second not in cluster.jobs:
            cluster.jobs[second] = {}
            raise NoAnswerError("timed out")

    cluster = use(Cluster(lambda name: condition("Failed"), fails))
    run_all(sweep, folder)
    assert (cluster.created, cluster.deleted) == ([first], [])


@pytest.mark.parametrize(
    ("error", "raised"), [(ApiError(503), "has not answered for 0 s (503 Refused)"), (ApiError(403), "refused to get")]
)
def test_jobs_go_on_where_the_command_gives_up(file, use, capsys, monkeypatch, error, raised) -> None:
    sweep, folder = Sweep.read(file), Path("out").absolute()
    monkeypatch.setattr(on_kubernetes, "_PATIENCE_SECONDS", 0.0)

    def fails(verb: str, name: str) -> None:
        if len(cluster.created) == 2:
            raise error

    cluster = use(Cluster(lambda name: condition("Created"), fails))
    with pytest.raises((SetupError, ConfigError), match=re.escape(raised)):
        run_all(sweep, folder)
    assert sorted(cluster.jobs) == sorted(made_of(sweep, folder))
    assert "Start the same command again: it waits for them" in capsys.readouterr().err


def test_jobs_go_on_where_an_outcome_cannot_be_shown(file: Path, use: Callable[[Cluster], Cluster]) -> None:
    sweep, folder = Sweep.read(file), Path("out").absolute()
    first, second = made_of(sweep, folder)
    cluster = use(Cluster(lambda name: condition("Failed" if name == first else "Created")))

    def end(_: Outcome) -> None:
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        run_all(sweep, folder, end)
    assert second in cluster.jobs


def test_a_job_that_cannot_be_deleted_does_not_keep_the_others(file, use, capsys) -> None:
    file.write_text(file.read_text().replace("[1, 4]", "[1, 2, 4]"))
    sweep, folder = Sweep.read(file), Path("out").absolute()
    first, second, third = made_of(sweep, folder)
    tries: dict[str, int] = {}

    def fails(verb: str, name: str) -> None:
        if verb == "delete" and cluster.created:
            tries[name] = tries.get(name, 0) + 1
            if name == first or (name == second and tries[name] == 1):
                raise ApiError(503)

    def ends(name: str) -> dict[str, Any]:
        if name == third:
            raise KeyboardInterrupt
        return condition("Created")

    cluster = use(Cluster(ends, fails))
    with pytest.raises(KeyboardInterrupt):
        run_all(sweep, folder)
    assert sorted(cluster.deleted) == sorted([second, third])
    said = capsys.readouterr().err
    assert "1 jobs could not be cancelled" in said
    assert f"kubectl delete --namespace default trainjobs.trainer.kubeflow.org {first}\n" in said


def test_a_cluster_that_never_answered_is_not_waited_for(file: Path, use: Callable[[Cluster], Cluster]) -> None:
    def fails(verb: str, name: str) -> None:
        raise NoAnswerError("connection refused")

    use(Cluster(lambda name: condition("Created"), fails))
    with pytest.raises(SetupError, match=r"has not answered for 0 s \(connection refused\). Check `kubectl"):
        run_all(Sweep.read(file), Path("out").absolute())


def test_the_client_is_asked_for_where_it_is_missing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(SetupError, match='pip install "kubernetes>=31"; or --dry-run'):
        command.main([str(file), "--on", "kubernetes", "--out", "out"])
