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
_MOST_ROUNDS = 100
_WAIT_SECONDS = 1.0
_GATHER_BYTES = 1 << 20  # takes longer than to ask for a call at its end


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

    They copy the tensors of a gather, from 32,768 elements on in parallel. Each takes the process's number of threads
    with its first gather, so that is 1 until both had one. Where that fails, only speed is lost.

    >>> from embershard.distributed import process_group
    >>> with process_group("cpu"):  # calls it for its own group
    ...     keep_gloo_to_one_core(dist.new_group(backend="gloo"))
    """
    num_threads, world_size = torch.get_num_threads(), dist.get_world_size(group)
    started, all_started = {threading.get_ident()}, threading.Event()

    def note_thread(_: Any) -> None:
        if threading.get_ident() not in started:  # the caller, if the gather has ended before
            started.add(threading.get_ident())
            if len(started) > _GLOO_THREADS:
                all_started.set()
            all_started.wait(_WAIT_SECONDS)  # so that the other thread takes the next gather

    torch.set_num_threads(1)
    try:
        for _ in range(_MOST_ROUNDS):
            gathered = [torch.empty(_GATHER_BYTES, dtype=torch.bool) for _ in range(world_size)]
            own = torch.full((_GATHER_BYTES,), all_started.is_set())
            gather = dist.all_gather(gathered, own, group, async_op=True).get_future()
            gather.then(note_thread)
            gather.wait()
            if all(rank[0] for rank in gathered):  # the ranks go on together
                break
    finally:
        torch.set_num_threads(num_threads)
