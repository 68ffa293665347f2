"""Which transfer a pool gets, and the change from buffers to the kernel when memory is locked."""

from __future__ import annotations

import functools

import pytest
import torch

from embershard.cache.config import CacheConfig
from embershard.cache.homes.memory import MemoryRows
from embershard.cache.homes.shape import PoolShape
from embershard.cache.rows import choose_transfer as transfers
from embershard.cache.rows import page_lock
from embershard.cache.rows.choose_transfer import (
    PageLockWarning,
    WhenLocked,
    scores_transfer_maker,
    transfer_kind,
    transfer_maker,
)
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.cache.rows.page_lock import PageLock
from embershard.cache.rows.transfer import PlainTransfer, ScoresTransfer, StagedTransfer
from embershard.cache.rows.uva_transfer import UvaTransfer
from embershard.errors import ConfigError
from tests.unit.cache.rows.test_page_lock import Locked

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def config(**values) -> CacheConfig:
    if values.get("host") == "mmap":
        values["host_dir"] = "/tmp"
    return CacheConfig(**values)


@pytest.mark.parametrize(
    ("settings", "device", "kind"),
    [
        ({}, CPU, "plain"),
        ({}, CUDA, "triton_uva"),
        ({"host": "mmap"}, CPU, "plain"),
        ({"host": "mmap"}, CUDA, "staged"),
        ({"transfer": "plain"}, CUDA, "plain"),
        ({"transfer": "staged"}, CPU, "staged"),
        ({"transfer": "staged"}, CUDA, "staged"),
        ({"transfer": "triton_uva"}, CUDA, "triton_uva"),
    ],
)
def test_the_transfer_follows_device_and_settings(settings, device, kind):
    assert transfer_kind(config(**settings), device) == kind


def test_without_triton_rows_go_through_buffers(monkeypatch):
    monkeypatch.setattr(transfers, "find_spec", lambda name: None)
    assert transfer_kind(config(), CUDA) == "staged"
    with pytest.raises(ConfigError, match='triton, which is not installed; set "staged"'):
        transfer_kind(config(transfer="triton_uva"), CUDA)


def test_the_kernel_needs_a_gpu_or_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert transfer_kind(config(transfer="triton_uva"), CPU) == "triton_uva"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="needs a GPU, the slots are on 'cpu'"):
        transfer_kind(config(transfer="triton_uva"), CPU)


@pytest.mark.parametrize(
    ("kind", "made"), [("plain", PlainTransfer), ("staged", StagedTransfer), ("triton_uva", UvaTransfer)]
)
def test_makers(kind, made):
    host = MemoryRows(PoolShape([4], 4))
    assert isinstance(transfer_maker(kind, CPU, host)([torch.zeros(3, 4)], host.parts), made)


@pytest.mark.parametrize("kind", ["plain", "staged", "triton_uva"])
def test_scores_never_land_later(kind):
    """On a CPU nothing keeps a thread from reading them right away."""
    rows = torch.zeros(4)
    assert isinstance(scores_transfer_maker(kind, CPU, rows)([torch.zeros(3)], [rows]), ScoresTransfer)


def test_buffers_until_the_memory_is_locked_and_the_kernel_afterwards():
    host, slots = [torch.arange(24.0).view(6, 4)], [torch.zeros(5, 4)]
    before = host[0].clone()
    locked = Locked(gate=0)
    lock = functools.cache(lambda: PageLock(host, locked.lock, locked.unlock))
    used: list[str] = []

    def then(*payloads):
        used.append("kernel")
        return UvaTransfer(*payloads)

    transfer = WhenLocked(slots, host, lock, StagedTransfer, then)
    transfer.fill(torch.tensor([4]), torch.tensor([1]))
    slots[0][1] += 1
    transfer.write_back(torch.tensor([1]), torch.tensor([4]))  # under way when the transfers change
    assert used == []
    locked.go_on.set()
    lock().wait()
    transfer.fill(torch.tensor([5]), torch.tensor([3]))
    assert used == ["kernel"]
    transfer.fill(torch.tensor([4]), torch.tensor([2]))
    transfer.finish()
    assert torch.equal(slots[0][2], before[4] + 1)
    assert torch.equal(slots[0][3], before[5])
    assert torch.equal(host[0][4], before[4] + 1)
    assert used == ["kernel"]


def test_nothing_is_locked_before_the_first_rows(monkeypatch):
    """TorchRec makes ShardedTensors of the host rows with the model, and refuses rows that are pinned."""
    locked = Locked()
    monkeypatch.setattr(page_lock, "lock_for_cuda", lambda _, address, size: locked.lock(address, size))
    monkeypatch.setattr(page_lock, "unlock_for_cuda", lambda _, addresses: locked.unlock(addresses))
    monkeypatch.setattr(page_lock, "cpus_beside", lambda _: ())
    monkeypatch.setattr(transfers, "WhenLocked", lambda slots, host, lock, *transfers: lock)
    host = MemoryRows(PoolShape([6], 4, initial=[ShardWeights("t", 0, 4, 0.5, 1.0)]))
    make = transfer_maker("triton_uva", CUDA, host)
    lock, of_more_slots = (make([torch.zeros(slots, 4)], host.parts) for slots in (3, 5))
    assert locked.blocks == {}
    assert not host.is_made
    lock().wait()
    assert list(locked.blocks) == [host.weights.data_ptr()]
    assert of_more_slots() is lock()
    assert host.is_made, "a GPU would read rows that nobody made"
    assert (host.weights >= 0.5).all()


def test_memory_that_cannot_be_locked_leaves_the_buffers_and_a_warning():
    host, slots = [torch.arange(24.0).view(6, 4)], [torch.zeros(5, 4)]
    locked = Locked(refuse=0)
    lock = PageLock(host, locked.lock, locked.unlock)
    transfer = WhenLocked(slots, host, lambda: lock, StagedTransfer, UvaTransfer)
    lock._thread.join()
    with pytest.warns(PageLockWarning, match=r'could not be locked.*ignores ulimit -l.*cache.transfer="staged"'):
        transfer.fill(torch.tensor([4]), torch.tensor([1]))
    transfer.fill(torch.tensor([5]), torch.tensor([2]))  # without another warning, which would be an error
    transfer.finish()
    assert torch.equal(slots[0][1:3], host[0][4:])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"transfer": "magic"}, "cache.transfer must be one of 'plain', 'staged', 'triton_uva', got 'magic'"),
        ({"transfer": "triton_uva", "host": "mmap"}, 'page-locked memory, and cache.host="mmap"'),
    ],
)
def test_settings_that_contradict_each_other(settings, says):
    with pytest.raises(ConfigError, match=says):
        config(**settings)
