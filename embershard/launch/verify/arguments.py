"""Arguments that `embershard verify` and the program of each rank have in common."""

from __future__ import annotations

import argparse

from embershard.launch.arguments import add_plan, add_settings, add_trust, positive


def add_comparison(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add `--config FILE`, which may be `required`, `--set KEY=VALUE`, `--plan FILE`, `--trust-code` and
    `--steps N`."""
    add_settings(parser, required=required)
    add_plan(parser)
    add_trust(parser)
    parser.add_argument(
        "--steps", type=positive, default=32, metavar="N", help="steps to train with each (default: %(default)s)"
    )
