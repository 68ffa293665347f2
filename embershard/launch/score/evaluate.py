"""`embershard eval`: the quality of a trained model on samples with labels."""

from __future__ import annotations

from collections.abc import Sequence

from embershard.launch.score.start import parser_of, start

_HELP = """Measure a trained model, from the newest valid checkpoint of a run, on the samples that the run holds out, or
on others. What it prints for the former is what training printed at that step.

  embershard eval runs/mine
  embershard eval runs/mine --data new.parquet
"""


def main(argv: Sequence[str]) -> int:
    """Run `embershard eval`; return the exit code."""
    return start(parser_of("eval", _HELP).parse_args(argv), [])
