"""The generated log has Yambda's published numbers, scaled, and its listens can be foretold in part."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yambda_like
from yambda import DAY, EVENT_TYPES
from yambda_like import MEAN_EVENTS, MEDIAN_EVENTS, MOST_EVENTS, LogOptions, write_log

from embershard.errors import ConfigError

OPTIONS = LogOptions(scale=0.001, mean_events=100, num_days=20, seed=3)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    num_events = write_log(folder, OPTIONS)
    table = pq.read_table(folder / "multi_event.parquet")
    assert len(table) == num_events
    return folder, table


@pytest.mark.slow
def test_numbers_are_the_published_ones(log):
    folder, table = log
    assert LogOptions(scale=1).num_items == 9_390_623
    counts = np.bincount(table["uid"].to_numpy())[1:]
    assert len(counts) == 1000
    assert np.median(counts) / 100 == pytest.approx(MEDIAN_EVENTS / MEAN_EVENTS, rel=0.15)
    assert counts.mean() == pytest.approx(100, rel=0.1)
    assert counts.max() <= np.ceil(100 * MOST_EVENTS / MEAN_EVENTS)
    kinds = dict(zip(*np.unique(table["event_type"].to_numpy(zero_copy_only=False), return_counts=True), strict=True))
    assert set(kinds) == set(EVENT_TYPES)
    assert kinds["listen"] / len(table) == pytest.approx(0.972, abs=0.005)
    assert kinds["like"] / len(table) == pytest.approx(0.019, abs=0.004)
    played = table.filter(pc.equal(table["event_type"], "listen"))["played_ratio_pct"].to_numpy()
    assert (played >= 50).mean() == pytest.approx(0.613 / 0.972, abs=0.03)
    assert table["timestamp"].to_numpy().max() < OPTIONS.num_days * DAY
    for name, most in (("artist", 1294), ("album", 3368)):
        pairs = pq.read_table(folder / f"{name}_item_mapping.parquet")
        assert sorted(pairs["item_id"].to_pylist()) == list(range(1, 9392))
        assert 1 <= min(pairs[f"{name}_id"].to_pylist()) <= max(pairs[f"{name}_id"].to_pylist()) <= most


@pytest.mark.slow
def test_events_are_by_user_and_time_and_only_listens_are_played(log):
    _, table = log
    uid, time = table["uid"].to_numpy().astype(np.int64), table["timestamp"].to_numpy()
    assert (np.diff(uid * 2**32 + time) >= 0).all()
    assert (time % 5 == 0).all()
    is_listen = pc.equal(table["event_type"], "listen")
    assert table["played_ratio_pct"].is_valid().equals(is_listen)


def test_a_listen_can_be_foretold_in_part(log):
    """Items are told apart by the other half of their listens."""
    _, table = log
    listens = table.filter(pc.equal(table["event_type"], "listen"))
    item, played = listens["item_id"].to_numpy(), listens["played_ratio_pct"].to_numpy() >= 50
    even = np.arange(len(item)) % 2 == 0
    seen, liked = (np.bincount(item[even], w, 9392) for w in (None, played[even]))
    often = even & False | (~even & (seen[item] >= 20))
    share = liked[item[often]] / seen[item[often]]
    high, low = played[often][share > np.median(share)].mean(), played[often][share < np.median(share)].mean()
    assert high - low > 0.15


@pytest.mark.slow
def test_a_users_events_do_not_depend_on_the_other_users(log, tmp_path, monkeypatch):
    _, table = log
    monkeypatch.setattr(yambda_like, "_USERS_AT_ONCE", 300)
    write_log(tmp_path, OPTIONS)
    assert pq.read_table(tmp_path / "multi_event.parquet").equals(table)


@pytest.mark.parametrize("wrong", [{"scale": 0.0}, {"scale": 2.0}, {"mean_events": 0}, {"num_days": 0}, {"seed": -1}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: got"):
        LogOptions(**wrong)
