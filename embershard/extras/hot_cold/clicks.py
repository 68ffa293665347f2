"""A second pass over the training data, where hot rows were chosen: hot and cold samples, and the clicks among them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from embershard.commands.profile.data_pass import PartReader, PassOptions, in_parts, part_ranges
from embershard.data import DataConfig, schema_of
from embershard.data.hashing import Ids
from embershard.data.sources.held_out import HeldOut
from embershard.extras.hot_cold.hot_samples import HotRowsFilter
from embershard.extras.hot_cold.part import find_hot_rows
from embershard.frequency import FrequencyProfile, HotRows
from embershard.training.config import RunConfig
from embershard.units import size

#: Differences of so many standard errors are no chance.
_CLEAR = 3.0


@dataclasses.dataclass(frozen=True)
class ClickCounts:
    """Samples of a kind, and clicks among them.

    >>> round(ClickCounts(10_000, 200).standard_error, 4)
    0.0014
    """

    samples: int = 0
    clicks: int = 0

    def __add__(self, other: ClickCounts) -> ClickCounts:
        return ClickCounts(self.samples + other.samples, self.clicks + other.clicks)

    @property
    def rate(self) -> float:
        """Share of clicks; 0 without samples."""
        return self.clicks / max(1, self.samples)

    @property
    def standard_error(self) -> float:
        """Standard error of the rate, as if clicks were independent of each other."""
        return math.sqrt(self.rate * (1 - self.rate) / max(1, self.samples))


def count_clicks(data: DataConfig, rows: HotRows, options: PassOptions, reader: PartReader) -> list[ClickCounts]:
    """Return the counts of hot and of cold samples, among those that the profile was counted on; of several labels,
    clicks are those of the first. None where labels are no clicks.

    Args:
        rows: of all tables, in the schema's order.
        reader: of the same data.

    Raises:
        SetupError: a process ended by itself.
    """
    target = schema_of(data).target
    if target.tasks[0] != "binary" or next(iter(target.heads)) in target.classes:
        return []
    of_tables = list(rows.rows.values())
    ranges = part_ranges(reader.num_samples, options.sample, reader.part_samples())
    make = partial(_make_worker, dataclasses.replace(data, num_workers=0), reader.held_out, of_tables)
    total = [ClickCounts(), ClickCounts()]
    for part in in_parts(ranges, options, make, _worker(reader, of_tables)):
        total = [before + more for before, more in zip(total, part, strict=True)]
    return total


def choose_and_count(
    config: RunConfig, profile: FrequencyProfile, num_bytes: int, options: PassOptions, reader: PartReader
) -> list[str]:
    """Choose hot rows for this memory, count hot and cold samples, and return what to say of both.

    Raises:
        SetupError: a process ended by itself.
    """
    rows = find_hot_rows(config, profile, num_bytes)
    return hot_sentences(rows, *count_clicks(config.data, rows, options, reader))


def hot_sentences(rows: HotRows, *counts: ClickCounts) -> list[str]:
    """Return what a reader must know before training on hot and cold batches; `counts`: see `count_clicks`."""
    whole = sum(rows.is_whole(table) for table in rows.rows)
    of_rows = (
        f"Hot rows: {rows.total:,} of {sum(rows.num_rows.values()):,} are looked up at least {rows.threshold:,} times "
        f"and take {size(rows.num_bytes)}; {whole} of {len(rows.rows)} tables are hot whole."
    )
    if not counts:
        return [of_rows]
    hot, cold = counts
    share = hot.samples / max(1, hot.samples + cold.samples)
    return [
        of_rows,
        f"Hot samples: {share:.2%} of {hot.samples + cold.samples:,} look up hot rows only. Click rate: "
        f"{_rate(hot)} of hot samples, {_rate(cold)} of cold ones (with standard errors). {_difference(hot, cold)}",
    ]


def _rate(counts: ClickCounts) -> str:
    return f"{counts.rate:.2%} +- {counts.standard_error:.2%}"


def _difference(hot: ClickCounts, cold: ClickCounts) -> str:
    if not hot.samples or not cold.samples:
        return "There is one kind only."
    error = math.hypot(hot.standard_error, cold.standard_error)
    if abs(hot.rate - cold.rate) <= _CLEAR * error:
        return f"They differ by no more than {_CLEAR:.0f} standard errors, which may be chance."
    return (
        "They differ: batches of one kind are not drawn like the data as a whole, and training alternates between two "
        'click rates (sharding.mode = "hot_cold").'
    )


def _make_worker(config: DataConfig, held_out: HeldOut, rows: Sequence[Ids]) -> Callable[[int, int], list[ClickCounts]]:
    return _worker(PartReader(config, held_out=held_out), rows)


def _worker(reader: PartReader, rows: Sequence[Ids]) -> Callable[[int, int], list[ClickCounts]]:
    of_rows = HotRowsFilter(rows)

    def count(start: int, stop: int) -> list[ClickCounts]:
        found = [ClickCounts(), ClickCounts()]
        for block in reader.read(start, stop):
            is_hot = of_rows.hot_samples(block)
            labels = block.labels if block.labels.ndim == 1 else block.labels[:, 0]
            there = ~np.isnan(labels)
            for kind, flags in enumerate((is_hot & there, ~is_hot & there)):
                found[kind] += ClickCounts(int(flags.sum()), int(labels[flags].sum()))
        return found

    return count
