"""Logs of events become windows: each event of a user with the events before it, and with items of other events."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from embershard.errors import ConfigError, DataError
from embershard.extras.event_logs import windows as events
from embershard.extras.event_logs.sessions import SessionOptions, session_log
from embershard.extras.event_logs.windows import BEHAVIOURS, WindowOptions, write_windows

pytestmark = pytest.mark.extra

Event = tuple[int, int, str, int]  # user, item, behaviour, time


def category(item: int) -> int:
    return item % 3 + 1


def write_log(path: Path, log: list[Event]) -> Path:
    path.write_text("".join(f"{user},{item},{category(item)},{what},{time}\n" for user, item, what, time in log))
    return path


def read(folder: Path) -> dict[str, list[dict]]:
    return {name: pq.read_table(folder / f"{name}.parquet").to_pylist() for name in ("train", "eval")}


def expected(log: list[Event], history: int) -> dict[str, list[dict]]:
    """The positive samples, by plain loops."""
    by_user = defaultdict(list)
    for event in sorted(log, key=lambda event: (event[0], event[3])):
        by_user[event[0]].append(event)
    found: dict[str, list[dict]] = {"train": [], "eval": []}
    for user, mine in by_user.items():
        for place in range(1, len(mine)):
            past, (_, item, _, time) = mine[max(0, place - history) : place], mine[place]
            found["eval" if place == len(mine) - 1 else "train"].append(
                {
                    "user": user,
                    "item": item,
                    "category": category(item),
                    "hist_item": [event[1] for event in past],
                    "hist_category": [category(event[1]) for event in past],
                    "hist_behaviour": [BEHAVIOURS.index(event[2]) + 1 for event in past],
                    "time": time,
                    "hist_time": [event[3] for event in past],
                    "history_length": len(past),
                    "hours_since_last": float(np.float32((time - past[-1][3]) / 3600)),
                    "label": 1,
                }
            )
    return found


logs = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 20), st.sampled_from(BEHAVIOURS)), min_size=2, max_size=40
).map(lambda rows: [(*row, 100 + 7 * number) for number, row in enumerate(rows)])


@given(
    log=logs, history=st.integers(1, 5), negatives=st.integers(0, 3), seed=st.integers(0, 9), parts=st.integers(1, 3)
)
@settings(max_examples=40, deadline=None)
def test_windows_are_those_of_plain_loops(log, history, negatives, seed, parts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("windows")
    path = write_log(folder / "log.csv", log)
    options = WindowOptions(history, negatives, seed)
    want = expected(log, history)
    assume(len({event[1] for event in log}) > 1 or not negatives)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "_PART_BYTES", max(1, path.stat().st_size // parts))
        patch.setattr(events, "_WINDOWS_AT_ONCE", 3)
        if not want["eval"]:
            with pytest.raises(DataError, match="no user has two events"):
                write_windows(path, folder, options)
            return
        windows = write_windows(path, folder, options)
    items = {event[1] for event in log}
    for name, samples in read(folder).items():
        order = sorted(samples[:: 1 + negatives], key=lambda s: (s["user"], s["hist_item"], s["item"]))
        assert order == sorted(want[name], key=lambda s: (s["user"], s["hist_item"], s["item"]))
        for positive, *others in zip(*([iter(samples)] * (1 + negatives)), strict=True):
            for other in others:
                assert other["item"] in items
                assert other["category"] == category(other["item"])
                assert other["item"] != positive["item"]
                changed = {"item": positive["item"], "category": positive["category"], "label": 1}
                assert other["label"] == 0
                assert {**other, **changed} == positive
    assert windows.num_events == len(log)
    assert windows.num_users == len({event[0] for event in log})
    assert windows.distinct["item"] == len(items)
    assert windows.largest["item"] == max(items)


def test_negatives_depend_on_seed_user_and_place_alone(tmp_path):
    log = [(user, (user * 7 + place * 5) % 19, "pv", place) for user in range(8) for place in range(5)]
    found = []
    for number, (order, seed) in enumerate([(log, 0), (log[::-1], 0), (log, 1)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_windows(write_log(folder / "log.csv", order), folder, WindowOptions(seed=seed))
        found.append(read(folder))
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_the_order_of_the_lines_does_not_matter(tmp_path):
    """Although items change their category."""
    lines = [f"{user},{n % 7},{n % 5},pv,{n}\n" for user in range(6) for n in range(20 * user, 20 * user + 20)]
    found = []
    for name, order in (("a", lines), ("b", lines[::-1])):
        (tmp_path / name).mkdir()
        log = tmp_path / f"{name}.csv"
        log.write_text("".join(order))
        write_windows(log, tmp_path / name, WindowOptions(5, 2, 0))
        found.append(read(tmp_path / name))
    assert found[0] == found[1]
    assert len(found[0]["train"]) == 6 * 18 * 3


@pytest.mark.parametrize("unit", ["seconds", "milliseconds", "microseconds", "nanoseconds"])
def test_times_of_any_unit_become_seconds(unit, tmp_path):
    per_second = 1000 ** ["seconds", "milliseconds", "microseconds", "nanoseconds"].index(unit)
    second = 1_700_000_000
    log = write_log(tmp_path / "log.csv", [(1, item, "pv", (second + item) * per_second) for item in (0, 3600, 7200)])
    (tmp_path / "out").mkdir()
    assert write_windows(log, tmp_path / "out", WindowOptions(5, 0)).time_unit == unit
    samples = [sample for of_split in read(tmp_path / "out").values() for sample in of_split]
    assert [sample["time"] for sample in samples] == [second + 3600, second + 7200]
    assert [sample["hist_time"][-1] for sample in samples] == [second, second + 3600]
    assert [sample["hours_since_last"] for sample in samples] == [1, 1]


def test_events_of_one_second_are_in_the_order_of_their_milliseconds(tmp_path):
    log = [(1, item, "pv", 1_700_000_000_000 + item) for item in (3, 1, 2)]
    (tmp_path / "out").mkdir()
    write_windows(write_log(tmp_path / "log.csv", log), tmp_path / "out", WindowOptions(5, 0))
    (last,) = read(tmp_path / "out")["eval"]
    assert (last["hist_item"], last["item"]) == ([1, 2], 3)


def test_one_item_has_no_negatives(tmp_path):
    log = write_log(tmp_path / "log.csv", [(1, 7, "pv", second) for second in range(4)])
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=r"all events are of item 7; needed two"):
        write_windows(log, tmp_path / "out", WindowOptions(5, 1, 0))
    assert write_windows(log, tmp_path / "out", WindowOptions(5, 0, 0)).num_train == 2


def test_popular_items_are_drawn_more_often(tmp_path):
    """As often as they occur, so that popularity alone tells nothing."""
    log = [(user, 1 if (user + place) % 2 else 2 + place, "pv", place) for user in range(300) for place in range(6)]
    write_windows(write_log(tmp_path / "log.csv", log), tmp_path, WindowOptions(negatives=2))
    others = [s["item"] for s in read(tmp_path)["train"] if s["label"] == 0]
    share = others.count(1) / len(others)
    assert 0.2 < share < 0.4  # half of all events; of those, half are positives of this item, which draw another one


def test_a_log_in_gzip_is_read(tmp_path):
    plain = write_log(tmp_path / "log.csv", [(1, 5, "pv", 1), (1, 6, "buy", 2)])
    (tmp_path / "log.csv.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert write_windows(tmp_path / "log.csv.gz", tmp_path, WindowOptions()).num_eval == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1,2,3,pv\n", "cannot be read as a log of events"),
        ("user,item,category,behaviour,time\n1,2,3,pv,4\n", "cannot be read as a log of events"),
        ("1,2,3,view,4\n", "event 1 is 1,2,3,view,4; needed .*pv, buy, cart, fav"),
        ("1,2,3,pv,4\n1,-2,3,pv,5\n", "event 2 is 1,-2,3,pv,5"),
        ("", "the file is empty"),
    ],
)
def test_a_line_that_is_no_event_is_named(text, said, tmp_path):
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(DataError, match=said):
        write_windows(tmp_path / "log.csv", tmp_path, WindowOptions())


def test_ids_that_are_far_apart_are_hashed():
    near = events.Windows(9, 2, 4, 2, {"user": 50, "item": 9, "category": 3}, {"user": 50, "item": 9, "category": 3})
    assert near.id_mapping == "modulo"
    assert near.num_rows == {
        "user": 52,
        "item": 11,
        "category": 5,
        "hist_item": 11,
        "hist_category": 5,
        "hist_behaviour": 6,
    }
    far = events.Windows(9, 2, 4, 2, {"user": 10**9, "item": 9, "category": 3}, {"user": 50, "item": 9, "category": 3})
    assert far.id_mapping == "hash"
    assert far.num_rows["user"] == 101


@pytest.mark.parametrize("options", [{"history": 0}, {"negatives": -1}])
def test_options_are_checked(options):
    with pytest.raises(ConfigError, match="needed at least"):
        WindowOptions(**options)


def test_sessions_are_a_log_of_a_seed(tmp_path):
    options = SessionOptions(num_users=60, num_items=90, num_categories=9)
    text = "".join(session_log(options))
    assert text == "".join(session_log(options))
    assert text != "".join(session_log(SessionOptions(num_users=60, num_items=90, num_categories=9, seed=1)))
    rows = [line.split(",") for line in text.splitlines()]
    assert {row[3] for row in rows} == set(BEHAVIOURS)
    assert {int(row[1]) % 9 + 1 == int(row[2]) for row in rows} == {True}
    for _, mine in itertools.groupby(rows, key=lambda row: row[0]):
        times = [int(row[4]) for row in mine]
        assert len(times) >= 3
        assert times == sorted(times)


@pytest.mark.parametrize("options", [{"num_users": 0}, {"drift": 1.5}, {"num_items": 3}])
def test_options_of_sessions_are_checked(options):
    with pytest.raises(ConfigError, match="got"):
        SessionOptions(**options)


def named_columns(log: list[Event], **names: str) -> pa.Table:
    columns = {"time": [each[3] for each in log], "behaviour": [each[2] for each in log]}
    columns |= {"category": [category(each[1]) for each in log], "item": [each[1] for each in log]}
    columns |= {"user": [each[0] for each in log], "other": ["x"] * len(log)}
    return pa.table({names.get(name, name): values for name, values in columns.items()})


def test_columns_of_json_lines_and_of_parquet_are_told_by_their_names(tmp_path):
    log = [(n % 5, n % 7, BEHAVIOURS[n % 4], 1_700_000_000 + n) for n in range(60)]
    table, found = named_columns(log), {}
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=7)
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    write_log(tmp_path / "log.csv", log)
    for ending in ("csv", "jsonl", "parquet"):
        (tmp_path / ending).mkdir()
        write_windows(tmp_path / f"log.{ending}", tmp_path / ending, WindowOptions(history=3))
        found[ending] = read(tmp_path / ending)
    assert found["csv"] == found["jsonl"] == found["parquet"]
    assert len(found["csv"]["train"]) > 50


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (named_columns([(1, 2, "pv", 3)], user="user_id"), "no column 'user'; a log of events needs user, item"),
        (named_columns([(1, 2, "pv", 3)], time="when"), "this one has when, behaviour, category, item, user, other"),
        (named_columns([(1, 2, "pv", None)]), "event 1 has no time; needed user, item, category"),
        (named_columns([("ann", 2, "pv", 3)]), "needed whole numbers, and a behaviour that is a text"),
        (named_columns([(1, 2, "click", 3)]), "event 1 is 1,2,3,click,3; needed ids and a time"),
    ],
)
def test_other_columns_are_refused_by_name(tmp_path, table, said):
    pq.write_table(table, tmp_path / "log.parquet")
    with pytest.raises(DataError, match=re.escape(said)):
        write_windows(tmp_path / "log.parquet", tmp_path, WindowOptions())


def test_bytes_that_are_no_text_are_not_shown(tmp_path):
    (tmp_path / "log.csv").write_bytes(np.random.default_rng(0).integers(128, 256, 2000).astype(np.uint8).tobytes())
    with pytest.raises(DataError, match="its bytes are no text"):
        write_windows(tmp_path / "log.csv", tmp_path, WindowOptions())
