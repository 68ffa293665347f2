"""Logs of users' events as samples: a window of a user's history, and the item that came next or one that did not.

The log is a CSV file without a header, in the layout of Alibaba's UserBehavior data set: user, item, category,
behaviour ("pv", "buy", "cart" or "fav") and time, in seconds since 1970, or in milliseconds or less. Or JSON lines or
Parquet with columns of these names.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embershard.data.block import short
from embershard.data.config import TableConfig
from embershard.data.hashing import Ids, make_key, mix64, random_words, unit_floats
from embershard.data.sources.input_file import InputFile
from embershard.data.sources.table.json_lines import has_json_lines
from embershard.data.sources.table.parquet_files import is_parquet, parquet_schema
from embershard.data.sources.table.text_forms import Given
from embershard.data.sources.table.whole_columns import WholeColumns
from embershard.errors import ConfigError, DataError, naming_file

BEHAVIOURS = ("pv", "buy", "cart", "fav")
SPARSE = ("user", "item", "category", "hist_item", "hist_category", "hist_behaviour")
#: In the files, for models that look at times: when the item is scored, and when each event of its history was.
TIMES = ("time", "hist_time")
DENSE = ("history_length", "hours_since_last")
_COLUMNS = ("user", "item", "category", "behaviour", "time")
_USER, _ITEM, _CATEGORY, _BEHAVIOUR, _TIME = range(5)
_NEGATIVE = 1
#: Bytes of the log whose users are in memory at a time, with about twice as much for sorting.
_PART_BYTES = 256 << 20
_EVENT_BYTES = 36  # in CSV
_WINDOWS_AT_ONCE = 2048
_COUNTED_AT_ONCE = 2_000_000  # events
_SECONDS_PER_HOUR = 3600.0
#: Units of times, and from which number on a time is in the next one: seconds since 1970 have 11 digits until 5138.
_UNITS = ("seconds", "milliseconds", "microseconds", "nanoseconds")
_LEAST_OF_UNITS = np.array([10**11, 10**14, 10**17])
Events = NDArray[np.int64]


@dataclass(frozen=True)
class WindowOptions:
    """How a log becomes samples.

    Attributes:
        history: most events before the one that is scored.
        negatives: samples with another item for each event, the item of a random event of the log.
        seed: of these items.

    >>> WindowOptions(history=20).negatives
    1

    Raises:
        ConfigError: a number is out of its range.
    """

    history: int = 50
    negatives: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        need_at_least(self, history=1, negatives=0, seed=0)


@dataclass(frozen=True)
class Windows:
    """What was written.

    Attributes:
        num_events, num_users: of the log.
        num_train, num_eval: samples, negatives included.
        largest: the largest id of user, item and category.
        distinct: how many of each there are.
        time_unit: of the log.
    """

    num_events: int
    num_users: int
    num_train: int
    num_eval: int
    largest: dict[str, int]
    distinct: dict[str, int]
    time_unit: str = "seconds"

    @property
    def id_mapping(self) -> str:
        """Mapping of ids to rows without a collision where that takes few rows more than there are ids."""
        return "modulo" if all(self.largest[n] < 4 * self.distinct[n] + 1000 for n in self.largest) else "hash"

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows of each sparse feature's table, row 0 for a missing value among them."""
        rows = {
            name: self.largest[name] + 2 if self.id_mapping == "modulo" else 2 * self.distinct[name] + 1
            for name in self.largest
        }
        return {
            **rows,
            **{f"hist_{name}": rows[name] for name in ("item", "category")},
            "hist_behaviour": len(BEHAVIOURS) + 2,
        }


def write_windows(log: Path, folder: Path, options: WindowOptions) -> Windows:
    """Write `train.parquet` and `eval.parquet` to an existing folder: each user's last event is held out.

    Every event but a user's first one is a sample with label 1, with the user's events before it as its history,
    oldest first, followed by `options.negatives` samples with label 0. The result does not depend on the order of the
    lines, apart from events of one user at the same time. An item of several categories has the lowest in a negative.
    Times are written in seconds.

    The log is read once and cut by users into parts on disk (40 bytes per event). In memory are one part (that of a
    256 MiB log), and of every distinct item its id, category and count (about 100 bytes while they are counted).

    Raises:
        DataError: a line is no event, no user has two, or there is one item.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        num_parts = max(1, -(-_size(log) // _PART_BYTES))
        parts = [Path(scratch, str(number)) for number in range(num_parts)]
        items, largest = _partition(log, parts)
        if options.negatives and len(items.ids) == 1:
            raise DataError(f"{log}: all events are of item {items.ids[0]}; needed two, for samples with label 0.")
        counts = {"train": 0, "eval": 0}
        num_events = num_users = unit = 0
        with ExitStack() as stack:
            writers = {name: stack.enter_context(SampleWriter(folder / f"{name}.parquet", _SCHEMA)) for name in counts}
            for path in parts:
                events = np.fromfile(path, np.int64).reshape(-1, len(_COLUMNS)) if path.exists() else _NONE
                units = np.searchsorted(_LEAST_OF_UNITS, events[:, _TIME], side="right")
                unit = max(unit, int(units.max(initial=0)))
                seconds = events[:, _TIME] // 1000**units
                order = np.lexsort((events[:, _TIME], seconds, events[:, _USER]))
                events[:, _TIME] = seconds
                events = events[order]
                num_events += len(events)
                num_users += len(np.unique(events[:, _USER]))
                for name, samples in _samples(events, items, options):
                    writers[name].write(samples)
                    counts[name] += len(samples)
    if not counts["eval"]:
        raise DataError(f"{log}: no user has two events; needed users with a history.")
    distinct = {"user": num_users, "item": len(items.ids), "category": len(np.unique(items.categories))}
    return Windows(num_events, num_users, counts["train"], counts["eval"], largest, distinct, _UNITS[unit])


_NONE: Events = np.empty((0, len(_COLUMNS)), np.int64)
_NO_ITEMS: Events = np.empty((0, 3), np.int64)
_LIST = pa.list_(pa.int64())
_SCHEMA = pa.schema(
    [
        *((name, _LIST if name.startswith("hist_") else pa.int64()) for name in (*SPARSE, *TIMES)),
        *((name, pa.float32()) for name in DENSE),
        ("label", pa.int8()),
    ]
)


def _size(log: Path) -> int:
    """Return about the bytes that the log has as CSV."""
    with naming_file(log):
        if is_parquet(InputFile.at(log)):
            return _EVENT_BYTES * parquet_schema(log)[1].num_rows
        return log.stat().st_size * (8 if log.suffix == ".gz" else 1)


def _partition(log: Path, parts: list[Path]) -> tuple[_Items, dict[str, int]]:
    """Write the events of each user to one of the parts; return the items, and the largest ids."""
    counted, num_pending = [_NO_ITEMS], 0
    largest = {"user": 0, "item": 0, "category": 0}
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in parts]
        for events in _read(log):
            for column, name in enumerate(largest):
                largest[name] = max(largest[name], int(events[:, column].max(initial=0)))
            counted.append(np.column_stack([events[:, (_ITEM, _CATEGORY)], np.ones(len(events), np.int64)]))
            num_pending += len(events)
            if num_pending > _COUNTED_AT_ONCE + len(counted[0]):
                counted, num_pending = [_added_up(counted)], 0
            part = (mix64(events[:, _USER].astype(np.uint64)) % np.uint64(len(parts))).astype(np.int64)
            for number, file in enumerate(files):
                file.write(events[part == number].tobytes())
    return _Items.of(_added_up(counted)), largest


def _added_up(parts: list[Events]) -> Events:
    """Return item, category and count [I, 3] of each distinct item, sorted; of several categories the lowest one."""
    every = np.concatenate(parts)
    every = every[np.lexsort((every[:, 1], every[:, 0]))]
    ids, first, places = np.unique(every[:, 0], return_index=True, return_inverse=True)
    counts = np.bincount(places.reshape(-1), weights=every[:, 2], minlength=len(ids))  # exact below 2^53
    return np.column_stack([ids, every[first, 1], counts.astype(np.int64)])


def _read(log: Path) -> Iterator[Events]:
    """Yield the events [n, 5] of the log, some at a time, behaviours as their numbers from 1 on."""
    file = InputFile.at(log)
    if is_parquet(file) or has_json_lines(file, TableConfig()):
        yield from _read_named(WholeColumns.at(log, Given()))
        return
    types = {name: pa.string() if name == "behaviour" else pa.int64() for name in _COLUMNS}
    first = 0
    try:
        with pa_csv.open_csv(
            log,
            read_options=pa_csv.ReadOptions(column_names=list(_COLUMNS), use_threads=False),
            convert_options=pa_csv.ConvertOptions(column_types=types, null_values=[], strings_can_be_null=False),
        ) as reader:
            for batch in reader:
                yield _events(log, first, batch)
                first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        what = " ".join(str(error).split())
        what = "its bytes are no text" if "\ufffd" in what else short(what)
        raise DataError(
            f"{log}: cannot be read as a log of events ({what}); needed lines without a header: "
            "user,item,category,behaviour,time; or JSON lines or Parquet with columns of these names."
        ) from None


def _read_named(log: WholeColumns) -> Iterator[Events]:
    """As `_read`, of a file whose columns have names."""
    path, names, first = log.file.path, log.schema.names, 0
    if lacking := [name for name in _COLUMNS if name not in names]:
        raise DataError(
            f"{path}: no column {lacking[0]!r}; a log of events needs {', '.join(_COLUMNS)}, and this one has "
            f"{', '.join(names[:20])}. Rename its columns."
        )
    for batch in log.batches():
        columns = dict(zip(names, batch.columns, strict=True))
        try:
            cast = [columns[name].cast(pa.string() if name == "behaviour" else pa.int64()) for name in _COLUMNS]
        except pa.ArrowException as error:
            what = short(" ".join(str(error).split()))
            raise DataError(f"{path}: needed whole numbers, and a behaviour that is a text ({what})") from None
        if without := next((name for name, each in zip(_COLUMNS, cast, strict=True) if each.null_count), ""):
            row = first + int(np.argmax(columns[without].is_null())) + 1
            raise DataError(f"{path}: event {row:,} has no {without}; needed {', '.join(_COLUMNS)} in each.")
        yield _events(path, first, pa.RecordBatch.from_arrays(cast, names=list(_COLUMNS)))
        first += batch.num_rows


def _events(log: Path, first: int, batch: Any) -> Events:
    columns = [batch.column(name) for name in _COLUMNS]
    numbers = pc.index_in(columns[_BEHAVIOUR], value_set=pa.array(BEHAVIOURS))
    columns[_BEHAVIOUR] = numbers.fill_null(-1)
    found = np.stack([np.asarray(column, np.int64) for column in columns], axis=1)
    found[:, _BEHAVIOUR] += 1
    wrong = np.flatnonzero((found[:, _BEHAVIOUR] == 0) | (found < 0).any(axis=1))
    if len(wrong):
        line = ",".join(str(batch.column(name)[int(wrong[0])]) for name in _COLUMNS)
        raise DataError(
            f"{log}: event {first + int(wrong[0]) + 1:,} is {line}; needed ids and a time of 0 or more, and a "
            f"behaviour among {', '.join(BEHAVIOURS)}."
        )
    return found


@dataclass(frozen=True, eq=False)
class _Items:
    """The items of a log: ids, categories, and the events up to each of them."""

    ids: Ids
    categories: Ids
    ends: Ids

    @classmethod
    def of(cls, items: Events) -> _Items:
        return cls(items[:, 0], items[:, 1], np.cumsum(items[:, 2]))

    def draw(self, uniform: NDArray[np.float64], other_than: Ids) -> Ids:
        """Return numbers of the items of random events; where that is the item itself, of the next one."""
        event = (uniform * (self.ends[-1] if len(self.ends) else 0)).astype(np.int64)
        found = np.searchsorted(self.ends, event, side="right")
        return np.where(self.ids[found] == other_than, (found + 1) % len(self.ids), found)


def _samples(events: Events, items: _Items, options: WindowOptions) -> Iterator[tuple[str, pa.Table]]:
    """Yield samples of events that are sorted by user and time, and the name of their file."""
    is_first = np.ones(len(events), bool)
    is_first[1:] = events[1:, _USER] != events[:-1, _USER]
    starts = np.maximum.accumulate(np.where(is_first, np.arange(len(events)), 0))
    is_last = np.append(is_first[1:], True)[: len(events)]
    for name, chosen in (("train", ~is_first & ~is_last), ("eval", ~is_first & is_last)):
        places = np.flatnonzero(chosen)
        for first in range(0, len(places), _WINDOWS_AT_ONCE):
            scored = places[first : first + _WINDOWS_AT_ONCE]
            yield name, _table(events, starts[scored], scored, items, options)


def _table(events: Events, starts: Ids, scored: Ids, items: _Items, options: WindowOptions) -> pa.Table:
    """Return the samples that score these events [n], each with its negatives behind it."""
    each = 1 + options.negatives
    scored, starts = np.repeat(scored, each), np.repeat(starts, each)
    copy = np.arange(len(scored)) % each
    first = np.maximum(starts, scored - options.history)
    lengths = scored - first
    ends = np.cumsum(lengths)
    past = np.arange(ends[-1]) - np.repeat(ends - lengths - first, lengths)  # the events of all histories, in turn
    item, category = events[scored, _ITEM].copy(), events[scored, _CATEGORY].copy()
    is_other = copy > 0
    counter = mix64(events[scored, _USER].astype(np.uint64)).astype(np.int64) + (scored - starts) * each + copy
    drawn = items.draw(unit_floats(random_words(make_key(options.seed, _NEGATIVE), counter)), item)
    item[is_other], category[is_other] = items.ids[drawn][is_other], items.categories[drawn][is_other]
    offsets = pa.array(np.append(0, ends).astype(np.int32))
    hours = (events[scored, _TIME] - events[scored - 1, _TIME]) / _SECONDS_PER_HOUR
    columns = [
        events[scored, _USER],
        item,
        category,
        *(pa.ListArray.from_arrays(offsets, events[past, column]) for column in (_ITEM, _CATEGORY, _BEHAVIOUR)),
        events[scored, _TIME],
        pa.ListArray.from_arrays(offsets, events[past, _TIME]),
        lengths.astype(np.float32),
        hours.astype(np.float32),
        (~is_other).astype(np.int8),
    ]
    return pa.table(columns, schema=_SCHEMA)


class SampleWriter:
    """A Parquet file that samples are appended to, a row group at a time.

    >>> with SampleWriter(Path("samples.parquet"), pa.schema([("item", pa.int64())])) as writer:
    ...     writer.write(pa.table({"item": [7, 8]}))
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path, self._schema = path, schema

    def __enter__(self) -> SampleWriter:
        with naming_file(self._path):
            self._writer = pq.ParquetWriter(self._path, self._schema, write_page_checksum=True)
        return self

    def write(self, samples: pa.Table) -> None:
        with naming_file(self._path):
            self._writer.write_table(samples)

    def __exit__(self, *error: object) -> None:
        with naming_file(self._path):
            self._writer.close()


def need_at_least(owner: object, **least: int) -> None:
    """Raise `ConfigError` where a field of options, which no file has, is less than the number of its name."""
    for name, lowest in least.items():
        if getattr(owner, name) < lowest:
            raise ConfigError(f"{name}: got {getattr(owner, name)}, needed at least {lowest}.")
