"""Counts are exact, survive the file, and damage never passes for a profile."""

from __future__ import annotations

import dataclasses
import json
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.errors import ConfigError, DataError, IdOutOfRangeError
from embershard.frequency import FrequencyProfile
from embershard.frequency import profile as profile_module
from embershard.frequency.collect import Collector, count_part
from embershard.frequency.counts import SparseCounts
from tests.covering import examples

ids = st.lists(st.integers(0, 49), max_size=30)


@given(st.lists(st.fixed_dictionaries({"user": ids, "item": ids}), max_size=5))
@examples(30)
def test_counts_are_those_of_a_slow_count(batches):
    tensors = [{name: torch.tensor(values, dtype=torch.int64) for name, values in b.items()} for b in batches]
    profile = FrequencyProfile.count(tensors, {"user": 50, "item": 1000})
    assert profile.num_batches == len(batches)
    for table, rows in (("user", 50), ("item", 1000)):
        counts = [0] * rows
        for batch in batches:
            for i in batch[table]:
                counts[i] += 1
        assert profile.counts[table].tolist() == counts
        assert profile.counts[table].dtype == torch.int64
        assert profile.num_rows(table) == rows


def test_counts_that_are_merged_often(monkeypatch):
    """As of many ids; the tensor of a batch is used again for the next one."""
    monkeypatch.setattr(profile_module, "_COUNTED_IDS", 1)
    monkeypatch.setattr(profile_module, "_LEAST_COUNTED_IDS", 7)
    random = np.random.default_rng(0)
    ids, expected = torch.empty(5, dtype=torch.int64), np.zeros(20, np.int64)

    def batches():
        for _ in range(50):
            ids.copy_(torch.from_numpy(random.integers(0, 20, 5)))
            np.add.at(expected, ids.numpy(), 1)
            yield {"t": ids}

    profile = FrequencyProfile.count(batches(), {"t": 20})
    assert profile.counts["t"].tolist() == expected.tolist()


def test_a_count_keeps_only_the_rows_that_occur():
    profile = FrequencyProfile.count([{"t": torch.tensor([5, 10**12 - 1, 5])}], {"t": 10**12})
    counts = profile.sparse("t")
    assert (counts.rows.tolist(), counts.hits.tolist()) == ([5, 10**12 - 1], [2, 1])
    assert counts.rows.nbytes + counts.hits.nbytes == 2 * 16


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_ids_of_any_integer_type_and_shape(dtype):
    profile = FrequencyProfile.count([{"t": torch.tensor([[1, 2], [1, 0]], dtype=dtype)}], {"t": 4})
    assert profile.counts["t"].tolist() == [1, 2, 1, 0]


def test_nothing_to_count():
    profile = FrequencyProfile.count(iter(()), {"t": 4, "u": 0})
    assert (profile.num_batches, profile.counts["t"].tolist(), profile.num_rows("u")) == (0, [0] * 4, 0)
    assert FrequencyProfile.count([{}], {"t": 4}).num_batches == 1


@pytest.mark.parametrize("rows", [4, 10_000])
@pytest.mark.parametrize("bad", [-1, 10_000, 2**40])
def test_an_id_that_is_no_row_is_named(rows, bad):
    with pytest.raises(IdOutOfRangeError, match=rf"table 't': id {bad} is not in \[0, {rows}\)"):
        FrequencyProfile.count([{"t": torch.tensor([1, bad])}], {"t": rows})


def test_an_unknown_table_is_named_with_its_batch():
    with pytest.raises(DataError, match=r"batch 2 has ids of table 'x'; known are \['t'\]"):
        FrequencyProfile.count([{}, {"x": torch.tensor([1])}], {"t": 4})


def test_shards_are_the_rows_of_a_rank():
    profile = FrequencyProfile({"t": torch.arange(10)}, 1)
    assert profile.shard("t", 10, 4, 3).dense(3).tolist() == [4, 5, 6]
    assert profile.shard("t", 10, 10, 0).rows.tolist() == []
    with pytest.raises(ConfigError, match=r"no table 'x', only .'t'.*same data and model"):
        profile.shard("x", 10, 0, 10)
    with pytest.raises(ConfigError, match="counted 10 rows of table 't', the model has 11"):
        profile.shard("t", 11, 0, 11)


@pytest.mark.parametrize("name", ["t", "a/b", "counts/t", "format", "t table", "schön", "file"])
def test_saved_and_loaded_it_is_the_same(tmp_path, name):
    path = tmp_path / "profile"
    saved = FrequencyProfile({name: torch.tensor([0, 2**40, 3]), "other": torch.zeros(0, dtype=torch.int64)}, 7)
    saved.save(path)
    assert path.exists(), "no suffix is added"
    loaded = FrequencyProfile.load(str(path))
    assert (set(loaded.counts), loaded.num_batches) == ({name, "other"}, 7)
    assert torch.equal(loaded.counts[name], saved.counts[name])
    assert loaded.counts[name].dtype == torch.int64


def test_a_large_table_with_few_rows_in_use_is_a_small_file(tmp_path):
    FrequencyProfile({"t": torch.zeros(1_000_000, dtype=torch.int64)}, 7).save(tmp_path / "p.npz")
    assert (tmp_path / "p.npz").stat().st_size < 20_000


@pytest.fixture
def saved(tmp_path):
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "profile.npz"
    FrequencyProfile({"t": torch.randint(0, 5000, (500,), generator=generator)}, 7).save(path)
    return path


def test_what_is_no_profile_is_refused(tmp_path, saved):
    def refused(match: str = "is not a frequency profile") -> None:
        with pytest.raises(DataError, match=match):
            FrequencyProfile.load(path)

    path = tmp_path / "missing.npz"
    refused()
    path = tmp_path
    refused("Is a directory. Give a file, not a folder")
    path = tmp_path / "x.npz"
    for content in (b"", b"text", saved.read_bytes()[:10], saved.read_bytes()[:300]):
        path.write_bytes(content)
        refused()
    np.savez(path, other=np.zeros(3))
    refused()
    np.savez(path, format=np.array([3, 1]))
    refused("of format 3, this version reads 1 and 2")
    np.savez(path, format=np.array([1, 1], dtype=object))
    refused()


def test_a_single_array_is_no_profile(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(DataError):
        FrequencyProfile.load(tmp_path / "x.npy")


@pytest.mark.slow
def test_a_damaged_file_is_refused_or_read_right(tmp_path, saved):
    content, expected = saved.read_bytes(), FrequencyProfile.load(saved)
    for place in range(0, len(content), 5):
        damaged = bytearray(content)
        damaged[place] ^= 0x55
        (tmp_path / "x.npz").write_bytes(damaged)
        try:
            loaded = FrequencyProfile.load(tmp_path / "x.npz")
        except DataError:
            continue
        assert loaded.num_batches == 7
        assert torch.equal(loaded.counts["t"], expected.counts["t"])


@pytest.mark.parametrize("counts", [np.zeros((2, 2), dtype=np.int64), np.zeros(3), np.array([1, -1])])
def test_arrays_that_are_no_counts_are_refused(tmp_path, counts):
    np.savez(tmp_path / "x.npz", **{"format": np.array([1, 1]), "counts/t": counts})
    with pytest.raises(DataError):
        FrequencyProfile.load(tmp_path / "x.npz")


# -------------------------------------------------------------------------------------- with statistics

ROWS = {"user": 300, "item": 40}


def lookups(num_samples: int, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [(rows * random.random(num_samples) ** 3).astype(np.int64) for rows in ROWS.values()]


def collected(rows: list[np.ndarray], **options: int) -> FrequencyProfile:
    collector = Collector(ROWS, **({"max_lookups": 10**6, "memory_bytes": 1 << 30} | options))
    collector.add(count_part(list(ROWS.values()), rows, [1, 1], len(rows[0])))
    found = collector.finish(origin="a test")
    return FrequencyProfile.of_sparse(ROWS, found.counts, collector.num_parts, found.statistics)


def test_loading_reads_no_counts(tmp_path, monkeypatch):
    collected(lookups(2000)).save(tmp_path / "p.npz")
    read = []
    loaded = FrequencyProfile.load(tmp_path / "p.npz")
    assert isinstance(loaded.counts, SparseCounts)
    sparse = loaded.counts.sparse
    monkeypatch.setattr(loaded.counts, "sparse", lambda table: read.append(table) or sparse(table))
    assert loaded.tables == ROWS
    assert "user" in loaded.counts
    assert "x" not in loaded.counts
    loaded.cache_statistics("user", 256)
    assert read == []
    loaded.shard("user", 300, 100, 50)
    assert read == ["user"]


def test_a_billion_rows_are_loaded_without_counting_to_a_billion(tmp_path):
    collector = Collector({"t": 10**9}, max_lookups=1000, memory_bytes=1 << 30)
    collector.add(count_part([10**9], [np.array([5, 999_999_999, 5])], [1], 3))
    found = collector.finish()
    FrequencyProfile.of_sparse({"t": 10**9}, found.counts, 1, found.statistics).save(tmp_path / "p.npz")
    loaded = FrequencyProfile.load(tmp_path / "p.npz")
    assert loaded.num_rows("t") == 10**9
    assert loaded.shard("t", 10**9, 999_999_990, 10).dense(10).tolist() == [0] * 9 + [1]
    assert loaded.sparse("t").hits.tolist() == [2, 1]
    assert loaded.statistics.tables["t"].num_lookups == 3


@given(st.lists(st.integers(0, 49), max_size=40), st.integers(0, 50), st.integers(0, 60))
@examples(30)
def test_lazy_counts_are_the_dense_ones(tmp_path_factory, values, start, size):
    path = tmp_path_factory.getbasetemp() / "lazy.npz"
    dense = FrequencyProfile.count([{"t": torch.tensor(values, dtype=torch.int64)}], {"t": 50})
    dense.save(path)
    lazy = FrequencyProfile.load(path)
    assert torch.equal(lazy.counts["t"], dense.counts["t"])
    shard = lazy.shard("t", 50, start, size).dense(size)
    assert shard[: 50 - start].tolist() == dense.counts["t"][start : start + size].tolist()
    assert lazy.sparse("t").rows.tolist() == dense.sparse("t").rows.tolist()
    assert lazy.sparse("t").hits.tolist() == dense.sparse("t").hits.tolist()


def test_statistics_are_saved_with_the_counts(tmp_path):
    profile = collected(lookups(2000))
    assert profile.statistics is not None
    named = dataclasses.replace(profile.statistics, preferences={"lru": 0.25})
    dataclasses.replace(profile, statistics=named).save(tmp_path / "p.npz")
    loaded = FrequencyProfile.load(tmp_path / "p.npz").need_statistics()
    assert (loaded.num_samples, loaded.origin, loaded.preferences) == (2000, "a test", {"lru": 0.25})
    assert loaded.trace.tables["item"].rows.tolist() == lookups(2000)[1].tolist()


def test_a_file_of_the_first_format_still_loads(tmp_path):
    arrays = {"format": np.array([1, 7]), "counts/t": np.array([0, 3, 1]), "counts/a/b": np.zeros(2, np.int64)}
    np.savez_compressed(tmp_path / "p.npz", **arrays)
    loaded = FrequencyProfile.load(tmp_path / "p.npz")
    assert (loaded.num_batches, loaded.statistics, set(loaded.counts)) == (7, None, {"t", "a/b"})
    assert loaded.counts["t"].tolist() == [0, 3, 1]
    with pytest.raises(ConfigError, match="counts only"):
        loaded.need_statistics()


def rewritten(path, change):
    """The file again, with its arrays changed by ``change``."""
    with np.load(path) as file:
        arrays = dict(file)
    change(arrays)
    np.savez(path, **arrays)
    return path


def header(**values):
    def change(arrays):
        old = json.loads(arrays["header"].tobytes())
        arrays["header"] = np.frombuffer(json.dumps(old | values).encode(), np.uint8)

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays.update({"ids/user": arrays["ids/user"][::-1]}),
        lambda arrays: arrays.update({"ids/user": arrays["ids/user"] + np.uint16(300)}),
        lambda arrays: arrays.update({"hits/user": arrays["hits/user"][1:]}),
        lambda arrays: arrays.update({"hits/user": arrays["hits/user"] * 0}),
        lambda arrays: arrays.update({"hits/user": arrays["hits/user"] * 1.0}),
        lambda arrays: arrays.pop("hits/user"),
        lambda arrays: arrays.pop("header"),
        lambda arrays: arrays.pop("trace/rows"),
        lambda arrays: arrays.update({"trace/rows": arrays["trace/rows"][1:]}),
        lambda arrays: arrays.update({"statistics/numbers": np.append(arrays["statistics/numbers"], 0.0)}),
        lambda arrays: arrays.update({"header": arrays["header"][:-1]}),
        header(tables={"user": 300}),
        header(tables=[1]),
        header(statistics={}),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(tmp_path, change):
    collected(lookups(300)).save(tmp_path / "p.npz")
    rewritten(tmp_path / "p.npz", change)
    with pytest.raises(DataError, match="is not a frequency profile"):
        FrequencyProfile.load(tmp_path / "p.npz").sparse("user")


def test_a_file_that_is_gone_or_cut_is_named(tmp_path):
    path = tmp_path / "p.npz"
    collected(lookups(300)).save(path)
    loaded = FrequencyProfile.load(path)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("more", b"")
    assert loaded.counts["user"].sum() == 300
    path.unlink()
    with pytest.raises(DataError, match=r"p\.npz is not a frequency profile"):
        loaded.sparse("user")


@pytest.mark.slow
@given(st.integers(0, 2000), st.integers(0, 2))
@settings(max_examples=10)
def test_merged_parts_are_the_whole(cut, seed):
    rows = lookups(2000, seed)
    whole = collected(rows)
    merged = FrequencyProfile.merge(
        [collected([each[:cut] for each in rows]), collected([each[cut:] for each in rows])]
    )
    one, other = whole.need_statistics(), merged.need_statistics()
    assert merged.num_batches == 2
    assert other.num_samples == 2000
    for table in ROWS:
        assert torch.equal(merged.counts[table], whole.counts[table])
        a, b = one.tables[table], other.tables[table]
        assert b.histogram.counts.tolist() == a.histogram.counts.tolist()
        assert b.histogram.rows.tolist() == a.histogram.rows.tolist()
        assert b.bag_sizes.tolist() == a.bag_sizes.tolist()
        assert other.trace.tables[table].rows.tolist() == one.trace.tables[table].rows.tolist()
        assert other.trace.tables[table].samples.tolist() == one.trace.tables[table].samples.tolist()
        assert b.stack.lookups.tolist() == a.stack.lookups.tolist()


def test_merged_windows_are_means_over_all_samples():
    parts = [collected(lookups(1024, 0)), collected(lookups(3072, 1))]
    merged = FrequencyProfile.merge(parts).need_statistics().tables["user"]
    assert merged.window_samples.tolist() == [256, 1024, 4096]
    means = [part.need_statistics().tables["user"].window_rows[0] for part in parts]
    assert merged.window_rows[0] == pytest.approx((means[0] + 3 * means[1]) / 4)
    assert merged.window_rows[2] == len(np.unique(np.concatenate([lookups(1024, 0)[0], lookups(3072, 1)[0]])))


@pytest.mark.parametrize("max_lookups", [10**6, 500])
def test_traces_of_different_rates_are_merged_at_the_lowest(max_lookups):
    parts = [collected(lookups(2000, 0)), collected(lookups(2000, 1), max_lookups=1000)]
    rates = [part.need_statistics().trace.rate for part in parts]  # type: ignore[union-attr]
    merged = FrequencyProfile.merge(parts, max_lookups).need_statistics()
    assert rates[0] == 1.0 > rates[1] >= merged.trace.rate
    assert (merged.trace.rate < rates[1]) == (max_lookups == 500)
    assert merged.trace.num_lookups <= max_lookups
    for table, trace in merged.trace.tables.items():
        constant = merged.trace.constant_rows[table]
        assert not np.isin(trace.rows, constant).any()
        hits = merged.trace.constant_lookups[table]
        both = np.concatenate([lookups(2000, seed)[list(ROWS).index(table)] for seed in (0, 1)])
        assert hits.tolist() == [int((both == row).sum()) for row in constant]


def test_what_cannot_be_merged_is_said():
    one, counts = collected(lookups(100)), FrequencyProfile.count([], ROWS)
    with pytest.raises(ConfigError, match="nothing to merge"):
        FrequencyProfile.merge([])
    with pytest.raises(ConfigError, match=r"profile 1 and profile 2 .*tables \['item'\] are in one of them only"):
        FrequencyProfile.merge([one, FrequencyProfile.count([], {"user": 300})])
    with pytest.raises(ConfigError, match="table 'item' has 40 and 41 rows"):
        one.compare(FrequencyProfile.count([], {"user": 300, "item": 41}))
    with pytest.raises(ConfigError, match="have counts only"):
        FrequencyProfile.merge([one, counts])
    assert FrequencyProfile.merge([counts, counts]).statistics is None


def test_compared_with_itself_and_with_others():
    first, second = collected(lookups(2000, 0)), collected(lookups(2000, 1))
    same = {each.table: each for each in first.compare(first)}["user"]
    assert (same.overlap, same.unseen) == (1.0, 0.0)
    assert same.hit_rate == same.own_hit_rate > 0.1
    other = {each.table: each for each in first.compare(second)}["user"]
    assert 0 < other.hit_rate <= other.own_hit_rate
    assert other.unseen == pytest.approx((~np.isin(lookups(2000, 1)[0], lookups(2000, 0)[0])).mean())
    assert other.num_top == round(0.015 * 300)


def test_cache_statistics_name_what_is_missing():
    profile = collected(lookups(2000))
    assert profile.cache_statistics("item", 1024).expected_lookups == pytest.approx(40, abs=1)
    with pytest.raises(ConfigError, match="no table 'x'"):
        profile.cache_statistics("x", 1024)
    with pytest.raises(ConfigError, match="embershard profile"):
        FrequencyProfile.count([], ROWS).cache_statistics("item", 1024)
