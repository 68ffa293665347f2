"""`embershard verify`: the first steps of a run with the cache and with stock TorchRec, compared bit for bit."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from embershard import distributed
from embershard.launch import launcher
from embershard.launch.arguments import (
    add_config_word,
    add_plan,
    add_settings,
    add_trust,
    make_parser,
    needed_config,
    positive,
    refuse_starters,
)
from embershard.launch.launcher import default_ranks, planned_ranks
from embershard.launch.rank import PROGRAM, Job, is_rank, run_rank
from embershard.launch.screen import plain_console, say
from embershard.settings.files import load_config
from embershard.training.config import RunConfig

_MORE_PINS = "Compare more steps (--steps), or larger batches (--set train.batch_size=...)."
_HELP = """Train the first steps of a run twice, with the cache and with stock TorchRec, and compare every bit of
losses, weights and optimizer states; where both are equal, again with ever smaller caches, until rows that a batch uses
were often in the way of an eviction. Nothing is kept. Both need the memory of their tables at the same time.
Exit codes: 0 equal; 1 different; 2 wrong usage, settings or data.

On several machines, torchrun starts the ranks: -m embershard verify run.toml.

  embershard verify run.toml
  embershard verify run.toml --nproc 4 --steps 200 --set cache.ratio=0.005
"""


@dataclass(frozen=True)
class VerifyJob(Job):
    """A comparison with stock TorchRec.

    Attributes:
        steps: to train with each.
        mark: a file that is made where they differ; the exit code is 0 then, since no rank failed.
    """

    steps: int
    mark: Path | None = None

    @staticmethod
    def of(arguments: argparse.Namespace) -> VerifyJob:
        """Read the settings that the arguments name."""
        file, trust = needed_config(arguments), arguments.trust_code
        config = load_config(RunConfig, file, arguments.overrides, trust_code=trust)
        config = replace(config, train=replace(config.train, deterministic=True))  # before CUDA starts
        return VerifyJob(config, None, trust, arguments.steps)

    def run(self, ranks: distributed.Ranks, supervision: distributed.Supervision) -> int:
        """Compare; return 0 for equal, 1 for different. Collective."""
        from embershard.extras.verify.equivalence import compare_with_stock

        verdict = compare_with_stock(self.config, ranks, self.steps)
        say(plain_console(quiet=not ranks.is_first), *verdict.lines(_MORE_PINS))
        if not verdict.is_equal and self.mark is not None:
            self.mark.touch()
        return 0 if verdict.is_equal or self.mark is not None else 1


def main(argv: Sequence[str]) -> int:
    """Run `embershard verify`: start the ranks, or be one of those that torchrun started. Return the exit code."""
    if is_rank():
        return run_rank(lambda: VerifyJob.of(_parser(starts_ranks=False).parse_intermixed_args(argv)))
    arguments = _parser(starts_ranks=True).parse_intermixed_args(argv)
    job = VerifyJob.of(arguments)
    num_ranks = planned_ranks(job.config, arguments.nproc) or default_ranks(job.config)
    job.config.train.rank_batch_size(num_ranks)  # raises before any rank starts
    with tempfile.TemporaryDirectory() as folder:
        different = Path(folder) / "different"
        code = launcher.start_ranks(num_ranks, PROGRAM, job=replace(job, mark=different))
        return 1 if different.exists() else code


def _parser(*, starts_ranks: bool) -> argparse.ArgumentParser:
    parser = make_parser("verify", _HELP)
    add_settings(parser)
    add_plan(parser)
    add_trust(parser)
    text = "steps to train with each (default: %(default)s)"
    parser.add_argument("--steps", type=positive, default=32, metavar="N", help=text)
    add_config_word(parser)
    if starts_ranks:
        text = "number of ranks (default: as embershard train)"
        parser.add_argument("--nproc", type=positive, metavar="N", help=text)
    else:
        refuse_starters(parser, "--nproc")
    return parser
