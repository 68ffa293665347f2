"""Averages that are computed beside the steps, and the same by `DMPCollection` whose hook keeps them for later."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embershard.extras.groups.groups import Groups
from tests.ranks import groups, look_ahead
from tests.ranks.look_ahead import Case


class Later:
    """A hook of `DMPCollection`: it notes all numbers and their means when an average begins, and gives the means to
    the numbers some steps later. What steps changed meanwhile keeps its change."""

    def __init__(self, num_groups: int) -> None:
        self._env = groups._env(Groups(num_groups, dist.get_world_size()))
        self._noted: list[list[tuple[Tensor, Tensor]]] = []
        self.begins = self.ends = False

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        if self.ends:
            for tensor, (before, mean) in zip(tensors, self._noted.pop(0), strict=True):
                changed = tensor.float() + (mean.float() - before.float())  # rounded once
                tensor.copy_(torch.where(tensor == before, mean, changed.to(tensor.dtype)))
            return
        noted = []
        for tensor in tensors:
            mean = self.mean_of(groups.copies_of(tensor, self._env.replica_pg))
            noted.append((tensor.clone(), mean))
            if not self.begins:
                tensor.copy_(mean)
        if self.begins:
            self._noted.append(noted)

    def mean_of(self, copies: Tensor) -> Tensor:
        """Of a tensor's copies, [n, ...], in rank order; equal numbers stay."""
        return groups.mean_in_rank_order(copies)


def train_stock(
    case: Case, num_groups: int, every: int, delay: int, hook: Later | None = None
) -> tuple[dict[str, list[Tensor]], list[Any]]:
    """All of its numbers take part in each average, trained or not."""
    hook = hook or Later(num_groups)
    model = groups.build_stock(case, num_groups, hook)
    due: list[int] = []

    def sync(begins: bool = False, ends: bool = False) -> None:
        hook.begins, hook.ends = begins, ends
        model.sync()

    def after(step: int) -> None:
        if due and step + 1 == due[0]:
            due.pop()
            sync(ends=True)
        if (step + 1) % every == 0:
            sync(begins=delay > 0)
            due.extend([step + 1 + delay] * (delay > 0))

    losses = look_ahead.train(look_ahead.plain(model), look_ahead.batches(case), after)
    if due:
        sync(ends=True)
    sync()
    return groups.snapshot(model), losses


def compare(
    case: Case,
    num_groups: int,
    every: int,
    delay: int,
    lookahead: int = 0,
    worker: bool | None = None,
    hook: Later | None = None,
    **averages: Any,
) -> groups.Outcome:
    """Ours beside stock; what differed on this rank. `averages`: more of `GroupedModelParallel`."""
    plain = dataclasses.replace(case, policy="lfu", ratio=1.0, cached=None, host_dir=None, host_bytes=None)
    expected, losses = train_stock(plain, num_groups, every, delay, hook)
    model = groups.build_ours(case, num_groups, every, sync_delay=delay, **averages)
    found = groups.train_ours(model, case, lookahead, worker)
    was_equal = model.rows_are_equal
    model.sync()
    outcome = groups.outcome(model, expected, losses, found)
    said_too_early = ["replicas are said to be equal"] * (was_equal and delay > 0)
    return dataclasses.replace(outcome, different=[*said_too_early, *outcome.different])
