"""The files of a run: config.toml, metrics.jsonl, TensorBoard events, result.json; the first rank's work."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from embershard import __version__
from embershard.decoding import to_toml
from embershard.errors import ConfigError
from embershard.launch.config import METRICS, RUN_CONFIG
from embershard.sharding.plan import Plan
from embershard.training.config import RunConfig
from embershard.training.reports import EvalReport, Report, SaveReport, TrainReport

PLAN = "plan.json"
LOCK = ".lock"
_held_locks: list[TextIO] = []  # open for as long as the process lives
#: Steps at the start that do not count for the speed: caches fill, memory is allocated.
WARMUP_STEPS = 10
_PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy")


def check_run_dir(folder: Path, *, resume: bool) -> None:
    """Raises `ConfigError` when `folder` holds a run, and the new one does not resume it."""
    if not resume and (folder / METRICS).exists():
        raise ConfigError(f"{folder} holds a run already. Use another --run-dir, or --resume to continue it.")


def lock_run_dir(folder: Path) -> None:
    """Hold ``folder`` for this process, to its end: killing a launcher leaves its ranks running for a while.

    Raises:
        ConfigError: another process writes into the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(
            f"{folder} is in use by another run. Wait for it or stop it (its ranks may outlive a killed launcher), "
            "or use another --run-dir."
        ) from error
    _held_locks.append(file)


class RunRecord:
    """Writes what a run says into its folder, as it says it, until `close`.

    Args:
        folder: the run's folder; made if need be.
        config: the run, as resolved.
        resumed_at: step at which an earlier run is continued, None for a new run.
        plan: that the run obeys; None where it has none.

    Raises:
        ConfigError: the folder holds another run, and this one does not resume it.
    """

    def __init__(self, folder: Path, config: RunConfig, resumed_at: int | None, plan: Plan | None = None) -> None:
        check_run_dir(folder, resume=resumed_at is not None)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        metrics = folder / METRICS
        (folder / RUN_CONFIG).write_text(to_toml(config), encoding="utf-8")
        (folder / PLAN).unlink(missing_ok=True)  # an earlier part of the run may have had one
        if plan is not None:
            plan.save(folder / PLAN)
        kept = _lines_up_to(metrics, resumed_at) if resumed_at is not None and metrics.exists() else []
        metrics.write_text("".join(kept), encoding="utf-8")
        self._metrics = metrics.open("a", encoding="utf-8")
        self._board = _tensorboard_writer(folder, resumed_at)

    def add(self, report: Report) -> None:
        """Appends one line to metrics.jsonl, and the report's numbers to TensorBoard."""
        kind, values = _flat(report)
        self._metrics.write(json.dumps({"kind": kind, **values}) + "\n")
        self._metrics.flush()
        for name, value in values.items():
            if name != "step" and isinstance(value, (int, float)):
                self._board.add_scalar(f"{kind}/{name}", value, report.step)

    def finish(self, result: dict[str, Any]) -> Path:
        """Writes result.json and returns its path."""
        path = self.folder / "result.json"
        path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        return path

    def close(self) -> None:
        """Closes the files."""
        self._metrics.close()
        self._board.close()


def steady_steps(step_seconds: Sequence[float], lookahead: int) -> tuple[Sequence[float], bool]:
    """The steps whose speed is that of a long run, and whether all of them are.

    Left out are the first `WARMUP_STEPS` (or a quarter of them, if there are fewer), and the last ones, for which no
    batch was left to be read: as many as batches are known ahead, but no more than half of what remains.
    """
    started = step_seconds[min(WARMUP_STEPS, len(step_seconds) // 4) :]
    left_out = min(lookahead, len(started) // 2)
    return started[: len(started) - left_out], left_out == lookahead


def make_result(
    *,
    config: RunConfig,
    steps: int,
    samples: int,
    step_seconds: list[float],
    world_size: int,
    device: str,
    loss: float | None,
    evaluation: EvalReport | None,
    cache: dict[str, Any] | None,
    look_ahead: dict[str, Any] | None,
    plan: Plan | None = None,
) -> dict[str, Any]:
    """What result.json says of a run.

    `samples_per_second` (global) and `step_ms` are of a long run's steps: :func:`steady_steps`. They are None when no
    step was trained. `is_steady` is False when the run was too short to have such steps only. A quality that is
    undefined or was not measured is None, and so are `cache`, `look_ahead` and `plan` in a run without.
    `measured_steps` are those that this process trained: the counts in `cache` are of these, while `steps` includes
    what a resumed run had before.
    """
    quality = evaluation.quality if evaluation else None
    measured, is_steady = steady_steps(step_seconds, config.lookahead)
    global_batch = config.train.batch_size * world_size
    p50, p95 = (float(v) * 1e3 for v in np.percentile(measured, [50, 95])) if measured else (None, None)
    return {
        "steps": steps,
        "measured_steps": len(step_seconds),
        "samples": samples,
        "samples_per_second": len(measured) * global_batch / sum(measured) if measured else None,
        "step_ms": {"p50": p50, "p95": p95},
        "is_steady": is_steady,
        "loss": loss,
        "auc": quality.auc if quality else None,
        "ne": quality.ne if quality else None,
        "logloss": quality.logloss if quality else None,
        "accuracy": quality.accuracy if quality else None,
        "calibration": quality.calibration if quality else None,
        "eval_samples": quality.samples if quality else 0,
        "world_size": world_size,
        "device": device,
        "cache": cache,
        "look_ahead": look_ahead,
        "plan": None if plan is None else {"path": config.sharding.plan, "digest": plan.digest},
        "versions": versions(),
        "git_commit": git_commit(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter to the numbers; those that are installed."""
    found = {"python": platform.python_version(), "embershard": __version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Commit of the source tree that this package runs from; None when it is installed without one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", os.fspath(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _flat(report: Report) -> tuple[str, dict[str, Any]]:
    if isinstance(report, TrainReport):
        return "train", dataclasses.asdict(report)
    if isinstance(report, EvalReport):
        return "eval", {"step": report.step, **vars(report.quality), "seconds": report.seconds}
    assert isinstance(report, SaveReport)
    return "checkpoint", {"step": report.step, "path": report.path.name, "seconds": report.seconds}


def _lines_up_to(metrics: Path, step: int) -> list[str]:
    """The lines of an earlier run that the resumed one will not write again; a torn last one is dropped."""
    kept = []
    for line in metrics.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            values = json.loads(line)
        except ValueError:
            break
        if values["step"] < step or (values["step"] == step and values["kind"] != "eval"):
            kept.append(line)
    return kept


def _tensorboard_writer(folder: Path, resumed_at: int | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=None if resumed_at is None else resumed_at + 1)
