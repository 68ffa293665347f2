"""Threads beside the training that keep to one core.

With more OpenMP threads than cores, libgomp's barriers sleep where they would spin, in all threads, as long as the
threads are there: a step of 20 ms takes 30 (docs/decisions/0022, 0029). So no thread but the training one may start an
OpenMP team.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

#: Threads that run a group's gloo operations, as torch 2.13 starts them.
_GLOO_THREADS = 2
_MOST_ROUNDS = 20
_WAIT_SECONDS = 1.0


def keep_to_one_core() -> None:
    """Let the calling thread's operations run in one thread.

    A thread takes the process's number when it first asks for its own; after that, `set_num_threads` of another thread
    does not change it. Without asking first, the number set here is lost, and the thread starts an OpenMP team. MKL has
    one number for all threads: the training thread sets its own again afterwards.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)


def keep_gloo_to_one_core(group: dist.ProcessGroup | None) -> None:
    """Let gloo's threads of a new group run their copies in one thread. Collective.

    They copy the tensors of a gather, from 32,768 elements on in parallel. Each must be told from within: callbacks of
    small gathers run in them. Where that fails, only speed is lost.

    >>> from embershard.distributed import process_group
    >>> with process_group("cpu"):  # calls it for its own group
    ...     keep_gloo_to_one_core(dist.new_group(backend="gloo"))
    """
    num_threads, told, all_told = torch.get_num_threads(), set[int](), threading.Event()

    def tell(_: Any) -> None:
        if threading.get_ident() != caller:  # the gather ended before it got its callback
            keep_to_one_core()
            told.add(threading.get_ident())
            if len(told) == _GLOO_THREADS:
                all_told.set()
            all_told.wait(_WAIT_SECONDS)  # so that the next gather is another thread's

    caller = threading.get_ident()
    for _ in range(_MOST_ROUNDS):
        gathers = [_gather(group, 0) for _ in range(_GLOO_THREADS)]
        for each in [work.get_future().then(tell) for work, _ in gathers]:
            each.wait()
        work, missing = _gather(group, _GLOO_THREADS - len(told))
        work.wait()
        if not any(missing):  # the ranks go on together
            break
    torch.set_num_threads(num_threads)


def _gather(group: dist.ProcessGroup | None, value: int) -> tuple[Any, list[torch.Tensor]]:
    """Start to gather a number of each rank; return the work, and what it will have gathered."""
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    return dist.all_gather(found, torch.tensor([value]), group, async_op=True), found
