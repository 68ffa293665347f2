"""`embershard verify`: starts the ranks that compare a run with stock TorchRec."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from embershard.launch.arguments import add_config_word, make_parser, needed_config, positive, set_words, trust_words
from embershard.launch.config import load_config
from embershard.launch.ranks import launcher
from embershard.launch.ranks.launcher import default_ranks, planned_ranks
from embershard.launch.verify.arguments import add_comparison
from embershard.training.config import RunConfig

_HELP = """Train the first steps of a run twice, with the cache and with stock TorchRec, and compare every bit of
losses, weights and optimizer states; where both are equal, again with ever smaller caches, until rows that a batch uses
were often in the way of an eviction. Nothing is kept. Both need the memory of their tables at the same time.
Exit codes: 0 equal; 1 different; 2 wrong usage, settings or data.

On several machines, torchrun starts the ranks: -m embershard.launch.verify.command --config run.toml.

  embershard verify run.toml
  embershard verify run.toml --nproc 4 --steps 200 --set cache.ratio=0.005
"""


def main(argv: Sequence[str]) -> int:
    """Run `embershard verify`; return the exit code."""
    parser = make_parser("verify", _HELP)
    add_comparison(parser, required=False)
    add_config_word(parser)
    parser.add_argument("--nproc", type=positive, metavar="N", help="number of ranks (default: as embershard train)")
    arguments = parser.parse_intermixed_args(argv)
    config = load_config(RunConfig, needed_config(arguments), arguments.overrides, trust_code=arguments.trust_code)
    num_ranks = planned_ranks(config, arguments.nproc) or default_ranks(config)
    config.train.rank_batch_size(num_ranks)  # raises before any rank starts
    given = ["--config", str(arguments.config), "--steps", str(arguments.steps)]
    given += set_words(arguments.overrides) + trust_words(arguments)
    with tempfile.TemporaryDirectory() as folder:
        different = Path(folder) / "different"
        code = launcher.start_ranks(
            num_ranks, "embershard.launch.verify.command", [*given, "--mark-difference", str(different)]
        )
        return 1 if different.exists() else code
