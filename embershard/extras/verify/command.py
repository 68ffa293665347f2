"""`embershard verify`: the first steps of a run with the cache and with stock TorchRec, compared bit for bit."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:  # it loads torch, and --help must answer at once
    from embershard.extras.verify.equivalence import Equivalence

_SHOWN = 8  # differences
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
        say(plain_console(quiet=not ranks.is_first), *lines(verdict, ranks.world_size))
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


def lines(verdict: Equivalence, num_ranks: int) -> Iterator[str]:
    """Yield the verdict for the screen."""
    trained = f"{verdict.steps} steps on {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}"
    if not verdict.is_equal:
        yield f"DIFFERENT within {trained}, with the cache and with stock TorchRec."
    else:
        yield (
            f"EQUAL: {trained}, with the cache and with stock TorchRec: all losses and {verdict.num_tensors} tensors "
            f"of weights and optimizer states, bit for bit."
        )
    for number, cache in enumerate(verdict.caches, 1):
        result = "different" if number == len(verdict.caches) and not verdict.is_equal else "equal"
        yield (
            f"  {cache.slots:,} slots: {result}; {cache.evictions:,} rows were evicted, and "
            f"{cache.passed_over:,} times a slot was passed over because a batch pinned it"
        )
    if verdict.is_equal:
        if not verdict.caches[-1].evictions:
            yield "No row was evicted, so this says little about the cache."
        if not verdict.caches[-1].passed_over:
            yield (
                "No pin mattered, in no size of the cache that was tried: a cache that evicts rows in use would have "
                "been equal, too. Compare more steps (--steps), or larger batches (--set train.batch_size=...)."
            )
        return
    if verdict.loss_step is not None:
        yield f"The first loss that differs is that of step {verdict.loss_step}."
    if verdict.step is None:
        yield "All weights and optimizer states are equal: the forward reads other rows than it trains."
        return
    when = "before the first step" if verdict.step == 0 else f"after step {verdict.step}"
    yield f"Weights or optimizer states differ first {when}, in {len(verdict.differences)} tensors:"
    for found in verdict.differences[:_SHOWN]:
        yield (
            f"  {found.tensor}, row {found.row:,} on rank {found.rank}: {found.cached!r} with the cache, "
            f"{found.stock!r} with stock TorchRec ({found.num_rows:,} rows differ)"
        )
    if len(verdict.differences) > _SHOWN:
        yield f"  and {len(verdict.differences) - _SHOWN} more"
