"""`embershard train`: checks the settings, then starts the ranks on this machine."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence

from embershard.decoding import to_toml
from embershard.errors import ConfigError
from embershard.launch.arguments import NEWEST, add_run_arguments, check_resume, make_parser, positive, whole
from embershard.launch.config import describe, load_config
from embershard.launch.ranks import launcher
from embershard.launch.run_dir import check_run_dir, default_run_dir
from embershard.sharding.plan import Plan
from embershard.training.config import RunConfig

_MOST_LOCAL_RANKS = 64  # above it, the number of processes must be asked for

_HELP = """Train a model on this machine: one process per GPU, or 2 on the CPU.

On several machines, start the ranks with torchrun instead:
  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 \\
      -m embershard.launch.train.command --config run.toml --run-dir /shared/run1
"""


def main(argv: Sequence[str]) -> int:
    """Run `embershard train`; return 0 when all ranks ended well."""
    arguments = _parser().parse_args(argv)
    check_resume(arguments)
    config = load_config(RunConfig, arguments.config, arguments.overrides)
    num_ranks = arguments.nproc
    if config.sharding.plan is not None:
        num_ranks = _planned_ranks(Plan.load(config.sharding.plan), num_ranks, arguments.dry_run)
    run_dir = arguments.run_dir or default_run_dir(arguments.config)
    check_run_dir(run_dir, resume=arguments.resume is not None or arguments.dry_run)
    if arguments.dry_run:
        print(to_toml(config))
        return 0
    if num_ranks is None:
        num_ranks = 2 if config.train.device == "cpu" else launcher.default_num_ranks()
        print(f"embershard: starting {num_ranks} ranks (--nproc N for another number).", flush=True)
    config.train.rank_batch_size(num_ranks)  # raises before any rank starts
    given = ["--config", str(arguments.config), "--run-dir", str(run_dir)]
    given += [word for override in arguments.overrides for word in ("--set", override)]
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


def _planned_ranks(plan: Plan, nproc: int | None, dry_run: bool) -> int:
    """Return `nproc`, or the plan's number of ranks; raise `ConfigError` where this command may not start them."""
    if nproc is None and plan.ranks_per_node != plan.world_size:
        raise ConfigError(
            f"the plan is for {plan.world_size} ranks on {plan.world_size // plan.ranks_per_node} nodes, and this "
            "command starts those of one; start them with torchrun (embershard train --help)."
        )
    if nproc is None and plan.world_size > _MOST_LOCAL_RANKS:
        raise ConfigError(
            f"the plan is for {plan.world_size} ranks on one node; say --nproc {plan.world_size} if you mean it."
        )
    num_ranks = nproc or plan.world_size
    if not dry_run:
        plan.check_ranks(num_ranks, num_ranks)  # all of them on this machine
    return num_ranks


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("train", _HELP)
    add_run_arguments(parser)
    parser.add_argument("--nproc", type=positive, metavar="N", help="number of ranks (default: GPUs, or 2)")
    parser.add_argument(
        "--max-restarts",
        type=whole,
        default=0,
        metavar="N",
        help="start ranks that failed again, at most N times, from the newest valid checkpoint (default: 0)",
    )
    parser.add_argument(
        "--hang-seconds",
        type=whole,
        default=int(launcher.HANG_SECONDS),
        metavar="S",
        help="end ranks that do nothing for so long, and name the one that hangs (default: %(default)s; 0: never)",
    )
    parser.add_argument("--dry-run", action="store_true", help="check the settings, print all of them, and stop")
    parser.epilog = "settings, for the TOML file and --set:\n\n" + _settings_reference()
    return parser


def _settings_reference() -> str:
    lines = []
    for setting in describe(RunConfig()):
        lines.append(f"  {setting.key}    {setting.type}    (default: {setting.default})")
        lines += textwrap.wrap(setting.doc, width=100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines).replace("%", "%%")
