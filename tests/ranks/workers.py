"""Rank processes that are started once and reused by all tests of a session: starting one costs seconds."""

from __future__ import annotations

import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_TIMEOUT_SECONDS = 120.0


class RankError(AssertionError):
    """A function failed on a rank; the message holds that rank's traceback."""


class RankPool:
    """``world_size`` processes in one gloo group. ``run`` calls a function on all of them and waits.

    The function must be importable (module level); it finds rank and world size through ``torch.distributed``.
    """

    def __init__(self, world_size: int) -> None:
        self._store = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world_size, str(Path(self._store.name, "store")), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` on every rank; what each returned, by rank."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = [self._answer(rank, function) for rank in range(len(self._pipes))]
        failed = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(answers) if error]
        if failed:
            raise RankError("\n".join(failed))
        return [result for _, result in answers]

    def _answer(self, rank: int, function: Callable[..., Any]) -> tuple[str | None, Any]:
        if not self._pipes[rank].poll(_TIMEOUT_SECONDS):
            self.close()
            raise RankError(f"rank {rank} did not come back from {function.__name__} in {_TIMEOUT_SECONDS:.0f} s")
        return self._pipes[rank].recv()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._store.cleanup()


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
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
