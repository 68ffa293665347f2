"""`embershard train`: checks the settings, then starts the ranks on this machine; under torchrun it is a rank."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from embershard import distributed  # its names load torch, and a launcher needs it not
from embershard.commands.data.command import add_choices, choice_words
from embershard.commands.train.from_data import check_no_choices, is_data, with_settings
from embershard.commands.train.warm_start import add_warm_start, frozen_overrides, warm_start_of, words_of
from embershard.data.sources.check import check_data
from embershard.errors import ConfigError
from embershard.launch import launcher
from embershard.launch.arguments import (
    NEWEST,
    add_config_word,
    add_run_arguments,
    as_called,
    check_resume,
    make_parser,
    needed_config,
    positive,
    refuse_starters,
    set_words,
    trust_words,
    whole,
)
from embershard.launch.launcher import default_ranks, has_small_batches, planned_ranks, warn_of_cores
from embershard.launch.rank import PROGRAM, Job, is_rank, run_rank
from embershard.launch.run_dir import check_run_dir, default_run_dir, was_resumed_by_this_job
from embershard.launch.stop_signals import stop_code
from embershard.lazy_names import named
from embershard.machine import THREADS_VARIABLE, RankThreads, cores_of_a_rank
from embershard.settings.decoding import to_toml
from embershard.settings.files import load_config
from embershard.training.config import RunConfig
from embershard.training.warm_start import WarmStart

_HELP = """Train on this machine; CONFIG may be data, with the options of data inspect.

All settings: embershard settings. On several machines: docs/operations.md.

  embershard train quickstart --set train.max_steps=100
  embershard train shop.csv --label 'rating>=4' --drop session
  embershard train run.toml --plan plan.json --run-dir runs/a --max-restarts 3
  embershard train run.toml --run-dir runs/mine --resume
"""


@dataclass(frozen=True)
class TrainJob(Job):
    """A training.

    Attributes:
        file, overrides: whence the settings are, for the commands that the first rank shows.
        resume: the step of a checkpoint, `NEWEST`, or None for a new run.
        unverified: resume from a checkpoint without a manifest, too.
        changes: settings that may have other values than in the checkpoint.
        profile_steps: the first and the last step that are traced.
        log_format: of what the first rank shows.
        start: what a new run begins with.
    """

    file: Path
    overrides: Sequence[str]
    resume: int | None
    unverified: bool
    changes: Sequence[str]
    profile_steps: tuple[int, int] | None
    log_format: Literal["text", "json"]
    start: WarmStart | None = None
    stops_in_order = True

    @staticmethod
    def of(arguments: argparse.Namespace) -> TrainJob:
        """Read the settings that the arguments name.

        Raises:
            ConfigError: they are wrong, or an argument has no effect.
        """
        check_resume(arguments)
        file, trust = needed_config(arguments), arguments.trust_code
        start, overrides = warm_start_of(arguments), arguments.overrides
        config = load_config(RunConfig, file, overrides, trust_code=trust, run_dir=arguments.run_dir)
        if frozen := frozen_overrides(arguments, config):
            overrides = [*overrides, *frozen]
            config = load_config(RunConfig, file, overrides, trust_code=trust, run_dir=arguments.run_dir)
        if config.model.build is None and (config.data.kind != "synthetic" or config.data.has_ids):
            from embershard.training.fit.model_size import check_tables  # it loads pyarrow

            check_tables(config)  # of one's own model, the ranks find the tables
        names = ("run_dir", "resume", "unverified", "profile_steps", "log_format")
        given = {name: getattr(arguments, name) for name in names} | {"changes": arguments.allow_change}
        return TrainJob(config, trust_code=trust, file=file, overrides=overrides, start=start, **given)

    def run(self, ranks: distributed.Ranks, supervision: distributed.Supervision) -> int:
        """Train; return 0, or 130 after Ctrl-C. Collective."""
        from embershard.commands.train.run import train_run

        run_dir = ranks.from_first(lambda: self.run_dir or default_run_dir(self.file))
        num_ranks = ranks.world_size if ranks.world_size == ranks.local_world_size else None
        train_run(
            self.config,
            ranks,
            run_dir,
            resume=ranks.from_first(lambda: resume_step(self.resume, run_dir)),
            unverified=self.unverified,
            changes=self.changes,
            same_run=self.same_run_command(num_ranks),
            go_on=self.resume_command(run_dir, num_ranks),
            supervision=supervision,
            profile_steps=self.profile_steps,
            log_format=self.log_format,
            start=self.start,
        )
        return stop_code(supervision.agreed)

    def restarted(self, has_trained: bool) -> TrainJob:
        """Return the job of ranks that are started again. A run that was to resume from a chosen step does so until it
        has trained: then there are newer ones."""
        return dataclasses.replace(self, resume=NEWEST if has_trained or self.resume is None else self.resume)

    def same_run_command(self, num_ranks: int | None) -> str:
        """Return the command of this run, without its choice of the cache; `num_ranks` as for `resume_command`."""
        overrides = [text for text in self.overrides if not text.startswith("cache.enabled")]
        return f"{self._command(overrides, num_ranks)} {shlex.join(words_of(self.start))}".rstrip()

    def resume_command(self, run_dir: Path, num_ranks: int | None) -> str:
        """Return the command that continues the run; `num_ranks` is None where torchrun on several nodes started it."""
        return f"{self._command(self.overrides, num_ranks)} --run-dir {shlex.quote(str(run_dir))} --resume"

    def _command(self, overrides: Sequence[str], num_ranks: int | None) -> str:
        if num_ranks is None:
            return "torchrun as before, with"
        words = ["train", "--config", str(self.file), *set_words(overrides), *trust_words(self.trust_code)]
        return as_called(f"embershard {shlex.join(words)} --nproc {num_ranks}")


def resume_step(step: int | None, run_dir: Path) -> int | None:
    """Return `step`; after a restart by torchrun, the newest one, which is of this run unless it was to go on from a
    chosen step and died before it did."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return step
    return NEWEST if step is None or was_resumed_by_this_job(run_dir) else step


def main(argv: Sequence[str]) -> int:
    """Run `embershard train`: start the ranks, or be one of those that torchrun started. Return the exit code."""
    if is_rank():
        return run_rank(lambda: rank_job(argv), stops_in_order=TrainJob.stops_in_order)
    arguments = _parser(starts_ranks=True).parse_intermixed_args(argv)
    if arguments.config is None:
        raise ConfigError(
            "train on what? Give data, as clicks.csv; a TOML file of settings; or an example: quickstart."
        )
    if is_data(arguments.config):
        arguments = with_settings(arguments)
    else:
        check_no_choices(arguments)
    job = TrainJob.of(arguments)
    config = job.config
    if config.tracking.trackers:
        from embershard.reports.tracking.trackers import check_trackers

        check_trackers(config.tracking)
    num_ranks = planned_ranks(config, arguments.nproc, is_started=not arguments.dry_run)
    run_dir = arguments.run_dir or default_run_dir(job.file)
    check_run_dir(run_dir, resume=job.resume is not None or arguments.dry_run)
    if arguments.dry_run:
        if num_ranks is not None or config.train.global_batch_size is None:
            config.train.rank_batch_size(num_ranks or 1)
        if config.data.deal == "cost":
            named("embershard.extras.deal.refused:check_run")(config, num_ranks)
        _print_settings(job, num_ranks or (1 if has_small_batches(config) else 2))
        return 0
    num_ranks = num_ranks or default_ranks(config)
    warn_of_cores(config, num_ranks)
    config.train.rank_batch_size(num_ranks)  # raises before any rank starts
    job = dataclasses.replace(job, run_dir=run_dir)
    return launcher.start_ranks(
        num_ranks,
        PROGRAM,
        job=job,
        most_restarts=arguments.max_restarts,
        restarted=job.restarted,
        hang_seconds=arguments.hang_seconds or None,
        stacks=run_dir / "stacks.txt",
    )


def rank_job(argv: Sequence[str]) -> TrainJob:
    """Return the job of a rank that torchrun started with these arguments."""
    arguments = _parser(starts_ranks=False).parse_intermixed_args(argv)
    if is_data(arguments.config):
        data = shlex.join([str(arguments.config), *choice_words(arguments)])
        raise ConfigError(
            f"{arguments.config} is data, and torchrun starts every rank with it. Write the settings once: embershard "
            f"data inspect {data} -o run.toml; then give run.toml."
        )
    check_no_choices(arguments)
    return TrainJob.of(arguments)


def _print_settings(job: TrainJob, num_ranks: int) -> None:
    """Check the data, and print the settings, in how many threads as many ranks on a CPU compute, and what one's own
    model has to train."""
    check_data(job.config.data, job.config.metrics.columns)
    own = ""
    if job.config.model.build is not None:
        from embershard.reports.progress import describe_own  # it loads TorchRec

        own = describe_own(job.config)  # first of all: it may fail
    print(to_toml(job.config))
    if job.config.train.device != "cuda" and job.config.data.kind != "synthetic":  # else nothing has loaded pyarrow
        print(_describe_threads(job.config, num_ranks))
    if own:
        print(own)
    if job.start is not None:
        plan_start = named("embershard.extras.warm_start.start:plan_start")  # it loads TorchRec
        print("\n".join(f"# {line}" for line in str(plan_start(job.start, job.config)).splitlines()))
    if job.resume is not None:
        print("# The checkpoint was not looked at: a run that resumes compares its settings with these.")


def _describe_threads(config: RunConfig, num_ranks: int) -> str:
    from embershard.training.fit.model_size import step_flops  # it loads pyarrow

    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    threads, why = os.environ.get(THREADS_VARIABLE), f"by {THREADS_VARIABLE}"
    if threads is None:
        found = RankThreads.for_step(step_flops(config, num_ranks), cores_of_a_rank(num_ranks))
        threads, why = str(found.count), f"{found.why} ({THREADS_VARIABLE}: another number)"
    return f"# Threads of each of {ranks} on a CPU: {threads}; {why}."


def _parser(*, starts_ranks: bool) -> argparse.ArgumentParser:
    parser = make_parser("train", _HELP, "[CONFIG] [options]")
    add_run_arguments(parser)
    add_config_word(parser)
    add_choices(parser, is_brief=True)
    add_warm_start(parser)
    text = "json: a line of JSON per report, and for the result"
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help=text)
    if not starts_ranks:
        refuse_starters(parser, "--nproc", "--max-restarts", "--hang-seconds", "--dry-run")
        return parser
    text = "ranks (default: GPUs, or 2; 1 of small batches)"
    parser.add_argument("--nproc", type=positive, metavar="N", help=text)
    text = "start failed ranks again, at most N times (default: 0)"
    parser.add_argument("--max-restarts", type=whole, default=0, metavar="N", help=text)
    launcher.add_hang_seconds(parser)
    text = "check the settings, the columns of the data and one's own model, print all settings, and stop"
    parser.add_argument("--dry-run", action="store_true", help=text)
    return parser


if __name__ == "__main__":
    from embershard.commands.cli import main as embershard  # jobs are pickled by this module's name

    sys.exit(embershard(["train", *sys.argv[1:]]))
