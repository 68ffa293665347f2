"""Handling of an exception that ends a training step on some ranks.

A step is collective. A rank that leaves the step after its backward owes the others nothing more. A rank that leaves it
earlier makes the others wait in a collective that it never enters; it must not start another collective, which the
others would take for that one. So it says through the process group's store that it left, and goes on only if all
ranks left, having begun the same collectives: one may have begun a collective, and left before it waited for it.
"""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import torch
import torch.distributed as dist

from embershard.errors import EmbershardError, StepError

#: Time that ranks that left a step wait for the others to leave it.
GRACE = datetime.timedelta(seconds=10)
_MOST_CHARACTERS = 500
_numbers = itertools.count()


class BackwardWatch:
    """Notices the end of a backward pass, including its collectives."""

    def __init__(self) -> None:
        self.is_done = False

    def watch(self, output: Any) -> None:
        """Watch the tensors in `output` (a tensor, or tuples, lists and dicts of them) for a backward pass."""
        if isinstance(output, tuple | list):
            for part in output:
                self.watch(part)
        elif isinstance(output, dict):
            self.watch(list(output.values()))
        elif isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(self._begin)

    def _begin(self, _: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]

    def _end(self) -> None:
        self.is_done = True


class LeftSteps:
    """Tells the other ranks of a pipeline that this rank left a step before its end.

    All ranks create their pipelines in the same order, so these objects belong together.
    """

    def __init__(self) -> None:
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._prefix = f"embershard/left_steps/{next(_numbers)}"
        self._left: tuple[int, BaseException, int] | None = None

    def say(self, step: int, error: BaseException, must_wait: bool = True) -> None:
        """Say that this rank leaves step number `step`. `must_wait`: it may go on only when all ranks have left."""
        if self._world_size == 1:
            return
        num_collectives = collectives_begun()
        if must_wait:
            self._left = step, error, num_collectives
        text = f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS]
        try:
            _store().set(self._key(step, self._rank), f"{num_collectives} {text}")
        except RuntimeError:  # the process with the store has ended: the others know
            return

    def check(self) -> None:
        """Check before the next step that all ranks left the step that this rank left, at the same collective.

        Raises:
            StepError: other ranks did not.
        """
        if self._left is None:
            return
        step, error, num_collectives = self._left
        try:
            _store().wait([self._key(step, rank) for rank in range(self._world_size)], GRACE)
        except RuntimeError:  # the store does not have all keys
            raise StepError(
                f"rank {self._rank} left step {step} before the end of its backward pass ({type(error).__name__}: "
                f"{error}), and other ranks did not leave it: they wait in it for this rank. Let the exception end "
                "this process, which ends the others; or raise it on all ranks alike"
            ) from error
        for rank in range(self._world_size):
            others, text = self._said(step, rank)
            if others != num_collectives:
                raise StepError(
                    f"rank {self._rank} left step {step} when it had begun {num_collectives} collectives "
                    f"({type(error).__name__}: {error}), rank {rank} when it had begun {others} ({text}): the next one "
                    "would not be the same on both. Let the exception end this process, or raise it on all ranks alike"
                ) from error
        self._left = None

    def explain(self, step: int, error: BaseException) -> None:
        """Explain `error` if it comes from a collective that failed because another rank left `step` and ended.

        Raises:
            StepError: another rank left the step; the message has what that rank raised.
        """
        if self._world_size == 1 or isinstance(error, EmbershardError) or not isinstance(error, RuntimeError):
            return
        for rank in range(self._world_size):
            try:
                if rank == self._rank or not _store().check([self._key(step, rank)]):
                    continue
                _, text = self._said(step, rank)
            except RuntimeError:  # the process with the store has ended
                return
            raise StepError(f"rank {rank} left step {step}, so no rank goes on. It raised {text}") from error

    def _said(self, step: int, rank: int) -> tuple[int, str]:
        """Return the number of collectives that `rank` had begun when it left `step`, and what it raised."""
        number, _, text = _store().get(self._key(step, rank)).decode().partition(" ")
        return int(number), text

    def _key(self, step: int, rank: int) -> str:
        return f"{self._prefix}/{step}/{rank}"


def collectives_begun() -> int:
    """Return how many collectives of the default group this rank has begun; 0 for a rank without others."""
    group: Any = dist.group.WORLD  # None: not initialised
    return 0 if group is None or group.size() == 1 else int(group._get_sequence_number_for_group())


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
