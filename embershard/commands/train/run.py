"""A whole training on one rank: from the run's folder to its result, with what the first rank shows and records."""

from __future__ import annotations

import dataclasses
import gc
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from embershard.distributed import Ranks, Supervision
from embershard.distributed.checkpoint.folder import checkpoints_for
from embershard.errors import ConfigError, FailedSaveError
from embershard.launch.arguments import NEWEST, program_words
from embershard.launch.run_dir import check_run_dir, lock_run_dir, note_resume
from embershard.launch.screen import JsonLines, LogFormat, plain_console, say, time_now
from embershard.lazy_names import named
from embershard.pipeline.pipelined_forward import sharded_modules
from embershard.reports.progress import ProgressDisplay, closing_table
from embershard.reports.record import RunRecord, make_result, report_line
from embershard.reports.start import ModelSummary, Start
from embershard.run_result import RunResult
from embershard.settings.decoding import flat
from embershard.settings.files import CHECKPOINTS
from embershard.sharding.plan import Plan
from embershard.sharding.torchrec.compat import unwrapped
from embershard.sharding.torchrec.modes.routes import why_no_route
from embershard.stages import TRACES
from embershard.training.checkpoint.identity import global_batch
from embershard.training.checkpoint.resume import resume_run
from embershard.training.config import RunConfig
from embershard.training.fit.host_types import as_in_slots, host_type_notes
from embershard.training.fit.machine_limits import larger_limit
from embershard.training.fit.model_size import table_rows, table_sizes, tables_of_run
from embershard.training.parts.part import Export
from embershard.training.reports import EvalReport, Report, TrainReport
from embershard.training.trainer import Trainer
from embershard.training.warm_start import WarmStart

if TYPE_CHECKING:
    from embershard.reports.tracking.trackers import Trackers


def train_run(
    config: RunConfig,
    ranks: Ranks,
    run_dir: Path,
    *,
    resume: int | None,
    unverified: bool,
    changes: Sequence[str],
    same_run: str,
    go_on: str,
    supervision: Supervision,
    profile_steps: tuple[int, int] | None = None,
    log_format: LogFormat = "text",
    start: WarmStart | None = None,
) -> None:
    """Train a whole run on this rank; the first rank shows and records it.

    Args:
        resume: the step of a checkpoint, `NEWEST`, or None for a new run.
        unverified: resume from a checkpoint without a manifest, too.
        changes: settings that may have other values than in the checkpoint.
        same_run, go_on: the commands of this run, and of its resume.
        supervision: by which the training may be asked to stop.
        profile_steps: the first and the last step that are traced.
        start: what the run begins with, if no checkpoint is there to go on from.
    """
    wanted = None if resume == NEWEST else resume
    ranks.from_first(lambda: _take_run_dir(run_dir, is_resumed=resume is not None, step=wanted))
    console = (JsonLines if log_format == "json" else plain_console)(quiet=not ranks.is_first)
    trainer = Trainer(config, ranks, run_dir / CHECKPOINTS, supervision, _base_writer(config), start)
    resumed_at = None if resume is None else _resume(trainer, run_dir, console, wanted, unverified, changes)
    if resumed_at is not None and trainer.is_over and ranks.from_first(lambda: _has_result(run_dir, trainer.steps)):
        trainer.close()
        say(console, f"{run_dir} is finished: step {trainer.steps} was its last. Nothing was changed.")
        return
    _announce(trainer, console, run_dir, same_run)
    trainer.parts += (traces := _traces(trainer, profile_steps, run_dir))
    with closing(_Outputs(trainer, run_dir, resumed_at, console)) if ranks.is_first else nullcontext() as outputs:
        if ranks.is_first and not supervision.has_launcher:
            supervision.notice = f"embershard: stopping after this step. Go on with:    {go_on}"
        failed_save = _train_and_report(trainer, outputs)
        _close(trainer, console, traces)
        if not supervision.must_stop:
            _finish(trainer, outputs, same_run)
        elif not supervision.notice:
            say(console, f"Go on with:    {go_on}")
    if failed_save is not None:
        raise failed_save
    for part in trainer.parts:
        part.raise_failure(go_on)


def _base_writer(config: RunConfig) -> Export | None:
    """Return what writes the bases of publications, if the run publishes."""
    if config.publish.folder is None:
        return None
    return partial(named("embershard.extras.serving.write:export_base"), config)


def _has_result(run_dir: Path, step: int) -> bool:
    """Return whether the run finished at `step`: its last evaluation, its result and its publication are there."""
    result = RunResult.find(run_dir)
    is_published = result is None or result.published is None or not result.published.problem
    return result is not None and result.steps == step and is_published


def _take_run_dir(run_dir: Path, *, is_resumed: bool, step: int | None) -> None:
    """Lock the folder of a run. The checkpoint of `step` must be there: looked for before a folder is made."""
    check_run_dir(run_dir, resume=is_resumed)
    checkpoints_for(run_dir / CHECKPOINTS, step)
    lock_run_dir(run_dir)


def _finish(trainer: Trainer, outputs: _Outputs | None, same_run: str) -> None:
    """Record the totals of a run that is over. Collective."""
    end = trainer.metrics.end(trainer.steps)
    totals = trainer.of_parts(lambda part: part.result())
    if outputs is not None:
        outputs.add(end)
        outputs.finish(totals, same_run)


def _train_and_report(trainer: Trainer, outputs: _Outputs | None) -> FailedSaveError | None:
    """Train; return the failure of the save at the end, where the settings say that the result is not lost with it."""
    trainer.ranks.barrier()  # the first one made its files: a signal finds all ranks before the training, or all in it
    trainer.supervision.is_training = True
    try:
        with _frozen():
            for report in trainer.train():
                if outputs is not None:
                    outputs.add(report)
    except FailedSaveError as error:
        if trainer.config.checkpoint.on_failed_save == "stop" or trainer.supervision.must_stop:
            raise
        return error
    return None


@contextmanager
def _frozen() -> Iterator[None]:
    """What was built stays until the end: full collections of garbage need not look at it, for a third of a second."""
    others = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not others:  # else what the process had frozen would be looked at, too
            gc.unfreeze()


def _traces(trainer: Trainer, steps: tuple[int, int] | None, run_dir: Path) -> list[Any]:
    """Return the part that traces steps, if some are to be traced."""
    if steps is None:
        return []
    return [named("embershard.extras.step_trace:StepTrace")(trainer, *steps, run_dir / TRACES)]


def _close(trainer: Trainer, console: Console, traces: Sequence[Any]) -> None:
    """Write what is left to be written, and say where traces are."""
    trainer.close()
    say(console, *(trace.describe() for trace in traces))


class _Outputs:
    def __init__(self, trainer: Trainer, run_dir: Path, resumed_at: int | None, console: Console) -> None:
        self._trainer, self._folder, self._console = trainer, run_dir, console
        self._record = RunRecord(run_dir, trainer.config, resumed_at, trainer.plan)
        self._trackers = (
            _trackers_of(trainer, run_dir, resumed_at, console) if trainer.config.tracking.trackers else None
        )
        may_end_early = trainer.config.train.early_stopping is not None
        self._display = ProgressDisplay(console, trainer.total_steps, trainer.steps, may_end_early=may_end_early)
        self._last: TrainReport | None = None
        self._evaluation: EvalReport | None = None

    def add(self, report: Report) -> None:
        is_new = self._record.add(report)  # what stands there from before a resume, trackers have, too
        if is_new and self._trackers is not None:
            self._trackers.add(report.kind, report.values())
        if isinstance(self._console, JsonLines):
            self._console.show(report_line(report))
        else:
            self._display.show(report)
        if isinstance(report, TrainReport):
            self._last = report
        elif isinstance(report, EvalReport):
            self._evaluation = report

    def finish(self, totals: Mapping[str, Any], same_run: str) -> None:
        self._display.close()
        result = make_result(self._trainer, self._last, self._evaluation, totals, self._record.windows())
        result.write(self._folder)
        if self._trackers is not None:
            self._trackers.finish(result.to_dict())
        if isinstance(self._console, JsonLines):
            self._console.show({"kind": "result", "time": time_now(), **result.to_dict()})
            return
        config = self._trainer.config
        self._console.print(closing_table(result, f"{config.model.title} on {config.data.kind} data"))
        other, change = _next_run(self._trainer, is_cached=result.cache is not None)
        if config.publish.folder is not None:  # it is that of one run
            change += f" --set publish.folder={shlex.quote(f'{config.publish.folder}_2')}"
        report = f"embershard report {shlex.quote(str(self._folder))} -o report.html"
        lines = {"Look at it as a page, with curves:": report}
        if "tensorboard" in config.tracking.trackers:
            board = program_words("tensorboard", "tensorboard.main")
            lines["Or in TensorBoard:"] = f"{board} --logdir {shlex.quote(str(self._folder))}"
        lines[f"Next, the same run {other}:"] = f"{same_run} {change}"
        say(
            self._console,
            *(summary for part in self._trainer.parts if (summary := part.summary())),
            f"Everything is in {self._folder}: result.json, metrics.jsonl, config.toml, checkpoints/.",
            *(line for what, command in lines.items() for line in (what, f"    {command}")),
        )

    def close(self) -> None:
        self._display.close()
        if self._trackers is not None:
            self._trackers.close()
        self._record.close()


def _trackers_of(trainer: Trainer, run_dir: Path, resumed_at: int | None, console: Console) -> Trackers:
    from embershard.reports.tracking.run import TrackedRun
    from embershard.reports.tracking.trackers import Trackers

    config, ranks = trainer.config, trainer.ranks
    run = TrackedRun(
        run_dir,
        flat(dataclasses.asdict(config)),
        config.tracking,
        resumed_at,
        ranks.world_size,
        global_batch(config, ranks.world_size),
        trainer.source.chunks("train").num_samples,
        _device_of(ranks),
    )
    return Trackers(run, partial(say, console))


def _device_of(ranks: Ranks) -> str:
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
    return f"{ranks.world_size} x {device}"


def _next_run(trainer: Trainer, is_cached: bool) -> tuple[str, str]:
    """Return what to compare a run with, and the arguments for that."""
    config = trainer.config
    mode = config.sharding.mode
    tables = () if trainer.plan is None or not is_cached else trainer.plan.tables
    if config.data.has_ids or any(each.kernel == "replicated" for each in tables):  # which need a cache to train so
        other = "lfu" if config.cache.policy == "lru" else "lru"
        return f"with another policy of the cache, {other} (same losses)", f"--set cache.policy={other}"
    if mode == "hot_cold":
        change = "--set sharding.mode=sharded --set sharding.hot_bytes=none"
        return "without copies of hot rows (another order of the samples)", change
    if mode == "data_parallel":
        return "with sharded tables (losses differ by rounding)", "--set sharding.mode=sharded"
    if config.cache.rounds_rows:  # which has no effect without a cache
        return "with host rows of fp32 (losses differ by rounding)", as_in_slots(config.cache)
    other = "with all rows on the device" if is_cached else "with a cache"
    change = f"--set cache.enabled={str(not is_cached).lower()}"
    with suppress(ConfigError):  # with other settings of the run
        whole = dataclasses.replace(config, cache=dataclasses.replace(config.cache, enabled=not is_cached))
        change += larger_limit(whole, trainer.ranks, trainer.plan)
    return f"{other} (same losses; compare speed and memory)", change


def _resume(
    trainer: Trainer, run_dir: Path, console: Console, step: int | None, unverified: bool, changes: Sequence[str]
) -> int:
    resumed = resume_run(trainer, step=step, allow_unverified=unverified, allow_changes=changes)
    trainer.ranks.from_first(lambda: note_resume(run_dir))
    say(console, *(f"Not used: {reason}." for reason in resumed.skipped))
    if resumed.checkpoint is None:
        say(console, f"No complete checkpoint in {trainer.checkpoints}; starting from the beginning.")
        return 0
    if not resumed.is_verified:
        say(console, f"{resumed.checkpoint} has no manifest: nothing of it was verified.")
    if resumed.comparison is not None:
        say(console, *resumed.comparison.notes)
    if resumed.set_aside:
        say(console, f"Set aside in {trainer.checkpoints}: {', '.join(resumed.set_aside)}.")
    say(console, f"Continuing from {resumed.checkpoint} at step {trainer.steps}.")
    return trainer.steps


def _announce(trainer: Trainer, console: Console, run_dir: Path, same_run: str) -> None:
    """Show what trains, and note in the folder how it was started."""
    config, ranks, tables = trainer.config, trainer.ranks, tables_of_run(trainer.config)
    model = ModelSummary.of(unwrapped(trainer.model.module), tables, sharded_modules(trainer.model))
    if ranks.is_first:
        Start.now(trainer.steps, same_run, _device_of(ranks), model).add_to(run_dir)
    kind = "GPU" if ranks.device.type == "cuda" else "CPU"
    dims = " and ".join(map(str, sorted({table.dim for table in tables})))
    num_ranks = "1 rank" if ranks.world_size == 1 else f"{ranks.world_size} ranks"
    threads = "1 thread" if torch.get_num_threads() == 1 else f"{torch.get_num_threads()} threads"
    steps = "" if trainer.total_steps is None else f"{trainer.total_steps:,} "
    notes = [] if trainer.plan is None else _plan_notes(trainer.plan, config, ranks)
    notes += [note for part in trainer.parts for note in part.notes()]
    notes += host_type_notes(config.cache, table_sizes(config, table_rows(config)))
    if trainer.memory_warning:
        notes.append(trainer.memory_warning)
    if config.cache.enabled and (trainer.steps or config.cache.policy_for(config.has_profile).warmup):
        rows = (
            "the rows that they held at the checkpoint"
            if trainer.steps
            else "the rows that the profile counted most often"
        )
        notes.append(f"The first step takes longer: it fills the caches with {rows}.")
    say(
        console,
        f"{config.model.title}: {len(tables)} tables with {sum(table.num_rows for table in tables):,} rows of "
        f"dim {dims}; {num_ranks} on {kind}, {threads} each; {steps}steps of "
        f"{global_batch(config, ranks.world_size):,} samples; run folder {run_dir}",
        *model.lines,
        *trainer.source.notes,
        *_step_notes(trainer),
        *notes,
    )


def _step_notes(trainer: Trainer) -> list[str]:
    """Return which parts of a step take the shorter way, and why others do not."""
    if not trainer.config.cache.enabled:
        return []
    modules = sharded_modules(trainer.model).values()
    reasons = [reason for module in modules if (reason := why_no_route(module))]
    if not trainer.config.look_ahead.lookahead:
        reasons = ["look_ahead.lookahead is 0"]
    ids = [f"Ids and rows travel as in TorchRec: {reasons[0]}."] if reasons else []
    if not reasons and trainer.ranks.world_size > 1:
        ids = ["Ids and rows travel in one all-to-all each."]
    reason = trainer.dense_call.reason
    return [
        *ids,
        f"The dense layers train as in DDP. {reason}" if reason else "The dense layers train in one call.",
    ]


def _plan_notes(plan: Plan, config: RunConfig, ranks: Ranks) -> list[str]:
    """Return what the reader should know of the plan that this run obeys."""
    notes = [f"Tables and caches are placed by {config.sharding.plan} ({plan.digest})."]
    if not config.cache.enabled:
        return [*notes, "Without a cache: the tables that it caches are whole on the device, at the same places."]
    size = [name for name in ("ratio", "device_bytes") if getattr(config.cache, name) is not None]
    if size:
        notes.append(f"cache.{size[0]} was for planning: the plan's slots apply.")
    if plan.prediction is None:
        return [*notes, "The plan has no prediction to compare this run with."]
    return [*notes, *plan.other_settings(config.predicted_from(ranks.device.type, ranks.world_size))]
