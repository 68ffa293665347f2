"""Rows get their initial weights when their block is first touched, once, and the same as made at once."""

from __future__ import annotations

import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.cache.rows import lazy_rows, memory
from embershard.cache.rows.host_store import HostStore
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.cache.rows.lazy_rows import LazyRows

TABLES = [ShardWeights("a", 1, 8, 1.0, 2.0), ShardWeights("b", 1, 16, 1.0, 2.0, first_row=40, first_column=8)]


def make(
    rows: tuple[int, ...] = (70, 23), block_bytes: int = 128, dtype=torch.float32
) -> tuple[LazyRows, torch.Tensor]:
    weights = torch.zeros(sum(rows), 8, dtype=dtype)
    with mock.patch.object(lazy_rows, "BLOCK_BYTES", block_bytes):  # 4 rows of float32
        return LazyRows(weights, rows, TABLES[: len(rows)]), weights


def eager(rows: tuple[int, ...] = (70, 23), dtype=torch.float32) -> torch.Tensor:
    weights = torch.zeros(sum(rows), 8, dtype=dtype)
    for table, part in zip(TABLES, weights.split(rows), strict=True):
        table.write(part)
    return weights


@given(
    st.tuples(st.integers(0, 70), st.integers(1, 40)),
    st.lists(st.lists(st.integers(0, 10_000), max_size=6), max_size=6),
    st.sampled_from([1, 128, 1024, 4096]),
    st.sampled_from([torch.float32, torch.float16]),
)
@settings(deadline=None)
def test_rows_are_those_made_at_once_in_any_order(rows, touched, block_bytes, dtype):
    lazy, weights = make(rows, block_bytes, dtype)
    expected, made = eager(rows, dtype), torch.zeros(sum(rows), dtype=torch.bool)
    for keys in touched:
        keys = torch.tensor([key % sum(rows) for key in keys], dtype=torch.int64)
        lazy.make(keys)
        made[keys] = True
        assert torch.equal(weights[made], expected[made])
    zero = ~weights.any(1)
    assert int(zero.sum()) >= sum(rows) - sum(len(keys) for keys in touched) * max(1, block_bytes // 16)
    assert torch.equal(weights[~zero], expected[~zero])
    lazy.make_all()
    assert lazy.num_unmade == 0
    assert torch.equal(weights, expected)


def test_rows_that_were_trained_are_never_made_again():
    lazy, weights = make()
    lazy.make(torch.tensor([9, 90]))
    weights[[8, 90]] = 7.0
    lazy.make(torch.tensor([8, 9, 90]))
    lazy.make_bytes(0, weights.nbytes)
    lazy.make_all()
    expected = eager()
    expected[[8, 90]] = 7.0
    assert torch.equal(weights, expected)


def test_the_flags_are_what_protects_trained_rows():
    """Negative control of the test above."""
    lazy, weights = make()
    lazy.make(torch.tensor([9]))
    weights[8] = 7.0
    lazy._made[:] = False
    lazy.make(torch.tensor([8]))
    assert not (weights[8] == 7.0).any()


def test_bytes_of_memory_are_made_by_whole_blocks():
    lazy, weights = make()
    lazy.make_bytes(130, 300)  # rows 4 to 9, in blocks of 4
    expected = eager()
    assert torch.equal(weights[4:12], expected[4:12])
    assert not weights[:4].any()
    assert not weights[12:].any()


@pytest.mark.slow
def test_rows_trained_beside_make_all_stay():
    """A fill makes the row, trains it and writes it back, while another thread makes all rows, as under a page lock."""
    lazy, weights = make((50_000, 10_000))
    with mock.patch.object(lazy_rows, "_CHUNK_BYTES", 1024):
        thread = threading.Thread(target=lazy.make_all)
        thread.start()
        trained = torch.randperm(60_000, generator=torch.Generator().manual_seed(0))[:4000]
        for keys in trained.split(10):
            lazy.make(keys)
            weights[keys] = 9.0
        thread.join()
    expected = eager((50_000, 10_000))
    expected[trained] = 9.0
    assert torch.equal(weights, expected)
    assert lazy.num_unmade == 0


@pytest.mark.parametrize("host", ["memory", "mmap"])
def test_the_host_store_makes_what_it_is_asked_for(host, tmp_path):
    states = [("momentum", torch.Size([]), torch.float32)]
    store = HostStore(
        [7000, 23], 8, torch.float32, states, host, str(tmp_path) if host == "mmap" else None, initial=TABLES
    )
    assert not store.weights.any()
    assert (store.is_made, store.flag_bytes) == (False, 55)  # blocks of 128 rows
    before = store.version
    store.make(torch.tensor([300]))
    expected = eager((7000, 23))
    assert torch.equal(store.weights[256:384], expected[256:384])
    assert not store.weights[384:].any()
    store.make_memory(store.states["momentum"].data_ptr(), 4)
    assert not store.weights[384:].any()
    store.make_all()
    assert store.is_made
    assert torch.equal(store.weights, expected)
    assert store.version == before, "making rows is nobody's write"


def test_rows_without_initial_weights_are_made_already():
    store = HostStore([10], 6, torch.float32, [])
    store.make(torch.tensor([3]))
    store.make_all()
    assert (store.is_made, store.flag_bytes, bool(store.weights.any())) == (True, 0, False)


def resident_bytes(*tensors: torch.Tensor) -> int:
    """Memory that the pages of tensors take, by the system's account."""
    ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, stop = (int(part, 16) for part in first.split("-"))
            counts = any(start < last and stop > address for address, last in ranges)
        elif counts and first == "Rss:":
            found += int(line.split()[1]) * 1024
    return found


def test_cold_rows_take_no_memory():
    """4.4 GB of rows, of which a thousand are touched; on huge pages they would take all of them."""
    states = [("square", torch.Size([16]), torch.float32)]
    store = HostStore([34_000_000], 16, torch.float32, states, initial=[ShardWeights("a", 0, 16, 1.0, 2.0)])
    keys = torch.randint(0, 34_000_000, (1000,), generator=torch.Generator().manual_seed(0))
    store.make(keys)
    assert (store.weights[keys] >= 1).all()
    store.states["square"][keys] = 1.0
    assert 1900 * 4096 <= resident_bytes(*store.payload) <= 2100 * 4096


def test_pages_grow_once_nearly_all_rows_are_made(monkeypatch):
    grown: list[torch.Tensor] = []
    monkeypatch.setattr(memory, "use_huge_pages", grown.append)
    stores = [HostStore([4096], 16, torch.float32, [], initial=[ShardWeights("a", 0, 16, 1.0, 2.0)]) for _ in range(2)]
    stores[0].make(torch.arange(4096 * 13 // 16))
    assert grown == []
    stores[0].make(torch.arange(4096 * 14 // 16))
    stores[0].make(torch.arange(4096))
    stores[1].make_all()
    assert [tensor.data_ptr() for tensor in grown] == [store.weights.data_ptr() for store in stores]
    real = memory.zeros(1 << 20, torch.float32, small_pages=True)
    monkeypatch.undo()
    memory.use_huge_pages(real)
    assert not real.any()
