"""``embershard profile``: counts a data set, shows, merges and compares such profiles."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from embershard.errors import ConfigError, DataError, EmbershardError
from embershard.launch.units import parse_bytes

_HELP = """Count how often every row is looked up, in one pass over the training data.

The profile is what the planner, the policy "frequency" and the warm-up of a cache work with:
  embershard profile /data/criteo -o profile.npz --config run.toml
  embershard profile show profile.npz --png curves.png
  embershard profile merge monday.npz tuesday.npz -o both.npz
  embershard profile compare monday.npz tuesday.npz
"""
#: Lookups on which policies are compared.
_PREFERENCE_LOOKUPS = 1_000_000
#: So many parts keep a further process busy longer than it takes to start.
_PARTS_PER_WORKER = 16
_WIDTH = 150


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 well, 2 wrong usage, settings or data."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[Sequence[str]], None]] = {"show": show, "merge": merge, "compare": compare}
    try:
        if arguments and arguments[0] in commands:
            commands[arguments[0]](arguments[1:])
        else:
            collect(arguments)
    except EmbershardError as error:
        print(f"embershard: {error}", file=sys.stderr)
        return 2
    return 0


def collect(argv: Sequence[str]) -> None:
    """``embershard profile DATA -o FILE``."""
    arguments = _collect_parser().parse_args(argv)
    if arguments.data is None and arguments.config is None:
        raise ConfigError("what is to be counted? Give DATA (a file, a folder, or the word synthetic), or --config.")
    _check_output(arguments.output)
    # Imported here, because it loads torch and TorchRec, and --help must answer at once.
    from embershard.launch.profile.data_pass import PART_SAMPLES, PartReader, PassOptions, profile_data

    config = run_config(arguments.data, arguments.config, arguments.overrides)
    console = Console()
    began = time.monotonic()
    reader = PartReader(config.data)
    workers = arguments.workers
    if workers is None:
        parts = reader.num_samples * arguments.sample / PART_SAMPLES
        workers = max(1, min(len(os.sched_getaffinity(0)), int(parts / _PARTS_PER_WORKER)))
    options = PassOptions(workers, arguments.sample, arguments.max_lookups, arguments.memory)
    with _progress(console) as show_progress:
        profile = profile_data(config.data, options, show_progress, reader)
    seconds = time.monotonic() - began
    profile = with_preferences(profile, config.train.batch_size)
    _save(profile, arguments.output)
    tables = profile.need_statistics().tables.values()
    lookups = sum(table.num_lookups for table in tables)
    lines = [
        f"{profile.need_statistics().num_samples:,} samples, {lookups:,} lookups in {len(tables)} tables: "
        f"{seconds:.1f} s, {lookups / max(seconds, 1e-9) / 1e6:.1f}M lookups/s, processes: {workers}.",
        f"{arguments.output}: {arguments.output.stat().st_size / 1e6:,.1f} MB. "
        f"Look at it: embershard profile show {arguments.output} --png curves.png",
    ]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def show(argv: Sequence[str]) -> None:
    """``embershard profile show FILE``."""
    parser = argparse.ArgumentParser(prog="embershard profile show", description="Show what a profile found.")
    parser.add_argument("profile", type=Path, help="file of a profile")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw hit rates against the size of the cache")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="show the N tables with most rows (20)")
    arguments = parser.parse_args(argv)
    if arguments.png is not None:
        _check_output(arguments.png)
    from embershard.frequency import FrequencyProfile
    from embershard.frequency.summary import stack_of_all
    from embershard.launch.profile.view import profile_table, sentences

    statistics = FrequencyProfile.load(arguments.profile).need_statistics()
    together = stack_of_all(statistics)
    console = _wide_console()
    console.print(profile_table(statistics, together, max(0, arguments.top)))
    for line in sentences(statistics, together):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if arguments.png is not None:
        from embershard.launch.profile.picture import draw

        draw(statistics, together, arguments.png)
        console.print(f"Hit-rate curves: {arguments.png}", soft_wrap=True, highlight=False, markup=False)


def merge(argv: Sequence[str]) -> None:
    """``embershard profile merge FILE... -o FILE``."""
    parser = argparse.ArgumentParser(
        prog="embershard profile merge",
        description="Make one profile of several (of days or ranks), in the order in which they are given.",
    )
    parser.add_argument("profiles", type=Path, nargs="+", metavar="FILE", help="files of profiles")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="file to write")
    parser.add_argument("--max-lookups", type=int, default=4_000_000, metavar="N", help=_MAX_LOOKUPS)
    parser.add_argument("--batch-size", type=int, default=1024, metavar="N", help="samples of a step (1024)")
    arguments = parser.parse_args(argv)
    _check_output(arguments.output)
    from embershard.frequency import FrequencyProfile

    merged = FrequencyProfile.merge([FrequencyProfile.load(path) for path in arguments.profiles], arguments.max_lookups)
    if merged.statistics is not None:
        merged = with_preferences(merged, arguments.batch_size)
    _save(merged, arguments.output)
    print(f"{arguments.output}: {len(arguments.profiles)} profiles in one.")


def compare(argv: Sequence[str]) -> None:
    """``embershard profile compare A B``."""
    parser = argparse.ArgumentParser(
        prog="embershard profile compare",
        description="How well rows that were chosen by profile A serve the data of profile B.",
    )
    parser.add_argument("a", type=Path, metavar="A", help="file of a profile, say of the day before")
    parser.add_argument("b", type=Path, metavar="B", help="file of a profile, say of today")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="show the N tables with most lookups (20)")
    arguments = parser.parse_args(argv)
    from embershard.frequency import FrequencyProfile
    from embershard.launch.profile.view import comparison_sentence, comparison_table

    found = FrequencyProfile.load(arguments.a).compare(FrequencyProfile.load(arguments.b))
    console = _wide_console()
    console.print(comparison_table(found, max(0, arguments.top)))
    console.print(comparison_sentence(found), soft_wrap=True, highlight=False, markup=False)


def run_config(data: str | None, path: Path | None, overrides: Sequence[str]) -> Any:
    """The `RunConfig` of a file and overrides, with ``data`` in the place of its data: a file, a folder, or the word
    synthetic. The kind of data is the config's, and else guessed from the name.

    Raises:
        ConfigError: a setting is wrong.
    """
    from embershard.data import kind_of_files
    from embershard.launch.config import apply_override, from_values, load_config
    from embershard.training.config import RunConfig

    def load(more: Sequence[str]) -> RunConfig:
        if path is not None:
            return load_config(RunConfig, path, [*overrides, *more])
        values: dict[str, Any] = {}
        for override in [*overrides, *more]:
            apply_override(RunConfig, values, override)
        return from_values(RunConfig, values)

    if data is None:
        return load([])
    if data == "synthetic":
        return load(["data.kind=synthetic", "data.path=none", "data.eval_path=none"])
    kind = load([]).data.kind
    if kind == "synthetic":
        kind = kind_of_files(Path(data))
    return load([f"data.kind={kind}", f"data.path={_toml_text(data)}"])


def with_preferences(profile: Any, batch_size: int) -> Any:
    """With the misses per lookup that every policy has in a replay; as it is where the data are too few for one."""
    from embershard.frequency.downsampling import downsampled
    from embershard.planning.simulate.replay import replay_preferences

    statistics = profile.need_statistics()
    if statistics.trace is None or statistics.trace.num_samples < 2 * batch_size:
        return profile
    trace = downsampled(statistics.trace, _PREFERENCE_LOOKUPS)
    found = replay_preferences(trace, profile.tables, batch_size)
    return dataclasses.replace(profile, statistics=dataclasses.replace(statistics, preferences=found))


_MAX_LOOKUPS = "most lookups to keep in their order, for replays (4000000); of more, a share of the rows is followed"


def _collect_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="embershard profile", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "data", nargs="?", metavar="DATA", help="file, folder, or the word synthetic (./show is a file)"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="file to write")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the run's settings: data, rows per table, order")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a setting, for instance data.criteo.num_rows=1000000; may be repeated",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes that read and count (default: cores, fewer for small data)"
    )
    parser.add_argument(
        "--sample",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="read only this share of the samples; states the error",
    )
    parser.add_argument("--max-lookups", type=int, default=4_000_000, metavar="N", help=_MAX_LOOKUPS)
    parser.add_argument(
        "--memory",
        type=parse_bytes,
        default=parse_bytes("4GB"),
        metavar="BYTES",
        help="memory for counts (4GB); the rarest rows are forgotten to stay below it",
    )
    return parser


def _toml_text(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _check_output(path: Path) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise ConfigError(f"{path} {what}; give the name of a file in a folder that exists.")


def _save(profile: Any, path: Path) -> None:
    try:
        profile.save(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}).") from error


def _wide_console() -> Console:
    """Tables have many columns: wide enough for them where no terminal says otherwise."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on a terminal; elsewhere nothing."""
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("samples"), MofNCompleteColumn(), BarColumn(bar_width=20), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("count", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
