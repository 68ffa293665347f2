"""`embershard data yambda`, which makes samples of Yambda's logs; and `yambda-like`, which generates such a log."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embershard.errors import naming_file
from embershard.launch.arguments import check_new_folder, help_parts, positive, whole
from embershard.launch.screen import plain_console, say
from embershard.settings.decoding import to_toml
from embershard.whole_file import whole_folder

if TYPE_CHECKING:
    from embershard.data.sources.yambda import Listens

_HELP = """Make samples of a log of music like Yambda's: a listen, its user's history before it, and whether at least
half of the track was played. A history has no event of the listen's moment or of a later one.

FILE is Yambda's multi_event.parquet, or its files of single types of events, flat or sequential. Written are a Parquet
file per day and run.toml, which trains a small HSTU on them, day by day (docs/dlrm_v4.md).

  embershard data yambda flat/5b/multi_event.parquet --metadata . --days 30 -o samples
  embershard train --config samples/run.toml
"""
_LIKE_HELP = """Generate a log of music with Yambda's published numbers and layout, to try everything without its
data. Which tracks are played to at least half can be foretold, in part, from user and item.

  embershard data yambda-like --scale 0.001 --events 200 --days 20 -o log
  embershard data yambda log/multi_event.parquet --history 99 --cross-scale 0.001 -o samples
"""
_NOTE = """# Samples that `embershard data yambda` made: {samples:,} listens of {users:,} users on {days} days.
# A small HSTU, to try them; examples/dlrm_v4.toml has the sizes of MLPerf Training's DLRMv4.

"""


def add_yambda(actions: Any) -> None:
    """Add both actions to `embershard data`."""
    text = "make samples of Yambda's logs of music, in time order"
    action = actions.add_parser("yambda", help=text, **help_parts(_HELP))
    action.add_argument("files", type=Path, nargs="+", metavar="FILE", help="the log")
    action.add_argument("-o", dest="output", type=Path, required=True, metavar="DIR", help="the new folder")
    text = "folder of artist_item_mapping.parquet and album_item_mapping.parquet (that of the first FILE)"
    action.add_argument("--metadata", type=Path, metavar="DIR", help=text)
    action.add_argument("--history", type=positive, default=4086, metavar="N", help="most events of a history (4086)")
    text = "events before a listen that becomes a sample (0)"
    action.add_argument("--min-history", type=whole, default=0, metavar="N", help=text)
    text = "of the log's clock: the first one with samples (0)"
    action.add_argument("--first-day", type=whole, default=0, metavar="N", help=text)
    action.add_argument("--days", type=positive, metavar="N", help="so many days with samples (all)")
    text = "rows of the crossed features' tables, relative to the reference's (1)"
    action.add_argument("--cross-scale", type=float, default=1.0, metavar="SHARE", help=text)
    action.set_defaults(run="yambda:make_samples")

    action = actions.add_parser("yambda-like", help="generate a log like Yambda's", **help_parts(_LIKE_HELP))
    action.add_argument("-o", dest="output", type=Path, required=True, metavar="DIR", help="the new folder")
    text = "users, items, artists and albums, relative to Yambda-5B (0.001)"
    action.add_argument("--scale", type=float, default=0.001, metavar="SHARE", help=text)
    action.add_argument("--events", type=positive, default=4763, metavar="N", help="of a user, on average (4763)")
    action.add_argument("--days", type=positive, default=300, metavar="N", help="of the log (300)")
    action.add_argument("--seed", type=whole, default=0, metavar="N", help="of everything (0)")
    action.set_defaults(run="yambda:generate")


def make_samples(arguments: argparse.Namespace) -> int:
    """Run `embershard data yambda`; return 0.

    Raises:
        EmbershardError: a file cannot be read or written, or is no such log.
    """
    from embershard.data.sources.yambda import ListenOptions, write_listens

    options = ListenOptions(
        arguments.history, arguments.min_history, arguments.first_day, arguments.days, arguments.cross_scale
    )
    folder: Path = arguments.output
    check_new_folder(folder)
    with whole_folder(folder) as partial:
        listens = write_listens(arguments.files, arguments.metadata or arguments.files[0].parent, partial, options)
        with naming_file(folder):
            text = _settings(folder.absolute(), listens, options.history)
            (partial / "run.toml").write_text(text, encoding="utf-8")
    share = listens.num_positive / listens.num_samples
    say(
        plain_console(),
        f"{listens.num_events:,} events of {listens.num_users:,} users: {listens.num_samples:,} samples on "
        f"{len(listens.days)} days, {share:.1%} played to at least half, in {folder}.",
        f"Train on them: embershard train --config {folder / 'run.toml'}",
    )
    return 0


def generate(arguments: argparse.Namespace) -> int:
    """Run `embershard data yambda-like`; return 0.

    Raises:
        EmbershardError: an option is out of its range, or a file cannot be written.
    """
    from embershard.data.sources.yambda_like import LogOptions, write_log

    options = LogOptions(arguments.scale, arguments.events, arguments.days, arguments.seed)
    check_new_folder(arguments.output)
    with whole_folder(arguments.output) as partial:
        num_events = write_log(partial, options)
    say(plain_console(), f"{num_events:,} events in {arguments.output}.")
    return 0


def _settings(folder: Path, listens: Listens, history: int) -> str:
    from embershard.data.sources.yambda import DAY, HISTORY, SPARSE, TARGET, TIMES

    settings = {
        "data": {
            "kind": "parquet",
            "path": str(folder),
            "parquet": {
                "sparse": list(SPARSE),
                "num_rows": [listens.num_rows[name] for name in SPARSE],
                "id_mapping": "none",
            },
            "time": {"column": "time", "window": DAY},
        },
        "model": {
            "arch": "hstu",
            "embedding_dim": 16,
            "over_arch_layer_sizes": [32, 1],
            "target": list(TARGET),
            "history": list(HISTORY),
            "hstu": {"num_layers": 2, "num_heads": 2, "head_dim": 8, "max_events": history, "times": list(TIMES)},
        },
        "cache": {"ratio": 0.05},
        "embedding_optimizer": {"kind": "rowwise_adagrad", "lr": 0.05},
        "dense_optimizer": {"kind": "adam", "lr": 0.002},
        "train": {"batch_size": 128},
    }
    note = _NOTE.format(samples=listens.num_samples, users=listens.num_users, days=len(listens.days))
    return note + to_toml(settings)
