"""What `embershard profile` does: counts a data set; shows, merges and compares such profiles."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embershard.cache.config import CachePolicy
from embershard.commands.profile.data_pass import PART_SAMPLES, PartReader, PassOptions, profile_data
from embershard.commands.profile.view import SIZES, comparison_sentence, comparison_table, profile_tables, sentences
from embershard.data import kind_of_files
from embershard.errors import ConfigError
from embershard.frequency import FrequencyProfile
from embershard.frequency.downsampling import downsampled
from embershard.frequency.summary import stack_of_all
from embershard.launch.arguments import config_file, text_override
from embershard.launch.screen import plain_console, progress_bar, save_figure, say, wide_console
from embershard.lazy_names import named
from embershard.planning.simulate.held_part import try_counts
from embershard.planning.simulate.replay import replay_preferences
from embershard.settings.decoding import decode, read_toml
from embershard.settings.files import apply_override, load_config
from embershard.sharding.run_shape import ReplaySettings
from embershard.training.config import RunConfig
from embershard.training.fit.id_rules import buckets_of_run, refuse_ids
from embershard.units import size

#: Whether counts last is tried in batches of so many samples, without look-ahead.
_BATCH_SIZE, _BY_COUNTS = 1024, ReplaySettings(CachePolicy("lfu", by_next_use=False), 0)
#: Lookups on which policies are compared.
_PREFERENCE_LOOKUPS = 1_000_000
#: Parts that keep a process busy longer than it takes to start.
_PARTS_PER_WORKER = 16


def collect(arguments: argparse.Namespace) -> None:
    """Run `embershard profile DATA -o FILE`."""
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
        choose_and_count = named("embershard.extras.hot_cold.clicks:choose_and_count")
        say(console, *choose_and_count(config, profile, arguments.hot, options, reader))


def show(arguments: argparse.Namespace) -> None:
    """Run `embershard profile show FILE`."""
    statistics = FrequencyProfile.load(arguments.profile).need_statistics()
    console = wide_console()
    with console.status("how long rows stay in a cache"):
        together = stack_of_all(statistics)
    for table in profile_tables(statistics, together, arguments.top):
        console.print(table)
    say(console, *sentences(statistics, together))
    with console.status("whether counts last"):
        held = try_counts(statistics, list(statistics.tables), SIZES[1], _BATCH_SIZE, _BY_COUNTS)
    if held is not None:
        tried = f"New data, tried on the profile in a cache for {SIZES[1]:.0%} of the rows"
        say(console, f"{tried}: {held.sentence}.")
    if arguments.png is not None:
        draw = named("embershard.extras.profile_picture.picture:make_figure")
        with progress_bar(console, "sizes replayed") as on_progress:
            save_figure(draw(statistics, together, on_progress), arguments.png)
        say(console, f"Hit-rate curves: {arguments.png}")


def merge(arguments: argparse.Namespace) -> None:
    """Run `embershard profile merge FILE... -o FILE`."""
    merged = FrequencyProfile.merge([FrequencyProfile.load(path) for path in arguments.profiles], arguments.max_lookups)
    if merged.statistics is not None:
        merged = with_preferences(merged, arguments.batch_size)
    merged.save(arguments.output)
    print(f"{arguments.output}: {len(arguments.profiles)} profiles in one.")


def compare(arguments: argparse.Namespace) -> None:
    """Run `embershard profile compare A B`."""
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
    kind = kind_of_files(Path(data)) if is_open else ""
    if kind == "avazu":
        _check_avazu(Path(data))
    return load([f"data.kind={kind}"] if is_open else [], [text_override("data.path", data)])


def _check_avazu(path: Path) -> None:
    """Raise `ConfigError` for a CSV file of another kind: only Avazu's needs no settings."""
    if not (path.is_file() and path.suffix == ".csv"):
        return
    with path.open("rb") as opened:
        is_avazu = opened.readline(100).startswith((b"id,click,hour", b"id,hour"))
    if not is_avazu:
        raise ConfigError(
            f"{path}: without settings, a CSV file is read as Avazu's, and its header is another one. Write its "
            f"settings: embershard data inspect {shlex.quote(str(path))} -o run.toml; then give --config run.toml."
        )


def with_preferences(profile: FrequencyProfile, batch_size: int) -> FrequencyProfile:
    """Return the profile with each policy's misses per lookup in a replay; unchanged where the data are too few."""
    statistics = profile.need_statistics()
    if statistics.trace is None or statistics.trace.num_samples < 2 * batch_size:
        return profile
    trace = downsampled(statistics.trace, _PREFERENCE_LOOKUPS)
    found = replay_preferences(trace, profile.tables, batch_size)
    return dataclasses.replace(profile, statistics=dataclasses.replace(statistics, preferences=found))
