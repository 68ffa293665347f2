"""Counts are exact, survive the file, and damage never passes for a profile."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.cache import FrequencyProfile
from embershard.errors import ConfigError, DataError, IdOutOfRangeError

ids = st.lists(st.integers(0, 49), max_size=30)


@given(st.lists(st.fixed_dictionaries({"user": ids, "item": ids}), max_size=5))
@settings(max_examples=30)
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
    assert profile.shard("t", 10, 4, 3).tolist() == [4, 5, 6]
    assert profile.shard("t", 10, 10, 0).tolist() == []
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
    refused()
    path = tmp_path / "x.npz"
    for content in (b"", b"text", saved.read_bytes()[:10], saved.read_bytes()[:300]):
        path.write_bytes(content)
        refused()
    np.savez(path, other=np.zeros(3))
    refused()
    np.savez(path, format=np.array([2, 1]))
    refused("of format 2, this version reads 1")
    np.savez(path, format=np.array([1, 1], dtype=object))
    refused()


def test_a_single_array_is_no_profile(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(DataError):
        FrequencyProfile.load(tmp_path / "x.npy")


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
        assert not loaded.counts or torch.equal(loaded.counts["t"], expected.counts["t"])


@pytest.mark.parametrize("counts", [np.zeros((2, 2), dtype=np.int64), np.zeros(3), np.array([1, -1])])
def test_arrays_that_are_no_counts_are_refused(tmp_path, counts):
    np.savez(tmp_path / "x.npz", **{"format": np.array([1, 1]), "counts/t": counts})
    with pytest.raises(DataError):
        FrequencyProfile.load(tmp_path / "x.npz")
