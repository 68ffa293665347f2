"""The command ``embershard``: train, profile, plan, report, doctor, --version."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence

from embershard import __version__
from embershard.errors import ConfigError, EmbershardError

_MOST_LOCAL_RANKS = 64  # more processes on one machine are nobody's default

_TRAIN_HELP = """Train a model on this machine: one process per GPU, or 2 on the CPU.

On several machines, start the ranks with torchrun instead:
  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 \\
      -m embershard.launch.train.command --config run.toml --run-dir /shared/run1
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 well, 1 failed, 2 wrong usage or settings."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["doctor"]:
        from embershard.launch.doctor.command import main as doctor

        return doctor(arguments[1:])
    if arguments[:1] == ["train"]:
        return train(arguments[1:])
    if arguments[:1] == ["profile"]:
        from embershard.launch.profile.command import main as profile

        return profile(arguments[1:])
    if arguments[:1] == ["plan"]:
        from embershard.launch.plan.command import main as plan

        return plan(arguments[1:])
    if arguments[:1] == ["report"]:
        from embershard.launch.report.command import main as report

        return report(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="embershard",
        description="Train recommendation models whose embedding tables are larger than device memory.",
    )
    parser.add_argument("--version", action="version", version=f"embershard {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("train", help="train a model (embershard train --help lists all settings)")
    commands.add_parser("profile", help="count how often every row of a data set is looked up, or show such a profile")
    commands.add_parser("plan", help="place tables and size caches, without a GPU at hand; predict memory and speed")
    commands.add_parser("report", help="set what a plan predicted beside what a run measured")
    commands.add_parser("doctor", help="check whether this machine can train, and say what to do if not")
    parser.parse_args(arguments)
    return 2  # unreachable: every known command was taken above


def train(argv: Sequence[str]) -> int:
    """``embershard train``: checks the settings, then starts the ranks."""
    # Imported here, because it loads torch and TorchRec, and the other commands must answer at once.
    from embershard.decoding import to_toml
    from embershard.launch.config import load_config
    from embershard.launch.record import check_run_dir
    from embershard.launch.train.command import default_run_dir
    from embershard.launch.train.local import default_num_ranks, start_ranks
    from embershard.sharding.plan import Plan
    from embershard.training.config import RunConfig

    arguments = _train_parser().parse_args(argv)
    run_dir = arguments.run_dir or default_run_dir(arguments.config)
    try:
        config = load_config(RunConfig, arguments.config, arguments.overrides)
        plan = None if config.sharding.plan is None else Plan.load(config.sharding.plan)
        num_ranks = arguments.nproc or (plan.world_size if plan else None)
        if plan is not None and arguments.nproc is None and plan.ranks_per_node != plan.world_size:
            raise ConfigError(
                f"the plan is for {plan.world_size} ranks on {plan.world_size // plan.ranks_per_node} nodes, and this "
                "command starts those of one; start them with torchrun (embershard train --help)."
            )
        if plan is not None and arguments.nproc is None and plan.world_size > _MOST_LOCAL_RANKS:
            raise ConfigError(
                f"the plan is for {plan.world_size} ranks on one node; say --nproc {plan.world_size} if you mean it."
            )
        if plan is not None and num_ranks is not None and not arguments.dry_run:
            plan.check_ranks(num_ranks, num_ranks)  # all of them on this machine
        check_run_dir(run_dir, resume=arguments.resume or arguments.dry_run)
    except EmbershardError as error:
        print(f"embershard: {error}", file=sys.stderr)
        return 2
    if arguments.resume and arguments.run_dir is None:
        print("embershard: --resume needs --run-dir, the folder of the run to continue.", file=sys.stderr)
        return 2
    if arguments.dry_run:
        print(to_toml(config))
        return 0
    if num_ranks is None:
        num_ranks = 2 if config.train.device == "cpu" else default_num_ranks()
        print(f"embershard: starting {num_ranks} ranks (--nproc N for another number).", flush=True)
    passed = [
        "--config",
        str(arguments.config),
        "--run-dir",
        str(run_dir),
        *(["--resume"] if arguments.resume else []),
    ]
    passed += [part for override in arguments.overrides for part in ("--set", override)]
    return start_ranks(num_ranks, "embershard.launch.train.command", passed)


def _train_parser() -> argparse.ArgumentParser:
    from embershard.launch.train.command import add_run_arguments

    parser = argparse.ArgumentParser(
        prog="embershard train", description=_TRAIN_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_arguments(parser)
    parser.add_argument("--nproc", type=_positive, metavar="N", help="number of ranks (default: GPUs, or 2)")
    parser.add_argument("--dry-run", action="store_true", help="check the settings, print all of them, and stop")
    parser.epilog = "settings, for the TOML file and --set:\n\n" + _settings_reference()
    return parser


def _settings_reference() -> str:
    from embershard.launch.config import describe
    from embershard.training.config import RunConfig

    blocks = []
    for setting in describe(RunConfig()):
        head = f"  {setting.key}    {setting.type}    (default: {setting.default})"
        body = textwrap.fill(setting.doc, width=100, initial_indent=" " * 8, subsequent_indent=" " * 8)
        blocks.append((f"{head}\n{body}" if setting.doc else head).replace("%", "%%"))
    return "\n".join(blocks)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"needed at least 1, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
