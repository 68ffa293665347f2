"""Yambda's logs become samples in time order, and no sample knows anything of its own moment or of a later one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yambda
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from yambda import CROSSES, DAY, EVENT_TYPES, HISTORY, SPARSE, ListenOptions, write_listens

from embershard.data.hashing import add_part
from embershard.errors import ConfigError, DataError

Event = tuple[int, int, int, str, int | None, int]  # uid, time, item, type, played, is_organic
ARTISTS, ALBUMS = {1: 7, 2: 7, 3: 5}, {1: 11, 2: 12, 4: 13}  # of items; item 0 has neither

events = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(0, 30).map(lambda moment: moment * DAY // 10),  # many at the same moment
        st.integers(0, 4),
        st.sampled_from(EVENT_TYPES),
        st.sampled_from([0, 49, 50, 100, 130, None]),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=60,
)


def write_metadata(folder: Path) -> None:
    for name, owners in (("artist", ARTISTS), ("album", ALBUMS)):
        pairs = [(owner, item) for item, owner in owners.items()] + [(99, item) for item in owners]  # the lowest counts
        columns = {f"{name}_id": [owner for owner, _ in pairs], "item_id": [item for _, item in pairs]}
        pq.write_table(pa.table(columns), folder / f"{name}_item_mapping.parquet")


def flat(log: list[Event]) -> pa.Table:
    names = ("uid", "timestamp", "item_id", "event_type", "played_ratio_pct", "is_organic")
    table = pa.table({name: [event[number] for event in log] for number, name in enumerate(names)})
    return table.set_column(3, "event_type", table.column("event_type").dictionary_encode())


def sequential(log: list[Event]) -> pa.Table:
    """A row per user, of lists."""
    table = flat(log)
    table = table.set_column(3, "event_type", table.column("event_type").cast(pa.string()))
    grouped = table.group_by("uid", use_threads=False).aggregate(
        [(name, "list") for name in table.column_names if name != "uid"]
    )
    return grouped.rename_columns([name.removesuffix("_list") for name in grouped.column_names])


def samples_of(folder: Path, table: pa.Table, options: ListenOptions) -> list[dict[str, Any]]:
    """Samples in the order of files and rows, each with the number of its file as `day`."""
    folder.mkdir(exist_ok=True)
    write_metadata(folder)
    pq.write_table(table, folder / "multi_event.parquet", row_group_size=7)
    (folder / "out").mkdir()
    write_listens([folder / "multi_event.parquet"], folder, folder / "out", options)
    files = sorted((folder / "out").glob("day_*.parquet"))
    return [{"day": int(file.stem[4:]), **row} for file in files for row in pq.read_table(file).to_pylist()]


def crossed(name: str, values: dict[str, int], options: ListenOptions) -> int:
    keys = np.full(1, list(CROSSES).index(name), np.uint64)
    for part in CROSSES[name][0]:
        keys = add_part(keys, np.full(1, values[part], np.uint64))
    return 1 + int(keys[0]) % (options.cross_rows(name) - 1)


def expected(log: list[Event], options: ListenOptions) -> list[dict[str, Any]]:
    """By plain loops; histories as sets of events, since those of one moment may stand in any order."""

    def bit(event: Event) -> int:
        if event[3] == "listen":
            return 1 if (event[4] or 0) >= 50 else 4
        return 2 if event[3] == "like" else 0

    found = []
    for event in log:
        uid, time, item, kind, _, is_organic = event
        past = [other for other in log if other[0] == uid and other[1] < time]
        if kind != "listen" or len(past) < options.min_history:
            continue
        artist, album = ARTISTS.get(item, 0), ALBUMS.get(item, 0)
        values = {"uid": uid, "item_id": item, "artist_id": artist, "album_id": album, "hour": time // 3600 % 24}
        values["is_organic"] = is_organic
        counts = {action: min(options.per_action, sum(bit(e) == action for e in past)) for action in (1, 2, 4)}
        found.append(
            {
                "day": time // DAY,
                **{name: values[name] for name in ("uid", "item_id", "artist_id", "album_id")},
                **{name: crossed(name, values, options) for name in CROSSES},
                "time": time,
                "label": int(bit(event) == 1),
                "counts": counts,
            }
        )
    return found


def no_future(log: list[Event], samples: list[dict[str, Any]]) -> None:
    """Every event of a history was one of the same user's before the sample's time, and days are in order."""
    bits = {1: {"listen"}, 2: {"like"}, 4: {"listen"}}
    for sample in samples:
        mine = {(time, item, kind) for uid, time, item, kind, *_ in log if uid == sample["uid"]}
        history = list(zip(sample["hist_time"], sample["hist_item_id"], sample["hist_action"], strict=True))
        assert all(time < sample["time"] for time, _, _ in history), "an event of the future"
        assert sample["hist_time"] == sorted(sample["hist_time"])
        assert all(any((time, item, kind) in mine for kind in bits[action]) for time, item, action in history)
        assert sample["day"] == sample["time"] // DAY
    assert [sample["day"] for sample in samples] == sorted(sample["day"] for sample in samples)


@pytest.mark.matrix
@given(log=events, history=st.integers(3, 9), least=st.integers(0, 3), parts=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_samples_are_those_of_plain_loops_and_know_no_future(log, history, least, parts, tmp_path_factory):
    options = ListenOptions(history, least, cross_scale=1e-6)
    want = expected(log, options)
    assume(want)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yambda, "_PART_BYTES", max(1, 3000 // parts))
        patch.setattr(yambda, "_SAMPLES_AT_ONCE", 4)
        found = samples_of(tmp_path_factory.mktemp("log"), flat(log), options)
    no_future(log, found)
    for sample in found:
        actions = sample.pop("hist_action")
        sample["counts"] = {action: actions.count(action) for action in (1, 2, 4)}
        assert [ARTISTS.get(item, 0) for item in sample["hist_item_id"]] == sample["hist_artist_id"]
        assert [ALBUMS.get(item, 0) for item in sample["hist_item_id"]] == sample["hist_album_id"]
        for name in (*HISTORY[:-1], "hist_time"):
            del sample[name]
    in_order = sorted(found, key=lambda sample: sorted((name, str(value)) for name, value in sample.items()))
    assert in_order == sorted(want, key=lambda sample: sorted((name, str(value)) for name, value in sample.items()))


TWO = [(1, 100, 1, "listen", 90, 0), (1, 200, 2, "listen", 10, 1), (1, 300, 3, "like", None, 1)]


def test_a_bound_that_is_off_by_one_is_seen(tmp_path, monkeypatch):
    log = [*TWO, (1, 300, 4, "listen", 80, 1)]
    no_future(log, samples_of(tmp_path / "good", flat(log), ListenOptions(9)))
    ends = yambda._ends_of_histories
    monkeypatch.setattr(yambda, "_ends_of_histories", lambda sorted_events: ends(sorted_events) + 1)
    with pytest.raises(AssertionError, match="an event of the future"):
        no_future(log, samples_of(tmp_path / "bad", flat(log), ListenOptions(9)))


def test_the_last_events_of_each_action_are_kept(tmp_path):
    log = [(1, 10 * n, n % 5, "listen", 90 if n % 2 else 10, 0) for n in range(20)]
    log += [(1, 5, 1, "like", None, 0), (1, 500, 1, "listen", 80, 0)]
    last = samples_of(tmp_path, flat(log), ListenOptions(history=7))[-1]  # two of each
    assert last["hist_time"] == [5, 160, 170, 180, 190]
    assert last["hist_action"] == [2, 4, 1, 4, 1]


@pytest.mark.slow
@given(log=events)
@settings(max_examples=20, deadline=None)
def test_both_layouts_and_any_order_give_the_same_samples(log, tmp_path_factory):
    options = ListenOptions(6, cross_scale=1e-6)
    assume(any(event[3] == "listen" for event in log))
    one = samples_of(tmp_path_factory.mktemp("flat"), flat(log), options)
    assert one == samples_of(tmp_path_factory.mktemp("sequential"), sequential(log), options)
    assert one == samples_of(tmp_path_factory.mktemp("turned"), flat(log[::-1]), options)


def test_files_of_single_types_are_one_log(tmp_path):
    want = samples_of(tmp_path / "multi", flat(TWO), ListenOptions(6))
    write_metadata(tmp_path)
    table = flat(TWO)
    pq.write_table(table.slice(0, 2).drop_columns(["event_type"]), tmp_path / "listens.parquet")
    pq.write_table(table.slice(2, 1).drop_columns(["event_type", "played_ratio_pct"]), tmp_path / "likes.parquet")
    (tmp_path / "out").mkdir()
    files = [tmp_path / "likes.parquet", tmp_path / "listens.parquet"]
    listens = write_listens(files, tmp_path, tmp_path / "out", ListenOptions(6))
    assert [{"day": 0, **row} for row in pq.read_table(tmp_path / "out" / "day_0000.parquet").to_pylist()] == want
    assert (listens.num_events, listens.num_users, listens.num_samples, listens.num_positive) == (3, 1, 2, 1)


def test_days_are_chosen_and_histories_begin_with_the_log(tmp_path):
    log = [(1, day * DAY + 7, day % 5, "listen", 90, 0) for day in range(6)]
    found = samples_of(tmp_path, flat(log), ListenOptions(30, first_day=2, num_days=3))
    assert [sample["day"] for sample in found] == [2, 3, 4]
    assert [len(sample["hist_time"]) for sample in found] == [2, 3, 4]


def test_tables_have_a_row_for_each_id(tmp_path):
    write_metadata(tmp_path)
    pq.write_table(flat(TWO), tmp_path / "multi_event.parquet")
    (tmp_path / "out").mkdir()
    rows = write_listens([tmp_path / "multi_event.parquet"], tmp_path, tmp_path / "out", ListenOptions()).num_rows
    assert set(rows) == set(SPARSE)
    assert [rows[name] for name in ("uid", "item_id", "artist_id", "album_id")] == [2, 5, 8, 14]
    assert sum(rows[name] for name in CROSSES) == 278_000_000, "the reference's"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (flat(TWO).drop_columns(["item_id"]), "has no column 'item_id'"),
        (flat(TWO).drop_columns(["event_type"]), "has no column 'event_type'"),
        (flat([(1, 5, 1, "danced", 3, 0)]), "event_type is danced; needed one of listen"),
        (flat([(1, -5, 1, "listen", 3, 0)]), "timestamp is -5; needed a number from 0"),
        (flat([(1, 2**32, 1, "listen", 3, 0)]), "timestamp is 4294967296"),
        (flat(TWO).set_column(0, "uid", pa.array(["a", "b", "c"])), "'uid' is of type string; needed integers"),
        (flat(TWO[2:]), "none of 1 events is a listen"),
        (flat([]).cast(flat(TWO).schema), "none of 0 events"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path, table, said):
    with pytest.raises(DataError, match=said):
        samples_of(tmp_path, table, ListenOptions(6))


def test_lists_of_different_lengths_are_refused(tmp_path):
    table = sequential(TWO)
    short = pa.array([[1]], pa.list_(pa.int64()))
    with pytest.raises(DataError, match="lists of one user have different lengths"):
        samples_of(tmp_path, table.set_column(table.column_names.index("is_organic"), "is_organic", short),
                   ListenOptions(6))  # fmt: skip


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    write_metadata(tmp_path)
    (tmp_path / "listens.parquet").write_text("uid")
    with pytest.raises(DataError, match=r"listens\.parquet: cannot be read as Parquet"):
        write_listens([tmp_path / "listens.parquet"], tmp_path, tmp_path, ListenOptions())
    with pytest.raises(DataError, match=r"artist_item_mapping\.parquet"):
        write_listens([tmp_path / "listens.parquet"], tmp_path / "none", tmp_path, ListenOptions())


@pytest.mark.parametrize("wrong", [{"history": 2}, {"min_history": -1}, {"num_days": 0}, {"cross_scale": 1.5}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: got"):
        ListenOptions(**wrong)
