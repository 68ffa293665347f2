"""Generates a log of music with Yambda's published numbers, in its layout, to try everything without its data. Which
tracks are played to at least half can be foretold, in part, from user and item.

Everything about a user is a function of (seed, user), so a log can be made in parts.

  python examples/dlrm_v4/yambda_like.py --scale 0.001 --events 200 --days 20 -o log
  python examples/dlrm_v4/yambda.py log/multi_event.parquet --history 99 --cross-scale 0.001 -o samples
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.special import expit, ndtri
from yambda import DAY, EVENT_TYPES

from embershard.data.hashing import Ids, add_part, make_key, mix64, random_words, unit_floats
from embershard.errors import ConfigError, EmbershardError, naming_file
from embershard.extras.event_logs.windows import need_at_least
from embershard.launch.arguments import check_new_folder, help_parts, positive, whole
from embershard.launch.screen import plain_console, say
from embershard.whole_file import whole_folder

#: Published: users, items, artists and albums of Yambda-5B (rows of the reference's tables, less row 0).
NUM_USERS, NUM_ITEMS, NUM_ARTISTS, NUM_ALBUMS = 1_000_000, 9_390_623, 1_293_394, 3_367_691
#: Published: mean, median and most events of a user.
MEAN_EVENTS, MEDIAN_EVENTS, MOST_EVENTS = 4763, 2695, 27_738
#: Published: shares of the types of events, of which "other" is 0.4 % dislikes and as much of each "un-"; and of the
#: listens, those that were played to at least half.
_SHARES = (0.972, 0.019, 0.004, 0.0025, 0.0025)
_PLAYED = 0.613 / 0.972
# Not published, so assumed: popularity by Zipf's law with exponent 1, and the rest below.
_FAVOURITES, _OF_FAVOURITES, _IS_ORGANIC = 8, 0.6, 0.5  # artists of a user; shares of the events
_SESSION = 15  # events of one artist or of any, some minutes apart
_GAP = 215.0  # seconds, at most
_ITEM_SPREAD, _TASTE_SPREAD, _LIKED = 1.0, 1.0, 1.2  # of the logit that a listen is played to at least half
_USERS_AT_ONCE = 2048
_ALBUM, _ARTIST, _LENGTH, _FAVOURITE, _KIND, _ITEM, _SESSION_TIME, _TIME, _PLAY, _RATIO, _TASTE, _QUALITY, _ORGANIC = (
    range(13)
)
_SCHEMA = pa.schema(
    [
        *((name, pa.uint32()) for name in ("uid", "timestamp", "item_id")),
        ("is_organic", pa.uint8()),
        ("event_type", pa.string()),
        ("played_ratio_pct", pa.uint16()),
        ("track_length_seconds", pa.uint32()),
    ]
)


@dataclass(frozen=True)
class LogOptions:
    """A log like Yambda's.

    Attributes:
        scale: users, items, artists and albums, relative to Yambda-5B.
        mean_events: of a user; lengths are spread as published.
        num_days: of the log.
        seed: of everything.

    >>> LogOptions(scale=0.001).num_items
    9391

    Raises:
        ConfigError: a number is out of its range.
    """

    scale: float = 0.001
    mean_events: int = MEAN_EVENTS
    num_days: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        need_at_least(self, mean_events=1, num_days=1, seed=0)
        if not 1e-5 <= self.scale <= 1:
            raise ConfigError(f"scale: got {self.scale}, needed a share from 0.00001 to 1.")

    def scaled(self, number: int) -> int:
        """Return so many, scaled."""
        return math.ceil(number * self.scale)

    @property
    def num_items(self) -> int:
        """Items of the log."""
        return self.scaled(NUM_ITEMS)


def write_log(folder: Path, options: LogOptions) -> int:
    """Write `multi_event.parquet` and both files of an item's owners to an existing folder; return the events."""
    catalog, num_events = _Catalog(options), 0
    for name, numbers in (("artist", catalog.artists), ("album", catalog.albums)):
        pairs = pa.table({f"{name}_id": numbers.astype(np.uint32), "item_id": catalog.items.astype(np.uint32)})
        file = folder / f"{name}_item_mapping.parquet"
        with naming_file(file):
            pq.write_table(pairs, file)
    file = folder / "multi_event.parquet"
    with naming_file(file), pq.ParquetWriter(file, _SCHEMA) as writer:
        for events in _events(options, catalog):
            writer.write_table(events)
            num_events += len(events)
    return num_events


class _Catalog:
    """Items, numbered from 1, and their albums and artists. The popularity of an item is that of its rank."""

    def __init__(self, options: LogOptions) -> None:
        self.num_items, self._key = options.num_items, make_key(options.seed, _QUALITY)
        self.items = np.arange(1, self.num_items + 1)
        num_albums, num_artists = options.scaled(NUM_ALBUMS), options.scaled(NUM_ARTISTS)
        uniform = unit_floats(random_words(make_key(options.seed, _ALBUM), self.items))
        self.albums = (uniform * num_albums).astype(np.int64) + 1
        self.artists = _by_zipf(unit_floats(random_words(make_key(options.seed, _ARTIST), self.albums)), num_artists)
        self._by_artist = np.argsort(self.artists, kind="stable")
        self._ends = np.cumsum(np.bincount(self.artists, minlength=num_artists + 1))
        step = int(self.num_items * 0.618) | 1
        self._step = next(step + more for more in range(self.num_items) if math.gcd(step + more, self.num_items) == 1)

    def draw(self, uniform: NDArray[np.float64]) -> Ids:
        """Return items by popularity, which has nothing to do with their numbers."""
        return (_by_zipf(uniform, self.num_items) * self._step) % self.num_items + 1

    def draw_of(self, artists: Ids, uniform: NDArray[np.float64]) -> Ids:
        """Return items of these artists; of an artist without items, any."""
        ends, begins = self._ends[artists], self._ends[artists - 1]
        places = begins + _by_zipf(uniform, np.maximum(ends - begins, 1)) - 1
        return self._by_artist[np.minimum(places, self.num_items - 1)] + 1

    def quality(self, items: Ids) -> NDArray[np.float64]:
        """Return what an item adds to the logit of everybody's listens."""
        return _ITEM_SPREAD * _spread(random_words(self._key, items))


def _by_zipf(uniform: NDArray[np.float64], most: int | Ids) -> Ids:
    """Return ranks from 1 to `most`, rank j in proportion to log(1 + 1 / j), which is about 1 / j."""
    return np.minimum(np.power(np.asarray(most) + 1.0, uniform).astype(np.int64), most)


def _spread(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return numbers with mean 0 and standard deviation 1."""
    return (unit_floats(words) - 0.5) * math.sqrt(12.0)


def _events(options: LogOptions, catalog: _Catalog) -> Iterator[pa.Table]:
    """Yield the events of some users at a time, by user and time."""
    num_users = options.scaled(NUM_USERS)
    at_once = max(1, _USERS_AT_ONCE * MEAN_EVENTS // max(options.mean_events, MEAN_EVENTS))
    for first in range(1, num_users + 1, at_once):
        yield _events_of(options, catalog, np.arange(first, min(first + at_once, num_users + 1)))


def _events_of(options: LogOptions, catalog: _Catalog, users: Ids) -> pa.Table:
    def draw(stream: int, *numbers: Ids) -> NDArray[np.uint64]:
        keys = np.full(len(numbers[0]), make_key(options.seed, stream), np.uint64)
        for number in numbers:
            keys = add_part(keys, number.astype(np.uint64))
        return keys

    lengths = _lengths(unit_floats(draw(_LENGTH, users)), options.mean_events)
    uid = np.repeat(users, lengths)
    step = np.arange(len(uid)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    session = step // _SESSION
    start = unit_floats(draw(_SESSION_TIME, uid, session)) * (options.num_days * DAY - _SESSION * _GAP)
    time = start + _GAP * (step % _SESSION + unit_floats(draw(_TIME, uid, step)))

    chosen = (unit_floats(draw(_FAVOURITE, uid, session)) * _FAVOURITES / _OF_FAVOURITES).astype(np.int64)
    has_favourite = chosen < _FAVOURITES
    favourite = _by_zipf(unit_floats(draw(_FAVOURITE, uid, chosen + (1 << 32))), int(catalog.artists.max()))
    uniform = unit_floats(draw(_ITEM, uid, step))
    item = np.where(has_favourite, catalog.draw_of(favourite, uniform), catalog.draw(uniform))

    taste = _TASTE_SPREAD * _spread(draw(_TASTE, uid, catalog.artists[item - 1]))
    logit = catalog.quality(item) + taste + _LIKED * (has_favourite - _OF_FAVOURITES) + _bias()
    is_played = unit_floats(draw(_PLAY, uid, step)) < expit(logit)
    ratio = (50 * (unit_floats(draw(_RATIO, uid, step)) + is_played)).astype(np.int64)
    ratio += (ratio == 99) & is_played  # most tracks that are played are played to their end, which is 100
    kind = np.searchsorted(np.cumsum(_SHARES[:-1]), unit_floats(draw(_KIND, uid, step)), side="right")
    order = np.lexsort((step, time, uid))
    is_listen = kind == 0
    columns = {
        "uid": uid,
        "timestamp": time.astype(np.int64) // 5 * 5,
        "item_id": item,
        "is_organic": unit_floats(draw(_ORGANIC, uid, session)) < _IS_ORGANIC,
        "played_ratio_pct": ratio,
        "track_length_seconds": 120 + (mix64(item.astype(np.uint64)) % np.uint64(180)).astype(np.int64),
    }
    arrays = {name: pa.array(values[order].astype(_SCHEMA.field(name).type.to_pandas_dtype())) for name, values in
              columns.items()}  # fmt: skip
    for name in ("played_ratio_pct", "track_length_seconds"):  # of listens alone, as in Yambda
        arrays[name] = pa.array(arrays[name].to_numpy(), mask=~is_listen[order])
    arrays["event_type"] = pa.array(np.array(EVENT_TYPES, object)[kind[order]], pa.string())
    return pa.table([arrays[name] for name in _SCHEMA.names], schema=_SCHEMA)


def _lengths(uniform: NDArray[np.float64], mean: int) -> Ids:
    """Return numbers of events: log-normal, with the published ratio of median and mean, and the published most."""
    sigma = math.sqrt(2 * math.log(MEAN_EVENTS / MEDIAN_EVENTS))
    drawn = mean * MEDIAN_EVENTS / MEAN_EVENTS * np.exp(sigma * ndtri(np.clip(uniform, 1e-12, 1 - 1e-12)))
    return np.clip(drawn, 1, math.ceil(mean * MOST_EVENTS / MEAN_EVENTS)).astype(np.int64)


def _bias() -> float:
    """Return the logit at which the published share of listens is played: the spread draws a sigmoid to the middle."""
    variance = _ITEM_SPREAD**2 + _TASTE_SPREAD**2 + _LIKED**2 * _OF_FAVOURITES * (1 - _OF_FAVOURITES)
    return math.log(_PLAYED / (1 - _PLAYED)) * math.sqrt(1 + math.pi * variance / 8)


def main(argv: Sequence[str]) -> int:
    """Generate a log; return the exit code."""
    parser = argparse.ArgumentParser("yambda_like.py", **help_parts(__doc__))
    parser.add_argument("-o", dest="output", type=Path, required=True, metavar="DIR", help="the new folder")
    text = "users, items, artists and albums, relative to Yambda-5B (0.001)"
    parser.add_argument("--scale", type=float, default=0.001, metavar="SHARE", help=text)
    parser.add_argument("--events", type=positive, default=4763, metavar="N", help="of a user, on average (4763)")
    parser.add_argument("--days", type=positive, default=300, metavar="N", help="of the log (300)")
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="of everything (0)")
    given = parser.parse_args(argv)
    try:
        options = LogOptions(given.scale, given.events, given.days, given.seed)
        check_new_folder(given.output)
        with whole_folder(given.output) as partial:
            num_events = write_log(partial, options)
    except EmbershardError as error:
        print(f"yambda_like.py: {error}", file=sys.stderr)
        return 2
    say(plain_console(), f"{num_events:,} events in {given.output}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
