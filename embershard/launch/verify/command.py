"""The program of each rank: `torchrun --nproc_per_node N -m embershard.launch.verify.command --config FILE [...]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from embershard.distributed import Supervision, process_group
from embershard.launch.config import load_config
from embershard.launch.ranks.rank_errors import show_errors_of_rank
from embershard.launch.screen import plain_console, say, silence_libraries
from embershard.launch.verify.arguments import add_comparison
from embershard.training.config import RunConfig
from embershard.training.quality.equivalence import Equivalence, compare_with_stock

_SHOWN = 8  # differences


@record
def main(argv: Sequence[str] | None = None) -> int:
    """Compare as one rank of a group, or alone; return 0 for equal, 1 for different."""
    parser = argparse.ArgumentParser(prog="python -m embershard.launch.verify.command", description=__doc__)
    add_comparison(parser, required=True)
    parser.add_argument("--mark-difference", type=Path, help=argparse.SUPPRESS)  # for the launcher; the exit code is 0
    arguments = parser.parse_args(argv)
    silence_libraries()
    show_errors_of_rank(Supervision.of_this_process())
    config = load_config(RunConfig, arguments.config, arguments.overrides, trust_code=arguments.trust_code)
    with process_group(config.train.device) as ranks:
        verdict = compare_with_stock(config, ranks, arguments.steps)
        say(plain_console(quiet=not ranks.is_first), *lines(verdict, ranks.world_size))
    if verdict.is_equal or arguments.mark_difference is None:
        return 0 if verdict.is_equal else 1
    arguments.mark_difference.touch()
    return 0


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
        yield from _weakness(verdict)
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


def _weakness(verdict: Equivalence) -> Iterator[str]:
    """Yield what the comparison of equal runs does not show."""
    last = verdict.caches[-1]
    if not last.evictions:
        yield "No row was evicted, so this says little about the cache."
    if not last.passed_over:
        yield (
            "No pin mattered, in no size of the cache that was tried: a cache that evicts rows in use would have been "
            "equal, too. Compare more steps (--steps), or larger batches (--set train.batch_size=...)."
        )


if __name__ == "__main__":
    sys.exit(main())
