"""Makes samples of a log of music like Yambda's: a listen, its user's history before it, and whether at least half of
the track was played. A history has no event of the listen's moment or of a later one.

FILE is Yambda's multi_event.parquet, or its files of single types of events, flat (a row per event) or sequential (a
row of lists per user), as Yandex publishes them. Written are a Parquet file per day and run.toml, which trains a small
HSTU on them, day by day (docs/dlrm_v4.md).

  python examples/dlrm_v4/yambda.py flat/5b/multi_event.parquet --metadata . --days 30 -o samples
  embershard train --config samples/run.toml
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embershard.data.hashing import Ids, add_part, mix64
from embershard.errors import ConfigError, DataError, EmbershardError, naming_file
from embershard.extras.event_logs.windows import SampleWriter, need_at_least
from embershard.launch.arguments import check_new_folder, help_parts, positive, whole
from embershard.launch.screen import plain_console, say
from embershard.settings.decoding import to_toml
from embershard.whole_file import whole_folder

EVENT_TYPES = ("listen", "like", "dislike", "unlike", "undislike")
#: Bits of `hist_action`: played to at least half, liked, played less. No history has the other types of events.
LISTEN_PLUS, LIKE, SKIP = ACTIONS = (1, 2, 4)
_HALF = 50  # percent
DAY = 86_400
#: Of each crossed feature what it crosses, and the rows of its table in the reference.
CROSSES: Mapping[str, tuple[tuple[str, ...], int]] = {
    "user_x_artist": (("uid", "artist_id"), 100_000_000),
    "user_x_album": (("uid", "album_id"), 40_000_000),
    "user_x_hour": (("uid", "hour"), 24_000_000),
    "item_x_hour": (("item_id", "hour"), 40_000_000),
    "artist_x_hour": (("artist_id", "hour"), 32_000_000),
    "user_x_is_organic": (("uid", "is_organic"), 2_000_000),
    "user_x_artist_x_hour": (("uid", "artist_id", "hour"), 40_000_000),
}
TARGET = ("item_id", "artist_id", "album_id")
HISTORY = (*(f"hist_{name}" for name in TARGET), "hist_action")
#: In seconds, as the log has them: when the item is scored, and when each event of its history was.
TIMES = ("time", "hist_time")
SPARSE = ("uid", *TARGET, *CROSSES, *HISTORY, *TIMES)
#: Bytes of Parquet whose users are in memory at a time: about 12 million events, and 2 GB with what is made of them.
_PART_BYTES = 128 << 20
_READ_AT_ONCE = {True: 256, False: 1 << 20}  # rows: users, or events
_SAMPLES_AT_ONCE = 1024  # of a row group
_EVENT = np.dtype([("uid", "u4"), ("time", "u4"), ("item", "u4"), ("action", "u1"), ("is_organic", "u1")])
_MOST = (1 << 32) - 1


@dataclass(frozen=True)
class ListenOptions:
    """How a log becomes samples.

    Attributes:
        history: most events of a history; a third of them for each of the three actions, the last ones before the
            sample.
        min_history: events that a user must have had before a listen that becomes a sample.
        first_day, num_days: days of the log's clock whose listens become samples; None: all that follow. Histories
            begin with the log.
        cross_scale: rows of the crossed features' tables, relative to the reference's.

    >>> ListenOptions(history=4086).per_action
    1362

    Raises:
        ConfigError: a number is out of its range.
    """

    history: int = 4086
    min_history: int = 0
    first_day: int = 0
    num_days: int | None = None
    cross_scale: float = 1.0

    def __post_init__(self) -> None:
        need_at_least(self, history=3, min_history=0, first_day=0)
        if self.num_days is not None:
            need_at_least(self, num_days=1)
        if not 0 < self.cross_scale <= 1:
            raise ConfigError(f"cross_scale: got {self.cross_scale}, needed a share in (0, 1].")

    @property
    def per_action(self) -> int:
        """Most events of a history that have the same action."""
        return self.history // len(ACTIONS)

    def cross_rows(self, name: str) -> int:
        """Return the rows of a crossed feature's table."""
        return max(2, math.ceil(CROSSES[name][1] * self.cross_scale))


@dataclass(frozen=True)
class Listens:
    """What was written.

    Attributes:
        num_events, num_users: of the log.
        num_samples, num_positive: listens; those that were played to at least half.
        days: numbers of the days that have samples, in order.
        num_rows: of the table of each sparse feature, whose ids are rows.
    """

    num_events: int
    num_users: int
    num_samples: int
    num_positive: int
    days: tuple[int, ...]
    num_rows: dict[str, int]


def write_listens(files: Sequence[Path], metadata: Path, folder: Path, options: ListenOptions) -> Listens:
    """Write a file of samples for each day, `day_0000.parquet` and so on, to an existing folder.

    A sample's history has the events of its user that were earlier: none of the same second (in Yambda, of the same
    five seconds) and none that came later. The order of the log's rows does not matter.

    The log is read once and cut by users into parts on disk (14 bytes per event). In memory are one part, that of 128
    MiB of the log's Parquet, and the owners of the items.

    Args:
        files: of the log: `multi_event.parquet`, or one file per type of event (`listens.parquet`, `likes.parquet`,
            ...), in either layout.
        metadata: the folder with `artist_item_mapping.parquet` and `album_item_mapping.parquet`. An item without an
            artist or album has number 0; of several the lowest.

    Raises:
        DataError: a file is no log of this kind, or no listen becomes a sample.
    """
    owners = [_Owners.read(metadata / f"{name}_item_mapping.parquet", f"{name}_id") for name in ("artist", "album")]
    with tempfile.TemporaryDirectory(dir=folder) as scratch, ExitStack() as stack:
        parts = [Path(scratch, str(number)) for number in range(max(1, -(-_size(files) // _PART_BYTES)))]
        largest = _partition(files, parts)
        writers: dict[int, SampleWriter] = {}
        num_events = num_users = num_samples = num_positive = 0
        for path in parts:
            events = _sorted(np.fromfile(path, _EVENT))
            num_events, num_users = num_events + len(events), num_users + len(np.unique(events["uid"]))
            for day, samples in _samples(events, owners, options):
                if day not in writers:
                    writers[day] = stack.enter_context(SampleWriter(folder / f"day_{day:04}.parquet", _SCHEMA))
                writers[day].write(samples)
                num_samples += len(samples)
                num_positive += pc.sum(samples.column("label")).as_py()
    if not num_samples:
        raise DataError(
            f"{files[0]}: none of {num_events:,} events is a listen on the days asked for, after {options.min_history} "
            "events of its user."
        )
    rows = {"uid": largest["uid"] + 1, "item_id": max(largest["item"], *(each.largest_item for each in owners)) + 1}
    rows |= {name: each.largest + 1 for name, each in zip(TARGET[1:], owners, strict=True)}
    rows |= {name: options.cross_rows(name) for name in CROSSES} | {f"hist_{name}": rows[name] for name in TARGET}
    rows |= {"hist_action": sum(ACTIONS) + 1} | dict.fromkeys(TIMES, _MOST + 1)
    return Listens(num_events, num_users, num_samples, num_positive, tuple(sorted(writers)), rows)


_LIST = pa.list_(pa.uint32())
_SCHEMA = pa.schema(
    [(name, _LIST if name.startswith("hist_") else pa.uint32()) for name in SPARSE] + [("label", pa.uint8())]
)


def _size(files: Sequence[Path]) -> int:
    total = 0
    for file in files:
        with naming_file(file):
            total += file.stat().st_size
    return total


@dataclass(frozen=True, eq=False)
class _Owners:
    """The artist, or the album, of each item: sorted items, and numbers."""

    items: Ids
    numbers: Ids

    @classmethod
    def read(cls, file: Path, column: str) -> _Owners:
        pairs = [_integers(file, batch, ("item_id", column)) for batch in _batches(file, ("item_id", column))]
        every = np.concatenate([np.stack(each, axis=1) for each in pairs]) if pairs else np.empty((0, 2), np.int64)
        every = every[np.lexsort((every[:, 1], every[:, 0]))]
        items, first = np.unique(every[:, 0], return_index=True)
        return cls(items, every[first, 1])

    @property
    def largest(self) -> int:
        return int(self.numbers.max(initial=0))

    @property
    def largest_item(self) -> int:
        return int(self.items.max(initial=0))

    def of(self, items: Ids) -> Ids:
        if not len(self.items):
            return np.zeros(len(items), np.int64)
        found = np.minimum(np.searchsorted(self.items, items), len(self.items) - 1)
        return np.where(self.items[found] == items, self.numbers[found], 0)


def _batches(file: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
    """Yield some rows of a Parquet file at a time, with those of the optional columns that it has."""
    try:
        with pq.ParquetFile(file, memory_map=True) as reader:
            schema = reader.schema_arrow
            if missing := [name for name in columns if name not in schema.names]:
                raise DataError(f"{file}: has no column {missing[0]!r}; needed {', '.join(columns)}, as in Yambda.")
            given = [*columns, *(name for name in optional if name in schema.names)]
            is_nested = any(_is_list(schema.field(name).type) for name in given)
            yield from reader.iter_batches(_READ_AT_ONCE[is_nested], columns=given)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read as Parquet ({' '.join(str(error).split())}).") from None


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _integers(file: Path, batch: pa.RecordBatch, names: Sequence[str]) -> list[Ids]:
    """Return columns of numbers from 0 to 2^32 - 1 as int64; an error names the first value that is none."""
    found = []
    for name in names:
        column = batch.column(batch.schema.get_field_index(name))
        if not (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
            raise DataError(f"{file}: column {name!r} is of type {column.type}; needed integers.")
        values = np.asarray(column.cast(pa.int64()).fill_null(-1), np.int64)
        if len(wrong := np.flatnonzero((values < 0) | (values > _MOST))):
            raise DataError(f"{file}: {name} is {column[int(wrong[0])]}; needed a number from 0 to {_MOST}.")
        found.append(values)
    return found


def _partition(files: Sequence[Path], parts: list[Path]) -> dict[str, int]:
    """Write the events of each user to one of the parts; return the largest ids."""
    largest = {"uid": 0, "item": 0}
    with ExitStack() as stack:
        opened = [stack.enter_context(path.open("wb")) for path in parts]
        for file in files:
            for events in _read(file):
                for name in largest:
                    largest[name] = max(largest[name], int(events[name].max(initial=0)))
                part = mix64(events["uid"].astype(np.uint64)) % np.uint64(len(parts))
                events = events[np.argsort(part, kind="stable")]
                borders = np.append(0, np.cumsum(np.bincount(part.astype(np.int64), minlength=len(parts))))
                for number, each in enumerate(opened):
                    each.write(events[borders[number] : borders[number + 1]].tobytes())
    return largest


def _read(file: Path) -> Iterator[NDArray[Any]]:
    """Yield events, some at a time; those without a bit of an action are left out."""
    named = next((kind for kind in EVENT_TYPES if file.stem == f"{kind}s"), None)
    needed = ["uid", "timestamp", "item_id", "is_organic"]
    needed += ["event_type"] if named is None else []
    needed += ["played_ratio_pct"] if named in (None, "listen") else []
    for batch in _batches(file, needed):
        columns = {name: batch.column(number) for number, name in enumerate(batch.schema.names)}
        if nested := [name for name, column in columns.items() if _is_list(column.type)]:
            lengths = [pc.fill_null(pc.list_value_length(columns[name]), 0) for name in nested]
            if any(not each.equals(lengths[0]) for each in lengths):
                raise DataError(f"{file}: lists of one user have different lengths in {', '.join(nested)}.")
            parents = pa.array(np.repeat(np.arange(batch.num_rows), lengths[0]))
            columns = {name: pc.list_flatten(c) if name in nested else c.take(parents) for name, c in columns.items()}
        flat = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
        uid, time, item, is_organic = _integers(file, flat, needed[:4])
        action = _actions(file, flat, named)
        events = np.empty(len(uid), _EVENT)
        for name, values in zip(_EVENT.names or (), (uid, time, item, action, is_organic), strict=True):
            events[name] = values
        yield events


def _actions(file: Path, batch: pa.RecordBatch, named: str | None) -> Ids:
    """Return the bit of each event's action, 0 for an event that is in no history and no sample."""
    kinds = np.full(batch.num_rows, EVENT_TYPES.index(named) if named else 0)
    if named is None:
        texts = batch.column("event_type").cast(pa.string())
        kinds = np.asarray(pc.index_in(texts, value_set=pa.array(EVENT_TYPES)).fill_null(-1))
        if len(wrong := np.flatnonzero(kinds < 0)):
            raise DataError(f"{file}: event_type is {texts[int(wrong[0])]}; needed one of {', '.join(EVENT_TYPES)}.")
    action = np.where(kinds == EVENT_TYPES.index("like"), LIKE, 0)
    if "played_ratio_pct" in batch.schema.names:
        column = batch.column("played_ratio_pct")
        played = np.asarray(column.cast(pa.float64()).fill_null(0.0))
        action = np.where(kinds == 0, np.where(played >= _HALF, LISTEN_PLUS, SKIP), action)
    return action


def _sorted(events: NDArray[Any]) -> NDArray[Any]:
    """Return events by user and time; those of one moment in an order that does not depend on the log's."""
    return events[np.lexsort([events[name] for name in ("is_organic", "action", "item", "time", "uid")])]


def _starts(is_first: NDArray[np.bool_]) -> Ids:
    return np.maximum.accumulate(np.where(is_first, np.arange(len(is_first)), 0))


def _ends_of_histories(events: NDArray[Any]) -> Ids:
    """Return for each of the sorted events the place behind the last one of its user that was earlier."""
    changes = (events["uid"][1:] != events["uid"][:-1]) | (events["time"][1:] != events["time"][:-1])
    return _starts(np.append(True, changes)[: len(events)])


def _samples(events: NDArray[Any], owners: Sequence[_Owners], options: ListenOptions) -> Iterator[tuple[int, pa.Table]]:
    """Yield the samples of sorted events by days: the number of the day, and some of its samples."""
    begins = _starts(np.append(True, events["uid"][1:] != events["uid"][:-1])[: len(events)])
    ends = _ends_of_histories(events)
    days = (events["time"] // DAY).astype(np.int64)
    is_scored = np.isin(events["action"], (LISTEN_PLUS, SKIP)) & (ends - begins >= options.min_history)
    is_scored &= days >= options.first_day
    if options.num_days is not None:
        is_scored &= days < options.first_day + options.num_days
    scored = np.flatnonzero(is_scored)
    scored = scored[np.argsort(days[scored], kind="stable")]
    columns = _Columns(events, owners, options)
    borders = np.flatnonzero(np.diff(days[scored])) + 1
    for of_day in np.split(scored, borders):
        for first in range(0, len(of_day), _SAMPLES_AT_ONCE):
            some = of_day[first : first + _SAMPLES_AT_ONCE]
            yield int(days[some[0]]), columns.table(some, begins[some], ends[some])


class _Columns:
    """The columns of the samples of sorted events."""

    def __init__(self, events: NDArray[Any], owners: Sequence[_Owners], options: ListenOptions) -> None:
        self._options, items = options, events["item"].astype(np.int64)
        self._of_event = {"item_id": items} | {
            name: each.of(items) for name, each in zip(TARGET[1:], owners, strict=True)
        }
        self._of_event |= {name: events[name].astype(np.int64) for name in ("uid", "time", "action", "is_organic")}
        self._of_event["hour"] = self._of_event["time"] // 3600 % 24
        self._with_action = [np.flatnonzero(events["action"] == bit) for bit in ACTIONS]

    def table(self, scored: Ids, begins: Ids, ends: Ids) -> pa.Table:
        """Return the samples of the events `scored` [n], whose users' events are those from `begins` to `ends`."""
        past, lengths = self._past(begins, ends)
        offsets = pa.array(np.append(0, np.cumsum(lengths)).astype(np.int32))
        columns = {}
        for name in SPARSE:
            if name.startswith("hist_"):
                values = pa.array(self._of_event[name.removeprefix("hist_")][past].astype(np.uint32))
                columns[name] = pa.ListArray.from_arrays(offsets, values)
            else:
                found = self._crossed(name, scored) if name in CROSSES else self._of_event[name][scored]
                columns[name] = pa.array(found.astype(np.uint32))
        columns["label"] = pa.array((self._of_event["action"][scored] == LISTEN_PLUS).astype(np.uint8))
        return pa.table(columns, schema=_SCHEMA)

    def _past(self, begins: Ids, ends: Ids) -> tuple[Ids, Ids]:
        """Return the places of the events of all histories, in turn, each in order; and the length of each."""
        samples, places = [], []
        for with_action in self._with_action:
            stop = np.searchsorted(with_action, ends)
            first = np.maximum(np.searchsorted(with_action, begins), stop - self._options.per_action)
            counts = stop - first
            behind = np.cumsum(counts)
            places.append(with_action[np.arange(behind[-1]) + np.repeat(stop - behind, counts)])
            samples.append(np.repeat(np.arange(len(ends)), counts))
        sample, place = np.concatenate(samples), np.concatenate(places)
        return place[np.lexsort((place, sample))], np.bincount(sample, minlength=len(ends))

    def _crossed(self, name: str, scored: Ids) -> Ids:
        """Return rows from 1 on of a crossed feature: a hash of what it crosses, and of its number."""
        keys = np.full(len(scored), list(CROSSES).index(name), np.uint64)
        for part in CROSSES[name][0]:
            keys = add_part(keys, self._of_event[part][scored].astype(np.uint64))
        return (keys % np.uint64(self._options.cross_rows(name) - 1)).astype(np.int64) + 1


_NOTE = """# Samples that examples/dlrm_v4/yambda.py made: {samples:,} listens of {users:,} users on {days} days.
# A small HSTU, to try them; examples/dlrm_v4.toml has the sizes of MLPerf Training's DLRMv4.

"""


def main(argv: Sequence[str]) -> int:
    """Make samples of a log; return the exit code."""
    parser = argparse.ArgumentParser("yambda.py", **help_parts(__doc__))
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="the log")
    parser.add_argument("-o", dest="output", type=Path, required=True, metavar="DIR", help="the new folder")
    text = "folder of artist_item_mapping.parquet and album_item_mapping.parquet (that of the first FILE)"
    parser.add_argument("--metadata", type=Path, metavar="DIR", help=text)
    parser.add_argument("--history", type=positive, default=4086, metavar="N", help="most events of a history (4086)")
    text = "events before a listen that becomes a sample (0)"
    parser.add_argument("--min-history", type=whole, default=0, metavar="N", help=text)
    text = "of the log's clock: the first one with samples (0)"
    parser.add_argument("--first-day", type=whole, default=0, metavar="N", help=text)
    parser.add_argument("--days", type=positive, metavar="N", help="so many days with samples (all)")
    text = "rows of the crossed features' tables, relative to the reference's (1)"
    parser.add_argument("--cross-scale", type=float, default=1.0, metavar="SHARE", help=text)
    given = parser.parse_args(argv)
    folder: Path = given.output
    try:
        options = ListenOptions(given.history, given.min_history, given.first_day, given.days, given.cross_scale)
        check_new_folder(folder)
        with whole_folder(folder) as partial:
            listens = write_listens(given.files, given.metadata or given.files[0].parent, partial, options)
            with naming_file(folder):
                text = _settings(folder.absolute(), listens, options.history)
                (partial / "run.toml").write_text(text, encoding="utf-8")
    except EmbershardError as error:
        print(f"yambda.py: {error}", file=sys.stderr)
        return 2
    share = listens.num_positive / listens.num_samples
    say(
        plain_console(),
        f"{listens.num_events:,} events of {listens.num_users:,} users: {listens.num_samples:,} samples on "
        f"{len(listens.days)} days, {share:.1%} played to at least half, in {folder}.",
        f"Train on them: embershard train --config {folder / 'run.toml'}",
    )
    return 0


def _settings(folder: Path, listens: Listens, history: int) -> str:
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
