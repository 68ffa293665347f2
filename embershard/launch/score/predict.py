"""`embershard predict`: the scores of samples, in a file."""

from __future__ import annotations

from collections.abc import Sequence

from embershard.launch.arguments import check_new_output
from embershard.launch.score.arguments import add_output
from embershard.launch.score.start import parser_of, start

_HELP = """Score samples with a trained model: from the newest valid checkpoint of a run to a Parquet file, streamed.

A row of the file is a sample, in the order of the samples: logit and score (the probability), both float32, and label
where the data have labels. See docs/serving.md.

  embershard predict runs/mine --data new.parquet -o scores.parquet
  embershard predict runs/mine -o held_out.parquet --nproc 2
"""


def main(argv: Sequence[str]) -> int:
    """Run `embershard predict`; return the exit code."""
    parser = parser_of("predict", _HELP)
    add_output(parser)
    arguments = parser.parse_args(argv)
    check_new_output(arguments.output)
    return start(arguments, ["-o", str(arguments.output)])
