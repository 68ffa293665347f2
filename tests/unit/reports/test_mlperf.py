"""The log for MLPerf: what its own checker says of it. Skipped where that is not installed (extra `[mlperf]`)."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from embershard.errors import ConfigError
from embershard.extras.mlperf import MLPERF_LOG
from embershard.reports.tracking.run import TrackedRun
from embershard.reports.tracking.trackers import Trackers
from embershard.settings.decoding import flat
from embershard.settings.files import load_config
from embershard.training.config import RunConfig, TrackingConfig

pytestmark = pytest.mark.extra

DLRM_V4 = Path(__file__).parents[3] / "examples" / "dlrm_v4.toml"
BATCH, EVERY, FIRST_EVAL, TRAIN_SAMPLES, EVAL_SAMPLES = 8192, 280, 7_000, 2_290_835_423, 2_058_204


@pytest.fixture(autouse=True)
def _is_installed() -> None:
    pytest.importorskip("mlperf_logging", reason="the extra [mlperf] is not installed")


def tracked(folder: Path, resumed_at: int | None = None, samples: int = TRAIN_SAMPLES) -> TrackedRun:
    config = load_config(RunConfig, DLRM_V4, [f"train.eval_every={EVERY}", "data.eval_path=later"])
    tracking = TrackingConfig(trackers=("mlperf",), mlperf_org="somebody")
    settings = flat(dataclasses.asdict(config))
    return TrackedRun(folder, settings, tracking, resumed_at, 8, BATCH, samples, "8 x GPU")


def tell(trackers: Trackers, steps: range, auc: float | None, seconds: float = 1.0) -> None:
    for step in steps:
        trackers.add("train", {"step": step, "samples": step * BATCH, "loss": 0.5})
        quality = {"auc": auc, "samples": EVAL_SAMPLES, "seconds": seconds}
        trackers.add("eval", {"step": step, **quality})


def failed_rules(folder: Path) -> set[str]:
    """Return the keys that MLPerf's checker refuses, by the rules of round 6.1."""
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--ruleset", "6.1.0"]
    command += ["--log_output", str(folder / "checked.log"), str(folder / MLPERF_LOG)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    said = done.stdout + done.stderr
    lines = [line.strip() for line in said.splitlines()]
    failed = {line.split("'")[1] for line in lines if "CHECK for '" in line or "Required " in line}
    failed |= {line.split("Failed checks for ")[1].split()[0] for line in lines if "Failed checks for" in line}
    assert ("SUCCESS" in said) == (not failed), said
    return failed


def lines_of(folder: Path) -> list[dict[str, Any]]:
    text = (folder / MLPERF_LOG).read_text()
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in text.splitlines()]


def test_the_checker_accepts_a_run_of_the_benchmarks_size(tmp_path):
    """The example's settings, with the data's true sizes, and an evaluation that reaches the target."""
    trackers = Trackers(tracked(tmp_path), pytest.fail)
    tell(trackers, range(FIRST_EVAL, FIRST_EVAL + 2 * EVERY, EVERY), 0.76)
    trackers.finish({})
    trackers.close()
    assert failed_rules(tmp_path) == set()
    values = {line["key"]: line["value"] for line in lines_of(tmp_path)}
    assert values["opt_gradient_clip_norm"] == 5.0  # what was, though the benchmark's is 1 (of a fifth of the loss)
    assert values["lowest_numerical_precision_in_linear"] == "bfloat16"
    assert (values["opt_adam_beta_1"], values["submission_org"], values["micro_batch_size"]) == (0.95, "somebody", 1024)
    status = lines_of(tmp_path)[-1]["metadata"]["status"]
    assert status == "success"


@pytest.mark.parametrize(
    ("samples", "auc", "refused"),
    [(1_000, 0.76, "train_samples"), (TRAIN_SAMPLES, 0.74, "eval_accuracy"), (TRAIN_SAMPLES, None, "eval_accuracy")],
)
def test_other_data_and_a_missed_target_are_what_the_checker_refuses(samples, auc, refused, tmp_path):
    trackers = Trackers(tracked(tmp_path, samples=samples), pytest.fail)
    tell(trackers, range(FIRST_EVAL, FIRST_EVAL + 1), auc)
    trackers.finish({})
    trackers.close()
    assert failed_rules(tmp_path) == {refused}
    reached = auc is not None and auc >= 0.75
    assert lines_of(tmp_path)[-1]["metadata"]["status"] == ("success" if reached else "aborted")


def test_a_resumed_run_adds_to_its_log(tmp_path):
    """It was killed within a line: the head stands once, and steps count on."""
    first = Trackers(tracked(tmp_path), pytest.fail)
    tell(first, range(FIRST_EVAL, FIRST_EVAL + 1), 0.7)
    del first  # killed: neither finished nor closed
    with (tmp_path / MLPERF_LOG).open("a") as log:
        log.write(':::MLLOG {"namespace": "", "ti')
    trackers = Trackers(tracked(tmp_path, resumed_at=FIRST_EVAL + 80), pytest.fail)
    tell(trackers, range(FIRST_EVAL + EVERY, FIRST_EVAL + EVERY + 1), 0.76)
    trackers.finish({})
    trackers.close()
    assert failed_rules(tmp_path) == set()
    blocks = [line["metadata"]["samples_count"] for line in lines_of(tmp_path) if line["key"] == "block_start"]
    assert blocks == [step * BATCH for step in (0, FIRST_EVAL, FIRST_EVAL + 80, FIRST_EVAL + EVERY)]


@pytest.mark.smoke
def test_the_log_is_of_one_benchmark_only():
    with pytest.raises(ConfigError, match=r'needed model\.arch = "hstu", got "dlrm"'):
        load_config(RunConfig, DLRM_V4.parent / "quickstart.toml", ['tracking.trackers=["mlperf"]'])
    with pytest.raises(ConfigError, match="no effect without"):
        TrackingConfig(mlperf_org="somebody")
