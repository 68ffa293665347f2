"""The files of a run: config.toml, plan.json, metrics.jsonl, TensorBoard events, result.json. The first rank writes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embershard.decoding import to_toml
from embershard.launch.config import METRICS, RUN_CONFIG
from embershard.launch.run_dir import check_run_dir
from embershard.launch.versions import git_commit, versions
from embershard.sharding.plan import Plan
from embershard.training.config import RunConfig
from embershard.training.reports import EvalReport, FailedSaveReport, Report, SaveReport, TrainReport
from embershard.training.trainer import Trainer

#: Steps at the start that do not count for the speed: caches fill, memory is allocated.
_WARMUP_STEPS = 10


class RunRecord:
    """Writes a run's reports into its folder as they come.

    Args:
        folder: the run's folder; made where it is missing.
        config: all settings of the run.
        resumed_at: step at which an earlier run is continued; None for a new run.
        plan: the plan that the run obeys, if any.

    Raises:
        ConfigError: the folder holds another run, and this one does not resume it.
    """

    def __init__(self, folder: Path, config: RunConfig, resumed_at: int | None, plan: Plan | None = None) -> None:
        check_run_dir(folder, resume=resumed_at is not None)
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RUN_CONFIG).write_text(to_toml(config), encoding="utf-8")
        (folder / "plan.json").unlink(missing_ok=True)  # an earlier part of the run may have had one
        if plan is not None:
            plan.save(folder / "plan.json")
        metrics = folder / METRICS
        kept = _lines_up_to(metrics, resumed_at) if resumed_at is not None and metrics.exists() else []
        metrics.write_text("".join(kept), encoding="utf-8")
        self._metrics = metrics.open("a", encoding="utf-8")
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self._board = SummaryWriter(str(folder), purge_step=None if resumed_at is None else resumed_at + 1)

    def add(self, report: Report) -> None:
        """Append a line to metrics.jsonl, and the report's numbers to TensorBoard."""
        kind, values = _flat(report)
        self._metrics.write(json.dumps({"kind": kind, **values}) + "\n")
        self._metrics.flush()
        for name, value in values.items():
            if name != "step" and isinstance(value, (int, float)):
                self._board.add_scalar(f"{kind}/{name}", value, report.step)

    def finish(self, result: dict[str, Any]) -> None:
        """Write result.json."""
        text = json.dumps(result, indent=2, allow_nan=False)
        (self._folder / "result.json").write_text(text + "\n", encoding="utf-8")

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._board.close()


def steady_steps(step_seconds: Sequence[float], lookahead: int) -> tuple[Sequence[float], bool]:
    """Return the steps that run at the speed of a long run, and whether all other steps are left out.

    Left out are the first 10 steps (of few steps the first quarter), and the last ones, during which no batch was left
    to read: one per batch known ahead, but at most half of the remaining steps.

    >>> steady_steps([1.0, 0.5, 0.5, 0.5], lookahead=1)
    ([0.5, 0.5], True)
    """
    started = step_seconds[min(_WARMUP_STEPS, len(step_seconds) // 4) :]
    left_out = min(lookahead, len(started) // 2)
    return started[: len(started) - left_out], left_out == lookahead


def make_result(
    trainer: Trainer,
    loss: float | None,
    evaluation: EvalReport | None,
    cache: dict[str, Any] | None,
    look_ahead: dict[str, Any] | None,
    sent_bytes: dict[str, Any],
) -> dict[str, Any]:
    """Return the content of result.json.

    `samples_per_second` (of all ranks) and `step_ms` are of the steps that `steady_steps` chooses, and None without a
    step; `is_steady` is False when the run was too short for them. A quality that is undefined or was not measured is
    None. `measured_steps` counts the steps of this process, as `cache` and `sent_bytes` do; `steps` includes those
    before a resume.
    """
    quality = {} if evaluation is None else dataclasses.asdict(evaluation.quality)
    config, ranks, plan = trainer.config, trainer.ranks, trainer.plan
    measured, is_steady = steady_steps(trainer.step_seconds, config.lookahead)
    global_batch = config.train.rank_batch_size(ranks.world_size) * ranks.world_size
    p50, p95 = (float(v) * 1e3 for v in np.percentile(measured, [50, 95])) if measured else (None, None)
    return {
        "steps": trainer.steps,
        "measured_steps": len(trainer.step_seconds),
        "samples": trainer.samples,
        "samples_per_second": len(measured) * global_batch / sum(measured) if measured else None,
        "step_ms": {"p50": p50, "p95": p95},
        "is_steady": is_steady,
        "loss": loss,
        **{name: quality.get(name) for name in ("auc", "ne", "logloss", "accuracy", "calibration")},
        "eval_samples": quality.get("samples", 0),
        "world_size": ranks.world_size,
        "device": ranks.device.type,
        "cache": cache,
        "look_ahead": look_ahead,
        "sent_bytes": sent_bytes,
        "plan": None if plan is None else {"path": config.sharding.plan, "digest": plan.digest},
        "versions": versions(),
        "git_commit": git_commit(),
    }


def _flat(report: Report) -> tuple[str, dict[str, Any]]:
    if isinstance(report, TrainReport):
        values = dataclasses.asdict(report)
        sent = values.pop("sent_bytes")
        return "train", {**values, **{f"sent_bytes_{kind}": count for kind, count in sent.items()}}
    if isinstance(report, EvalReport):
        return "eval", {"step": report.step, **dataclasses.asdict(report.quality), "seconds": report.seconds}
    if isinstance(report, FailedSaveReport):
        return "failed_checkpoint", dataclasses.asdict(report)
    assert isinstance(report, SaveReport)
    return "checkpoint", {"step": report.step, "path": report.path.name, "seconds": report.seconds}


def _lines_up_to(metrics: Path, step: int) -> list[str]:
    """Return the lines of an earlier run that the resumed one will not write again, without a torn last line."""
    kept = []
    for line in metrics.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            values = json.loads(line)
        except ValueError:
            break
        if values["step"] < step or (values["step"] == step and values["kind"] != "eval"):
            kept.append(line)
    return kept
