"""`embershard profile`: the arguments of counting a data set, and of showing, merging and comparing such profiles."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from embershard.errors import ConfigError
from embershard.launch.arguments import add_settings, add_trust, check_output, make_parser, positive, whole
from embershard.units import parse_bytes

_HELP = """Count how often every row is looked up, in one pass over the training data.

The profile is what the planner, the policy "frequency" and the warm-up of a cache work with:
  embershard profile /data/criteo -o profile.npz --config run.toml
  embershard profile show profile.npz --png curves.png
  embershard profile merge monday.npz tuesday.npz -o both.npz
  embershard profile compare monday.npz tuesday.npz
"""
_MERGE_HELP = """Make one profile of several (of days or ranks), in the order in which they are given.

  embershard profile merge monday.npz tuesday.npz -o both.npz
"""
_COMPARE_HELP = """Say how well rows that profile A chose serve the data of profile B.

  embershard profile compare monday.npz tuesday.npz
"""
_SHOW_HELP = """Show what a profile found.

  embershard profile show profile.npz --png curves.png
"""


def main(argv: Sequence[str]) -> int:
    """Run `embershard profile` or one of its commands; return 0."""
    actions = {"show": _show_parser, "merge": _merge_parser, "compare": _compare_parser}
    is_action = bool(argv) and argv[0] in actions
    arguments = (actions[argv[0]] if is_action else _parser)().parse_args(argv[is_action:])
    if not is_action and arguments.data is None and arguments.config is None:
        raise ConfigError("what is to be counted? Give DATA (a file, a folder, or the word synthetic), or --config.")
    for name in ("output", "png"):
        if getattr(arguments, name, None) is not None:
            check_output(getattr(arguments, name))
    from embershard.commands.profile import run  # it loads torch and TorchRec, and --help must answer at once

    getattr(run, argv[0] if is_action else "collect")(arguments)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("profile", _HELP)
    text = "file, folder, or the word synthetic (./show is a file)"
    parser.add_argument("data", nargs="?", metavar="DATA", help=text)
    add_settings(parser)
    add_trust(parser)
    _add_outputs(parser)
    text = "processes that read and count (default: cores, fewer for small data)"
    parser.add_argument("--workers", type=int, metavar="N", help=text)
    text = "count on this machine, or in tasks of a Ray cluster: the same profile (default: %(default)s)"
    parser.add_argument("--on", choices=("local", "ray"), default="local", help=text)
    text = "read only this share of the samples; states the error"
    parser.add_argument("--sample", type=float, default=1.0, metavar="SHARE", help=text)
    text = "also choose hot rows for this memory, and read the data again for hot samples and their click rate"
    parser.add_argument("--hot", type=parse_bytes, metavar="BYTES", help=text)
    text = "memory for counts (4GiB); the rarest rows are forgotten to stay below it"
    parser.add_argument("--memory", type=parse_bytes, default="4GiB", metavar="BYTES", help=text)
    return parser


def _show_parser() -> argparse.ArgumentParser:
    parser = make_parser("profile show", _SHOW_HELP)
    parser.add_argument("profile", type=Path, help="file of a profile")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw hit rates against the size of the cache")
    parser.add_argument("--top", type=whole, default=20, metavar="N", help="show the N tables with most rows (20)")
    return parser


def _merge_parser() -> argparse.ArgumentParser:
    parser = make_parser("profile merge", _MERGE_HELP)
    parser.add_argument("profiles", type=Path, nargs="+", metavar="FILE", help="files of profiles")
    _add_outputs(parser)
    parser.add_argument("--batch-size", type=positive, default=1024, metavar="N", help="samples of a step (1024)")
    return parser


def _compare_parser() -> argparse.ArgumentParser:
    parser = make_parser("profile compare", _COMPARE_HELP)
    parser.add_argument("a", type=Path, metavar="A", help="file of a profile, say of the day before")
    parser.add_argument("b", type=Path, metavar="B", help="file of a profile, say of today")
    parser.add_argument("--top", type=whole, default=20, metavar="N", help="show the N tables with most lookups (20)")
    return parser


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="file to write")
    text = "most lookups to keep in their order, for replays (4000000); of more, a share of the rows is followed"
    parser.add_argument("--max-lookups", type=positive, default=4_000_000, metavar="N", help=text)
