"""The files of a run: config.toml, plan.json, metrics.jsonl, curves.json, bad_rows.jsonl; and its `RunResult`.

The first rank writes them; the result is made when the run ends.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embershard.data.block import BadRow
from embershard.distributed import Ranks
from embershard.errors import naming_file
from embershard.launch.run_dir import check_run_dir
from embershard.launch.screen import time_now
from embershard.launch.versions import git_commit, versions
from embershard.machine import RankThreads
from embershard.metrics.figures import metric_names
from embershard.run_result import (
    RESULT,
    HeldOutPart,
    ObeyedPlan,
    RunResult,
    StepTimes,
    WindowResult,
    mean_quality,
)
from embershard.settings.decoding import to_record
from embershard.settings.files import CURVES, METRICS, RUN_CONFIG
from embershard.sharding.plan import Plan
from embershard.training.arithmetic import rank_threads
from embershard.training.checkpoint.identity import global_batch
from embershard.training.config import RunConfig
from embershard.training.reports import BadRowsReport, EvalReport, Report, TrainReport
from embershard.training.trainer import Trainer
from embershard.whole_file import whole_file

#: Steps at the start that do not count for the speed: caches fill, memory is allocated.
_WARMUP_STEPS = 10
_DAMAGED, _BAD_ROWS = "metrics.damaged.jsonl", "bad_rows.jsonl"
_Again = tuple[Any, ...]
#: Lines of bad_rows.jsonl.
_MOST_BAD_ROWS = 10_000


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
        with whole_file(folder / RUN_CONFIG) as partial:  # a resume that is killed leaves the settings of before
            partial.write_text(to_record(config), encoding="utf-8")
        for earlier in ("plan.json", RESULT, CURVES):  # an earlier part of the run may have had them
            (folder / earlier).unlink(missing_ok=True)
        if plan is not None:
            plan.save(folder / "plan.json")
        metrics = folder / METRICS
        kept, self._standing, damaged = list[bytes](), set[_Again](), list[bytes]()
        if resumed_at is not None and metrics.exists():
            kept, self._standing, damaged = _lines_up_to(metrics, resumed_at)
        if damaged:
            with naming_file(folder / _DAMAGED), (folder / _DAMAGED).open("ab") as aside:
                aside.writelines(damaged)
        with whole_file(metrics) as partial:  # a full disk leaves the earlier lines as they are
            partial.write_bytes(b"".join(kept))
        self._bad_rows = BadRowFile(folder / _BAD_ROWS)
        self._metrics = metrics.open("a", encoding="utf-8")

    def add(self, report: Report) -> bool:
        """Append a line to metrics.jsonl, and bad rows to their file; return False for a report that stands there, from
        before a resume."""
        if isinstance(report, BadRowsReport):
            self._bad_rows.add(report.rows)
        if isinstance(report, EvalReport) and report.curves:
            curves = {label: dataclasses.asdict(each) for label, each in report.curves.items()}
            with whole_file(self._folder / CURVES) as partial:
                partial.write_text(json.dumps({"step": report.step, "labels": curves}), encoding="utf-8")
        line = report_line(report)
        if _of_report(line) in self._standing:
            return False
        with naming_file(self._metrics.name):
            self._metrics.write(json.dumps(line) + "\n")
            self._metrics.flush()
        return True

    def windows(self) -> tuple[WindowResult, ...]:
        """Return the windows of time that the whole run evaluated, those before a resume included."""
        with naming_file(self._metrics.name):
            lines = map(json.loads, Path(self._metrics.name).read_bytes().splitlines())
            return tuple(WindowResult.of(line) for line in lines if line["kind"] == "window")

    def close(self) -> None:
        """Close the files."""
        with naming_file(self._metrics.name):
            self._metrics.close()


class BadRowFile:
    """A file of bad rows, one JSON object to a line with the keys file, row, column and problem.

    Each row is listed once, and at most 10,000 of them; the file of a resumed run goes on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listed: set[str] = set()
        if path.exists():
            self._listed.update(path.read_text(encoding="utf-8", errors="replace").splitlines())

    def add(self, rows: Sequence[BadRow]) -> None:
        """List rows; the file is made when the first one comes."""
        lines = dict.fromkeys(
            json.dumps({"file": str(row.path), "row": row.row, "column": row.column, "problem": row.problem})
            for row in rows
        )
        new = [line for line in lines if line not in self._listed][: max(0, _MOST_BAD_ROWS - len(self._listed))]
        if new:
            with naming_file(self._path), self._path.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in new)
            self._listed.update(new)


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
    last: TrainReport | None,
    evaluation: EvalReport | None,
    totals: Mapping[str, Any],
    windows: Sequence[WindowResult] = (),
) -> RunResult:
    """Return the result of a run that ended; speed and `step_ms` are of the steps that `steady_steps` chooses.

    Args:
        last: the last report of training, if there is one.
        evaluation: the last one; without one, the quality is that of the `windows`.
        totals: of all ranks: what `Part.result` gives.
    """
    quality = mean_quality(windows) if evaluation is None else evaluation.quality
    config, ranks, plan = trainer.config, trainer.ranks, trainer.plan
    measured, is_steady = steady_steps(trainer.step_seconds, config.lookahead)
    p50, p95 = (float(v) * 1e3 for v in np.percentile(measured, [50, 95])) if measured else (None, None)
    return RunResult(
        steps=trainer.steps,
        measured_steps=len(trainer.step_seconds),
        samples=trainer.samples,
        samples_per_second=len(measured) * global_batch(config, ranks.world_size) / sum(measured) if measured else None,
        step_ms=StepTimes(p50, p95),
        is_steady=is_steady,
        loss=None if last is None else last.loss,
        label_losses={} if last is None else last.label_losses,
        quality={name: quality.get(name) for name in metric_names(trainer.target, config.metrics.more)},
        slices={} if evaluation is None else evaluation.slices,
        eval_samples=int(quality.get("samples") or 0),
        held_out=_held_out(trainer, windows),
        windows=tuple(windows),
        world_size=ranks.world_size,
        device=ranks.device.type,
        threads=_threads(config, ranks),
        changes=tuple(dataclasses.asdict(change) for change in trainer.state.changes),
        plan=None if plan is None else ObeyedPlan(config.sharding.plan, plan.digest),
        versions=versions(),
        git_commit=git_commit(),
        **{"hot_cold": None, **totals},
    )


def _threads(config: RunConfig, ranks: Ranks) -> RankThreads:
    chosen, count = rank_threads(config, ranks), torch.get_num_threads()
    return chosen if chosen.count == count else RankThreads(count, "by torch.set_num_threads")


def report_line(report: Report) -> dict[str, Any]:
    """Return a report as a line of metrics.jsonl: its kind, the time now, and its values."""
    return {"kind": report.kind, "time": time_now(), **report.values()}


def _held_out(trainer: Trainer, evaluated: Sequence[WindowResult]) -> HeldOutPart:
    source, data = trainer.source, trainer.config.data
    held_out, rest = (source.chunks(split).num_samples for split in ("eval", "train"))
    in_windows = 0
    if data.eval_path is None and (windows := source.held_out.windows) is not None:
        in_windows = rest - int(windows.firsts[1])
    elif data.follow:
        in_windows = 0 if data.eval_path is not None else sum(window.samples for window in evaluated)
    split = data.split if data.eval_path is None else "eval_path"
    return HeldOutPart(split, source.held_out.how, held_out + in_windows, held_out + rest)


def _lines_up_to(metrics: Path, step: int) -> tuple[list[bytes], set[_Again], list[bytes]]:
    """Return the lines of an earlier run up to a step; what of that step the resumed run may report again; and the
    lines that cannot be read."""
    kept, standing, damaged = [], set(), []
    for line in metrics.read_bytes().splitlines(keepends=True):
        whole = line if line.endswith(b"\n") else line + b"\n"
        try:
            values = json.loads(line)
            at, again = values["step"], _of_report(values)
            is_kept = at <= step
        except (ValueError, KeyError, TypeError):
            damaged.append(whole)
            continue
        if is_kept:
            kept.append(whole)
        if at == step and again is not None:
            standing.add(again)
    return kept, standing, damaged


def _of_report(values: Mapping[str, Any]) -> _Again | None:
    """Return what tells a report from the others that a resumed run may make again; None for other kinds."""
    names = next((each.told_by for each in Report.__subclasses__() if each.kind == values["kind"]), None)
    if names is None:
        return None
    return values["kind"], values["step"], *(values.get(name) for name in names)
