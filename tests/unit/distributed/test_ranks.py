"""No thread of a process group starts a team of OpenMP threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from embershard.distributed import Ranks, process_group, ranks
from embershard.distributed.ranks import keep_gloo_to_one_core
from embershard.errors import ConfigError, DataError
from tests.unit.gpu_model.collectives import Mirror, mirrored_ranks

LARGE = 1 << 18  # elements; torch copies 32,768 in parallel


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(LARGE).add_(1.0)  # the calling thread's team
    yield
    torch.set_num_threads(threads)


def started_by(group: dist.ProcessGroup | None) -> int:
    """Threads that gathers of large tensors start."""
    before = len(os.listdir("/proc/self/task"))
    for _ in range(8):  # by either thread of the group
        dist.all_gather([torch.empty(LARGE)], torch.ones(LARGE), group)
    return len(os.listdir("/proc/self/task")) - before


def test_one_rank_gathers_without_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    gathers: list[torch.Tensor] = []
    monkeypatch.setattr(ranks, "gather_into", lambda out, value, group: gathers.append(out.zero_()))
    cpu, value = torch.device("cpu"), torch.arange(6.0).view(3, 2)
    assert torch.equal(Ranks(0, 1, 0, 1, cpu).all_gather(value), value[None])
    assert gathers == []
    assert Ranks(0, 2, 0, 2, cpu).all_gather(value).shape == (2, 3, 2)
    assert len(gathers) == 1


@pytest.mark.slow
def test_gathers_start_no_thread() -> None:
    with process_group("cpu") as ranks:
        assert started_by(None) == 0
        assert started_by(ranks.with_own_group().group) == 0
        assert torch.get_num_threads() == 2


def test_without_it_they_do() -> None:
    with process_group("cpu"):
        group = dist.new_group(backend="gloo")
        assert started_by(group) == 2


@pytest.mark.slow
def test_a_process_with_one_thread_stays_so() -> None:
    torch.set_num_threads(1)
    with process_group("cpu"):
        keep_gloo_to_one_core(None)
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize("value", [torch.tensor(7), torch.arange(6.0).view(2, 3).t(), torch.empty(0, 2)])
def test_a_gather_copies_no_rank_s_tensor_by_itself(value: torch.Tensor) -> None:
    """A list of one tensor per rank costs NCCL a kernel for each, in every step."""
    with mirrored_ranks(64, rank=3), mock.patch.object(Mirror, "allgather") as of_lists:
        found = Ranks(3, 64, 3, 64, torch.device("cpu")).all_gather(value)
    of_lists.assert_not_called()
    assert torch.equal(found, torch.stack([value] * 64))
    assert found.is_contiguous()


@pytest.mark.parametrize("numa", [True, False])
def test_a_rank_stays_beside_its_gpu_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, numa: bool) -> None:
    """With no more OpenMP threads than there are cores; before anything allocates memory for rows."""
    kept: list[set[int]] = []
    monkeypatch.setattr(ranks, "pick_device", lambda *_: torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: f"gpu {device.index}")
    monkeypatch.setattr(ranks, "cpus_near", lambda gpu: {5} if gpu == "gpu 1" else set())
    monkeypatch.setattr(ranks, "keep_to", kept.append)

    def refuse(*_: object, **__: object) -> None:
        raise InterruptedError("no GPU is here")

    monkeypatch.setattr(ranks.dist, "init_process_group", refuse)
    with pytest.raises(InterruptedError), process_group("cuda", numa=numa):
        pass
    assert (kept, torch.get_num_threads()) == (([{5}], 1) if numa else ([], 2))


@pytest.mark.parametrize("fails_here", [True, False])
def test_what_fails_on_a_rank_fails_on_all(fails_here: bool) -> None:
    said: list[Exception | None] = []

    class SecondFails(Ranks):
        def all_gather_objects(self, value: object) -> list[object]:
            said.append(value)  # type: ignore[arg-type]
            return [value, DataError("of rank 1")]

    def make() -> int:
        if fails_here:
            raise DataError("of rank 0")
        return 7

    both = SecondFails(0, 2, 0, 2, torch.device("cpu"))
    with pytest.raises(DataError, match="of rank 0" if fails_here else "of rank 1"):
        both.together(make, DataError)
    assert len(said) == 1
    if fails_here:
        with pytest.raises(DataError, match="of rank 0"):
            both.together(make, ConfigError)
        assert len(said) == 1, "the error of another kind is this rank's own"
