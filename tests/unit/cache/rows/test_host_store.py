"""The host tier: one block of rows, shown table by table; in memory or in a file without a name."""

from __future__ import annotations

import os

import pytest
import torch

from embershard.cache import HostStore
from embershard.errors import ConfigError

STATES = [("momentum", torch.Size([]), torch.float32), ("square", torch.Size([8]), torch.float32)]
FP32, FP16 = torch.float32, torch.float16


@pytest.fixture(params=["memory", "mmap"])
def make(request, tmp_path):
    def store(rows=(3, 1, 4), dim=8, dtype=FP32, states=STATES) -> HostStore:
        return HostStore(rows, dim, dtype, states, request.param, str(tmp_path) if request.param == "mmap" else None)

    return store


def test_rows_start_as_zeros_in_the_declared_shapes(make):
    store = make()
    assert [tuple(t.shape) for t in store.payload] == [(8, 8), (8,), (8, 8)]
    assert all(t.dtype == FP32 and not t.any() for t in store.payload)
    assert store.row_offsets == [0, 3, 4]
    assert store.num_rows == 8


def test_tables_and_the_flat_block_are_views_of_the_same_memory(make):
    store = make()
    store.flat_weights.copy_(torch.arange(64.0))
    assert [t.shape[0] for t in store.table_weights()] == [3, 1, 4]
    assert store.table_weights()[1][0].tolist() == list(range(24, 32))
    store.table_weights()[2][0] = -1.0
    assert (store.weights[4] == -1.0).all()
    store.table_states()[2][0][3] = 7.0
    assert store.states["momentum"][7] == 7.0
    assert [[tuple(s.shape) for s in table] for table in store.table_states()][1] == [(1,), (1, 8)]


def test_bytes_are_those_of_all_payload_tensors(make):
    assert make().row_bytes == 4 * (8 + 1 + 8)
    assert make().host_bytes == 8 * 4 * (8 + 1 + 8)
    half = make(dtype=FP16, states=STATES[:1])
    assert (half.row_bytes, half.host_bytes) == (2 * 8 + 4, 8 * (2 * 8 + 4))
    assert make(states=[]).payload[0].shape == (8, 8)


@pytest.mark.parametrize("part", ["flat_weights", "weights", "table_weights", "state", "table_state"])
def test_the_version_tells_of_writes_through_any_view(make, part):
    store = make()
    views = {
        "flat_weights": store.flat_weights,
        "weights": store.weights,
        "table_weights": store.table_weights()[1],
        "state": store.states["square"],
        "table_state": store.table_states()[1][0],
    }
    before = store.version
    views[part].add_(1.0)
    assert store.version > before


def test_the_version_does_not_tell_of_the_cache_s_own_writes(make):
    store = make()
    before = store.version
    store.weights.data[3] = 1.0
    assert store.version == before
    assert store.weights[3].sum() == 8.0


def test_a_large_store_behaves_like_a_small_one(make):
    """Above a few megabytes the memory comes from another allocator (huge pages)."""
    store = make(rows=(300_000, 100_001), dim=8)
    assert not any(t.any() for t in store.payload)
    assert all(t.is_contiguous() and t.data_ptr() % 64 == 0 for t in store.payload)
    before = store.version
    store.table_weights()[1].add_(1.0)
    assert store.version > before
    assert store.flat_weights.sum() == 8 * 100_001
    assert store.states["momentum"].sum() == 0


def test_a_table_without_rows_on_this_rank(make):
    store = make(rows=(2, 0, 3))
    assert [t.shape[0] for t in store.table_weights()] == [2, 0, 3]
    assert store.row_offsets == [0, 2, 2]


def test_a_pool_without_rows_on_this_rank(make):
    """Row-wise: 5 rows over 4 ranks are 2, 2, 1 and none."""
    store = make(rows=(0,))
    assert store.host_bytes == 0
    assert store.row_bytes == 4 * (8 + 1 + 8)


def test_mapped_files_leave_no_name_behind_and_take_no_space_before_they_are_written(tmp_path):
    store = HostStore([1000], 64, FP32, [], "mmap", str(tmp_path / "new" / "folder"))
    assert os.listdir(tmp_path / "new" / "folder") == []
    store.weights[999] = 3.0
    assert store.weights[999].sum() == 192.0


def test_stores_in_one_folder_do_not_share_rows(tmp_path):
    a, b = (HostStore([10], 4, FP32, [], "mmap", str(tmp_path)) for _ in range(2))
    a.weights.fill_(1.0)
    assert not b.weights.any()


def test_a_disk_that_is_too_small_is_refused_with_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(ConfigError, match=r"host_dir='.*' has 1000 B free, 3\.12 KiB are needed.*another disk"):
        HostStore([100], 8, FP32, [], "mmap", str(tmp_path))


def test_the_states_need_room_on_the_disk_too(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 5000})())
    with pytest.raises(ConfigError, match=r"4\.88 KiB free"):
        HostStore([100], 8, FP32, STATES[1:], "mmap", str(tmp_path))  # 3200 bytes twice


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"host_dir='.*file.sub' cannot be made"):
        HostStore([10], 4, FP32, [], "mmap", str(tmp_path / "file" / "sub"))
