"""The main job, as a user starts it: real clicks, two ranks, cached and uncached, interrupted and resumed.

Each run is a handful of processes that import torch, so runs are shared by the tests that look at them, and those that
need no new interpreters are forked (`commands.run`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.covering import matrix
from tests.ranks import commands
from tests.ranks.agents import two_agents, two_networks
from tests.ranks.test_resharding import tensors_that_differ
from tests.unit.distributed.checkpoints import flip_bit

pytestmark = pytest.mark.ranks

CACHE_KEYS = {
    "ratio", "slots", "device_bytes", "host_bytes", "hit_rate_unique", "hit_rate_lookups", "fills",
    "write_backs", "bytes_to_device", "bytes_to_host", "evictions", "overflow_growths", "critical_path_fills",
}  # fmt: skip
RESULT_KEYS = {
    "steps", "samples", "samples_per_second", "step_ms", "loss", "auc", "ne", "logloss", "world_size",
    "device", "cache", "look_ahead", "versions", "git_commit",
}  # fmt: skip
#: Of the run that most tests look at.
STEPS = 105
#: Bytes between ranks of the training; `other` has those of the reports themselves.
SENT, OTHER = ("ids", "embeddings", "gradients", "dense_all_reduce", "sync"), {"sent_bytes_other"}
LAST = f"checkpoints/step_{STEPS}"
EMBERSHARD = [sys.executable, "-m", "embershard.commands.cli"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def run(project: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in the project, in new interpreters, and shows what it said where it fails."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(project), environment.get("PYTHONPATH", "")])
    return ended(subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=600))


def embershard(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a command in forked processes, and shows what it said where its exit code is not `code`."""
    return ended(commands.run(arguments, folder), code)


def ended(done: subprocess.CompletedProcess[str], code: int = 0) -> subprocess.CompletedProcess[str]:
    assert done.returncode == code, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


def metrics(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [values for line in lines if (values := json.loads(line))["kind"] == kind]


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in metrics(run_dir, "train")]


def result(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text())


@pytest.fixture(scope="module")
def settings(criteo_sample: Path) -> list[str]:
    given = [f"data.path={criteo_sample}", "train.log_every=1", "cache.ratio=0.03"]
    return ["--config", "examples/criteo.toml", *(word for text in given for word in ("--set", text))]


@pytest.fixture(scope="module")
def cached(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cached")
    run_dir = folder / "run"
    done = embershard(folder, "train", *settings, "--nproc", "2", "--run-dir", str(run_dir))
    (run_dir / "stdout").write_text(done.stdout)
    return run_dir


def test_lines_of_metrics_add_up_to_the_result(cached: Path) -> None:
    """Means of a rank in a step, times steps and ranks, and what came behind the last of them."""
    found, lines, (end,) = result(cached), metrics(cached, "train"), metrics(cached, "end")
    steps = np.diff([0, *(line["step"] for line in lines)])
    totals = {name: found["cache"][name] for name in ("fills", "write_backs")}
    totals |= {f"sent_bytes_{name}": found["sent_bytes"][name] for name in found["sent_bytes"] if name in SENT}
    assert set(totals) == {name.removeprefix("total_") for name in end if name.startswith("total_")} - OTHER
    for name, total in totals.items():
        in_steps = sum(2 * count * line[name] for count, line in zip(steps.tolist(), lines, strict=True))
        assert round(in_steps) + end[f"total_{name}"] == total, name
    assert end["total_write_backs"] > 0, "the rows of the last steps are written back behind them"


def test_real_clicks_are_learned_through_a_small_cache(cached: Path) -> None:
    found = result(cached)
    assert set(found) >= RESULT_KEYS
    assert set(found["cache"]) >= CACHE_KEYS
    assert found["auc"] > 0.6
    assert found["ne"] < 1.0
    assert found["eval_samples"] == 1000  # a tenth of the sample, once each, though 1000 is no multiple of 2 x 128
    assert (found["world_size"], found["steps"], found["samples"]) == (2, STEPS, STEPS * 256)
    assert found["cache"]["evictions"] > 5000
    assert 0.5 < found["cache"]["hit_rate_unique"] < 1.0
    for name in ("slots", "fills", "evictions", "device_bytes"):
        total = found["cache"][name]
        assert sum(table[name] for table in found["cache"]["tables"].values()) == total
        assert sum(rank[name] for rank in found["cache"]["ranks"]) == total
    assert [rank["rank"] for rank in found["memory"]] == [0, 1]
    for rank in found["memory"]:  # rows, scores and slots are in its process, and the libraries were there before
        own = found["cache"]["ranks"][rank["rank"]]
        assert rank["host_bytes_before"] + own["host_bytes"] + own["device_bytes"] < rank["host_bytes"]
        assert rank["device_bytes"] is None
    assert {path.name for path in cached.iterdir()} >= {"config.toml", "metrics.jsonl", "result.json", "checkpoints"}
    assert list(cached.glob("events.out.tfevents.*"))


def test_plain_lines_and_a_closing_table_when_not_on_a_terminal(cached: Path) -> None:
    text = (cached / "stdout").read_text()
    assert f"step {STEPS}/{STEPS}  " in text
    assert "samples/s  loss" in text
    assert "rows on device" in text
    assert "--set cache.enabled=false" in text
    assert "\x1b" not in text


@pytest.mark.matrix
def test_uncached_run_of_the_same_command_has_the_same_losses(cached, settings, tmp_path) -> None:
    off = ["--set", "cache.enabled=false"]
    embershard(tmp_path, "train", *settings, *off, "--nproc", "2", "--run-dir", str(tmp_path / "r"))
    assert losses(tmp_path / "r") == losses(cached)
    assert len(losses(cached)) == STEPS
    assert result(tmp_path / "r")["cache"] is None
    assert result(tmp_path / "r")["auc"] == result(cached)["auc"]


Networks = tuple[str, list[list[str]], list[str]]


@pytest.fixture
def networks() -> Iterator[Networks | None]:
    """Two network namespaces; None where they cannot be made."""
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(two_networks())
        except (OSError, subprocess.CalledProcessError):
            found = None
        yield found


def run_by_two_agents(
    project: Path, settings: list[str], run_dir: Path, networks: Networks | None, *hidden: str
) -> list[tuple[int, str]]:
    """Trains by two agents with a rank each; `hidden` are words before the second one's command."""
    if networks is None:
        return two_agents(project, settings, run_dir, 1)
    address, (first, second), interfaces = networks
    within = [first, [*second, *hidden]]
    return two_agents(project, settings, run_dir, 1, address=address, within=within, interfaces=interfaces)


@pytest.mark.matrix
def test_new_interpreters_train_to_the_bits_of_forked_ones(cached, project_dir, settings, tmp_path) -> None:
    """Strings have other hashes in them."""
    run(project_dir, *EMBERSHARD, "train", *settings, "--nproc", "2", "--run-dir", str(tmp_path / "r"))
    assert losses(tmp_path / "r") == losses(cached)
    assert tensors_that_differ(cached / LAST, tmp_path / "r" / LAST) == []


@pytest.mark.matrix
def test_two_torchrun_agents_train_to_the_bits_of_one(networks, cached, project_dir, settings, tmp_path) -> None:
    """Over a network of their own, where this process may make one."""
    found = run_by_two_agents(project_dir, settings, tmp_path, networks)
    assert [code for code, _ in found] == [0, 0], "\n".join(output[-4000:] for _, output in found)
    assert losses(tmp_path) == losses(cached)
    assert result(tmp_path)["auc"] == result(cached)["auc"]
    assert tensors_that_differ(cached / LAST, tmp_path / LAST) == []


@pytest.mark.matrix
def test_machines_that_share_no_folder_are_refused(networks, project_dir, settings, tmp_path) -> None:
    if networks is None:
        pytest.skip("network namespaces cannot be made here")
    hidden = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {tmp_path} && exec "$@"', "sh"]
    found = run_by_two_agents(project_dir, settings, tmp_path / "run", networks, *hidden)
    assert all(code for code, _ in found)
    assert "does not see the run's folder" in found[0][1]


@pytest.mark.matrix
def test_a_resumed_run_has_the_losses_of_the_uninterrupted_one(cached, settings, tmp_path) -> None:
    run_dir = tmp_path / "r"
    shutil.copytree(cached, run_dir)
    shard = run_dir / LAST / "__1_0.distcp"
    flip_bit(shard, shard)
    (run_dir / "checkpoints" / "step_999").mkdir()
    (run_dir / "checkpoints" / f"step_{STEPS + 1}.tmp").mkdir()  # what a run leaves that died while saving
    resumed = [*settings, "--run-dir", str(run_dir), "--resume"]
    done = embershard(tmp_path, "train", *resumed, "--nproc", "2")
    assert re.search(r"^Not used: .*step_999: manifest.json is missing", done.stdout, re.MULTILINE)
    assert re.search(r"^Not used: .*step_105: __1_0.distcp: its bytes 0 to \d+ are not", done.stdout, re.MULTILINE)
    assert "step_70 at step 70" in done.stdout
    assert losses(run_dir) == losses(cached)
    assert result(run_dir)["auc"] == result(cached)["auc"]
    assert result(run_dir)["steps"] == STEPS
    before = {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    again = embershard(tmp_path, "train", *resumed, "--nproc", "2")
    assert f"is finished: step {STEPS} was its last" in again.stdout
    assert {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()} == before


@pytest.mark.matrix
@pytest.mark.parametrize("on_one", [False, matrix(True)])
def test_a_resume_whose_ranks_cannot_share_the_batch_goes_on_as_is_advised(tmp_path: Path, on_one: bool) -> None:
    given = ["data.synthetic.num_samples=600", "data.synthetic.scale=0.0001", "train.batch_size=7"]
    config = ["--config", "examples/quickstart.toml", "--run-dir", str(tmp_path / "r")]
    words = ["train", *config, *(word for text in given for word in ("--set", text)), "--set"]
    embershard(tmp_path, *words, "train.max_steps=1", "--nproc", "1")
    refused = embershard(tmp_path, *words, "train.max_steps=2", "--resume", "--nproc", "2", code=1)
    advised = re.search(r"Use a number of ranks that divides (7), or another batch: (--set .*)", refused.stderr)
    assert advised is not None, refused.stderr
    if on_one:
        embershard(tmp_path, *words, "train.max_steps=2", "--resume", "--nproc", "1")  # which divides it
    last = f"train.max_steps={3 if on_one else 2}"
    embershard(tmp_path, *words, last, "--resume", "--nproc", "2", *shlex.split(advised[2]))
    assert result(tmp_path / "r")["samples"] == (7 + 7 + 6 if on_one else 7 + 6)


@pytest.mark.matrix
def test_a_comparison_that_is_refused_goes_through_as_is_advised(settings: list[str], tmp_path: Path) -> None:
    words = ["verify", *settings, "--steps", "2", "--nproc", "2", "--set", "sharding.exchange=rows"]
    refused = embershard(tmp_path, *words, code=1)
    advised = re.search(r'Compare with "(\w+)", or on one rank \((--nproc 1)\)', refused.stderr)
    assert advised is not None, refused.stderr
    for remedy in (["--set", f"sharding.exchange={advised[1]}"], advised[2].split()):
        assert "EQUAL: 2 steps" in embershard(tmp_path, *words, *remedy).stdout


@pytest.mark.matrix
def test_empty_slices_low_precision_and_the_cross_network(tmp_path: Path) -> None:
    # 1000 held-out samples in global batches of 2 x 200: of the last one rank 1 gets nothing.
    given = [
        "data.synthetic.num_samples=10000", "data.synthetic.scale=0.001", "data.eval_fraction=0.1",
        "train.batch_size=200", "train.epochs=none", "train.max_steps=6", "train.log_every=1",
        "train.precision=bf16", "model.arch=dlrm_dcn", "model.table_dtype=fp16", "cache.ratio=0.3",
        "profile.samples=3000", "schedule.warmup_steps=2", "schedule.decay=linear",
        "schedule.decay_steps=4", "dense_optimizer.clip_norm=1.0", "checkpoint.at_end=false",
    ]  # fmt: skip
    more = [word for text in given for word in ("--set", text)]
    config = ["--config", "examples/quickstart.toml", "--run-dir", str(tmp_path / "r"), "--nproc", "2"]
    embershard(tmp_path, "train", *config, *more)
    assert metrics(tmp_path / "r", "eval")[-1]["samples"] == 1000
    factors = [line["learning_rate_factor"] for line in metrics(tmp_path / "r", "train")]
    assert factors == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert result(tmp_path / "r")["cache"]["hit_rate_unique"] > 0
    assert not (tmp_path / "r" / "checkpoints").exists()


@pytest.mark.matrix
def test_a_loss_that_is_not_finite_ends_the_run_and_is_named(tmp_path: Path) -> None:
    given = ["dense_optimizer.lr=1e30", "data.synthetic.num_samples=20000", "data.synthetic.scale=0.001"]
    more = [word for text in given for word in ("--set", text)]
    config = ["--config", "examples/quickstart.toml", "--run-dir", str(tmp_path / "r")]
    done = embershard(tmp_path, "train", *config, *more, "--nproc", "2", code=1)
    assert "NotFiniteError: Step " in done.stderr
    assert "Traceback" not in done.stderr
    assert "failed first" in done.stderr


@pytest.mark.parametrize("how", ["forked", matrix("by torchrun")])
def test_the_plain_torchrec_example_runs(project_dir: Path, tmp_path: Path, how: str) -> None:
    script = "examples/train_dlrm.py"
    said = commands.run_script([script], tmp_path) if how == "forked" else run(project_dir, *TORCHRUN, script).stdout
    first, *_, last = [line for line in said.splitlines() if line.startswith("step ")]
    assert float(last.split()[3]) < float(first.split()[3])
    assert "hit rate" in last


@pytest.mark.parametrize("example", [matrix("criteo"), "quickstart"])
def test_verify_finds_the_examples_equal_to_stock_torchrec(settings: list[str], tmp_path: Path, example: str) -> None:
    small = ["--set", "data.synthetic.scale=0.01", "--set", "profile.samples=5000", "--set", "train.batch_size=128"]
    given = settings if example == "criteo" else ["--config", "examples/quickstart.toml", *small]
    small_cache = ["--set", "cache.ratio=0.01"]
    done = embershard(tmp_path, "verify", *given, *small_cache, "--nproc", "2", "--steps", "12")
    assert "EQUAL: 12 steps on 2 ranks" in done.stdout
    assert "No row was evicted" not in done.stdout


def test_verify_says_what_it_cannot_compare(settings: list[str], tmp_path: Path) -> None:
    done = embershard(tmp_path, "verify", *settings, "--set", "cache.enabled=false", "--nproc", "1", code=1)
    assert "there is no cache to compare" in done.stderr
