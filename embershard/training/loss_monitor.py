"""Losses of all ranks, read without stalling a GPU."""

from __future__ import annotations

import math

import torch

from embershard.distributed import Ranks
from embershard.errors import EmbershardError


class NotFiniteError(EmbershardError, ArithmeticError):
    """A rank's loss is NaN or infinite."""


class LossMonitor:
    """Collects every step's losses, and stops the run on all ranks when one is not finite.

    On a GPU a loss is read when the next one is added, so the host never waits for the step in flight. The run then
    stops one step late, but names the right step.

    Attributes:
        signal: the largest number that a rank gave with a loss that was read; the same on all ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._pending: tuple[int, torch.Tensor, torch.cuda.Event | None] | None = None
        self._losses: list[float] = []
        self.signal = 0

    def add(self, step: int, loss: torch.Tensor, *, signal: int = 0) -> None:
        """Add this rank's mean loss, a tensor [], and the number of the signal that asked it to stop. Collective.

        Raises:
            NotFiniteError: a rank's loss is not finite; the same on every rank.
        """
        self._read()
        loss = loss.detach().float()
        gathered = self._ranks.all_gather(torch.stack([loss, torch.full_like(loss, signal)]))
        if gathered.device.type == "cpu":
            self._pending = (step, gathered, None)
            self._read()
            return
        host = torch.empty(gathered.shape, pin_memory=True)
        host.copy_(gathered, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending = (step, host, event)

    def mean(self) -> float:
        """Wait for the losses since the last call and return their mean over steps and ranks; NaN without any."""
        self._read()
        losses, self._losses = self._losses, []
        return math.fsum(losses) / len(losses) if losses else math.nan

    def _read(self) -> None:
        if self._pending is None:
            return
        step, gathered, event = self._pending
        self._pending = None
        if event is not None:
            event.synchronize()
        losses, signals = gathered.T.tolist()
        self.signal = max(self.signal, *map(int, signals))
        for rank, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise NotFiniteError(
                    f"Step {step}: the loss of rank {rank} is {loss}. Lower the learning rates, clip "
                    "(dense_optimizer.clip_norm), warm up (schedule.warmup_steps), or look for bad data."
                )
        self._losses.append(math.fsum(losses) / len(losses))
