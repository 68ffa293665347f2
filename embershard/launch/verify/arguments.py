"""Arguments that `embershard verify` and the program of each rank have in common."""

from __future__ import annotations

import argparse

from embershard.launch.arguments import positive


def add_steps(parser: argparse.ArgumentParser) -> None:
    """Add `--steps N`."""
    parser.add_argument(
        "--steps", type=positive, default=32, metavar="N", help="steps to train with each (default: %(default)s)"
    )
