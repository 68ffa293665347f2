"""Rows get their initial weights when their block is first touched, once, and the same as made at once."""

from __future__ import annotations

import resource
import threading
from pathlib import Path
from unittest import mock

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.cache import loops
from embershard.cache.homes.mapped import MappedRows
from embershard.cache.homes.memory import MemoryRows
from embershard.cache.homes.shape import PoolShape
from embershard.cache.rows import lazy_rows, memory
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.cache.rows.lazy_rows import LazyRows
from embershard.errors import ConfigError
from embershard.machine import host_memory

TABLES = [ShardWeights("a", 1, 8, 1.0, 2.0), ShardWeights("b", 1, 16, 1.0, 2.0, first_row=40, first_column=8)]


def make(
    rows: tuple[int, ...] = (70, 23), block_bytes: int = 128, dtype=torch.float32
) -> tuple[LazyRows, torch.Tensor]:
    weights = torch.zeros(sum(rows), 8, dtype=dtype)
    with mock.patch.object(lazy_rows, "BLOCK_BYTES", block_bytes):  # 4 rows of float32
        return LazyRows(weights, rows, TABLES[: len(rows)]), weights


def eager(rows: tuple[int, ...] = (70, 23), dtype=torch.float32) -> torch.Tensor:
    weights = torch.zeros(sum(rows), 8, dtype=dtype)
    for table, part in zip(TABLES[: len(rows)], weights.split(rows), strict=True):
        table.write(part)
    return weights


@pytest.mark.slow
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


def test_who_needs_rows_waits_for_a_part_of_those_that_are_made(monkeypatch):
    lazy, weights = make()
    monkeypatch.setattr(lazy_rows, "_CHUNK_BYTES", 256)  # 8 rows
    monkeypatch.setattr(lazy_rows.time, "sleep", lambda seconds: unmade.append((lazy.num_unmade, lazy._lock.locked())))
    unmade: list[tuple[int, bool]] = []
    lazy.make_bytes(0, weights.nbytes)
    assert unmade == [(number, False) for number in range(22, 0, -2)]
    assert torch.equal(weights, eager())


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
    shape = PoolShape([7000, 23], 8, torch.float32, states, TABLES)
    store = MappedRows(shape, str(tmp_path)) if host == "mmap" else MemoryRows(shape)
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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_read_without_being_made_and_made_later(dtype):
    lazy, weights = make(dtype=dtype)
    lazy.make(torch.tensor([5]))
    weights[5] = 9.0
    expected = eager(dtype=dtype)
    expected[5] = 9.0
    keys, places, out = torch.tensor([5, 92, 69, 6]), torch.tensor([3, 0, 2, 5]), torch.zeros(6, 8, dtype=dtype)
    unmade = lazy.num_unmade
    lazy.read(keys, out, places)
    assert torch.equal(out[places], expected[keys])
    assert not out[[1, 4]].any()
    assert lazy.num_unmade == unmade
    lazy.make_later(keys)
    for thread in threading.enumerate():
        if thread.name == "embershard-rows":
            thread.join()
    assert lazy.num_unmade == unmade - 2
    assert torch.equal(weights[keys], expected[keys])


def test_a_save_has_the_initial_weights_of_rows_that_were_read_ahead_and_then_changed():
    """A row that is put aside for the save was made before, though its block was not when the save began."""
    store = MemoryRows(PoolShape([512], 8, initial=TABLES[:1]))
    keys, slots = torch.tensor([3, 300]), torch.zeros(2, 8)
    with mock.patch.object(LazyRows, "make_later"):
        store.read_ahead(keys, [slots], torch.arange(2))
    frozen = store.freeze()
    store.before_write(keys)
    store.weights.data[keys] = 7.0
    assert torch.equal(frozen.read(store.weights), eager((512,)))
    store.make_all()
    assert (store.weights[keys] == 7.0).all(), "made later, they would be lost"


def test_writes_look_for_rows_to_make_only_until_the_thread_has_made_them():
    """Else every write-back of a training would, for as long as some rows are never looked up."""
    store = MemoryRows(PoolShape([100_000], 8, initial=[ShardWeights("a", 3, 8, 1.0, 2.0)]))
    keys = torch.arange(0, 50_000, 40)
    may_go_on = threading.Event()
    with mock.patch.object(lazy_rows.time, "sleep", side_effect=lambda _: may_go_on.wait()):
        store.read_ahead(keys, [torch.zeros(keys.numel(), 8)], torch.arange(keys.numel()))
        (thread,) = (each for each in threading.enumerate() if each.name == "embershard-rows")
        store.before_write(keys[-1:])
        assert store.weights[keys[-1]].all(), "made before it is written"
        may_go_on.set()
        thread.join()
    store.before_write(keys[:1])
    assert store.weights[keys].all()
    assert not store.is_made
    with mock.patch.object(LazyRows, "make") as make:
        store.before_write(keys)
    make.assert_not_called()


def test_rows_without_initial_weights_are_made_already():
    store = MemoryRows(PoolShape([10], 6))
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
    store = MemoryRows(PoolShape([34_000_000], 16, torch.float32, states, initial=[ShardWeights("a", 0, 16, 1.0, 2.0)]))
    keys = torch.randint(0, 34_000_000, (1000,), generator=torch.Generator().manual_seed(0))
    store.make(keys)
    assert (store.weights[keys] >= 1).all()
    store.states["square"][keys] = 1.0
    assert 1900 * 4096 <= resident_bytes(*store.parts) <= 2100 * 4096


def test_fresh_rows_take_the_memory_of_what_is_written():
    """Also where the caller brings the weights: on huge pages the first write-backs would wait for gigabytes."""
    store = MemoryRows(PoolShape([34_000_000], 16, torch.float32, [("square", torch.Size([16]), torch.float32)]))
    keys = torch.randint(0, 34_000_000, (1000,), generator=torch.Generator().manual_seed(0))
    store.before_write(keys)
    for rows in store.parts:
        rows[keys] = 1.0
    assert 1900 * 4096 <= resident_bytes(*store.parts) <= 2100 * 4096


@pytest.mark.parametrize("fills_all", [False, True])
def test_pages_grow_once_nearly_all_of_them_were_written_to(monkeypatch, fills_all):
    grown: list[torch.Tensor] = []
    monkeypatch.setattr(memory, "use_huge_pages", grown.append)
    store = MemoryRows(PoolShape([4096], 16), fills_all=fills_all)  # 64 pages
    for _ in range(3):
        store.before_write(torch.randint(0, 4096, (64,)))
    assert [tensor.data_ptr() for tensor in grown] == ([] if fills_all else [store.weights.data_ptr()])


def test_more_rows_than_the_machine_has_memory_for():
    """Rows that are never touched take none; 52 GB of them ended in "Cannot allocate memory"."""
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        pytest.skip("this system promises no more memory than it has")
    rows = 4 * host_memory().total_bytes // 64
    store = MemoryRows(PoolShape([rows], 16, initial=[ShardWeights("a", 0, 16, 1.0, 2.0)]))
    store.make(torch.tensor([rows - 1]))
    assert (store.weights[rows - 1] >= 1).all()


def test_memory_that_a_limit_forbids_is_refused_with_figures():
    limit, mapped = resource.getrlimit(resource.RLIMIT_AS), int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (mapped * resource.getpagesize() + (1 << 30), limit[1]))
    try:
        with pytest.raises(ConfigError, match=r"^2\.00 GiB of host memory for rows.*ulimit -v allows \d.*GiB taken"):
            MemoryRows(PoolShape([1 << 25], 16))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


def test_pages_grow_once_nearly_all_rows_are_made(monkeypatch):
    grown: list[torch.Tensor] = []
    monkeypatch.setattr(memory, "use_huge_pages", grown.append)
    stores = [MemoryRows(PoolShape([4096], 16, initial=[ShardWeights("a", 0, 16, 1.0, 2.0)])) for _ in range(2)]
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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_a_thread_of_the_lowest_priority_calls_is_compiled_before(dtype):
    """Others would wait for Numba's lock for as long as such a thread compiles."""
    with (
        mock.patch.object(loops, "read_blocks", wraps=loops.read_blocks) as reads,
        mock.patch.object(loops, "make_blocks_of", wraps=loops.make_blocks_of) as makes,
    ):
        rows, _ = make(dtype=dtype)
        assert makes.call_count == 1
        frozen = rows.freeze()
        assert reads.call_count == 1
        frozen.read(0, 93, torch.empty(93, 8, dtype=dtype))
        rows._make(torch.arange(3).numpy())
    for calls in (reads, makes):
        first, second = ([numba.typeof(each) for each in call.args] for call in calls.call_args_list)
        assert first == second
