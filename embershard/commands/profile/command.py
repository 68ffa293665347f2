"""`embershard profile`: counts a data set; shows, merges and compares such profiles."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embershard.errors import ConfigError
from embershard.launch.arguments import (
    add_settings,
    add_trust,
    check_output,
    config_file,
    make_parser,
    positive,
    text_override,
    whole,
)
from embershard.launch.screen import plain_console, progress_bar, say, wide_console
from embershard.units import parse_bytes, size

if TYPE_CHECKING:  # they load torch and TorchRec, and --help must answer at once: functions import what they need
    from embershard.frequency import FrequencyProfile
    from embershard.training.config import RunConfig

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
#: Lookups on which policies are compared.
_PREFERENCE_LOOKUPS = 1_000_000
#: Parts that keep a process busy longer than it takes to start.
_PARTS_PER_WORKER = 16


def main(argv: Sequence[str]) -> int:
    """Run `embershard profile` or one of its commands; return 0."""
    commands = {"show": show, "merge": merge, "compare": compare}
    if argv and argv[0] in commands:
        commands[argv[0]](argv[1:])
    else:
        collect(argv)
    return 0


def collect(argv: Sequence[str]) -> None:
    """Run `embershard profile DATA -o FILE`."""
    arguments = _collect_parser().parse_args(argv)
    if arguments.data is None and arguments.config is None:
        raise ConfigError("what is to be counted? Give DATA (a file, a folder, or the word synthetic), or --config.")
    check_output(arguments.output)
    from embershard.commands.profile.data_pass import PART_SAMPLES, PartReader, PassOptions, profile_data
    from embershard.training.fit.id_rules import buckets_of_run, refuse_ids

    config = run_config(arguments.data, arguments.config, arguments.overrides, trust_code=arguments.trust_code)
    if arguments.hot is not None:
        refuse_ids(config.data, "hot rows have copies on all ranks")
    console = plain_console()
    began = time.monotonic()
    reader = PartReader(config.data, config.model, ids=buckets_of_run(config))
    on_ray, workers = arguments.on == "ray", arguments.workers
    if on_ray and workers is not None:
        raise ConfigError("--workers has no effect with --on ray: Ray counts in as many tasks as it has CPUs.")
    if workers is None:
        parts = reader.num_samples * arguments.sample / PART_SAMPLES
        workers = max(1, min(len(os.sched_getaffinity(0)), int(parts / _PARTS_PER_WORKER)))
    options = PassOptions(workers, arguments.sample, arguments.max_lookups, arguments.memory, on_ray)
    with progress_bar(console, "samples") as on_progress:
        profile = profile_data(config.data, options, on_progress, reader)
    seconds = time.monotonic() - began
    profile = with_preferences(profile, config.train.rank_batch_size(1))
    profile.save(arguments.output)
    statistics = profile.need_statistics()
    lookups = sum(table.num_lookups for table in statistics.tables.values())
    say(
        console,
        f"{statistics.num_samples:,} samples, {lookups:,} lookups in {len(statistics.tables)} tables: "
        f"{seconds:.1f} s, {lookups / max(seconds, 1e-9) / 1e6:.1f}M lookups/s, "
        f"{'on Ray' if on_ray else f'processes: {workers}'}.",
        f"{arguments.output}: {size(arguments.output.stat().st_size)}. "
        f"Look at it: embershard profile show {arguments.output} --png curves.png",
    )
    if arguments.hot is not None:
        from embershard.commands.profile.data_pass import count_clicks, hot_sentences
        from embershard.training.parts.hot_cold import find_hot_rows

        rows = find_hot_rows(config, profile, arguments.hot)
        say(console, *hot_sentences(rows, *count_clicks(config.data, rows, options, reader)))


def show(argv: Sequence[str]) -> None:
    """Run `embershard profile show FILE`."""
    parser = make_parser(
        "profile show", "Show what a profile found.\n\n  embershard profile show profile.npz --png curves.png\n"
    )
    parser.add_argument("profile", type=Path, help="file of a profile")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw hit rates against the size of the cache")
    parser.add_argument("--top", type=whole, default=20, metavar="N", help="show the N tables with most rows (20)")
    arguments = parser.parse_args(argv)
    if arguments.png is not None:
        check_output(arguments.png)
    from embershard.commands.profile.view import profile_tables, sentences
    from embershard.frequency import FrequencyProfile
    from embershard.frequency.summary import stack_of_all

    statistics = FrequencyProfile.load(arguments.profile).need_statistics()
    console = wide_console()
    with console.status("how long rows stay in a cache"):
        together = stack_of_all(statistics)
    for table in profile_tables(statistics, together, arguments.top):
        console.print(table)
    say(console, *sentences(statistics, together))
    if arguments.png is not None:
        from embershard.commands.profile.view import draw  # loads matplotlib

        with progress_bar(console, "sizes replayed") as on_progress:
            draw(statistics, together, arguments.png, on_progress)
        say(console, f"Hit-rate curves: {arguments.png}")


def merge(argv: Sequence[str]) -> None:
    """Run `embershard profile merge FILE... -o FILE`."""
    parser = make_parser("profile merge", _MERGE_HELP)
    parser.add_argument("profiles", type=Path, nargs="+", metavar="FILE", help="files of profiles")
    _add_outputs(parser)
    parser.add_argument("--batch-size", type=positive, default=1024, metavar="N", help="samples of a step (1024)")
    arguments = parser.parse_args(argv)
    check_output(arguments.output)
    from embershard.frequency import FrequencyProfile

    merged = FrequencyProfile.merge([FrequencyProfile.load(path) for path in arguments.profiles], arguments.max_lookups)
    if merged.statistics is not None:
        merged = with_preferences(merged, arguments.batch_size)
    merged.save(arguments.output)
    print(f"{arguments.output}: {len(arguments.profiles)} profiles in one.")


def compare(argv: Sequence[str]) -> None:
    """Run `embershard profile compare A B`."""
    parser = make_parser("profile compare", _COMPARE_HELP)
    parser.add_argument("a", type=Path, metavar="A", help="file of a profile, say of the day before")
    parser.add_argument("b", type=Path, metavar="B", help="file of a profile, say of today")
    parser.add_argument("--top", type=whole, default=20, metavar="N", help="show the N tables with most lookups (20)")
    arguments = parser.parse_args(argv)
    from embershard.commands.profile.view import comparison_sentence, comparison_table
    from embershard.frequency import FrequencyProfile

    found = FrequencyProfile.load(arguments.a).compare(FrequencyProfile.load(arguments.b))
    console = wide_console()
    console.print(comparison_table(found, arguments.top))
    say(console, comparison_sentence(found))


def run_config(data: str | None, path: Path | None, overrides: Sequence[str], *, trust_code: bool = False) -> RunConfig:
    """Return the settings of a file (None: the defaults) and overrides, with `data` in place of their data.

    `data` is a file, a folder, or the word synthetic; None keeps the data of the settings. Where the settings name no
    files, the kind of data follows from the files' names. A TOML file, or the name of an example, is the settings.
    `trust_code` is that of `load_config`.
    """
    from embershard.data import kind_of_files
    from embershard.settings.decoding import decode, read_toml
    from embershard.settings.files import apply_override, load_config
    from embershard.training.config import RunConfig

    def load(before: Sequence[str], after: Sequence[str]) -> RunConfig:
        if path is not None:
            return load_config(RunConfig, path, [*before, *overrides, *after], trust_code=trust_code)
        values: dict[str, Any] = {}
        for override in [*before, *overrides, *after]:
            apply_override(RunConfig, values, override)
        return decode(RunConfig, values)

    if data is not None and path is None and (settings := config_file(data)).suffix == ".toml":
        path, data = settings, None
    if data is None:
        return load([], [])
    if data == "synthetic":
        return load([], ["data.kind=synthetic", "data.path=none", "data.eval_path=none"])
    section = {} if path is None else read_toml(path).get("data", {})
    is_open = not isinstance(section, dict) or section.get("kind", "synthetic") == "synthetic"
    return load([f"data.kind={kind_of_files(Path(data))}"] if is_open else [], [text_override("data.path", data)])


def with_preferences(profile: FrequencyProfile, batch_size: int) -> FrequencyProfile:
    """Return the profile with each policy's misses per lookup in a replay; unchanged where the data are too few."""
    from embershard.frequency.downsampling import downsampled
    from embershard.planning.simulate.replay import replay_preferences

    statistics = profile.need_statistics()
    if statistics.trace is None or statistics.trace.num_samples < 2 * batch_size:
        return profile
    trace = downsampled(statistics.trace, _PREFERENCE_LOOKUPS)
    found = replay_preferences(trace, profile.tables, batch_size)
    return dataclasses.replace(profile, statistics=dataclasses.replace(statistics, preferences=found))


def _collect_parser() -> argparse.ArgumentParser:
    parser = make_parser("profile", _HELP)
    parser.add_argument(
        "data", nargs="?", metavar="DATA", help="file, folder, or the word synthetic (./show is a file)"
    )
    add_settings(parser)
    add_trust(parser)
    _add_outputs(parser)
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes that read and count (default: cores, fewer for small data)"
    )
    parser.add_argument(
        "--on",
        choices=("local", "ray"),
        default="local",
        help="count on this machine, or in tasks of a Ray cluster: the same profile (default: %(default)s)",
    )
    parser.add_argument(
        "--sample",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="read only this share of the samples; states the error",
    )
    parser.add_argument(
        "--hot",
        type=parse_bytes,
        metavar="BYTES",
        help="also choose hot rows for this memory, and read the data again for hot samples and their click rate",
    )
    parser.add_argument(
        "--memory",
        type=parse_bytes,
        default="4GiB",
        metavar="BYTES",
        help="memory for counts (4GiB); the rarest rows are forgotten to stay below it",
    )
    return parser


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="file to write")
    parser.add_argument(
        "--max-lookups",
        type=positive,
        default=4_000_000,
        metavar="N",
        help="most lookups to keep in their order, for replays (4000000); of more, a share of the rows is followed",
    )
