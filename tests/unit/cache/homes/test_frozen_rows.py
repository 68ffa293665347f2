"""Frozen rows are those of one moment, whatever is written to the host tier while they are read."""

from __future__ import annotations

import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embershard.cache.homes import home as homes
from embershard.cache.homes.home import FrozenRows
from embershard.cache.homes.mapped import MappedRows
from embershard.cache.homes.memory import MemoryRows
from embershard.cache.homes.shape import PoolShape
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.errors import CacheError

STATES = [("momentum", torch.Size([]), torch.float32), ("square", torch.Size([4]), torch.float16)]
ROWS = (70, 1, 29)


def make_host(lazy: bool = False, folder: Path | None = None) -> MemoryRows:
    shards = [ShardWeights(f"t{t}", 3, 4, -1.0, 1.0) for t in range(len(ROWS))]
    shape = PoolShape(ROWS, 4, torch.float32, STATES, shards if lazy else None)
    host = MappedRows(shape, str(folder)) if folder else MemoryRows(shape)
    if not lazy:
        for tensor in host.parts:
            tensor.data.copy_(torch.randn(tensor.shape))
    return host


def contents(host: MemoryRows) -> list[Tensor]:
    """What the rows are now; those without weights have their initial ones."""
    weights = host.weights.clone()
    lazy = None if host._lazy is None else host._lazy.freeze()
    if lazy is not None:
        lazy.read(0, host.num_rows, weights)
    return [weights, *(state.clone() for state in host.states.values())]


def train(host: MemoryRows, keys: list[int]) -> None:
    """Write rows as a write-back does: of rows that are made, through `.data`."""
    rows = torch.tensor(sorted(set(keys)), dtype=torch.int64)
    host.make(rows)
    host.before_write(rows)
    for tensor in host.parts:
        tensor.data[rows] = torch.randn(rows.numel(), *tensor.shape[1:]).to(tensor.dtype)


def freeze(host: MemoryRows, block_rows: int, **arguments: int) -> FrozenRows:
    with mock.patch.object(homes, "BLOCK_BYTES", block_rows * 16):
        frozen = host.freeze()
        if arguments:
            frozen = host._frozen = FrozenRows(host, **arguments)
        return frozen


def blocks(host: MemoryRows, block_rows: int) -> list[tuple[int, int]]:
    """First row and end of every block, table after table."""
    found = []
    for start, rows in zip(host.row_offsets, host.rows_per_table, strict=True):
        found += [(first, min(first + block_rows, start + rows)) for first in range(start, start + rows, block_rows)]
    return found


def read(frozen: FrozenRows, host: MemoryRows, block: tuple[int, int], into: list[Tensor]) -> None:
    for tensor, out in zip(host.parts, into, strict=True):
        part = frozen.read(tensor[block[0] : block[1]])
        assert part.untyped_storage().size() == part.nbytes, "torch would copy it to save it"
        out[block[0] : block[1]] = part


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


keys_of_a_step = st.lists(st.integers(0, sum(ROWS) - 1), max_size=30)


@pytest.mark.slow
@given(st.lists(keys_of_a_step, max_size=12), st.integers(1, 40), st.booleans(), st.randoms())
@settings(deadline=None)
def test_any_writes_between_the_blocks(writes, block_rows, lazy, random):
    host = make_host(lazy)
    for keys in writes[:3]:
        train(host, keys)
    expected, got = contents(host), [torch.empty_like(tensor) for tensor in host.parts]
    frozen = freeze(host, block_rows)
    unmade = 0 if host._lazy is None else host._lazy.num_unmade
    pending = list(writes)
    for block in blocks(host, block_rows):
        while pending and random.random() < 0.5:
            train(host, pending.pop())
        read(frozen, host, block, got)
    assert same(got, expected)
    if lazy and not writes:
        assert host._lazy.num_unmade == unmade > 0, "reading makes no row in the host tier"
    frozen.close()


@pytest.mark.slow
@given(st.lists(keys_of_a_step, max_size=12), keys_of_a_step, st.integers(1, 9), st.randoms())
@settings(deadline=None)
def test_any_writes_between_some_rows(writes, asked, piece, random):
    """Rows that are not asked for are left out, and what is written to them is put aside in vain."""
    host = make_host()
    expected, frozen = contents(host), host.freeze()
    keys, pending, got = torch.tensor(sorted(set(asked)), dtype=torch.int64), list(writes), []
    for some in keys.split(piece) if len(keys) else ():
        while pending and random.random() < 0.5:
            train(host, pending.pop())
        got.append(frozen.select(some))
    for number, tensor in enumerate(expected):
        found = [parts[number] for parts in got]
        assert not found or torch.equal(torch.cat(found), tensor[keys])
    frozen.close()


@pytest.mark.parametrize("broken", [False, True])
def test_rows_that_are_not_put_aside_would_be_noticed(broken):
    host = make_host()
    expected, got = contents(host), [torch.empty_like(tensor) for tensor in host.parts]
    frozen = freeze(host, 16)
    with mock.patch.object(FrozenRows, "put_aside") if broken else mock.patch.object(homes, "_", create=True):
        train(host, [5, 99])
    for block in blocks(host, 16):
        read(frozen, host, block, got)
    assert same(got, expected) is not broken


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_reader_beside_the_training_with_room_for_few_rows(tmp_path, lazy, mapped):
    """The writes of every step are beyond the room, so they wait for the reader; all is exact, and bounded."""
    host = make_host(lazy, tmp_path if mapped else None)
    expected, got = contents(host), [torch.empty_like(tensor) for tensor in host.parts]
    frozen = freeze(host, 7, most_aside_bytes=5 * host.row_bytes)
    go = threading.Event()

    def read_all() -> None:
        go.wait()
        for block in blocks(host, 7):
            read(frozen, host, block, got)

    reader = threading.Thread(target=read_all)
    reader.start()
    wait = FrozenRows._wait

    def wait_for_the_reader(self: FrozenRows) -> None:
        go.set()
        wait(self)

    generator = torch.Generator().manual_seed(5)
    with mock.patch.object(FrozenRows, "_wait", wait_for_the_reader):
        for _ in range(20):
            train(host, torch.randint(0, sum(ROWS), (40,), generator=generator).tolist())
    reader.join()
    assert same(got, expected)
    assert frozen.aside_bytes == 5 * host.row_bytes
    assert frozen.wait_seconds > 0


def test_more_than_half_of_the_room_is_filling():
    host = make_host()
    frozen = freeze(host, 7, most_aside_bytes=5 * host.row_bytes)
    train(host, [7, 8, 9])
    assert not frozen.is_filling
    train(host, [8, 20])
    assert frozen.is_filling
    for block in list(blocks(host, 7))[:2]:
        read(frozen, host, block, [torch.empty_like(tensor) for tensor in host.parts])
    assert not frozen.is_filling
    frozen.close()


def test_a_reader_that_ends_early_frees_who_waits():
    host = make_host()
    frozen = freeze(host, 7, most_aside_bytes=host.row_bytes)
    threading.Timer(0.05, frozen.close).start()
    train(host, [1, 2, 3])
    with pytest.raises(CacheError, match="given up"):
        frozen.read(host.weights[:7])
    host.freeze().close()  # the next save


def test_rows_of_tables_that_nobody_reads_are_skipped():
    host = make_host()
    expected = contents(host)
    frozen = freeze(host, 16, most_aside_bytes=3 * host.row_bytes)
    train(host, [0, 69, 72])
    assert torch.equal(frozen.read(host.weights[71:87]), expected[0][71:87])
    train(host, [90, 95])  # the places of the skipped rows are free again
    assert torch.equal(frozen.read(host.weights[87:100]), expected[0][87:100])


def test_writes_by_others_and_interrupts_are_noticed():
    host = make_host()
    frozen = freeze(host, 16)
    host.weights[3] = 1.0
    with pytest.raises(CacheError, match="written to while a checkpoint was being saved"):
        frozen.read(host.weights[:16])
    frozen.close()
    frozen = freeze(host, 16)
    interrupted = mock.patch("embershard.cache.rows.transfer.RowTable.copy", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        train(host, [3])
    with pytest.raises(CacheError, match="interrupted"):
        frozen.read(host.weights[:16])


def test_only_memory_of_the_rows_has_a_position():
    host = make_host()
    frozen = host.freeze()
    assert frozen.position(host.weights[71:]) == frozen.position(host.states["momentum"][71:]) == 71
    assert frozen.position(torch.zeros(3)) is None
    assert frozen.position(host.weights[:0]) is None
