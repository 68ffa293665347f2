"""Runs in which the loss of one rank is not finite."""

from __future__ import annotations

from pathlib import Path

import torch

from embershard.errors import NotFiniteError
from tests.ranks.planned import here
from tests.unit.training.poisoned import config_of, losses, run


def skip_batches(bad_rank: int, cache: str, left_out: set[int]) -> tuple[bool, list[str], list[str]]:
    """Train while `bad_rank` has a poisoned batch, and without these batches: are the losses equal, which tensors
    differ, and what this rank said of the skipped batches."""
    ranks = here()
    config, bad = config_of(cache, batch_size=50), {2, 7, 12}
    reports, state, _ = run(config, ranks, poisoned=bad if ranks.rank == bad_rank else ())
    without, expected, _ = run(config, ranks, left_out=left_out)
    different = [name for name, values in state.items() if not torch.equal(values, expected[name])]
    return losses(reports) == losses(without), different, [r.reason for r in reports if hasattr(r, "reason")]


def stop(folder: Path, bad_rank: int) -> str:
    """Train until `bad_rank` has a poisoned batch; return the error."""
    ranks = here()
    try:
        run(config_of("cached", "stop", batch_size=50), ranks, folder, poisoned={7} if ranks.rank == bad_rank else ())
    except NotFiniteError as error:
        return str(error)
    return ""
