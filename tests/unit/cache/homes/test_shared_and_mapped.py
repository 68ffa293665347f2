"""The host tier: one block of rows, shown table by table; in memory or in a file without a name."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from embershard.cache.config import CachePolicy
from embershard.cache.homes.mapped import MappedRows
from embershard.cache.homes.memory import MemoryRows
from embershard.cache.homes.shape import PoolShape
from embershard.cache.homes.shared import CELLS_PER_RANK, Barriers, NodeShare, SharedRows
from embershard.cache.row_cache import RowCache
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.cache.rows.transfer import PlainTransfer
from embershard.cache.tickets import Ticket
from embershard.distributed import process_group
from embershard.errors import CacheError, ConfigError
from embershard.extras.data_parallel.node_memory import NodeMemory

STATES = [("momentum", torch.Size([]), torch.float32), ("square", torch.Size([8]), torch.float32)]
FP32, FP16 = torch.float32, torch.float16


@pytest.fixture(params=["memory", "mmap"])
def make(request, tmp_path):
    def store(rows=(3, 1, 4), dim=8, dtype=FP32, states=STATES) -> MemoryRows:
        shape = PoolShape(rows, dim, dtype, states)
        return MemoryRows(shape) if request.param == "memory" else MappedRows(shape, str(tmp_path))

    return store


def test_rows_start_as_zeros_in_the_declared_shapes(make):
    store = make()
    assert [tuple(t.shape) for t in store.parts] == [(8, 8), (8,), (8, 8)]
    assert all(t.dtype == FP32 and not t.any() for t in store.parts)
    assert store.row_offsets == [0, 3, 4]
    assert store.num_rows == 8


def test_tables_and_the_flat_block_are_views_of_the_same_memory(make):
    store = make()
    store.views.flat_weights.copy_(torch.arange(64.0))
    assert [t.shape[0] for t in store.views.table_weights()] == [3, 1, 4]
    assert store.views.table_weights()[1][0].tolist() == list(range(24, 32))
    store.views.table_weights()[2][0] = -1.0
    assert (store.weights[4] == -1.0).all()
    store.views.table_states()[2][0][3] = 7.0
    assert store.states["momentum"][7] == 7.0
    assert [[tuple(s.shape) for s in table] for table in store.views.table_states()][1] == [(1,), (1, 8)]


def test_bytes_are_those_of_all_payload_tensors(make):
    assert make().row_bytes == 4 * (8 + 1 + 8)
    assert make().host_bytes == 8 * 4 * (8 + 1 + 8)
    half = make(dtype=FP16, states=STATES[:1])
    assert (half.row_bytes, half.host_bytes) == (2 * 8 + 4, 8 * (2 * 8 + 4))
    assert make(states=[]).parts[0].shape == (8, 8)


@pytest.mark.parametrize("part", ["flat_weights", "weights", "table_weights", "state", "table_state"])
def test_the_version_tells_of_writes_through_any_view(make, part):
    store = make()
    views = {
        "flat_weights": store.views.flat_weights,
        "weights": store.weights,
        "table_weights": store.views.table_weights()[1],
        "state": store.states["square"],
        "table_state": store.views.table_states()[1][0],
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
    assert not any(t.any() for t in store.parts)
    assert all(t.is_contiguous() and t.data_ptr() % 64 == 0 for t in store.parts)
    before = store.version
    store.views.table_weights()[1].add_(1.0)
    assert store.version > before
    assert store.views.flat_weights.sum() == 8 * 100_001
    assert store.states["momentum"].sum() == 0


def test_a_table_without_rows_on_this_rank(make):
    store = make(rows=(2, 0, 3))
    assert [t.shape[0] for t in store.views.table_weights()] == [2, 0, 3]
    assert store.row_offsets == [0, 2, 2]


def test_a_pool_without_rows_on_this_rank(make):
    """Row-wise: 5 rows over 4 ranks are 2, 2, 1 and none."""
    store = make(rows=(0,))
    assert store.host_bytes == 0
    assert store.row_bytes == 4 * (8 + 1 + 8)


def test_mapped_files_leave_no_name_behind_and_take_no_space_before_they_are_written(tmp_path):
    store = MappedRows(PoolShape([1000], 64), str(tmp_path / "new" / "folder"))
    assert os.listdir(tmp_path / "new" / "folder") == []
    store.weights[999] = 3.0
    assert store.weights[999].sum() == 192.0


def vm_flags(tensor: torch.Tensor) -> set[str]:
    """What the system was told about the memory of a tensor."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(place[1], 16) <= tensor.data_ptr() < int(place[2], 16)
        elif is_here and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError("no such memory")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
@pytest.mark.parametrize("is_shared", [False, True])
def test_the_system_reads_no_rows_ahead_in_mapped_files(is_shared, tmp_path):
    """`rr`: reads are random. Weights and states; of rows that ranks share, too."""
    cells = torch.zeros(1, CELLS_PER_RANK, dtype=torch.int64)
    with process_group("cpu") as ranks:
        files = NodeMemory(ranks, str(tmp_path))
        share = NodeShare(files.zeros, [(0, 5000)], Barriers(cells, 0), Barriers(cells.clone(), 0), is_mapped=True)
        shape = PoolShape([5000], 8, FP32, STATES)
        store = SharedRows(shape, share) if is_shared else MappedRows(shape, str(tmp_path))
    assert all("rr" in vm_flags(tensor) for tensor in store.parts)
    assert "rr" not in vm_flags(MemoryRows(PoolShape([5000], 8, FP32, STATES)).weights)


def test_a_save_of_mapped_rows_fetches_whole_blocks(tmp_path, monkeypatch):
    """Without reading ahead it would wait for the disk at every page."""
    store, fetched = MappedRows(PoolShape([5000], 8), str(tmp_path)), []
    monkeypatch.setattr("embershard.cache.rows.memory.fetch_soon", lambda part: fetched.append(part.data_ptr()))
    monkeypatch.setattr("embershard.cache.homes.home.BLOCK_BYTES", 2048 * 32)
    store.weights.uniform_()
    frozen = store.freeze()
    for first in range(0, 5000, 2048):
        rows = store.weights[first : first + 2048]
        assert torch.equal(frozen.read(rows), rows)
    assert fetched == [store.weights[first].data_ptr() for first in range(0, 5000, 2048)]


def test_stores_in_one_folder_do_not_share_rows(tmp_path):
    a, b = (MappedRows(PoolShape([10], 4), str(tmp_path)) for _ in range(2))
    a.weights.fill_(1.0)
    assert not b.weights.any()


def test_a_disk_that_is_too_small_is_refused_with_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(ConfigError, match=r"host_dir='.*' has 1000 B free, 3\.12 KiB are needed.*another disk"):
        MappedRows(PoolShape([100], 8), str(tmp_path))


def test_the_states_need_room_on_the_disk_too(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 5000})())
    with pytest.raises(ConfigError, match=r"4\.88 KiB free"):
        MappedRows(PoolShape([100], 8, FP32, STATES[1:]), str(tmp_path))  # 3200 bytes twice


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"host_dir='.*file.sub' cannot be made"):
        MappedRows(PoolShape([10], 4), str(tmp_path / "file" / "sub"))


RANKS, ROWS = 2, (20, 20)
OWN = [[(0, 10), (0, 10)], [(10, 10), (10, 10)]]
SLOTS, DISTANCES, STEPS = 12, range(1, 7), 30  # the batch in training, the next one, and one that is trained


class Node:
    """Memory of a machine, and its ranks."""

    def __init__(self, timeout_seconds: float = 600.0) -> None:
        self._tensors: dict[int, Tensor] = {}
        cells = torch.zeros(RANKS, CELLS_PER_RANK, dtype=torch.int64)
        self.barriers = [Barriers(cells, rank, timeout_seconds) for rank in range(RANKS)]

    def share(self, rank: int) -> NodeShare:
        numbers = iter(range(100))

        def allocate(numel: int, dtype: torch.dtype) -> Tensor:
            return self._tensors.setdefault(next(numbers), torch.zeros(numel, dtype=dtype))

        return NodeShare(allocate, OWN[rank], self.barriers[rank], self.barriers[rank])

    def host(self, rank: int) -> SharedRows:
        shards = [ShardWeights(f"t{t}", 7, 4, -0.5, 0.5, first) for t, (first, _) in enumerate(OWN[rank])]
        states = [("momentum", torch.Size([]), torch.float32)]
        return SharedRows(PoolShape(ROWS, 4, torch.float32, states, initial=shards), self.share(rank))


class Rank:
    """A cache of one rank. Training a row adds 1 to its weights and 2 to its state. ``num_stale``: rows that were not
    as often trained when they were looked up as this rank had trained them."""

    def __init__(self, node: Node, rank: int) -> None:
        self.host = node.host(rank)
        payload = [torch.zeros(SLOTS + 1, 4), torch.zeros(SLOTS + 1)]
        self.payload, self.counts, self.num_stale = payload, torch.zeros(sum(ROWS)), 0
        self.cache = RowCache(
            ["t0", "t1"], self.host, lambda _: payload, SLOTS, [0, 1], CachePolicy("lru"), torch.device("cpu"),
            owner=f"rank {rank}",
        )  # fmt: skip

    def prepare(self, keys: list[int]) -> Ticket:
        lengths = [sum(key < ROWS[0] for key in keys), sum(key >= ROWS[0] for key in keys)]
        ticket = self.cache.prepare(torch.tensor(sorted(keys)), torch.tensor(lengths))
        assert ticket is not None
        return ticket

    def train(self, keys: list[int], ticket: Ticket | None = None) -> None:
        """One batch; all ranks call it with the same keys."""
        rows, ticket = torch.tensor(sorted(keys)), ticket or self.prepare(keys)
        self.cache.wait(ticket)
        self.num_stale += int((self.payload[1][ticket.slots] != 2 * self.counts[rows]).sum())
        self.counts[rows] += 1
        self.cache.begin_update(ticket)
        for tensor, step in zip(self.payload, (1.0, 2.0), strict=True):
            tensor[ticket.slots] += step
        self.cache.release(ticket)


def on_all(run: Callable[[int], Any]) -> list[Any]:
    """`run(rank)` in a thread per rank."""
    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(run, range(RANKS)))


def batches(distance: int) -> list[list[int]]:
    """Rows of both ranks and tables: a batch's rows are evicted by the third plan after it, and come back `distance`
    plans later."""
    groups = [[row, 10 + row, 20 + row, 30 + row] for row in range(3 + distance)]
    return [groups[step % len(groups)] for step in range(STEPS)]


def train_all(distance: int) -> list[Rank]:
    """Two ranks after training and a flush: rank 0 prepares the next batch in a thread beside the training, rank 1
    before it. As in a backward, no rank trains before all of them have looked their rows up."""
    node, barrier = Node(), threading.Barrier(RANKS, timeout=600)
    ranks, stream = [Rank(node, rank) for rank in range(RANKS)], batches(distance)

    def run(rank: int, worker: ThreadPoolExecutor) -> None:
        cache = ranks[rank].cache
        tickets = [ranks[rank].prepare(keys) for keys in stream[:2]]
        for keys, coming in zip(stream, stream[2:], strict=False):
            cache.freeze_pins()
            job = worker.submit(ranks[rank].prepare, coming)
            if rank == 1:
                tickets.append(job.result())
            barrier.wait()
            ranks[rank].train(keys, tickets.pop(0))
            if rank == 0:
                tickets.append(job.result())
            cache.unfreeze_pins()
        for keys, ticket in zip(stream[-2:], tickets, strict=True):
            barrier.wait()
            ranks[rank].train(keys, ticket)
        cache.flush()

    with ThreadPoolExecutor(RANKS) as workers:
        on_all(lambda rank: run(rank, workers))
    return ranks


def slow_write_backs(seconds: float) -> Any:
    """Rank 0's rows take long to reach the host tier."""
    write_back = PlainTransfer.write_back

    def late(self: PlainTransfer, slots: Tensor, keys: Tensor) -> None:
        if bool((keys % 20 < 10).any()):
            time.sleep(seconds)
        write_back(self, slots, keys)

    return mock.patch.object(PlainTransfer, "write_back", late)


def expected_rows() -> Tensor:
    weights = torch.empty(sum(ROWS), 4)
    for t, (rows, first) in enumerate(zip(ROWS, (0, ROWS[0]), strict=True)):
        ShardWeights(f"t{t}", 7, 4, -0.5, 0.5).write(weights[first : first + rows])
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("distance", DISTANCES)
def test_a_row_comes_back_as_it_left(distance: int) -> None:
    """Evicted by all ranks, written back late by its owner, filled again by all of them: nothing is lost."""
    with slow_write_backs(0.003):
        ranks = train_all(distance)
    weights = expected_rows()
    for row, count in enumerate(ranks[0].counts.int().tolist()):
        for _ in range(count):
            weights[row] += 1.0
    for rank in ranks:
        assert rank.num_stale == 0
        assert torch.equal(rank.host.weights, weights)
        assert torch.equal(rank.host.states["momentum"], 2 * rank.counts)
        assert sum(stats.evictions for stats in rank.cache.stats()) > 4 * 20


@pytest.mark.slow
def test_without_barriers_rows_come_back_as_they_were() -> None:
    """The test above can fail."""
    with slow_write_backs(0.02), mock.patch.object(Barriers, "wait"):
        stale = [rank.num_stale for distance in DISTANCES for rank in train_all(distance)]
    assert sum(stale) > 0


def test_only_the_owner_writes_a_row_back() -> None:
    node = Node()
    ranks = [Rank(node, rank) for rank in range(RANKS)]
    on_all(lambda rank: ranks[rank].train([0, 12, 21, 35]))
    ranks[0].cache.flush()
    assert ranks[0].host.states["momentum"].nonzero().flatten().tolist() == [0, 21]
    ranks[1].cache.flush()
    assert ranks[0].host.states["momentum"].nonzero().flatten().tolist() == [0, 12, 21, 35]
    assert [[stats.write_backs for stats in rank.cache.stats()] for rank in ranks] == [[1, 1], [1, 1]]


@pytest.mark.slow
def test_a_flush_on_one_rank_loses_nothing() -> None:
    node, barrier = Node(), threading.Barrier(RANKS, timeout=600)
    ranks = [Rank(node, rank) for rank in range(RANKS)]

    def run(rank: int) -> None:
        for number, keys in enumerate(batches(2)):
            ticket = ranks[rank].prepare(keys)
            barrier.wait()
            ranks[rank].train(keys, ticket)
            if number % 3 == rank:
                ranks[rank].cache.flush()
        ranks[rank].cache.flush()

    on_all(run)
    for rank in ranks:
        assert rank.num_stale == 0
        assert torch.equal(rank.host.states["momentum"], 2 * rank.counts)


def test_views_of_the_own_rows() -> None:
    node = Node()
    hosts = [node.host(rank) for rank in range(RANKS)]
    whole = expected_rows()
    for rank, host in enumerate(hosts):
        for table, (first, count) in enumerate(OWN[rank]):
            start = host.row_offsets[table] + first
            assert torch.equal(host.views.table_weights()[table], whole[start : start + count])
            assert host.views.table_states()[table][0].shape == (count,)
        assert host.host_bytes == sum(count for _, count in OWN[rank]) * host.row_bytes
    is_own = hosts[0].is_own(torch.tensor([0, 9, 10, 19, 20, 29, 30, 39]))
    assert is_own.tolist() == [True, True, False, False] * 2


def test_different_plans_are_noticed() -> None:
    node = Node()
    ranks = [Rank(node, rank) for rank in range(RANKS)]

    def run(rank: int) -> str:
        with pytest.raises(CacheError) as error:
            ranks[rank].train([rank, 12, 21, 35])
        return str(error.value)

    for message in on_all(run):
        assert "planned batch 1 differently" in message


def test_a_rank_that_does_not_come_is_named() -> None:
    ranks = Node(timeout_seconds=0.1).barriers
    with pytest.raises(CacheError, match=r"rank 1 did not come to barrier 1 within 0 s"):
        ranks[0].wait("tables t0, t1")
