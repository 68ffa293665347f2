"""`embershard train`: checks the settings, then starts the ranks on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from embershard.data.sources.check import check_data
from embershard.decoding import to_toml
from embershard.launch.arguments import (
    NEWEST,
    add_config_word,
    add_run_arguments,
    check_resume,
    make_parser,
    positive,
    profile_words,
    set_words,
    trust_words,
    whole,
)
from embershard.launch.config import load_config
from embershard.launch.examples import needed_config
from embershard.launch.ranks import launcher
from embershard.launch.ranks.number import default_ranks, planned_ranks, warn_of_cores
from embershard.launch.run_dir import check_run_dir, default_run_dir
from embershard.launch.trackers import check_trackers
from embershard.training.config import RunConfig

_HELP = """Train a model on this machine: one process per GPU, or 2 on the CPU.

All settings: embershard settings. On several machines, start the ranks with torchrun (docs/training.md).

  embershard train quickstart --set train.max_steps=100
  embershard train run.toml --plan plan.json --run-dir runs/mine --max-restarts 3
  embershard train run.toml --run-dir runs/mine --resume
"""


def main(argv: Sequence[str]) -> int:
    """Run `embershard train`; return 0 when all ranks ended well."""
    arguments = _parser().parse_intermixed_args(argv)
    check_resume(arguments)
    file, trust = needed_config(arguments), arguments.trust_code
    config = load_config(RunConfig, file, arguments.overrides, trust_code=trust, run_dir=arguments.run_dir)
    check_trackers(config.tracking)
    num_ranks = planned_ranks(config, arguments.nproc, is_started=not arguments.dry_run)
    run_dir = arguments.run_dir or default_run_dir(arguments.config)
    check_run_dir(run_dir, resume=arguments.resume is not None or arguments.dry_run)
    if arguments.dry_run:
        check_data(config.data)
        own = ""
        if config.model.build is not None:
            from embershard.launch.train.own_model import describe_own  # it loads TorchRec

            own = f"\n{describe_own(config)}"
        if arguments.resume is not None:
            own += "\n# The checkpoint was not looked at: a run that resumes compares its settings with these."
        print(f"{to_toml(config)}{own}")
        return 0
    num_ranks = num_ranks or default_ranks(config)
    warn_of_cores(config, num_ranks)
    config.train.rank_batch_size(num_ranks)  # raises before any rank starts
    given = ["--config", str(arguments.config), "--run-dir", str(run_dir)]
    given += set_words(arguments.overrides) + profile_words(arguments.profile_steps) + trust_words(arguments)
    allowed = ["--unverified"] if arguments.unverified else []
    allowed += [word for key in arguments.allow_change for word in ("--allow-change", key)]
    resume = [] if arguments.resume is None else _resume_words(arguments.resume, allowed)

    def restarted(has_trained: bool) -> list[str]:
        """A run that was to resume from a chosen step does so until it has trained: then there are newer ones."""
        return given + (_resume_words(NEWEST, allowed if resume else []) if has_trained or not resume else resume)

    return launcher.start_ranks(
        num_ranks,
        "embershard.launch.train.command",
        given + resume,
        restarts=launcher.Restarts(arguments.max_restarts, restarted),
        hang_seconds=arguments.hang_seconds or None,
        stacks=run_dir / "stacks.txt",
    )


def _resume_words(step: int, allowed: Sequence[str]) -> list[str]:
    return ["--resume", *([] if step == NEWEST else [str(step)]), *allowed]


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("train", _HELP, "[CONFIG] [options]")
    add_run_arguments(parser, required=False)
    add_config_word(parser)
    parser.add_argument("--nproc", type=positive, metavar="N", help="number of ranks (default: GPUs, or 2)")
    parser.add_argument(
        "--max-restarts",
        type=whole,
        default=0,
        metavar="N",
        help="start ranks that failed again, at most N times, from the newest valid checkpoint (default: 0)",
    )
    launcher.add_hang_seconds(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the settings, the columns of the data and one's own model, print all settings, and stop",
    )
    return parser
