"""A run that publishes, by its commands: the folder, the record, the commands, and a server without embershard."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from embershard.commands import cli
from embershard.distributed import PublishConfig, Supervision
from embershard.errors import CheckpointError, ConfigError, FailedPublicationError
from embershard.extras.publications import command as publish
from embershard.extras.publications import write
from embershard.extras.serving import serving_model
from embershard.extras.serving.serving_replica import Replica
from embershard.launch.arguments import NEWEST
from embershard.models import ModelConfig
from embershard.run_result import PublishedState, RunResult
from embershard.training.config import RunConfig
from tests.unit.commands.conftest import clicks, config_of_clicks, train_here
from tests.unit.serving.test_export import WITHOUT

pytestmark = [pytest.mark.extra, pytest.mark.slow]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 9 steps that was resumed to 12, whose folder has publications."""
    folder = tmp_path_factory.mktemp("published_run")
    pq.write_table(clicks(), folder / "clicks.parquet")
    config = config_of_clicks(folder / "clicks.parquet", max_steps=9)
    config = dataclasses.replace(config, model=ModelConfig("deepfm", 8))
    config = dataclasses.replace(config, publish=PublishConfig(str(folder / "published"), every_steps=4))
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=12))
    train_here(config, folder / "run")
    shutil.copytree(folder / "run", folder / "longer")  # this process has the lock of the other
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        train_here(longer, folder / "longer", resume=NEWEST)
    (folder / "longer" / "shown.txt").write_text(shown.getvalue())
    return folder / "longer"


def _published_by(run_dir: Path, steps: int) -> PublishedState:
    result = RunResult.find(run_dir)
    assert result.steps == steps
    assert result.published is not None
    return result.published


def test_the_last_state_that_found_the_disk_full_is_published_by_a_resume_without_a_step(tmp_path, monkeypatch):
    pq.write_table(clicks(), tmp_path / "clicks.parquet")
    config = config_of_clicks(tmp_path / "clicks.parquet", max_steps=5)
    config = dataclasses.replace(config, publish=PublishConfig(str(tmp_path / "published"), every_steps=2))
    way_on = {"supervision": Supervision(), "go_on": "the way on"}
    writes = write._write_tensors

    def fails(path: Path, tensors: object) -> object:
        if "delta_" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return writes(path, tensors)

    with monkeypatch.context() as full:
        full.setattr(write, "_write_tensors", fails)
        told = "step 5 is not published: .* No space left .* Replicas have base_0, of step 0. .* the way on"
        with pytest.raises(FailedPublicationError, match=told):
            train_here(config, tmp_path / "run", **way_on)
    published = _published_by(tmp_path / "run", steps=5)
    assert published.step == 0
    assert "No space left" in published.problem
    shutil.copytree(tmp_path / "run", tmp_path / "again")  # this process has the lock of the other
    train_here(config, tmp_path / "again", resume=NEWEST, **way_on)
    lines = [json.loads(line) for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [5]  # trained once
    assert _published_by(tmp_path / "again", steps=5).problem == ""
    assert Replica(tmp_path / "published").have.step == 5


def test_the_run_that_is_suggested_next_has_a_folder_of_its_own(run_dir):
    shown = "".join((run_dir / "shown.txt").read_text().split())  # without the breaks of its lines
    assert f"--setpublish.folder={run_dir.parent}/published_2" in shown


def test_the_record_has_the_publications(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = {line["name"]: line["step"] for line in lines if line["kind"] == "publication"}
    assert found == {"base_0": 0, "delta_1": 4, "delta_2": 8, "delta_3": 9, "delta_4": 12}
    assert all(line["delay_seconds"] > 0 for line in lines if line["kind"] == "publication" and line["rows"])


def test_the_reports_count_them(run_dir, tmp_path, capsys):
    assert cli.main(["report", str(run_dir)]) == 0
    assert "Publications" in capsys.readouterr().out
    assert cli.main(["report", str(run_dir), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Publications: bases and deltas" in page
    rows = re.findall(r"<td[^>]*>(.*?)</td>", page[page.index("bases and deltas") :], re.DOTALL)
    assert [text.strip() for text in rows[:2]] == ["longer", "1"]


@pytest.mark.matrix  # test_export.py has an export, and test_replica.py replicas
def test_it_is_served_without_embershard(run_dir, tmp_path, project_dir):
    """By the example, in a process that cannot import embershard: the scores are those of an export of the run."""
    samples = clicks(40, seed=1).drop_columns("click").to_pylist()
    (tmp_path / "samples.json").write_text(json.dumps(samples))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program, folder = str(project_dir / "examples" / "serve.py"), str(run_dir.parent / "published")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, program, folder, "samples.json"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    step, _, scores = done.stdout.partition(": ")
    assert step == "step 12"
    assert cli.main(["export", str(run_dir), "-o", str(tmp_path / "exported"), "--step", "last"]) == 0
    model = serving_model.load(tmp_path / "exported")
    expected = model(*model.encode(samples)).sigmoid().tolist()
    assert json.loads(scores) == expected


def test_the_commands(run_dir, tmp_path, capsys):
    folder = run_dir.parent / "published"
    assert publish.main(["ls", str(folder)]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("base_0", "delta_1", "delta_4"))
    assert publish.main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out.count("valid") == 5
    assert publish.main(["base", str(folder)]) == 0
    assert "base_4" in capsys.readouterr().out
    model = serving_model.load(folder / "base_4")
    assert model.columns == ["age", "user", "items"]
    damaged = folder / "delta_2" / "dense.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1])
    assert publish.main(["verify", str(folder)]) == 1
    assert "INVALID" in capsys.readouterr().out
    damaged.write_bytes(whole)
    with pytest.raises(CheckpointError):
        publish.main(["base", str(folder)])  # nothing is newer than base_4
    with pytest.raises(ConfigError, match="no publications there"):
        publish.main(["ls", str(tmp_path)])


def test_another_run_does_not_publish_there(run_dir, tmp_path):
    from embershard.settings.files import RUN_CONFIG, load_config

    config = load_config(RunConfig, run_dir / RUN_CONFIG)
    with pytest.raises(ConfigError, match="publications of another run"):
        train_here(config, tmp_path / "other")
