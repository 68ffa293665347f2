"""Rank processes that are started once and reused by all tests of a session: starting one costs seconds."""

from __future__ import annotations

import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.ranks.commands import forked

_TIMEOUT_SECONDS = 600.0  # a rank that hangs; no machine is so busy
_AFTER_ERROR_SECONDS = 5.0


class RankError(AssertionError):
    """A function failed on a rank; the message holds that rank's traceback."""


class RankPool:
    """``world_size`` processes in one group, by default of gloo, ``local_world_size`` to a pretended node. ``run``
    calls a function on all of them and waits.

    The function must be importable (module level); it finds rank and world size through
    ``torch.distributed``. When it fails on one rank while others wait for that rank in a collective, the
    processes are replaced.
    """

    def __init__(
        self,
        world_size: int,
        local_world_size: int | None = None,
        backend: str = "gloo",
        timeout_seconds: float = _TIMEOUT_SECONDS,
    ) -> None:
        self._world_size = world_size
        self._timeout_seconds = timeout_seconds
        self._backend = backend
        self._local_world_size = local_world_size or world_size
        self._start()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` on every rank; what each returned, by rank."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: dict[int, tuple[str | None, Any]] = {}
        timeout = self._timeout_seconds
        while len(answers) < self._world_size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(waiting), timeout)
            if not ready:
                break
            for pipe in ready:
                answers[waiting[pipe]] = pipe.recv()  # type: ignore[index, union-attr]
            if any(error for error, _ in answers.values()):
                timeout = _AFTER_ERROR_SECONDS  # the others may be waiting for the one that failed
        failed = [f"rank {rank}:\n{error}" for rank, (error, _) in sorted(answers.items()) if error]
        missing = sorted(set(range(self._world_size)) - set(answers))
        if missing:
            self.close()
            self._start()
            failed.append(f"ranks {missing} did not come back from {function.__name__}")
        if failed:
            raise RankError("\n".join(failed))
        return [answers[rank][1] for rank in range(self._world_size)]

    def _start(self) -> None:
        self._store = tempfile.TemporaryDirectory()
        # Once forked, a process cannot use a GPU that its parent asked for.
        context = forked() if self._backend == "gloo" else mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            ranks = (rank, self._world_size, self._local_world_size)
            process = context.Process(
                target=_serve, args=(*ranks, str(Path(self._store.name, "store")), theirs, self._backend), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._store.cleanup()


def _serve(rank: int, world_size: int, local_world_size: int, store: str, pipe: Connection, backend: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_RANK=str(rank % local_world_size), LOCAL_WORLD_SIZE=str(local_world_size))
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module=r"torch(rec)?\.")  # theirs, not ours
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            with warnings.catch_warnings():
                pipe.send((None, function(*args)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
