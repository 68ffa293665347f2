"""`LateAverage`: an average of rows that is computed beside the steps behind it, and arrives some of them later."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from embershard.distributed.ranks import keep_gloo_to_one_core
from embershard.pipeline.worker import CacheWorker
from embershard.sharding.torchrec.compat import GroupedEnv


class LateAverage:
    """Computes one average at a time, in a thread, and on a GPU on a stream, of its own.

    Rows are read when the average begins. Steps train on meanwhile; where it ends, they keep what they trained
    (`moved`).

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._worker = CacheWorker(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._means: list[list[Tensor]] = []

    def begin(self, average: Callable[[], list[list[Tensor]]]) -> None:
        """Begin `average`, which returns means. It is collective: nothing else may use its process group meanwhile."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

        def run() -> None:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                self._means = average()

        self._worker.start(run)

    def end(self) -> list[list[Tensor]]:
        """Wait for the average that was begun, and return its means.

        Raises:
            Exception: that of a collective, once.
        """
        self._worker.join()
        self._worker.check()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        means, self._means = self._means, []
        return means

    def drop(self) -> None:
        """Wait for the average that was begun, if any, and forget it, even one that failed."""
        self._worker.join()
        self._means, self._worker.failure = [], None


def group_beside(env: GroupedEnv) -> dist.ProcessGroup:
    """Return a process group of this rank's replicas for a thread of its own: that of `env` may be the one that the
    training uses, and the order of what is sent in a group must be the same on all ranks. Collective, on all ranks."""
    group, _ = dist.new_subgroups_by_enumeration(env.device_mesh.mesh.T.tolist())
    if env.device_mesh.device_type == "cpu":
        keep_gloo_to_one_core(group)
    return group


def moved(now: Tensor, before: Tensor, mean: Tensor) -> Tensor:
    """Return rows that steps changed since an average began, with the average: numbers that are still what they were
    are the mean, bit for bit, so that replicas have equal ones; others keep what the steps added. Small types are added
    up as fp32.

    >>> before, mean = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    >>> moved(torch.tensor([1.0, 2.5]), before, mean).tolist()
    [3.0, 4.5]
    """
    wide = torch.float32 if now.dtype in (torch.float16, torch.bfloat16) else now.dtype
    added = now.to(wide) + (mean.to(wide) - before.to(wide))
    return torch.where(now == before, mean, added.to(now.dtype))
